"""The registry of one agent: the values of all metrics, and the page that shows them.

The caller decides when a value changes. No type of the metrics library leaks.
"""

from collections.abc import Mapping
from typing import Any, Final

import prometheus_client

from nodeagent.metrics.table import METRICS, Counter, Gauge, Histogram, Metric

__all__ = ["METRICS_CONTENT_TYPE", "Metrics"]

METRICS_CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
"""Source: Prometheus, text exposition format 0.0.4."""


class Metrics:
    """The values of all metrics of the agent of `node`.

    `labels` are the values of the labels that the table names, in that order.
    """

    def __init__(self, node: str) -> None:
        """Register the metrics of the table, of the process, and of Python."""
        self._node = node
        self._registry = prometheus_client.CollectorRegistry()
        # One more series for each counter, which Velero does not have.
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call] # the library has no types
        prometheus_client.ProcessCollector(registry=self._registry)
        prometheus_client.PlatformCollector(registry=self._registry)
        prometheus_client.GCCollector(registry=self._registry)
        self._newest: dict[Metric, dict[tuple[str, ...], None]] = {}
        self._collectors = {metric: self._register(metric) for metric in METRICS}
        for metric in METRICS:
            for labels in metric.start:
                self._series(metric, labels)

    def _register(self, metric: Metric) -> Any:  # noqa: ANN401 - of the library, one of three classes
        options: dict[str, Any] = {"labelnames": ["node", *metric.labels], "registry": self._registry}
        if isinstance(metric, Histogram):
            return prometheus_client.Histogram(metric.name, metric.text, buckets=metric.buckets, **options)
        if isinstance(metric, Counter) and not metric.bare:
            return prometheus_client.Counter(metric.name, metric.text, **options)
        return prometheus_client.Gauge(metric.name, metric.text, **options)

    def inc(self, counter: Counter, *labels: str, by: float = 1) -> None:
        """Add to a counter, which never decreases; 0 makes its series exist."""
        self._series(counter, labels).inc(max(0, by))

    def set(self, gauge: Gauge, value: float, *labels: str) -> None:
        """Set one series of a gauge."""
        self._series(gauge, labels).set(value)

    def observe(self, histogram: Histogram, seconds: float, *labels: str) -> None:
        """Count a duration; less than 0, by clocks that differ, is 0."""
        self._series(histogram, labels).observe(max(0.0, seconds))

    def show(self, gauge: Gauge, values: Mapping[tuple[str, ...], float]) -> None:
        """Set these series of a gauge, by their labels, and remove all others."""
        self._collectors[gauge].clear()
        for labels, value in values.items():
            self.set(gauge, value, *labels)

    def forget(self, *gauges: Gauge, **labels: str) -> None:
        """Remove the series with these labels; there may be none."""
        for gauge in gauges:
            self._collectors[gauge].remove_by_labels({"node": self._node, **labels})

    def _series(self, metric: Metric, labels: tuple[str, ...]) -> Any:  # noqa: ANN401 - as above
        if metric.at_most is not None:
            newest = self._newest.setdefault(metric, {})
            newest[labels] = None
            if len(newest) > metric.at_most:
                oldest = next(iter(newest))
                del newest[oldest]
                self._collectors[metric].remove(self._node, *oldest)
        return self._collectors[metric].labels(self._node, *labels)

    def render(self) -> bytes:
        """Return everything in the text exposition format."""
        text = prometheus_client.generate_latest(self._registry)
        for metric in METRICS:
            if isinstance(metric, Counter) and metric.bare:
                # The library appends `_total` to the name of whatever it declares as a counter.
                gauge, counter = f"# TYPE {metric.name} gauge\n", f"# TYPE {metric.name} counter\n"
                text = text.replace(gauge.encode(), counter.encode())
        return text

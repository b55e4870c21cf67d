"""What the agent counts, and how a scraper reads it.

Knows the names: the peer's, so that dashboards keep working, and ours beside them. Does not
know when anything happens; whoever does calls a hook. No type of the metrics library leaks.
"""

from collections.abc import Mapping
from typing import Final

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

from core.models.phases import Phase

__all__ = ["METRICS_CONTENT_TYPE", "Metrics"]

METRICS_CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
"""Source: Prometheus, text exposition format 0.0.4."""

_PEERS_NAMES: Final = {"DataUpload": "data_upload", "DataDownload": "data_download"}
_ENDINGS: Final = {Phase.COMPLETED: "success", Phase.FAILED: "failure", Phase.CANCELED: "cancel"}

_MINUTES: Final = (1, 5, 10, 15, 30, 60, 120, 180, 240)
_LONG_BUCKETS: Final = tuple(minutes * 60.0 for minutes in _MINUTES)
_OPERATIONS: Final = 100
"""PodVolumeBackups that have series of their own: many scrapes' worth on one node."""

_WAIT_BUCKETS: Final = (1.0, 5.0, 15.0, *_LONG_BUCKETS)


class Metrics:
    """The metrics of one agent, in a registry of their own.

    `kind` is a load's kind, such as `DataUpload`, everywhere.
    """

    def __init__(self, node: str) -> None:
        """Count for the agent of `node`."""
        self._node = node
        self._registry = CollectorRegistry()
        # A series more for each counter, which neither the peer has nor anybody reads.
        disable_created_metrics()  # type: ignore[no-untyped-call] # the library's own gap
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self._registry)
        self._endings = {
            (kind, phase): self._peers_counter(f"{name}_{ending}", f"{kind}s of this node that ended {phase}")
            for kind, name in _PEERS_NAMES.items()
            for phase, ending in _ENDINGS.items()
        }
        self._moved = self._counter("moved_bytes", "Bytes that were read from or written to volumes", "kind")
        self._sent = self._counter("sent_bytes", "Bytes that went to the bucket", "kind")
        self._rate = self._gauge("rate_bytes_per_second", "How fast a running load moves data now", "kind", "uid")
        self._queue = self._gauge("queue_length", "Loads that are not final, by kind and state", "kind", "state")
        self._position = self._gauge("queue_position", "Position of the loads next in line", "kind", "name")
        self._in_line: set[tuple[str, str]] = set()
        self._slots = self._gauge("slots", "Loads that may move data on this node at a time", "state")
        self._config_valid = self._gauge("config_valid", "1 if the configuration is in force as it is written")
        self._config_info = self._gauge("config_info", "The configuration in force, by its hash", "hash")
        self._priority_class = self._gauge("priority_class_usable", "0 if data movers go without the configured class")
        self._requests = self._counter("api_requests", "Requests to the API server by answer", "verb", "status")
        self._leader = self._gauge("dispatcher", "1 if this agent is the dispatcher")
        self._repository = self._gauge("repository_ready", "1 if the repository can be used", "repository_name")
        self._wait = Histogram(
            "nodeagent_wait_seconds",
            "Time from a load's creation until its data began to move",
            ["node", "kind"],
            buckets=_WAIT_BUCKETS,
            registry=self._registry,
        )
        # Gauges: the library would add `_total` to the names of counters, and the peer has none.
        self._enqueued = self._peers_gauge("enqueue_count", "PodVolumeBackups that this node was given")
        self._dequeued = self._peers_gauge("dequeue_count", "PodVolumeBackups that this node is done with")
        labels = ["node", "operation", "backupName", "pod_volume_backup"]
        name, words = "podVolume_pod_volume_operation_latency_seconds", "Time a PodVolumeBackup's transfer took"
        self._latency = Histogram(name, words, labels, buckets=_LONG_BUCKETS, registry=self._registry)
        self._last_latency = Gauge(f"{name}_gauge", words, labels, registry=self._registry)
        self._operations: dict[tuple[str, str, str, str], None] = {}
        self._config_hash = ""

    def _counter(self, name: str, words: str, *labels: str) -> Counter:
        return Counter(f"nodeagent_{name}", words, ["node", *labels], registry=self._registry)

    def _gauge(self, name: str, words: str, *labels: str) -> Gauge:
        return Gauge(f"nodeagent_{name}", words, ["node", *labels], registry=self._registry)

    def _peers_counter(self, name: str, words: str) -> Counter:
        """Return a counter of the peer's, which shows itself as 0 from the start."""
        counter = Counter(f"podVolume_{name}", words, ["node"], registry=self._registry)
        counter.labels(self._node)
        return counter

    def _peers_gauge(self, name: str, words: str) -> Gauge:
        gauge = Gauge(f"podVolume_pod_volume_backup_{name}", words, ["node"], registry=self._registry)
        gauge.labels(self._node)
        return gauge

    def transfer_finished(self, kind: str, phase: Phase) -> None:
        """Count a load that ended; the peer counts only some kinds."""
        if counter := self._endings.get((kind, phase)):
            counter.labels(self._node).inc()

    def bytes_moved(self, kind: str, delta: int) -> None:
        """Add what was read from or written to a volume."""
        self._moved.labels(self._node, kind).inc(max(0, delta))

    def bytes_sent(self, kind: str, delta: int) -> None:
        """Add what went to the bucket."""
        self._sent.labels(self._node, kind).inc(max(0, delta))

    def rate(self, kind: str, uid: str, bytes_per_second: float) -> None:
        """Show how fast the load `uid` moves now."""
        self._rate.labels(self._node, kind, uid).set(bytes_per_second)

    def rate_gone(self, kind: str, uid: str) -> None:
        """Show the load `uid` no longer."""
        self._rate.remove_by_labels({"node": self._node, "kind": kind, "uid": uid})

    def queue_length(self, kind: str, state: str, n: int) -> None:
        """Show how many loads of a kind are in a state."""
        self._queue.labels(self._node, kind, state).set(n)

    def queue_positions(self, positions: Mapping[tuple[str, str], int]) -> None:
        """Show the positions in line of these loads, by kind and name, and of no others any more."""
        for kind, name in self._in_line - positions.keys():
            self._position.remove(self._node, kind, name)
        for (kind, name), position in positions.items():
            self._position.labels(self._node, kind, name).set(position)
        self._in_line = set(positions)

    def waited(self, kind: str, seconds: float) -> None:
        """Note how long a load waited until its data began to move."""
        self._wait.labels(self._node, kind).observe(max(0.0, seconds))

    def slots(self, used: int, total: int) -> None:
        """Show the slots of this node."""
        self._slots.labels(self._node, "used").set(used)
        self._slots.labels(self._node, "total").set(total)

    def config_valid(self, ok: bool) -> None:  # noqa: FBT001 - the one thing this hook is about
        """Show whether the configuration is in force as it is written."""
        self._config_valid.labels(self._node).set(ok)

    def config_hash(self, text: str) -> None:
        """Show the fingerprint of the configuration in force, and no other any more."""
        if self._config_hash and self._config_hash != text:
            self._config_info.remove(self._node, self._config_hash)
        self._config_hash = text
        self._config_info.labels(self._node, text).set(1)

    def priority_class_usable(self, ok: bool) -> None:  # noqa: FBT001 - as above
        """Show whether data movers get the priority class that is configured, if any is."""
        self._priority_class.labels(self._node).set(ok)

    def request(self, verb: str, status: int) -> None:
        """Count a request to the API server; status 0 is no answer."""
        self._requests.labels(self._node, verb, str(status)).inc()

    def leader(self, is_leader: bool) -> None:  # noqa: FBT001 - the one thing this hook is about
        """Show whether this agent is the dispatcher."""
        self._leader.labels(self._node).set(is_leader)

    def repository(self, name: str, ok: bool) -> None:  # noqa: FBT001 - as above
        """Show whether a repository can be used."""
        self._repository.labels(self._node, name).set(ok)

    def pod_volume_backup_enqueued(self) -> None:
        """Count a PodVolumeBackup that this node was given."""
        self._enqueued.labels(self._node).inc()

    def pod_volume_backup_dequeued(self) -> None:
        """Count a PodVolumeBackup that this node is done with."""
        self._dequeued.labels(self._node).inc()

    def pod_volume_operation(self, operation: str, backup: str, *, name: str, seconds: float) -> None:
        """Note how long the transfer of the PodVolumeBackup `name` took; only the last ones are shown."""
        labels = (self._node, operation, backup, name)
        self._latency.labels(*labels).observe(seconds)
        self._last_latency.labels(*labels).set(seconds)
        # As many as the peer names, but not for ever: a dozen series each would never go away.
        self._operations[labels] = None
        if len(self._operations) > _OPERATIONS:
            oldest = next(iter(self._operations))
            del self._operations[oldest]
            self._latency.remove(*oldest)
            self._last_latency.remove(*oldest)

    def render(self) -> bytes:
        """Return everything in the text exposition format."""
        return generate_latest(self._registry)

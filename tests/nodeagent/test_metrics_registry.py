"""The metrics as Prometheus scrapes them."""

import re

import pytest

from nodeagent.metrics import (
    CLOCK_SKEW,
    CONFIG_VALID,
    EXPOSE_SECONDS,
    LAST_PROGRESS,
    MAINTENANCE_FAILURE,
    MAINTENANCE_GAUGES,
    METRICS,
    MOVED_BYTES,
    PENDING,
    POD_VOLUME_BACKUPS_STARTED,
    POD_VOLUME_LAST_SECONDS,
    POD_VOLUME_SECONDS,
    RATE,
    SLOTS,
    Metric,
    Metrics,
)
from tests.support.golden import assert_golden_text

_NOT_OURS = r"(# (HELP|TYPE) )?(process|python)_"


@pytest.fixture
def metrics() -> Metrics:
    return Metrics("node-a")


def _samples(metrics: Metrics) -> dict[str, float]:
    """Return the value of each sample by name and labels as rendered."""
    lines = metrics.render().decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def test_the_page_of_an_agent_that_has_just_started(metrics: Metrics) -> None:
    """Velero's counters exist from the start; the order of phases differs from process to process."""
    lines = sorted(metrics.render().decode().splitlines())
    assert_golden_text("metrics", "".join(f"{line}\n" for line in lines if not re.match(_NOT_OURS, line)))


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_names_are_ours_or_veleros(metric: Metric) -> None:
    assert metric.name.startswith(("nodeagent_", "velero_", "podVolume_"))


def test_a_counter_never_decreases_and_starts_at_0_once_its_labels_are_known(metrics: Metrics) -> None:
    for delta in (5, 7, -3):
        metrics.inc(MOVED_BYTES, "DataUpload", by=delta)
    metrics.inc(POD_VOLUME_BACKUPS_STARTED)
    metrics.inc(MAINTENANCE_FAILURE, "app-default-kopia", by=0)
    samples = _samples(metrics)
    assert samples['nodeagent_moved_bytes_total{kind="DataUpload",node="node-a"}'] == 12
    assert samples['podVolume_pod_volume_backup_enqueue_count{node="node-a"}'] == 1
    failures = 'velero_repo_maintenance_failure_total{node="node-a",repository_name="app-default-kopia"}'
    assert samples[failures] == 0
    assert samples["process_resident_memory_bytes"] > 0


def test_durations_are_counted_by_their_size_from_0_on(metrics: Metrics) -> None:
    for seconds in (2.0, -1.0):
        metrics.observe(EXPOSE_SECONDS, seconds, "DataUpload")
    samples = _samples(metrics)
    assert samples['nodeagent_expose_seconds_bucket{kind="DataUpload",le="1.0",node="node-a"}'] == 1
    assert samples['nodeagent_expose_seconds_sum{kind="DataUpload",node="node-a"}'] == 2


def test_a_gauge_shows_what_was_set_last(metrics: Metrics) -> None:
    metrics.set(CLOCK_SKEW, -2.5)
    metrics.set(CONFIG_VALID, value=True)
    metrics.set(CONFIG_VALID, value=False)
    metrics.set(SLOTS, 1, "used")
    samples = _samples(metrics)
    assert samples['nodeagent_clock_skew_seconds{node="node-a"}'] == -2.5
    assert samples['nodeagent_config_valid{node="node-a"}'] == 0
    assert samples['nodeagent_slots{node="node-a",state="used"}'] == 1


def test_only_what_is_shown_last_has_series(metrics: Metrics) -> None:
    metrics.show(PENDING, {("DataUpload", "New", "Queued"): 3, ("DataDownload", "New", "Other"): 1})
    metrics.show(PENDING, {("DataUpload", "New", "Queued"): 2})
    shown = {name: value for name, value in _samples(metrics).items() if name.startswith("nodeagent_pending")}
    assert shown == {'nodeagent_pending{kind="DataUpload",node="node-a",reason="Queued",state="New"}': 2}


def test_what_is_forgotten_has_no_series(metrics: Metrics) -> None:
    for gauge in (RATE, LAST_PROGRESS):
        for uid in ("u1", "u2"):
            metrics.set(gauge, 10.5, "DataUpload", uid)
    metrics.forget(RATE, LAST_PROGRESS, kind="DataUpload", uid="u1")
    metrics.forget(RATE, kind="DataUpload", uid="never set")
    left = [name for name in _samples(metrics) if "uid=" in name]
    assert [re.sub("{.*uid=", "{", name) for name in left] == [
        'nodeagent_rate_bytes_per_second{"u2"}',
        'nodeagent_last_progress_seconds{"u2"}',
    ]
    # Without labels every series is.
    for gauge in MAINTENANCE_GAUGES:
        metrics.set(gauge, 1, *("any" for _ in gauge.labels))
    metrics.forget(*MAINTENANCE_GAUGES)
    assert not any("any" in name for name in _samples(metrics))


def test_only_the_latest_pod_volume_backups_have_series_with_veleros_labels(metrics: Metrics) -> None:
    for number in range(150):
        labels = ("op", "velero/nightly", f"pvb-{number:03}")
        metrics.observe(POD_VOLUME_SECONDS, 1.0, *labels)
        metrics.set(POD_VOLUME_LAST_SECONDS, 1.0, *labels)
    text = metrics.render().decode()
    labels_shown = 'backupName="velero/nightly",node="node-a",operation="op",pod_volume_backup'
    assert f'latency_seconds_gauge{{{labels_shown}="pvb-050"}}' in text
    assert f'{labels_shown}="pvb-049"' not in text
    assert text.count("latency_seconds_gauge{") == text.count("latency_seconds_count{") == 100

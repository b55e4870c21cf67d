"""The metrics as Prometheus scrapes them."""

import re

import pytest

from nodeagent.runtime.metrics import Metrics
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


def test_bytes_are_summed_by_kind_and_never_decrease(metrics: Metrics) -> None:
    for delta in (5, 7, -3):
        metrics.bytes_moved("DataUpload", delta)
        metrics.bytes_sent("DataUpload", delta)
    samples = _samples(metrics)
    assert samples['nodeagent_moved_bytes_total{kind="DataUpload",node="node-a"}'] == 12
    assert samples['nodeagent_sent_bytes_total{kind="DataUpload",node="node-a"}'] == 12


def test_hashed_deduplicated_and_stored_bytes_are_summed_and_never_decrease(metrics: Metrics) -> None:
    for delta in (5, 7, -3):
        metrics.bytes_hashed("DataUpload", delta, deduplicated=delta - 1, stored=delta - 2)
    samples = _samples(metrics)
    assert samples['nodeagent_hashed_bytes_total{kind="DataUpload",node="node-a"}'] == 12
    assert samples['nodeagent_deduplicated_bytes_total{kind="DataUpload",node="node-a"}'] == 10
    assert samples['nodeagent_stored_bytes_total{kind="DataUpload",node="node-a"}'] == 8


def test_queue_and_expose_durations_are_histograms(metrics: Metrics) -> None:
    metrics.accepted("DataUpload", 2.0)
    metrics.exposed("DataUpload", -1.0)
    samples = _samples(metrics)
    for name, at_most_1, total in (("queue", 0, 2), ("expose", 1, 0)):
        assert samples[f'nodeagent_{name}_seconds_bucket{{kind="DataUpload",le="1.0",node="node-a"}}'] == at_most_1
        assert samples[f'nodeagent_{name}_seconds_sum{{kind="DataUpload",node="node-a"}}'] == total


def test_only_current_pending_reasons_have_series(metrics: Metrics) -> None:
    metrics.pending_by_reason({("DataUpload", "Queued"): 3, ("DataDownload", "Other"): 1})
    metrics.pending_by_reason({("DataUpload", "Queued"): 2})
    shown = {name: value for name, value in _samples(metrics).items() if name.startswith("nodeagent_pending")}
    assert shown == {'nodeagent_pending{kind="DataUpload",node="node-a",reason="Queued"}': 2}


def test_a_repository_without_an_ended_maintenance_has_counters(metrics: Metrics) -> None:
    metrics.maintenance_failed("app-default-kopia")
    metrics.maintenance_known("app-default-kopia")
    labels = '{node="node-a",repository_name="app-default-kopia"}'
    samples = _samples(metrics)
    assert samples[f"velero_repo_maintenance_failure_total{labels}"] == 1
    assert samples[f"velero_repo_maintenance_success_total{labels}"] == 0


def test_what_interruptions_cost_is_summed_by_kind_and_never_decreases(metrics: Metrics) -> None:
    for delta in (5, 7, -3):
        metrics.retry_lost("DataUpload", delta + 0.5)
        metrics.resent("DataUpload", delta)
    samples = _samples(metrics)
    assert samples['nodeagent_retry_lost_seconds_total{kind="DataUpload",node="node-a"}'] == 13
    assert samples['nodeagent_retry_resent_bytes_total{kind="DataUpload",node="node-a"}'] == 12


def test_a_rate_exists_while_its_transfer_runs(metrics: Metrics) -> None:
    name = 'nodeagent_rate_bytes_per_second{kind="DataUpload",node="node-a",uid="u1"}'
    metrics.rate("DataUpload", "u1", 10.5)
    assert _samples(metrics)[name] == 10.5
    metrics.progressed("DataUpload", "u1", 1000.0)
    progress = 'nodeagent_last_progress_seconds{kind="DataUpload",node="node-a",uid="u1"}'
    assert _samples(metrics)[progress] == 1000
    metrics.remove_rate("DataUpload", "u1")
    assert {name, progress} & _samples(metrics).keys() == set()


def test_removing_an_unknown_rate_is_allowed(metrics: Metrics) -> None:
    metrics.remove_rate("DataUpload", "u1")


def test_only_the_active_hash_has_a_series(metrics: Metrics) -> None:
    metrics.config_hash("one")
    metrics.config_hash("two")
    shown = [name for name in _samples(metrics) if name.startswith("nodeagent_config_info")]
    assert shown == ['nodeagent_config_info{hash="two",node="node-a"}']


def test_gauges_show_the_current_state(metrics: Metrics) -> None:
    metrics.queue_length("DataUpload", "waiting", 3)
    metrics.slots(1, 2)
    metrics.config_valid(ok=False)
    metrics.leader(is_leader=True)
    metrics.clock_skew(-2.5)
    metrics.nodes_passed_over(frozenset({"b", "c"}))
    metrics.nodes_passed_over(frozenset({"c"}))
    metrics.repository("app-default-kopia", ok=True)
    metrics.request("list", 200)
    metrics.object_skipped("Pod")
    metrics.waited("DataUpload", 2.0)
    samples = _samples(metrics)
    shown = {re.sub(r'node="node-a",?|,node="node-a"', "", name).replace("{}", ""): v for name, v in samples.items()}
    expected = {
        'nodeagent_queue_length{kind="DataUpload",state="waiting"}': 3,
        'nodeagent_slots{state="used"}': 1,
        'nodeagent_slots{state="total"}': 2,
        "nodeagent_config_valid": 0,
        "nodeagent_clock_skew_seconds": -2.5,
        'nodeagent_node_passed_over{passed_over="b"}': None,
        'nodeagent_node_passed_over{passed_over="c"}': 1,
        "nodeagent_dispatcher": 1,
        'nodeagent_repository_ready{repository_name="app-default-kopia"}': 1,
        'nodeagent_api_requests_total{status="200",verb="list"}': 1,
        'nodeagent_skipped_objects_total{kind="Pod"}': 1,
        'nodeagent_wait_seconds_sum{kind="DataUpload"}': 2,
    }
    normal = {re.sub(r",(?=})", "", name): value for name, value in shown.items()}
    assert {name: normal.get(name) for name in expected} == expected


def test_pod_volume_operations_have_veleros_labels(metrics: Metrics) -> None:
    metrics.pod_volume_operation("backup", "b1", name="b1-cmssg", seconds=3)
    text = metrics.render().decode()
    labels = r'\{backupName="b1",node="node-a",operation="backup",pod_volume_backup="b1-cmssg"\} 3.0'
    assert re.search(r"podVolume_pod_volume_operation_latency_seconds_gauge" + labels, text)


def test_the_process_has_metrics(metrics: Metrics) -> None:
    assert _samples(metrics)["process_resident_memory_bytes"] > 0


def test_only_the_latest_pod_volume_backups_have_series() -> None:
    metrics = Metrics("node-a")
    for number in range(150):
        metrics.pod_volume_operation("op", "velero/nightly", name=f"pvb-{number:03}", seconds=1.0)
    text = metrics.render().decode()
    assert 'pod_volume_backup="pvb-049"' not in text
    assert text.count("latency_seconds_gauge{") == text.count("latency_seconds_count{") == 100

"""What Prometheus finds: every metric that the rules and the dashboard use, of an agent while it moves data."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from tests.cluster.apart import installed_apart
from tests.cluster.gate import open_gate
from tests.cluster.monitored import Monitored
from tests.cluster.upkeep import Upkeep
from tests.support.monitoring import dashboard_queries, metrics_in, rule_queries

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cluster.conftest import Bed

__all__: list[str] = []

pytestmark = [pytest.mark.cluster, pytest.mark.lane(name="apart"), pytest.mark.timeout(500)]

_OF_FAULTS = {
    "nodeagent_node_passed_over",
    "nodeagent_retries_total",
    "nodeagent_retry_lost_seconds_total",
    "nodeagent_retry_resent_bytes_total",
}
"""They have no series before the first interruption or the first node that fails; `tests/deploy` finds their names."""

_OF_PROMETHEUS = {"up"}
_SECONDS = 60


@pytest.fixture
def monitored(agent: Bed, space: str) -> Iterator[Monitored]:
    with open_gate() as gate, installed_apart(agent, space, url=gate.url) as own:
        yield Monitored(Upkeep(own), gate)
        gate.open()


def test_agents_serve_every_metric_that_rules_and_dashboard_use(monitored: Monitored) -> None:
    monitored.start(backup_interval="24h", verification_interval="168h")
    monitored.upkeep.wait_for_entry("Succeeded")
    monitored.back_up("data")
    monitored.verify("passed")
    monitored.hold()
    monitored.leave_pending()
    wanted = metrics_in((*rule_queries(), *dashboard_queries())) - _OF_FAULTS - _OF_PROMETHEUS
    missing, deadline = wanted, time.monotonic() + _SECONDS
    while missing and time.monotonic() < deadline:
        time.sleep(0.5)
        missing = wanted - monitored.scrape().keys()
    assert missing == set()
    # The figures of the volume are those of its backup.
    samples = monitored.scrape()
    (size,) = samples["nodeagent_volume_last_backup_bytes"]
    assert size == monitored.backup["status"]["progress"]["totalBytes"]
    assert samples["nodeagent_volume_backup_interval_seconds"] == [86_400]
    assert samples["nodeagent_volume_last_verification_ok"] == [1]
    assert max(samples["nodeagent_volume_last_backup_timestamp_seconds"]) <= time.time() + 1

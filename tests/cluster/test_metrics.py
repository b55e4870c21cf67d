"""What Prometheus and a browser find while data moves: every metric that rules and dashboard use, and each page."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from tests.cluster.apart import OTHER_NODE, installed_apart
from tests.cluster.gate import open_gate
from tests.cluster.monitored import Monitored
from tests.cluster.upkeep import Upkeep
from tests.nodeagent.support.browser import visit
from tests.support.monitoring import dashboard_queries, metrics_in, rule_queries
from tests.support.ui_command import running_ui

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


@pytest.fixture(scope="module")
def monitored(agent: Bed, module_space: str) -> Iterator[Monitored]:
    """Agents of their own that have backed a volume up; one backup is held while it moves data, another is pending."""
    with open_gate() as gate, installed_apart(agent, module_space, url=gate.url) as own:
        found = Monitored(Upkeep(own), gate)
        found.start(backup_interval="24h", verification_interval="168h")
        found.upkeep.wait_for_entry("Succeeded")
        found.back_up("data")
        found.verify("passed")
        found.hold()
        found.leave_pending()
        yield found
        gate.open()


def test_agents_serve_every_metric_that_rules_and_dashboard_use(monitored: Monitored) -> None:
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


async def test_the_pages_show_what_moves_what_is_pending_and_what_is_protected(monitored: Monitored) -> None:
    space, done = monitored.upkeep.own.space, monitored.backup["metadata"]["name"]
    async with running_ui("--namespace", space) as (_, url), visit(url) as tab:
        await tab.page.get_by_text("The cluster is").wait_for()
        overview = await tab.text()
        assert f"pvb/{done}" in overview
        assert "passed" in overview
        moving = await tab.open("/transfers?state=running")
        assert "InProgress" in moving
        assert OTHER_NODE in moving
        assert "LocationMissing" in await tab.open("/queue")
        assert "Succeeded" not in await tab.open(f"/transfers/pvb/{done}")
        assert "Completed" in await tab.text()
        await tab.open("/repositories")
        assert "Succeeded" in await tab.follow(await tab.page.locator("tbody th a").first.inner_text())
        for path in ("/", "/transfers", f"/transfers/pvb/{done}", f"/nodes/{OTHER_NODE}", "/queue", "/repositories"):
            await tab.open(path)
            assert (path, await tab.violations()) == (path, [])
        assert tab.faults == []

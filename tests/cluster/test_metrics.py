"""What Prometheus and a browser find while data moves: every metric that rules and dashboard use, and each page."""

import time
from collections.abc import Iterator

import pytest

from tests.client.support.browser import visit
from tests.cluster.apart import CALM_NODE, installed_apart
from tests.cluster.bed import Bed
from tests.cluster.gate import open_gate
from tests.cluster.monitored import Monitored
from tests.cluster.upkeep import Upkeep
from tests.support.monitoring import dashboard_queries, metrics_in, rule_queries
from tests.support.ui_command import running_ui
from tests.testbed.api import Json
from tests.testbed.processes import wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.lane(name="apart"), pytest.mark.timeout(1800)]

_OF_FAULTS = {
    "nodeagent_node_passed_over",
    "nodeagent_retention_held_bytes",
    "nodeagent_retention_old_rules",
    "nodeagent_retention_waiting_copies",
    "nodeagent_retries_total",
    "nodeagent_retry_lost_seconds_total",
    "nodeagent_retry_resent_bytes_total",
    "nodeagent_volume_not_protected",
    "nodeagent_volume_shrunk",
}
"""They have no series before the first interruption, node that fails, report of retention or volume to look at.

`tests/deploy` finds their names.
"""

_OF_PROMETHEUS = {"up"}

_COMPLETE_MS = 600_000


def _wait_longer(pod: Json) -> None:
    """Let a mover that is held wait until the pages were seen."""
    container = pod["containers"][0]
    others = [one for one in container["env"] if one["name"] != "DATA_MOVER_STALL_TIMEOUT"]
    container["env"] = [*others, {"name": "DATA_MOVER_STALL_TIMEOUT", "value": "20m"}]


@pytest.fixture(scope="module")
def monitored(agent: Bed, module_space: str) -> Iterator[Monitored]:
    """Agents of their own that have backed a volume up; one backup is held while it moves data, another is pending."""
    with open_gate() as gate, installed_apart(agent, module_space, url=gate.url, node=CALM_NODE) as own:
        found = Monitored(Upkeep(own), gate)
        found.start(backup_interval="24h", verification_interval="168h", change=_wait_longer)
        found.upkeep.wait_for_entry("Succeeded")
        found.back_up("data")
        found.verify("passed")
        found.hold()
        found.leave_pending()
        yield found
        gate.open()


def test_agents_serve_every_metric_that_rules_and_dashboard_use(monitored: Monitored) -> None:
    wanted = metrics_in((*rule_queries(), *dashboard_queries())) - _OF_FAULTS - _OF_PROMETHEUS
    wait_for(
        lambda: f"metrics: {wanted - monitored.scrape().keys()}",
        lambda: wanted <= monitored.scrape().keys(),
        pause_seconds=0.5,
    )
    # The figures of the volume are those of its backup.
    samples = monitored.scrape()
    (size,) = samples["nodeagent_volume_last_backup_bytes"]
    assert size == monitored.backup["status"]["progress"]["totalBytes"]
    assert samples["nodeagent_volume_backup_interval_seconds"] == [86_400]
    assert samples["nodeagent_volume_last_verification_ok"] == [1]
    assert max(samples["nodeagent_volume_last_backup_timestamp_seconds"]) <= time.time() + 1


@pytest.mark.sample("scripts")
@pytest.mark.parametrize("script", [True, False], ids=["scripts", "no scripts"])
async def test_each_page_shows_the_cluster_while_data_moves(monitored: Monitored, script: bool) -> None:
    space, done, held = monitored.upkeep.own.space, monitored.backup["metadata"]["name"], monitored.held
    (repository,) = monitored.upkeep.own.kubectl("get", "backuprepositories", "-o", "name").split()
    pending = {
        "/transfers/du/later": ("LocationMissing", "fix the cause"),
        "/queue": ("du/later", "LocationMissing", f"pvb/{held}"),
    }
    facts = {
        "/": (f"pvb/{done}", "passed", CALM_NODE, "ready"),
        "/transfers": (f"pvb/{held}", "InProgress", CALM_NODE),
        "/transfers?state=running": (f"pvb/{held}", "InProgress"),
        f"/transfers/pvb/{held}": ("wait: it is under way", f"on node {CALM_NODE}", "Running", "End of the log"),
        f"/transfers/pvb/{done}": ("Completed", "passed", "nothing: it is complete"),
        f"/nodes/{CALM_NODE}": (f"pvb/{held}", "slots are used"),
        "/repositories": (space, "Ready"),
        f"/repositories/{repository.rpartition('/')[2]}": ("Succeeded", "of new data in 1 backup", "Next maintenance"),
    }
    if script:
        # A location that does not exist fails its transfer after two minutes, so what is pending comes first, and once.
        monitored.leave_pending("later")
    async with running_ui("--namespace", space) as (_, url), visit(url, script=script) as tab:
        await tab.page.get_by_text("The cluster is").wait_for()
        for path, wanted in ((pending | facts) if script else facts).items():
            text = await tab.open(path)
            assert (path, [one for one in wanted if one not in text]) == (path, [])
            if script:
                assert (path, await tab.violations()) == (path, [])
        assert tab.faults == []


async def test_a_page_shows_how_data_moves_on(monitored: Monitored) -> None:
    """Last, since it opens the gate."""
    space, held = monitored.upkeep.own.space, monitored.held
    async with running_ui("--namespace", space) as (_, url), visit(url) as tab:
        await tab.page.get_by_text("The cluster is").wait_for()
        assert "InProgress" in await tab.open(f"/transfers/pvb/{held}")
        monitored.gate.open()
        await tab.page.get_by_text("nothing: it is complete").wait_for(timeout=_COMPLETE_MS)
        assert "Completed" in await tab.text()

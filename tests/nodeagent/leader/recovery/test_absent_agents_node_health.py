"""Lost nodes: deleted, or not Ready for long enough."""

import asyncio
from datetime import timedelta

import pytest

from core.kube.client import KubeClient
from core.kube.resources import NODES
from core.kube.transport import Retry
from core.models.names import label_value
from nodeagent.leader.recovery.absent_agents import NodeHealth, explain_node_loss
from tests.nodeagent.support.dispatching import cluster_node
from tests.support.clock import LoopClock
from tests.support.fakekube import FakeKube
from tests.support.objects import JsonDict
from tests.support.tasks import running

FIVE = timedelta(minutes=5)
DAY = timedelta(hours=24)
SINCE = "2026-11-21T12:00:00Z"
UNKNOWN = {"status": "Unknown", "lastTransitionTime": SINCE, "reason": "NodeStatusUnknown", "message": "no word"}


@pytest.mark.parametrize(
    ("condition", "seconds", "words"),
    [
        pytest.param(None, 0, "node n does not exist", id="no such node"),
        pytest.param({"status": "True", "lastTransitionTime": SINCE}, 9999, None, id="ready"),
        pytest.param({}, 9999, None, id="never said anything"),
        pytest.param({"status": "Unknown"}, 9999, None, id="no time"),
        pytest.param(UNKNOWN, 299, None, id="not yet"),
        pytest.param(UNKNOWN, 300, "node n is not Ready for 5m0s: NodeStatusUnknown: no word", id="unknown"),
        pytest.param(
            {"status": "False", "lastTransitionTime": SINCE}, 300, "node n is not Ready for 5m0s", id="without words"
        ),
    ],
)
def test_a_node_is_lost_if_deleted_or_not_ready_for_long(
    condition: JsonDict | None, seconds: float, words: str | None
) -> None:
    assert explain_node_loss("n", condition, seconds=seconds, gone_after=FIVE) == words


async def losses(kube: FakeKube, *labels: str, skew: timedelta = timedelta()) -> list[bool]:
    """Return whether the nodes with those label values are lost, five minutes after the first list."""
    clock = LoopClock(skew)
    client = KubeClient(kube, Retry(clock))
    health = NodeHealth(client, clock, gone_after=FIVE)
    assert not any(map(health.is_lost, labels))
    async with running(health.run(), lead_seconds=299):
        assert not any(health.is_lost(label) for label in labels if label in {"node-a", "node-b"})
        await asyncio.sleep(2)
        found = list(map(health.is_lost, labels))
        for node in kube.objects(NODES):
            await client.delete(NODES, "", node["metadata"]["name"])
        await asyncio.sleep(5)
        assert not any(map(health.is_lost, labels))
    return found


@pytest.mark.looptime
@pytest.mark.parametrize("skew", [timedelta(), DAY, -DAY], ids=["right", "a day ahead", "a day behind"])
async def test_nodes_are_found_by_label_value(skew: timedelta) -> None:
    kube, long = FakeKube(), "n" * 70
    kube.put(cluster_node("node-a"))
    kube.put(cluster_node("node-b", ready=False))
    kube.put(cluster_node(long))
    found = await losses(kube, "node-a", "node-b", "node-c", label_value(long), "n" * 57, skew=skew)
    assert found == [False, True, True, False, True]


@pytest.mark.looptime
async def test_a_node_that_was_ready_in_between_is_not_lost() -> None:
    kube, clock = FakeKube(), LoopClock(-DAY)
    kube.put(cluster_node("node-a", ready=False, since="2026-11-21T12:00:00Z"))
    health = NodeHealth(KubeClient(kube, Retry(clock)), clock, gone_after=FIVE)
    async with running(health.run(), lead_seconds=200):
        kube.put(cluster_node("node-a"))
        await asyncio.sleep(1)
        kube.put(cluster_node("node-a", ready=False, since="2026-11-21T12:03:21Z"))
        await asyncio.sleep(299)
        assert not health.is_lost("node-a")
        await asyncio.sleep(2)
        assert health.is_lost("node-a")
        kube.put(cluster_node("node-a"))
        await asyncio.sleep(1)
        assert (health.is_lost("node-a"), len(health._not_ready)) == (False, 0)


@pytest.mark.looptime
async def test_without_a_list_no_node_is_lost_and_a_rejected_one_is_repeated(caplog: pytest.LogCaptureFixture) -> None:
    kube, clock = FakeKube(), LoopClock()
    kube.put(cluster_node("node-a"))
    kube.fail_next("GET", "/nodes", 403, times=3)
    health = NodeHealth(KubeClient(kube, Retry(clock)), clock, gone_after=FIVE)
    async with running(health.run(), lead_seconds=30):
        assert not health.is_lost("node-b")
        await asyncio.sleep(200)
        assert not health.is_lost("node-a")
        assert health.is_lost("node-b")
    warnings = [record.levelname for record in caplog.records if "cannot detect lost nodes" in record.message]
    assert warnings.count("WARNING") == 1

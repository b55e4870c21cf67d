"""Transfers with an unavailable agent or a lost node, and which nodes are lost."""

import asyncio
import json
from dataclasses import dataclass, replace
from datetime import timedelta

import pytest

from core.kube.resources import DATA_UPLOADS, NODES, PODS
from core.kube.transport import Request, Response
from core.models.names import DATA_MOVER_FINALIZER, NODE_LABEL, OUTCOME_ANNOTATION, label_value
from core.models.units import format_duration
from nodeagent.leader.recovery.absent_agents import NodeHealth, explain_node_loss
from tests.nodeagent.support.dispatching import Gate, Scene, agent_pod, cluster_node, open_scene
from tests.nodeagent.support.transfers import NAMESPACE, mover_pod
from tests.support.clock import LoopClock
from tests.support.fakekube import FakeKube
from tests.support.objects import JsonDict
from tests.support.tasks import running

pytestmark = pytest.mark.looptime


BEFORE_START = ["Accepted", "Prepared"]
RUNNING = ["InProgress", "Canceling"]

OUTCOME = '{"phase":"Completed","result":{"snapshotID":"s1","source":{"byPath":"/x"}}}'


def bound_scene(*live: str) -> Scene:
    """Return a scene with two nodes, and agents on `live`; its transfers are bound to a node."""
    scene = open_scene(*live, bound=True)
    for name in ("node-a", "node-b"):
        scene.kube.put(cluster_node(name))
    return scene


def add(scene: Scene, phase: str, annotations: dict[str, str] | None = None) -> JsonDict:
    """Add a transfer of node-a; a running one has its mover there."""
    status: JsonDict = {"phase": phase, "acceptedTimestamp": LoopClock().now().isoformat(timespec="seconds")}
    marks, finalizers = annotations or {}, [DATA_MOVER_FINALIZER]
    transfer = scene.add("du", status=status, labels={NODE_LABEL: "node-a"}, finalizers=finalizers, annotations=marks)
    if phase in RUNNING:
        scene.kube.put(mover_pod(transfer, phase="Running"))
    return transfer


@pytest.mark.parametrize("phase", [*BEFORE_START, *RUNNING])
@pytest.mark.cause("node-removed")
async def test_transfers_of_a_deleted_node_fail_within_30_seconds(phase: str) -> None:
    scene = bound_scene("node-a", "node-b")
    add(scene, phase)
    async with scene.dispatching():
        await asyncio.sleep(20)
        assert scene.phase("du") == phase
        await scene.client.delete(NODES, "", "node-a")
        await scene.until(lambda: scene.phase("du") == "Failed", seconds=30)
        await scene.until(lambda: scene.kind.cleaned == ["du"], seconds=10)
    assert scene.message("du").startswith("node node-a does not exist; its ")


@pytest.mark.parametrize("phase", [*BEFORE_START, "Canceling"])
@pytest.mark.cause("node-not-ready")
async def test_transfers_of_a_node_that_is_not_ready_for_long_fail(phase: str) -> None:
    scene = bound_scene("node-a", "node-b")
    add(scene, phase)
    async with scene.dispatching():
        await asyncio.sleep(5)
        since = LoopClock().now().isoformat(timespec="seconds")
        scene.kube.put(cluster_node("node-a", ready=False, since=since))
        scene.kube.put(agent_pod("node-a", ready=False))
        await asyncio.sleep(290)
        assert scene.phase("du") == phase
        await scene.until(lambda: scene.phase("du") == "Failed", seconds=20)
    assert scene.message("du").startswith(
        "node node-a is not Ready for 5m0s: NodeStatusUnknown: Kubelet stopped posting node status.; its "
    )


async def test_an_accepted_transfer_of_a_lost_node_is_reassigned_if_possible() -> None:
    scene = open_scene("node-a", "node-b")
    add(scene, "Accepted")
    async with scene.dispatching():
        await asyncio.sleep(5)
        # Its agent's pod is still there, and says that it is Ready.
        await scene.client.delete(NODES, "", "node-a")
        await scene.until(lambda: scene.label() == "node-b", seconds=30)
    assert scene.phase("du") == "Accepted"


@pytest.mark.parametrize("phase", [*BEFORE_START, *RUNNING])
@pytest.mark.cause("agent-unavailable")
async def test_an_unavailable_agent_is_reported_until_it_is_back(phase: str) -> None:
    scene = bound_scene("node-b")
    add(scene, phase)
    expected = "no node agent is ready on node node-a: "
    async with scene.dispatching():
        await scene.until(lambda: scene.message("du").startswith(expected), seconds=45)
        assert "when the agent is back" in scene.message("du")
        await asyncio.sleep(120)
        assert scene.reasons("du") == ["AgentUnavailable"]
        # Another version may word it in another way.
        scene.set_status("du", message="reworded")
        scene.kube.put(agent_pod("node-a"))
        await scene.until(lambda: scene.message("du") == "", seconds=10)
    assert (scene.phase("du"), scene.reason("du")) == (phase, "")


@pytest.mark.parametrize(("phase", "step"), [("Accepted", "not prepared"), ("Prepared", "not started")])
async def test_the_prepare_timeout_continues_while_the_agent_is_unavailable(phase: str, step: str) -> None:
    scene = bound_scene("node-b")
    transfer = add(scene, phase)
    # It may have waited for its slot for long; that alone is no reason.
    scene.kube.put(transfer | {"status": transfer["status"] | {"acceptedTimestamp": "2026-11-21T09:00:00Z"}})
    async with scene.dispatching():
        await asyncio.sleep(1750)
        assert scene.phase("du") == phase
        await scene.until(lambda: scene.phase("du") == "Failed", seconds=100)
    assert scene.message("du") == f"{step} within 30m0s: no node agent is ready on node node-a"


@pytest.mark.parametrize("canceled", [False, True])
async def test_an_accepted_transfer_that_no_agent_can_take_over_is_reported_and_ended(canceled: bool) -> None:
    scene = open_scene("node-a")
    scene.kube.put(agent_pod("node-a", ready=False))
    add(scene, "Accepted")
    async with scene.dispatching():
        expected = "no node agent is ready on node node-a: continues when the agent is back"
        await scene.until(lambda: scene.message("du") == expected, seconds=45)
        if canceled:
            await scene.client.patch(DATA_UPLOADS, NAMESPACE, "du", {"spec": {"cancel": True}})
        await asyncio.sleep(290 if canceled else 1700)
        assert scene.phase("du") == "Accepted"
        await scene.until(lambda: scene.phase("du") == ("Canceled" if canceled else "Failed"), seconds=100)
    assert scene.message("du").endswith(": no node agent is ready on node node-a")


@pytest.mark.parametrize("evicted", [False, True], ids=["gone", "evicted"])
async def test_a_canceled_transfer_whose_mover_is_lost_while_its_agent_is_unavailable_is_ended(evicted: bool) -> None:
    scene = bound_scene("node-b")
    transfer = add(scene, "InProgress")
    scene.kube.put(transfer | {"spec": transfer["spec"] | {"cancel": True}})
    pod = mover_pod(transfer, phase="Running")
    scene.kube.put(pod)
    async with scene.dispatching():
        await asyncio.sleep(60)
        assert scene.phase("du") == "InProgress"
        if evicted:
            scene.kube.put(pod | {"status": {"phase": "Failed", "reason": "Evicted", "message": "disk pressure"}})
        else:
            await scene.client.delete(PODS, NAMESPACE, "du")
        await scene.until(lambda: scene.phase("du") == "Canceled", seconds=45)
    why = ": Evicted: disk pressure" if evicted else ""
    expected = f"data mover pod velero/du was lost without a result{why}; no node agent is ready on node node-a"
    assert scene.message("du") == f"spec.cancel is set; {expected}"


@dataclass
class OldList(Gate):
    """Lists nodes as they were before node-a was created."""

    async def request(self, request: Request) -> Response:
        response = await super().request(request)
        if request.path != NODES.path():
            return response
        body = json.loads(response.body)
        body["items"] = [node for node in body["items"] if node["metadata"]["name"] != "node-a"]
        return replace(response, body=json.dumps(body).encode())


@pytest.mark.parametrize("phase", [*BEFORE_START, *RUNNING])
async def test_a_node_missing_from_the_cache_only_is_not_lost(phase: str) -> None:
    scene = bound_scene("node-a", "node-b")
    add(scene, phase)
    async with scene.dispatching(scene.dispatcher(OldList(scene.kube, lambda _: False))):
        await asyncio.sleep(60)
        assert scene.phase("du") == phase
        await scene.client.delete(NODES, "", "node-a")
        await scene.until(lambda: scene.phase("du") == "Failed", seconds=30)


async def test_the_log_is_copied_before_cleanup_for_an_unavailable_agent(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    scene = bound_scene("node-b")
    transfer = add(scene, "Failed")
    scene.kube.put(mover_pod(transfer, phase="Running"))
    scene.kube.logs[NAMESPACE, "du"] = "first words\nlast words\n"
    async with scene.dispatching():
        await scene.until(lambda: scene.kind.cleaned == ["du"], seconds=60)
    expected = [record for record in caplog.records if record.getMessage().startswith("mover: ")]
    assert [record.getMessage() for record in expected] == ["mover: first words", "mover: last words"]


@pytest.mark.parametrize(
    ("phase", "limit"),
    [*((phase, timedelta(minutes=5)) for phase in BEFORE_START), *((phase, timedelta(hours=1)) for phase in RUNNING)],
)
@pytest.mark.parametrize("by", ["cancel", "deletion"])
async def test_an_unanswered_cancel_request_is_forced(by: str, phase: str, limit: timedelta) -> None:
    scene = bound_scene("node-b")
    transfer = add(scene, phase)
    async with scene.dispatching():
        await scene.until(lambda: scene.message("du") != "", seconds=45)
        if by == "cancel":
            await scene.client.patch(DATA_UPLOADS, NAMESPACE, "du", {"spec": {"cancel": True}})
        else:
            await scene.client.delete(DATA_UPLOADS, NAMESPACE, transfer["metadata"]["name"])
        await asyncio.sleep(limit.total_seconds() - 10)
        assert scene.phase("du") == phase
        await scene.until(lambda: scene.kind.cleaned == ["du"], seconds=100)
        if by == "deletion":
            await scene.until(lambda: not scene.phases(), seconds=5)
            return
    assert scene.phase("du") == "Canceled"
    assert f"force canceled after {format_duration(limit)}: no node agent" in scene.message("du")


async def test_the_timeout_of_a_cancel_request_begins_again_with_another_leader() -> None:
    scene = bound_scene("node-b")
    add(scene, "Prepared")
    await scene.client.patch(DATA_UPLOADS, NAMESPACE, "du", {"spec": {"cancel": True}})
    async with scene.dispatching():
        await asyncio.sleep(300)
    async with scene.dispatching():
        await asyncio.sleep(300)
        assert scene.phase("du") == "Prepared"
        await scene.until(lambda: scene.phase("du") == "Canceled", seconds=100)


@pytest.mark.parametrize("lost", [True, False], ids=["node lost", "agent unavailable"])
@pytest.mark.parametrize("kept", [True, False], ids=["outcome kept", "only in the pod"])
async def test_a_result_is_kept_until_an_agent_is_ready_and_taken_over_by_it(kept: bool, lost: bool) -> None:
    scene = bound_scene("node-b")
    scene.kube.put(agent_pod("node-b", ready=False))
    add(scene, "InProgress", {OUTCOME_ANNOTATION: OUTCOME} if kept else {})
    if kept:
        await scene.client.delete(PODS, NAMESPACE, "du")
    else:
        ended = [{"name": "mover", "state": {"terminated": {"exitCode": 0, "message": "{}"}}}]
        scene.kube.put(mover_pod(scene.transfer("du"), phase="Succeeded", containerStatuses=ended))
    if lost:
        await scene.client.delete(NODES, "", "node-a")
    async with scene.dispatching():
        await asyncio.sleep(120)
        assert (scene.phase("du"), scene.label()) == ("InProgress", "node-a")
        scene.kube.put(agent_pod("node-b"))
        await scene.until(lambda: scene.label() == "node-b", seconds=45)
        await scene.until(lambda: scene.reasons("du")[-1] == "Reassigned", seconds=5)
    assert scene.phase("du") == "InProgress"
    status = scene.transfer("du")["status"]
    assert (status["node"], status["acceptedByNode"]) == ("node-b", "node-a")


@pytest.mark.parametrize("known_from", ["status", "volume", "nothing"])
async def test_a_node_with_a_long_name_is_named_in_full_if_the_name_is_known(known_from: str) -> None:
    scene, long = bound_scene("node-b"), "n" * 70
    transfer = add(scene, "Prepared")
    transfer["metadata"]["labels"][NODE_LABEL] = label_value(long)
    transfer["status"] |= {"node": long} if known_from == "status" else {}
    scene.kube.put(transfer)
    scene.kind.nodes["du"] = long if known_from == "volume" else "node-b"
    async with scene.dispatching():
        await scene.until(lambda: scene.phase("du") == "Failed", seconds=30)
    shown = label_value(long) if known_from == "nothing" else long
    assert scene.message("du").startswith(f"node {shown} does not exist; ")


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
def test_a_node_is_lost_if_gone_or_not_ready(condition: JsonDict | None, seconds: float, words: str | None) -> None:
    assert explain_node_loss("n", condition, seconds=seconds, gone_after=FIVE) == words


async def losses(kube: FakeKube, *labels: str, skew: timedelta = timedelta()) -> list[bool]:
    """Return whether the nodes with those label values are lost, five minutes after the first list."""
    clock = LoopClock(skew)
    client = kube.client
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


@pytest.mark.parametrize("skew", [timedelta(), DAY, -DAY], ids=["right", "a day ahead", "a day behind"])
async def test_nodes_are_found_by_label_value(skew: timedelta) -> None:
    kube, long = FakeKube(), "n" * 70
    kube.put(cluster_node("node-a"))
    kube.put(cluster_node("node-b", ready=False))
    kube.put(cluster_node(long))
    found = await losses(kube, "node-a", "node-b", "node-c", label_value(long), "n" * 57, skew=skew)
    assert found == [False, True, True, False, True]


async def test_a_node_that_was_ready_in_between_is_not_lost() -> None:
    kube, clock = FakeKube(), LoopClock(-DAY)
    kube.put(cluster_node("node-a", ready=False, since="2026-11-21T12:00:00Z"))
    health = NodeHealth(kube.client, clock, gone_after=FIVE)
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
        assert (health.is_lost("node-a"), len(health._not_ready._observed)) == (False, 0)


async def test_without_a_list_no_node_is_lost_and_a_rejected_one_is_repeated(caplog: pytest.LogCaptureFixture) -> None:
    kube, clock = FakeKube(), LoopClock()
    kube.put(cluster_node("node-a"))
    kube.fail_next("GET", "/nodes", 403, times=3)
    health = NodeHealth(kube.client, clock, gone_after=FIVE)
    async with running(health.run(), lead_seconds=30):
        assert not health.is_lost("node-b")
        await asyncio.sleep(200)
        assert not health.is_lost("node-a")
        assert health.is_lost("node-b")
    warnings = [record.levelname for record in caplog.records if "cannot detect lost nodes" in record.message]
    assert warnings.count("WARNING") == 1

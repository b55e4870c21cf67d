"""Loads whose agent or node stays away."""

import asyncio
import json
from dataclasses import dataclass, replace
from datetime import timedelta

import pytest

from core.kube.client import KubeClient
from core.kube.resources import DATA_UPLOADS, NODES, PODS
from core.kube.retry import Retry
from core.kube.transport import Request, Response
from core.models.base import JsonDict
from core.models.names import (
    CANCEL_REQUESTED_ANNOTATION,
    DATA_MOVER_FINALIZER,
    NODE_LABEL,
    OUTCOME_ANNOTATION,
    PENDING_REASON_ANNOTATION,
    label_value,
)
from core.models.units import format_duration
from tests.nodeagent.support.dispatching import Gate, Scene, agent_pod, cluster_node, open_scene
from tests.nodeagent.support.transfers import NAMESPACE, mover_pod
from tests.support.clock import LoopClock

pytestmark = pytest.mark.looptime

BEFORE_START = ["Accepted", "Prepared"]
RUNNING = ["InProgress", "Canceling"]


def bound_scene(*live: str) -> Scene:
    """Return a scene with two nodes, and agents on `live`; its loads can be carried out by one node only."""
    scene = open_scene(*live)
    for name in ("node-a", "node-b"):
        scene.kube.put(cluster_node(name))
    object.__setattr__(scene.kind, "bound_to_node", True)
    return scene


def add(scene: Scene, phase: str, annotations: dict[str, str] | None = None) -> JsonDict:
    """Add a load of node-a; one that runs has its mover there."""
    status: JsonDict = {"phase": phase, "acceptedTimestamp": LoopClock().now().isoformat(timespec="seconds")}
    load = scene.add(
        "du",
        status=status,
        labels={NODE_LABEL: "node-a"},
        finalizers=[DATA_MOVER_FINALIZER],
        annotations=annotations or {},
    )
    if phase in RUNNING:
        scene.kube.put(mover_pod(load, phase="Running"))
    return load


async def remove_node(scene: Scene, name: str) -> None:
    await KubeClient(scene.kube, Retry(LoopClock())).delete(NODES, "", name)


@pytest.mark.parametrize("phase", [*BEFORE_START, *RUNNING])
@pytest.mark.cause("node-removed")
async def test_a_node_that_is_removed_ends_its_loads_within_30_seconds(phase: str) -> None:
    scene = bound_scene("node-a", "node-b")
    add(scene, phase)
    async with scene.dispatching():
        await asyncio.sleep(20)
        assert scene.phase("du") == phase
        await remove_node(scene, "node-a")
        await scene.until(lambda: scene.phase("du") == "Failed", seconds=30)
        await scene.until(lambda: scene.kind.cleaned == ["du"], seconds=10)
    assert scene.message("du").startswith("node node-a does not exist any more; its ")


@pytest.mark.parametrize("phase", [*BEFORE_START, *RUNNING])
@pytest.mark.cause("node-not-ready")
async def test_a_node_that_is_not_ready_for_long_ends_its_loads(phase: str) -> None:
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


async def test_an_accepted_load_of_a_lost_node_goes_to_another_agent_if_any_can_do_it() -> None:
    scene = open_scene("node-a", "node-b")
    add(scene, "Accepted")
    async with scene.dispatching():
        await asyncio.sleep(5)
        # Its agent's pod is still there, and says that it is Ready.
        await remove_node(scene, "node-a")
        await scene.until(lambda: scene.load("du")["metadata"]["labels"][NODE_LABEL] == "node-b", seconds=30)
    assert scene.phase("du") == "Accepted"


@pytest.mark.parametrize("phase", [*BEFORE_START, *RUNNING])
@pytest.mark.cause("agent-away")
async def test_an_agent_that_stays_away_is_told_and_that_it_is_back_too(phase: str) -> None:
    scene = bound_scene("node-b")
    add(scene, phase)
    told = "no node agent is ready on node node-a: "
    async with scene.dispatching():
        await scene.until(lambda: scene.message("du").startswith(told), seconds=45)
        assert "when the agent is back" in scene.message("du")
        await asyncio.sleep(120)
        assert scene.reasons("du") == ["AgentUnavailable"]
        scene.kube.put(agent_pod("node-a"))
        await scene.until(lambda: scene.message("du") == "", seconds=10)
    assert scene.phase("du") == phase


@pytest.mark.parametrize(
    ("message", "annotations"),
    [
        pytest.param("reworded", {PENDING_REASON_ANNOTATION: "AgentUnavailable"}, id="annotated"),
        pytest.param(
            "no node agent is ready on node node-a: it goes on when the agent is back",
            {},
            id="of an agent before 0.1.0",
        ),
    ],
)
async def test_a_report_of_an_unavailable_agent_is_removed_once_the_agent_is_ready(
    message: str, annotations: dict[str, str]
) -> None:
    scene = bound_scene("node-a")
    load = add(scene, "Prepared")
    load["metadata"]["annotations"] = annotations
    scene.kube.put(load | {"status": load["status"] | {"message": message}})
    async with scene.dispatching():
        await scene.until(lambda: scene.message("du") == "", seconds=10)
    assert PENDING_REASON_ANNOTATION not in scene.load("du")["metadata"].get("annotations", {})


async def test_messages_of_other_reasons_stay_while_the_agent_is_ready() -> None:
    scene = bound_scene("node-a")
    load = add(scene, "Prepared")
    scene.kube.put(load | {"status": load["status"] | {"message": "waiting for a free slot on node node-a"}})
    async with scene.dispatching():
        await asyncio.sleep(60)
    assert scene.message("du") == "waiting for a free slot on node node-a"


async def test_the_prepare_timeout_runs_on_while_the_agent_is_away() -> None:
    scene = bound_scene("node-b")
    add(scene, "Accepted")
    async with scene.dispatching():
        await asyncio.sleep(1750)
        assert scene.phase("du") == "Accepted"
        await scene.until(lambda: scene.phase("du") == "Failed", seconds=100)
    assert scene.message("du") == "not prepared within 30m0s: no node agent is ready on node node-a"


async def test_a_prepared_load_does_not_keep_its_place_for_an_agent_that_never_comes_back() -> None:
    scene = bound_scene("node-b")
    load = add(scene, "Prepared")
    # It has waited for its slot for long; that alone is no reason.
    scene.kube.put(load | {"status": load["status"] | {"acceptedTimestamp": "2026-11-21T09:00:00Z"}})
    async with scene.dispatching():
        await asyncio.sleep(1750)
        assert scene.phase("du") == "Prepared"
        await scene.until(lambda: scene.phase("du") == "Failed", seconds=100)
    assert scene.message("du") == "not started within 30m0s: no node agent is ready on node node-a"


@pytest.mark.parametrize("canceled", [False, True], ids=["not asked for", "canceled"])
@pytest.mark.parametrize("evicted", [False, True], ids=["gone", "evicted"])
async def test_a_load_whose_mover_is_lost_while_its_agent_is_away_ends(evicted: bool, canceled: bool) -> None:
    scene = bound_scene("node-b")
    load = add(scene, "InProgress")
    scene.kube.put(load | {"spec": load["spec"] | {"cancel": canceled}})
    pod = mover_pod(load, phase="Running")
    scene.kube.put(pod)
    async with scene.dispatching():
        await asyncio.sleep(60)
        assert scene.phase("du") == "InProgress"
        if evicted:
            scene.kube.put(pod | {"status": {"phase": "Failed", "reason": "Evicted", "message": "disk pressure"}})
        else:
            await KubeClient(scene.kube, Retry(LoopClock())).delete(PODS, NAMESPACE, "du")
        await scene.until(lambda: scene.phase("du") in {"Failed", "Canceled"}, seconds=45)
    why = ": Evicted: disk pressure" if evicted else ""
    told = f"data mover pod velero/du is gone; it left no result{why}; no node agent is ready on node node-a"
    asked = "cancel was asked for by spec.cancel; " if canceled else ""
    assert (scene.phase("du"), scene.message("du")) == ("Canceled" if canceled else "Failed", asked + told)


@dataclass
class OldList(Gate):
    """Lists nodes as they were before node-a came."""

    async def request(self, request: Request) -> Response:
        response = await super().request(request)
        if request.path != NODES.path():
            return response
        body = json.loads(response.body)
        body["items"] = [node for node in body["items"] if node["metadata"]["name"] != "node-a"]
        return replace(response, body=json.dumps(body).encode())


@pytest.mark.parametrize("phase", [*BEFORE_START, *RUNNING])
async def test_a_node_that_only_our_cache_does_not_show_is_not_lost(phase: str) -> None:
    scene = bound_scene("node-a", "node-b")
    add(scene, phase)
    async with scene.dispatching(scene.dispatcher(OldList(scene.kube, lambda _: False))):
        await asyncio.sleep(60)
        assert scene.phase("du") == phase
        await remove_node(scene, "node-a")
        await scene.until(lambda: scene.phase("du") == "Failed", seconds=30)


async def test_the_log_of_a_mover_is_kept_before_it_is_removed_for_an_agent_that_is_away(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    scene = bound_scene("node-b")
    load = add(scene, "Failed")
    scene.kube.put(mover_pod(load, phase="Running"))
    scene.kube.logs[NAMESPACE, "du"] = "first words\nlast words\n"
    async with scene.dispatching():
        await scene.until(lambda: scene.kind.cleaned == ["du"], seconds=60)
    told = [record for record in caplog.records if record.getMessage().startswith("mover: ")]
    assert [record.getMessage() for record in told] == ["mover: first words", "mover: last words"]


@pytest.mark.parametrize(
    ("phase", "limit"),
    [*((phase, timedelta(minutes=5)) for phase in BEFORE_START), *((phase, timedelta(hours=1)) for phase in RUNNING)],
)
@pytest.mark.parametrize("by", ["cancel", "deletion"])
async def test_a_cancel_that_nobody_answers_is_forced(by: str, phase: str, limit: timedelta) -> None:
    scene = bound_scene("node-b")
    load = add(scene, phase)
    client = KubeClient(scene.kube, Retry(LoopClock()))
    async with scene.dispatching():
        await scene.until(lambda: scene.message("du") != "", seconds=45)
        if by == "cancel":
            await client.patch(DATA_UPLOADS, NAMESPACE, "du", {"spec": {"cancel": True}})
        else:
            await client.delete(DATA_UPLOADS, NAMESPACE, load["metadata"]["name"])
        await asyncio.sleep(limit.total_seconds() - 10)
        assert scene.phase("du") == phase
        await scene.until(lambda: scene.kind.cleaned == ["du"], seconds=100)
        if by == "deletion":
            await scene.until(lambda: not scene.phases(), seconds=5)
            return
    assert scene.phase("du") == "Canceled"
    assert f"nobody answered within {format_duration(limit)}: no node agent" in scene.message("du")


async def test_the_time_of_a_cancel_survives_a_change_of_the_leader() -> None:
    scene = bound_scene("node-b")
    add(scene, "Prepared")
    client = KubeClient(scene.kube, Retry(LoopClock()))
    await client.patch(DATA_UPLOADS, NAMESPACE, "du", {"spec": {"cancel": True}})
    began = asyncio.get_running_loop().time()
    for _ in range(4):
        async with scene.dispatching():
            await asyncio.sleep(60)
    assert CANCEL_REQUESTED_ANNOTATION in scene.load("du")["metadata"]["annotations"]
    async with scene.dispatching():
        await scene.until(lambda: scene.phase("du") == "Canceled", seconds=400)
    assert asyncio.get_running_loop().time() - began < 420


@pytest.mark.parametrize("lost", [True, False], ids=["node lost", "agent away"])
@pytest.mark.parametrize("kept", [True, False], ids=["outcome kept", "only in the pod"])
async def test_a_result_that_is_there_goes_to_another_agent(kept: bool, lost: bool) -> None:
    scene = bound_scene("node-b")
    add(scene, "InProgress", {OUTCOME_ANNOTATION: '{"phase":"Completed"}'} if kept else {})
    if not kept:
        ended = [{"state": {"terminated": {"exitCode": 0, "message": "{}"}}}]
        scene.kube.put(mover_pod(scene.load("du"), phase="Succeeded", containerStatuses=ended))
    if lost:
        await remove_node(scene, "node-a")
    async with scene.dispatching():
        await scene.until(lambda: scene.load("du")["metadata"]["labels"][NODE_LABEL] == "node-b", seconds=45)
        await scene.until(lambda: scene.reasons("du") == ["HandedOn"], seconds=5)
    assert scene.phase("du") == "InProgress"


@pytest.mark.parametrize("lost", [True, False], ids=["node lost", "agent away"])
async def test_a_kept_result_waits_for_an_agent_although_its_mover_is_gone(lost: bool) -> None:
    scene = bound_scene("node-b")
    scene.kube.put(agent_pod("node-b", ready=False))
    add(scene, "InProgress", {OUTCOME_ANNOTATION: '{"phase":"Completed"}'})
    await KubeClient(scene.kube, Retry(LoopClock())).delete(PODS, NAMESPACE, "du")
    if lost:
        await remove_node(scene, "node-a")
    async with scene.dispatching():
        await asyncio.sleep(120)
        assert scene.phase("du") == "InProgress"
        scene.kube.put(agent_pod("node-b"))
        await scene.until(lambda: scene.load("du")["metadata"]["labels"][NODE_LABEL] == "node-b", seconds=45)
    assert scene.phase("du") == "InProgress"


@pytest.mark.parametrize("told_by", ["status", "volume", "nobody"])
async def test_a_node_with_a_long_name_is_called_by_it_if_anything_tells_it(told_by: str) -> None:
    scene, long = bound_scene("node-b"), "n" * 70
    load = add(scene, "Prepared")
    load["metadata"]["labels"][NODE_LABEL] = label_value(long)
    load["status"] |= {"node": long} if told_by == "status" else {}
    scene.kube.put(load)
    scene.kind.nodes["du"] = long if told_by == "volume" else "node-b"
    async with scene.dispatching():
        await scene.until(lambda: scene.phase("du") == "Failed", seconds=30)
    shown = label_value(long) if told_by == "nobody" else long
    assert scene.message("du").startswith(f"node {shown} does not exist any more; ")

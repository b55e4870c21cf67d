"""Transfers whose mover and agent are lost continue, if they may."""

import asyncio
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from typing import Literal

import pytest

from core.kube.resources import BACKUPS, DATA_UPLOADS, NODES, PODS
from core.models.base import JsonDict
from core.models.names import ATTEMPT_LABEL, DATA_MOVER_FINALIZER, NODE_LABEL
from core.models.phases import AttemptStage, InterruptionCause, RetryRules
from core.models.transfers import DataDownload, PodVolumeBackup
from tests.nodeagent.support.dispatching import Scene, ScriptedKind, agent_pod, cluster_node, interrupted, open_scene
from tests.nodeagent.support.transfers import NAMESPACE, mover_pod
from tests.support.clock import LoopClock

pytestmark = pytest.mark.looptime

BETWEEN = [AttemptStage.WAITING, AttemptStage.READY, AttemptStage.EXPOSING]
LOST = "node node-a does not exist"
BACKUP = {"apiVersion": "velero.io/v1", "kind": "Backup", "name": "nightly", "uid": "uid-of-nightly"}


def lost_scene(*live: str, bound: bool = False) -> Scene:
    """Return a scene with a transfer that runs on node-a, and agents on `live`."""
    scene = open_scene(*live, bound=bound)
    for node in ("node-a", "node-b"):
        scene.kube.put(cluster_node(node))
    status = {"phase": "InProgress", "node": "node-a"}
    transfer = scene.add("du", status=status, labels={NODE_LABEL: "node-a"}, finalizers=[DATA_MOVER_FINALIZER])
    scene.kube.put(mover_pod(transfer, phase="Running"))
    return scene


async def delete(scene: Scene, what: Literal["node", "mover"]) -> None:
    if what == "node":
        await scene.client.delete(NODES, "", "node-a")
    else:
        await scene.client.delete(PODS, NAMESPACE, "du")


def lose_node(scene: Scene) -> None:
    """Make node-a not Ready from now on, and its agent too."""
    since = LoopClock().now().isoformat(timespec="seconds")
    scene.kube.put(cluster_node("node-a", ready=False, since=since))
    scene.kube.put(agent_pod("node-a", ready=False))


async def until_failed(scene: Scene, *, seconds: float = 45) -> str:
    """Return the message of the transfer once it has failed."""
    await scene.until(lambda: scene.phase("du") == "Failed", seconds=seconds)
    return scene.message("du")


@pytest.mark.parametrize(
    ("phase", "how"),
    [("InProgress", "deleted"), *(("Prepared", how) for how in ("deleted", "not ready", "agent unavailable"))],
)
async def test_a_transfer_of_a_lost_node_continues_on_another(phase: str, how: str) -> None:
    scene = lost_scene("node-a", "node-b")
    scene.set_status("du", phase=phase)
    async with scene.dispatching():
        await asyncio.sleep(10)
        if how == "deleted":
            await delete(scene, "node")
        elif how == "not ready":
            lose_node(scene)
        else:
            scene.kube.put(agent_pod("node-a", ready=False))
        await scene.until(lambda: scene.label() == "node-b", seconds=1900)
        await asyncio.sleep(60)
    attempts = scene.attempts("du")
    assert (attempts.number, attempts.stage, attempts.retries) == (2, AttemptStage.WAITING, 1)
    (interruption,) = attempts.interruptions
    assert (interruption.cause, interruption.node) == (InterruptionCause.NODE_LOST, "node-a")
    assert (scene.phase("du"), scene.reason("du")) == ("InProgress", "Interrupted")
    assert scene.reasons("du")[-1] == "Interrupted"
    if how == "deleted":
        assert (interruption.message, interruption.terminated) == (LOST, False)
        assert scene.message("du") == f"attempt 1 was interrupted: {LOST}; attempt 2 begins in 30s"
        assert scene.reasons("du") == ["Interrupted"]


@pytest.mark.parametrize("running", [True, False], ids=["running", "between two attempts"])
async def test_the_transfers_of_a_deleted_node_are_shared_among_all_agents(*, running: bool) -> None:
    scene = lost_scene("node-a", "node-b", "node-c", "node-d")
    names = ["du", *(f"du-{number}" for number in range(8))]
    for name in names[1:]:
        transfer = scene.add(name, status={"phase": "InProgress", "node": "node-a"}, labels={NODE_LABEL: "node-a"})
        scene.kube.put(mover_pod(transfer, phase="Running"))
    for name in names if not running else ():
        scene.set_attempts(name, interrupted(InterruptionCause.EVICTED, AttemptStage.WAITING))
    async with scene.dispatching():
        await asyncio.sleep(10)
        await delete(scene, "node")
        await scene.until(lambda: all(scene.label(name) != "node-a" for name in names), seconds=60)
    assert Counter(scene.label(name) for name in names) == {"node-b": 3, "node-c": 3, "node-d": 3}


@pytest.mark.parametrize(
    ("evicted", "cause"), [(True, InterruptionCause.EVICTED), (False, InterruptionCause.DELETED)], ids=str
)
async def test_without_mover_and_agent_it_continues_on_another_node(evicted: bool, cause: InterruptionCause) -> None:
    scene = lost_scene("node-b")
    async with scene.dispatching():
        await asyncio.sleep(60)
        assert scene.attempts("du").number == 1
        if evicted:
            status = {"phase": "Failed", "reason": "Evicted", "message": "disk pressure"}
            scene.kube.put(mover_pod(scene.transfer("du"), **status))
        else:
            await delete(scene, "mover")
        await scene.until(lambda: scene.label() == "node-b", seconds=45)
    assert scene.attempts("du").interruptions[0].cause is cause


@pytest.mark.parametrize("what", ["lost", "lost-applied", 409, 500])
async def test_an_interruption_is_announced_once_in_any_case(what: Literal["lost", "lost-applied"] | int) -> None:
    scene = lost_scene("node-a", "node-b")
    async with scene.dispatching(), scene.dispatching():
        await asyncio.sleep(10)
        scene.kube.fail_next("PATCH", "datauploads/du", what, times=3)
        await delete(scene, "node")
        await scene.until(lambda: scene.label() == "node-b", seconds=100)
        await asyncio.sleep(60)
    assert scene.attempts("du").number == 2


@pytest.mark.parametrize(
    ("rules", "limit"),
    [
        (RetryRules(max_retries=0), "0 retries (maxRetries)"),
        (RetryRules(enabled=False), "retries are switched off"),
        (RetryRules(deadline=timedelta(seconds=5)), "older than 5s (deadline)"),
    ],
    ids=["retries", "off", "age"],
)
@pytest.mark.parametrize("phase", ["Prepared", "InProgress"])
async def test_a_transfer_beyond_a_limit_fails_with_cause_and_limit(rules: RetryRules, limit: str, phase: str) -> None:
    scene = lost_scene("node-a", "node-b")
    scene.retry = rules
    scene.set_status("du", phase=phase)
    async with scene.dispatching():
        await asyncio.sleep(10)
        await delete(scene, "node")
        message = await until_failed(scene)
    work = "data path was running" if phase == "InProgress" else "volume was being prepared"
    assert message == f"{LOST}; its {work} there; not retried: {limit}"
    assert scene.attempts("du").number == 1


async def test_a_transfer_with_a_cancel_request_is_canceled() -> None:
    scene = lost_scene("node-a", "node-b")
    await scene.client.patch(DATA_UPLOADS, NAMESPACE, "du", {"spec": {"cancel": True}})
    await delete(scene, "node")
    async with scene.dispatching():
        await scene.until(lambda: scene.phase("du") == "Canceled", seconds=30)
    assert scene.message("du") == f"spec.cancel is set; {LOST}"


async def test_without_another_agent_it_is_reported_until_there_is_one() -> None:
    scene = lost_scene("node-a")
    await delete(scene, "node")
    async with scene.dispatching():
        await scene.until(lambda: scene.message("du") == f"{LOST}: continues when an agent is ready", seconds=30)
        await asyncio.sleep(100)
        assert scene.reasons("du") == ["AgentUnavailable"]
        scene.kube.put(agent_pod("node-b"))
        await scene.until(lambda: scene.label() == "node-b", seconds=45)
    assert scene.attempts("du").number == 2


@pytest.mark.parametrize("stage", BETWEEN)
async def test_between_two_attempts_it_is_reassigned(stage: AttemptStage) -> None:
    scene = lost_scene("node-b")
    scene.set_attempts("du", interrupted(InterruptionCause.EVICTED, stage))
    scene.kube.put(mover_pod(scene.transfer("du"), node="", phase="Pending"))
    async with scene.dispatching():
        await scene.until(lambda: scene.label() == "node-b", seconds=45)
        await scene.until(lambda: "Reassigned" in scene.reasons("du"), seconds=5)
    assert (scene.attempts("du").number, scene.phase("du")) == (2, "InProgress")
    assert "acceptedByNode" not in scene.transfer("du")["status"]


async def test_between_two_attempts_without_any_agent_it_fails_at_its_deadline() -> None:
    scene = lost_scene("node-a")
    scene.kube.put(agent_pod("node-a", ready=False))
    scene.retry = RetryRules(deadline=timedelta(hours=1))
    scene.set_attempts("du", interrupted(InterruptionCause.EVICTED, AttemptStage.READY))
    async with scene.dispatching():
        cause = "no node agent is ready on node node-a"
        await scene.until(lambda: scene.message("du") == f"{cause}: continues when the agent is back", seconds=45)
        assert await until_failed(scene, seconds=3700) == f"{cause}; not retried: older than 1h0m0s (deadline)"


@pytest.mark.parametrize("mover", ["runs", "lost"])
async def test_a_transfer_that_is_bound_to_its_node_continues_when_that_is_back(mover: str) -> None:
    scene = lost_scene("node-a", "node-b", bound=True)
    async with scene.dispatching():
        await asyncio.sleep(5)
        lose_node(scene)
        if mover == "lost":
            await delete(scene, "mover")
        await asyncio.sleep(900)
        assert (scene.phase("du"), scene.reason("du")) == ("InProgress", "AgentUnavailable")
        assert scene.message("du").endswith("continues when the agent is back")
        scene.kube.put(cluster_node("node-a"))
        scene.kube.put(agent_pod("node-a"))
        await scene.until(lambda: scene.message("du") == "", seconds=15)
    assert (scene.attempts("du").number, scene.label(), scene.phase("du")) == (1, "node-a", "InProgress")


@pytest.mark.parametrize("bound", [True, False], ids=["bound", "free"])
@pytest.mark.parametrize("reason", ["OOMKilled", "Completed"])
async def test_a_transfer_bound_to_its_node_is_taken_over_with_a_result_only(reason: str, *, bound: bool) -> None:
    scene = lost_scene("node-b", bound=bound)
    state = {"terminated": {"exitCode": 0 if reason == "Completed" else 137, "reason": reason}}
    containers = [{"name": "mover", "state": state}]
    scene.kube.put(mover_pod(scene.transfer("du"), phase="Failed", containerStatuses=containers))
    async with scene.dispatching():
        await scene.until(lambda: scene.reasons("du") != [], seconds=60)
        await asyncio.sleep(60)
    waits = bound and reason == "OOMKilled"
    assert (scene.label(), scene.reasons("du")) == (
        ("node-a", ["AgentUnavailable"]) if waits else ("node-b", ["Reassigned"])
    )
    assert (scene.attempts("du").number, scene.phase("du")) == (1, "InProgress")
    assert scene.message("du").endswith("continues when the agent is back") is waits


@pytest.mark.parametrize("stage", [AttemptStage.RUNNING, *BETWEEN])
async def test_a_transfer_that_is_bound_to_its_node_fails_with_its_workload_pod(stage: AttemptStage) -> None:
    scene = lost_scene("node-b", bound=True)
    scene.set_attempts("du", interrupted(InterruptionCause.EVICTED, stage))
    await delete(scene, "mover")
    async with scene.dispatching():
        await asyncio.sleep(100)
        assert scene.phase("du") == "InProgress"
        scene.kind.gone.add("du")
        message = await until_failed(scene)
    assert message.endswith("no node agent is ready on node node-a; not retried: workload pod app/db no longer exists")


@pytest.mark.parametrize("stage", [AttemptStage.RUNNING, *BETWEEN])
async def test_a_transfer_that_waits_for_its_node_fails_at_its_deadline(stage: AttemptStage) -> None:
    scene = lost_scene("node-b", bound=True)
    scene.set_attempts("du", interrupted(InterruptionCause.EVICTED, stage))
    async with scene.dispatching():
        await asyncio.sleep(5)
        lose_node(scene)
        scene.retry = replace(scene.retry, deadline=timedelta(minutes=10))
        await asyncio.sleep(560)
        assert scene.phase("du") == "InProgress"
        message = await until_failed(scene, seconds=80)
    assert "node-a" in message
    assert message.endswith("; not retried: older than 10m0s (deadline)")


@pytest.mark.parametrize("bound", [True, False], ids=["the only node", "another could"])
@pytest.mark.parametrize("node_lost", [True, False], ids=["node lost", "agent unavailable"])
async def test_an_attempt_with_a_pod_on_its_node_is_given_up_in_time(node_lost: bool, bound: bool) -> None:
    scene = lost_scene("node-a", "node-b", bound=bound)
    scene.set_attempts("du", interrupted(InterruptionCause.EVICTED, AttemptStage.EXPOSING))
    async with scene.dispatching():
        await scene.until(lambda: scene.ledger() == {"uid-of-du"})
        if node_lost:
            lose_node(scene)
        else:
            scene.kube.put(agent_pod("node-a", ready=False))
        await asyncio.sleep(280 if node_lost else 1780)
        assert scene.ledger() == {"uid-of-du"}
        await scene.until(lambda: scene.ledger() == set(), seconds=90)
    attempts = scene.attempts("du")
    assert (attempts.number, attempts.stage, scene.label()) == (
        3,
        AttemptStage.WAITING,
        "node-a" if bound else "node-b",
    )


@pytest.mark.parametrize("phase", ["Prepared", "InProgress"])
@pytest.mark.parametrize("mover", ["ours", "another's", "another's evicted", "gone"])
async def test_a_restore_does_not_continue_while_a_mover_without_a_fence_may_write(mover: str, phase: str) -> None:
    scene = open_scene("node-a", "node-b")
    scene.others.append(ScriptedKind(DataDownload))
    labels = {NODE_LABEL: "node-a"}
    restore = scene.add_kind(DataDownload, "du", status={"phase": phase, "node": "node-a"}, labels=labels)
    evicted = {"phase": "Failed", "reason": "Evicted"}
    pod = mover_pod(restore, **(evicted if "evicted" in mover else {"phase": "Running"}))
    pod["metadata"]["labels"] |= {ATTEMPT_LABEL: "1"} if mover == "ours" else {}
    if mover != "gone":
        scene.kube.put(pod)
    async with scene.dispatching():
        await asyncio.sleep(5)
        lose_node(scene)
        await scene.until(lambda: scene.attempts("du").number == 2 or scene.phase("du") == "Failed", seconds=400)
    refused = scene.message("du").endswith(
        "; not retried: its data mover, of Velero or of an older version, may still write to the volume"
    )
    unknown = mover == "gone" and phase == "Prepared"
    assert (scene.phase("du") == "Failed", refused) == ("another's" in mover or unknown, "another's" in mover)


@pytest.mark.parametrize("phase", ["Completed", "InProgress"])
async def test_a_pod_volume_backup_is_not_retried_once_its_backup_is_final(phase: str) -> None:
    scene = open_scene("node-b")
    scene.kube.put(cluster_node("node-a"))
    scene.others.append(ScriptedKind(PodVolumeBackup, bound_to_node=True))
    meta: JsonDict = {"name": "nightly", "namespace": NAMESPACE, "uid": BACKUP["uid"]}
    scene.kube.put({"apiVersion": BACKUPS.api_version, "kind": "Backup", "metadata": meta, "status": {"phase": phase}})
    labels = {NODE_LABEL: "node-a"}
    scene.add_kind(PodVolumeBackup, "du", status={"phase": "InProgress"}, labels=labels, ownerReferences=[BACKUP])
    async with scene.dispatching():
        await scene.until(lambda: scene.message("du") != "", seconds=45)
    assert scene.phase("du") == ("Failed" if phase == "Completed" else "InProgress")
    assert ("not retried: Backup velero/nightly is Completed" in scene.message("du")) is (phase == "Completed")

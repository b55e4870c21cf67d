"""Orphaned transfers are adopted, reassigned, reported or cleaned up; each step, over every state and every owner."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from core.kube.resources import DATA_UPLOADS, EVENTS
from core.models.names import DATA_MOVER_FINALIZER, NODE_LABEL, OUTCOME_ANNOTATION
from core.models.phases import AttemptStage, Phase
from core.models.reasons import PendingReason
from exposer.causes import CauseFinder
from exposer.model import Pending
from exposer.settings import ExposeSettings
from exposer.template import AgentTemplate
from nodeagent.app import build_kinds
from nodeagent.leader.index import Entry
from nodeagent.leader.recovery.orphaned_transfers import OwnerState, RecoveryAction, decide_recovery
from tests.nodeagent.support.dispatching import agent_pod, entry, open_scene
from tests.nodeagent.support.transfers import mover_pod
from tests.support.clock import LoopClock

pytestmark = pytest.mark.looptime


RECORDINGS = Path(__file__).parents[3] / "recordings" / "velero-1.18.2"


async def test_an_accepted_transfer_is_reassigned_after_its_agent_is_unavailable_for_a_while() -> None:
    scene = open_scene("node-a", "node-b")
    accepted_at = "2026-11-21T12:00:00Z"
    status = {"phase": "Accepted", "acceptedByNode": "node-a", "acceptedTimestamp": accepted_at}
    scene.add("du", status=status, labels={NODE_LABEL: "node-a"}, finalizers=[DATA_MOVER_FINALIZER])
    async with scene.dispatching():
        await asyncio.sleep(60)
        scene.kube.put(agent_pod("node-a", ready=False))
        await asyncio.sleep(25)
        assert scene.label() == "node-a"
        await scene.until(lambda: scene.label() == "node-b", seconds=15)
        await scene.until(lambda: scene.reasons("du") == ["Reassigned"])
    assert scene.transfer("du")["status"] == status | {"acceptedByNode": "node-b"}


@pytest.mark.parametrize(
    ("status", "pod_node", "node"),
    [
        pytest.param({"phase": "InProgress", "node": "node-c"}, "", "node-c", id="its node, even without an agent"),
        pytest.param({"phase": "Prepared"}, "node-b", "node-b", id="the mover pod's node"),
        pytest.param({"phase": "Accepted", "acceptedByNode": "node-b"}, "", "node-b", id="the accepting node"),
        pytest.param({"phase": "Accepted", "acceptedByNode": "node-c"}, "", "node-a", id="a live agent instead"),
        pytest.param({"phase": "Accepted", "acceptedByNode": "win"}, "node-b", "node-b", id="while its acceptor runs"),
    ],
)
async def test_a_transfer_of_veleros_agent_is_adopted(status: dict[str, str], pod_node: str, node: str) -> None:
    scene = open_scene("node-a", "node-b")
    scene.kube.put(agent_pod("win", annotations={}))
    scene.add("du", status=status, finalizers=[DATA_MOVER_FINALIZER])
    if pod_node:
        scene.kube.put(mover_pod(scene.transfer("du"), node=pod_node))
    async with scene.dispatching():
        await scene.until(lambda: scene.label() != "", seconds=5)
    assert scene.label() == node
    assert scene.transfer("du")["status"]["phase"] == status["phase"]


@pytest.mark.parametrize(
    ("status", "pod_node", "node"),
    [
        pytest.param({"phase": "Accepted", "acceptedByNode": "win"}, "", "node-a", id="its volume is being exposed"),
        pytest.param({"phase": "Accepted", "acceptedByNode": "win"}, "node-x", "node-a", id="pod without an agent"),
        pytest.param({"phase": "InProgress", "acceptedByNode": "node-a", "node": "win"}, "win", "win", id="data moves"),
    ],
)
async def test_a_transfer_stays_with_a_running_velero_agent(status: dict[str, str], pod_node: str, node: str) -> None:
    scene = open_scene("node-a")
    scene.kube.put(agent_pod("win", annotations={}))
    scene.add("du", status=status, finalizers=[DATA_MOVER_FINALIZER])
    if pod_node:
        scene.kube.put(mover_pod(scene.transfer("du"), node=pod_node))
    before = scene.transfer("du")
    async with scene.dispatching():
        await asyncio.sleep(100)
        assert scene.transfer("du") == before
        scene.kube.put(agent_pod("win", annotations={}, ready=False))
        await scene.until(lambda: scene.label() != "", seconds=40)
    assert scene.label() == node


@pytest.mark.parametrize("cancel", [False, True])
async def test_an_accepted_transfer_of_velero_is_reported_and_ended_without_any_agent(cancel: bool) -> None:
    scene = open_scene("node-a")
    scene.kube.put(agent_pod("node-a", ready=False))
    scene.add("du", status={"phase": "Accepted", "acceptedByNode": "win"}, finalizers=[DATA_MOVER_FINALIZER])
    async with scene.dispatching():
        cause = "no node agent is ready on node win"
        await scene.until(
            lambda: scene.transfer("du")["status"].get("message") == f"{cause}: continues when the agent is back",
            seconds=45,
        )
        if cancel:
            await scene.client.patch(DATA_UPLOADS, "velero", "du", {"spec": {"cancel": True}})
        await asyncio.sleep(280 if cancel else 1700)
        assert scene.phases() == {"du": "Accepted"}
        await scene.until(lambda: scene.phases() == {"du": "Canceled" if cancel else "Failed"}, seconds=120)
    assert scene.transfer("du")["status"]["message"].endswith(f": {cause}")


async def test_an_accepted_transfer_of_velero_is_given_to_the_first_agent_that_is_ready() -> None:
    scene = open_scene("node-a")
    scene.kube.put(agent_pod("node-a", ready=False))
    scene.add("du", status={"phase": "Accepted", "acceptedByNode": "win"}, finalizers=[DATA_MOVER_FINALIZER])
    async with scene.dispatching():
        for ready in (False, True, False):
            # It is left to an agent of Velero that is only restarted.
            scene.kube.put(agent_pod("win", annotations={}, ready=ready))
            await asyncio.sleep(100)
            assert ("message" in scene.transfer("du")["status"]) is not ready
            assert scene.label() == ""
        scene.kube.put(agent_pod("node-a"))
        await scene.until(lambda: scene.label() == "node-a", seconds=45)
    assert scene.phases() == {"du": "Accepted"}


@pytest.mark.parametrize("phase", ["Prepared", "InProgress", "Canceling"])
async def test_a_transfer_created_with_its_phase_and_without_a_node_fails(phase: str) -> None:
    scene = open_scene("node-a", limit=1)
    scene.add("exposed", status={"phase": phase}, finalizers=[DATA_MOVER_FINALIZER])
    scene.add("next")
    async with scene.dispatching():
        await scene.until(lambda: scene.phases() == {"exposed": "Failed", "next": "Accepted"}, seconds=15)
    expected = f"cannot determine the owning agent in phase {phase}: no node label and no data mover pod"
    assert scene.transfer("exposed")["status"]["message"] == expected


async def test_an_orphaned_final_transfer_is_cleaned_up_and_its_marks_removed() -> None:
    scene = open_scene("node-b")
    scene.add("synced", status={"phase": "Completed"}, finalizers=[DATA_MOVER_FINALIZER, "other/one"])
    labels = {NODE_LABEL: "node-a", "other": "1"}
    marks = {OUTCOME_ANNOTATION: "{}", "other": "1"}
    scene.add("left", status={"phase": "Failed"}, annotations=marks, labels=labels, finalizers=[DATA_MOVER_FINALIZER])
    scene.add("done", status={"phase": "Completed"})
    done = scene.transfer("done")
    async with scene.dispatching():
        await scene.until(lambda: scene.kind.cleaned == ["synced"], seconds=5)
        await scene.until(lambda: scene.kind.cleaned == ["synced", "left"], seconds=40)
        await asyncio.sleep(1)
    assert scene.transfer("synced")["metadata"]["finalizers"] == ["other/one"]
    left = scene.transfer("left")["metadata"]
    assert "finalizers" not in left
    assert left["labels"] == {"other": "1"}
    assert left["annotations"] == {"other": "1"}
    assert scene.transfer("done") == done


async def test_cleanups_of_orphans_and_what_blocks_them_are_on_the_status_page() -> None:
    scene = open_scene("node-b")
    for name in ("held", "rejected"):
        scene.add(name, status={"phase": "Completed"}, finalizers=[DATA_MOVER_FINALIZER])
    scene.kind.held["held"] = Pending("CleaningUp", "Pod velero/held is being deleted")
    scene.kube.fail_next("PATCH", "/datauploads/rejected", 403, times=3)
    async with scene.dispatching() as dispatcher:
        await scene.until(lambda: "rejected" in str(dispatcher.report().get("orphans")), seconds=10)
        await scene.until(lambda: "held is" in str(dispatcher.report()["orphans"]["pendingMessages"]), seconds=10)
        shown = dispatcher.report()["orphans"]
        assert (shown["transfers"], shown["pendingMessages"]) == ({"CLEAN_UP": 2}, ["Pod velero/held is being deleted"])
        assert dispatcher._term is not None
        pending = dispatcher._term._orphans._pending
        assert (len(pending._records), len(pending._operations._observed)) == (1, 1)
        transfer = scene.transfer("held")
        transfer["metadata"]["finalizers"] = []
        scene.kube.put(transfer)
        await scene.client.delete(DATA_UPLOADS, "velero", "held")
        await scene.until(lambda: dispatcher.report()["orphans"]["transfers"] == {}, seconds=200)
        assert dispatcher.report()["orphans"]["lastError"].startswith("DataUpload velero/rejected: ")
        # Nothing is remembered of a deleted transfer.
        assert (len(pending._records), len(pending._operations._observed)) == (0, 0)


async def test_the_invalid_fields_of_an_unreadable_transfer_are_reported_once_and_others_too() -> None:
    scene = open_scene("node-a")
    transfer, foreign = scene.add("du"), scene.add("foreign")
    del transfer["spec"]["sourceNamespace"]
    scene.kube.put(transfer)
    scene.kube.put(foreign | {"spec": {"datamover": "foreign-mover"}})
    async with scene.dispatching():
        await scene.until(lambda: scene.reasons("du") == ["Unreadable"], seconds=10)
        await asyncio.sleep(60)
        (event,) = scene.kube.objects(EVENTS)
        scene.kube.put(transfer | {"spec": {"csiSnapshot": 1}})
        await scene.until(lambda: scene.reasons("du") == ["Unreadable", "Unreadable"], seconds=10)
        await asyncio.sleep(60)
    assert len(scene.kube.objects(EVENTS)) == 2
    assert (event["involvedObject"]["name"], event["type"]) == ("du", "Warning")
    assert "invalid DataUpload velero/du: spec: Object missing required field `sourceNamespace`" in event["message"]


async def test_a_fault_of_a_later_transfer_of_the_same_name_is_logged_again(caplog: pytest.LogCaptureFixture) -> None:
    scene = open_scene("node-a")
    scene.kube.fail_next("PATCH", "/datauploads/du", 403, times=1000)
    async with scene.dispatching():
        for number in (1, 2):
            scene.add("du", status={"phase": "Completed"}, finalizers=[DATA_MOVER_FINALIZER])
            await scene.until(lambda: [one.levelname for one in caplog.records].count("ERROR") == number, seconds=10)  # noqa: B023 - called at once
            scene.add("du", status={"phase": "Completed"})
            await asyncio.sleep(120)


@pytest.mark.parametrize("recording", ["dataupload", "datadownload", "podvolumebackup", "podvolumerestore"])
async def test_a_recorded_transfer_synced_from_another_cluster_loses_its_finalizer_only(recording: str) -> None:
    """Neither its node nor anything that it was about is in this cluster."""
    scene = open_scene("node-a")
    versions = [each["object"] for each in json.loads((RECORDINGS / f"{recording}.json").read_text())]
    synced = [
        transfer
        for transfer in versions
        if transfer["metadata"].get("finalizers") and transfer["status"].get("phase") == "Completed"
    ]
    scene.kube.put(synced[-1])
    (before,) = scene.transfers()
    client, settings = scene.client, ExposeSettings(AgentTemplate("mover:1", host_pods="/host_pods"))
    causes, own = CauseFinder(client, LoopClock()), frozenset({"velero", ""})
    scene.kind, *scene.others = build_kinds(client, causes, lambda: settings, own, node="node-a")  # type: ignore[assignment] # as good as scripted ones
    async with scene.dispatching():
        await scene.until(lambda: "finalizers" not in scene.transfers()[0]["metadata"], seconds=20)
        await asyncio.sleep(60)
    (after,) = scene.transfers()
    for transfer in (before, after):
        del transfer["metadata"]["resourceVersion"]
    del before["metadata"]["finalizers"]
    assert after == before
    assert scene.kube.objects(EVENTS) == []


ANY = (False, True)


def every_case() -> Iterator[tuple[Entry, OwnerState]]:
    """Yield every transfer with every owner state; without a label no agent can be unavailable."""
    reasons = ("", PendingReason.AGENT_UNAVAILABLE, PendingReason.WAITING_FOR_SLOT)
    states: list[tuple[Phase, AttemptStage | None]] = [
        (phase, None) for phase in Phase if phase is not Phase.IN_PROGRESS
    ]
    states += [(Phase.IN_PROGRESS, stage) for stage in AttemptStage]
    for (phase, stage), label, finalizer, reason, ours in product(states, ("", "node-a"), ANY, reasons, ANY):
        transfer = replace(
            entry("du", phase=phase, node_label=label, finalizer=finalizer, reason=reason, managed=ours), stage=stage
        )
        if phase is Phase.NEW and not ours:
            yield (
                replace(transfer, fault="spec: Field required"),
                OwnerState(unavailable=False, velero=False, node_lost=False, bound=False),
            )
        known = ANY if label else (False,)
        for unavailable, velero, lost, bound in product(known, known, known, ANY):
            yield transfer, OwnerState(unavailable=unavailable, velero=velero, node_lost=lost, bound=bound)


def expected(transfer: Entry, owner: OwnerState) -> RecoveryAction:
    """Return the expected step; the first matching row counts."""
    gone = owner.unavailable or owner.node_lost
    idle = transfer.phase is Phase.ACCEPTED or transfer.stage in set(AttemptStage) - {AttemptStage.RUNNING}
    table = [
        (bool(transfer.fault) and not transfer.node_label, RecoveryAction.REPORT_INVALID),
        (not transfer.managed, RecoveryAction.NOTHING),
        (transfer.phase is Phase.NEW, RecoveryAction.NOTHING),
        (transfer.phase.final and not transfer.finalizer, RecoveryAction.NOTHING),
        (transfer.phase.final and bool(transfer.node_label) and not gone, RecoveryAction.NOTHING),
        (transfer.phase.final, RecoveryAction.CLEAN_UP),
        (not transfer.node_label, RecoveryAction.ADOPT),
        (owner.velero and not idle, RecoveryAction.NOTHING),
        (gone and idle and not owner.bound, RecoveryAction.REASSIGN),
        (owner.node_lost, RecoveryAction.LEAVE_NODE),
        (owner.unavailable, RecoveryAction.WAIT_FOR_AGENT),
        (transfer.reason == "AgentUnavailable", RecoveryAction.CLEAR_REPORT),
        (True, RecoveryAction.NOTHING),
    ]
    return next(action for applies, action in table if applies)


def test_every_case_matches_the_table() -> None:
    for transfer, owner in every_case():
        assert decide_recovery(transfer, owner) is expected(transfer, owner), (transfer, owner)


@pytest.mark.parametrize("phase", ["Accepted", "InProgress", "Completed"])
async def test_a_rejected_recovery_is_retried_every_minute(phase: str) -> None:
    scene = open_scene("node-b")
    scene.add("du", status={"phase": phase}, labels={NODE_LABEL: "node-a"}, finalizers=[DATA_MOVER_FINALIZER])
    scene.kube.fail_next("PATCH", "/datauploads/du", 403, times=1000)
    async with scene.dispatching():
        await asyncio.sleep(60)
        before = [request.method for request in scene.kube.requests].count("PATCH")
        await asyncio.sleep(600)
        assert 9 <= [request.method for request in scene.kube.requests].count("PATCH") - before <= 11
        scene.kube.fulfill()
        await scene.until(lambda: scene.label() != "node-a" or scene.phases() == {"du": "Failed"}, seconds=65)


async def test_a_blocked_cleanup_is_retried_every_minute_and_soon_again_once_it_gets_on() -> None:
    scene = open_scene("node-a")
    scene.add("du", status={"phase": "Completed"}, labels={NODE_LABEL: "gone"}, finalizers=[DATA_MOVER_FINALIZER])
    scene.kind.held["du"] = Pending("CleaningUp", "Pod du is being deleted", operation="deletion of pod")
    async with scene.dispatching():
        await asyncio.sleep(900)
        before = len(scene.kind.cleaned)
        await asyncio.sleep(600)
        assert 9 <= len(scene.kind.cleaned) - before <= 11
        before = len(scene.kind.cleaned)
        scene.kind.held["du"] = Pending("CleaningUp", "PVC du is being deleted", operation="deletion of pvc")
        await scene.until(lambda: len(scene.kind.cleaned) > before + 1, seconds=70)
        scene.kind.held.clear()
        await scene.until(lambda: NODE_LABEL not in scene.transfer("du")["metadata"].get("labels", {}), seconds=10)

"""The quota is never exceeded, whatever fails; interrupted transfers begin their next attempts within it."""

import asyncio
import random
from typing import Literal

import pytest

from core.kube.resources import DATA_UPLOADS, EVENTS
from core.kube.transport import Request
from core.models.names import ACCEPT_FENCE_ANNOTATION, NODE_LABEL, PENDING_REASON_ANNOTATION
from core.models.phases import AttemptStage, InterruptionCause
from core.models.transfers import DataUpload
from nodeagent.transfers.kinds.base import Admission, AdmissionState
from tests.nodeagent.support.dispatching import (
    RESOURCES,
    Scene,
    ScriptedKind,
    agent_pod,
    interrupted,
    is_accept,
    most_held,
    open_scene,
)
from tests.nodeagent.support.transfers import NAMESPACE
from tests.support.tasks import running

pytestmark = pytest.mark.looptime


Fault = Literal["lost", "lost-applied"] | int
NOT_READY = Admission(AdmissionState.PENDING, "SnapshotNotReady", "the snapshot is not ready")


BOTH = pytest.mark.parametrize("resumes", [False, True], ids=["accept", "resumption"])


def add_first(scene: Scene, *, resumes: bool) -> None:
    """Store a transfer that starts, for the first time or again, and another one."""
    if resumes:
        scene.add_interrupted("du-1")
    else:
        scene.add("du-1")
    scene.add("du-2")


def resumed(scene: Scene) -> list[str]:
    return sorted(name for name in scene.phases() if scene.attempts(name).stage is AttemptStage.EXPOSING)


def started(scene: Scene, *, resumes: bool) -> bool:
    return "du-1" in resumed(scene) if resumes else scene.phase("du-1") == "Accepted"


async def test_a_reservation_is_released_only_behind_a_fence() -> None:
    scene = open_scene(limit=1)
    scene.add("du-1")
    # Paused right after the reservation: whatever it sends about the transfer comes late.
    async with scene.paused(lambda request: "datauploads/du-1" in request.path and bool(scene.ledger())) as gate:
        scene.kind.answers["du-1"] = NOT_READY
        scene.add("du-2")
        async with scene.dispatching():
            await scene.until(lambda: scene.phase("du-2") == "Accepted")
            assert ACCEPT_FENCE_ANNOTATION in scene.transfer("du-1")["metadata"]["annotations"]
            gate.open.set()
            await asyncio.sleep(5)
            assert scene.phase("du-1") == ""
            del scene.kind.answers["du-1"]
            scene.set_status("du-2", phase="InProgress")
            await scene.until(lambda: scene.phase("du-1") == "Accepted")
    assert "annotations" not in scene.transfer("du-1")["metadata"]
    assert most_held(scene.kube) == 1


async def test_a_fence_that_cannot_be_written_keeps_the_reservation() -> None:
    scene = open_scene(limit=1)
    scene.add("du-1")
    scene.add("du-2")
    async with scene.paused(is_accept):
        scene.kind.answers["du-1"] = NOT_READY
    scene.set_status("du-1", message=NOT_READY.message)
    scene.kube.fail_next("PATCH", "datauploads/du-1", 403, times=3)
    async with scene.dispatching():
        await asyncio.sleep(2)
        assert scene.ledger() == {"uid-of-du-1"}
        await scene.until(lambda: scene.phase("du-2") == "Accepted")
    assert scene.ledger() == {"uid-of-du-2"}


@pytest.mark.cause("accept-rejected")
@pytest.mark.parametrize("status", [403, 422])
@pytest.mark.parametrize("ledger", [[], ["lost-applied"], [500] * 5], ids=str)
@BOTH
async def test_a_transfer_whose_start_is_rejected_holds_no_reservation(
    *, resumes: bool, status: int, ledger: list[Fault]
) -> None:
    """As by an admission policy; others go on, and it starts once that is changed."""
    scene = open_scene("node-a", limit=1)
    async with scene.dispatching():
        await asyncio.sleep(1)
        for fault in ledger:
            scene.kube.fail_next("PATCH", "configmaps", fault)
        add_first(scene, resumes=resumes)
        scene.kube.fail_next("PATCH", "datauploads/du-1", status, times=12)
        await scene.until(lambda: scene.phase("du-2") == "Accepted", seconds=20)
        assert scene.reasons("du-1") == ["Rejected"]
        scene.set_status("du-2", phase="InProgress")
        await scene.until(lambda: started(scene, resumes=resumes), seconds=500)
    assert len(scene.kube.requests) < 100
    assert (scene.message("du-1"), most_held(scene.kube)) == ("", 1)


@pytest.mark.parametrize("what", ["lost", "lost-applied", 409, 500])
@BOTH
async def test_a_start_without_an_answer_is_resolved(*, resumes: bool, what: Fault) -> None:
    scene = open_scene(limit=1)
    add_first(scene, resumes=resumes)
    scene.kube.fail_next("PATCH", "datauploads/du-1", what, times=6 if resumes else 1)
    async with scene.dispatching():
        await scene.until(lambda: started(scene, resumes=resumes))
        await asyncio.sleep(30)
        # With or without an answer, one Event is recorded.
        assert scene.reasons("du-1") == ["Resumed" if resumes else "Accepted"]
        assert (scene.ledger(), scene.accepted) == ({"uid-of-du-1"}, [] if resumes else ["du-1"])
        if resumes:
            scene.set_stage("du-1", AttemptStage.RUNNING)
        else:
            scene.set_status("du-1", phase="InProgress")
        await scene.until(lambda: scene.phase("du-2") == "Accepted")
    assert most_held(scene.kube) == 1


async def test_an_edited_limit_is_active_at_once() -> None:
    scene = open_scene("node-a", limit=1)
    for number in range(6):
        scene.add(f"du-{number}")
    async with scene.dispatching() as dispatcher:
        await scene.until(lambda: len(scene.accepted) == 1)
        await scene.until(lambda: scene.message("du-5") != "")
        scene.limit = 3
        dispatcher.request_pass()
        await scene.until(lambda: len(scene.accepted) == 3, seconds=1)
        scene.limit = 2
        dispatcher.request_pass()
        scene.set_status("du-0", phase="InProgress")
        await asyncio.sleep(20)
        assert len(scene.accepted) == 3
        scene.set_status("du-1", phase="InProgress")
        await scene.until(lambda: len(scene.accepted) == 4, seconds=1)
        scene.limit = None
        dispatcher.request_pass()
        await scene.until(lambda: len(scene.accepted) == 6, seconds=1)


ATTEMPT = "attempt 1 was interrupted: it ended; attempt 2"
OLD, OLDER = "2026-11-21T11:00:00Z", "2026-11-21T10:00:00Z"


def is_resumption(request: Request) -> bool:
    return request.method == "PATCH" and b"Exposing" in (request.body or b"")


async def test_one_write_begins_the_next_attempt() -> None:
    scene = open_scene("node-a")
    scene.add_interrupted("du", annotations={PENDING_REASON_ANNOTATION: "Interrupted"})
    scene.set_status("du", message="attempt 1 was interrupted", startTimestamp=OLD)
    async with scene.dispatching():
        await scene.until(lambda: scene.reasons("du") != [])
    cr = scene.transfer("du")
    assert cr["status"] == {"phase": "InProgress", "startTimestamp": OLD}
    assert scene.attempts("du") == interrupted().move(AttemptStage.EXPOSING)
    assert (scene.reason("du"), scene.reasons("du")) == ("", ["Resumed"])
    assert (scene.ledger(), scene.accepted) == ({"uid-of-du"}, [])


async def test_interrupted_transfers_go_before_new_ones_and_one_of_each_node_at_a_time() -> None:
    scene = open_scene("node-a", "node-b", limit=3, bound=True)
    scene.add("new-1", creationTimestamp="2026-11-20T10:00:00Z")
    scene.add("new-2", creationTimestamp="2026-11-20T10:00:00Z")
    scene.add_interrupted("a-old", creationTimestamp=OLD)
    scene.add_interrupted("a-older", creationTimestamp=OLDER)
    scene.add_interrupted("b", node="node-b")
    async with scene.dispatching():
        await scene.until(lambda: len(scene.accepted) == 1)
        assert resumed(scene) == ["a-older", "b"]
        await scene.until(lambda: scene.reason("a-old") == "Resuming", seconds=10)
        assert scene.message("a-old") == f"{ATTEMPT} begins after another transfer's on node node-a"
        scene.set_stage("a-older", AttemptStage.RUNNING)
        # Before the New one, for which the quota has no place now.
        await scene.until(lambda: resumed(scene) == ["a-old", "b"], seconds=5)
        assert scene.accepted == ["new-1"]
        scene.set_stage("b", AttemptStage.RUNNING)
        await scene.until(lambda: scene.accepted == ["new-1", "new-2"], seconds=5)
    assert most_held(scene.kube) == 3


async def test_one_that_does_not_get_on_delays_no_other() -> None:
    scene = open_scene("node-a", "node-b", limit=5)
    scene.add_interrupted("stuck", stage=AttemptStage.EXPOSING)
    scene.add_interrupted("next")
    async with scene.dispatching():
        await scene.until(lambda: scene.reasons("next") == ["Resumed"])
        assert resumed(scene) == ["next", "stuck"]
        assert scene.label("next") == "node-b"
    (event,) = [one for one in scene.kube.objects(EVENTS) if one["reason"] == "Resumed"]
    assert event["message"] == "the node agent on node node-b prepares attempt 2"


async def test_without_quota_it_is_reported_once_what_it_waits_for_and_nothing_is_polled() -> None:
    scene = open_scene("node-a", limit=1)
    scene.add("du-1", status={"phase": "Prepared"}, labels={NODE_LABEL: "node-a"})
    scene.add_interrupted("du-2")
    async with scene.dispatching() as dispatcher:
        await scene.until(lambda: scene.reason("du-2") == "Resuming", seconds=15)
        (shown,) = dispatcher.report()["interrupted"]
        assert (shown["name"], shown["stage"], shown["nodeLabel"]) == ("du-2", "Ready", "node-a")
        assert scene.message("du-2") == f"{ATTEMPT} is queued before all New transfers: prepareQueueLength (1) reached"
        await asyncio.sleep(10)
        sent = len(scene.kube.requests)
        await asyncio.sleep(100)
        assert len(scene.kube.requests) == sent
        assert scene.reasons("du-2") == ["Resuming"]
        scene.set_status("du-1", phase="InProgress")
        await scene.until(lambda: resumed(scene) == ["du-2"], seconds=5)
    assert scene.message("du-2") == ""


async def test_it_is_reported_again_what_it_waits_for_once_its_agent_is_back() -> None:
    scene = open_scene("node-a", "node-b", limit=1, bound=True)
    scene.add("du-1", status={"phase": "Prepared"}, labels={NODE_LABEL: "node-b"})
    scene.add_interrupted("du-2")
    async with scene.dispatching():
        await scene.until(lambda: scene.reason("du-2") == "Resuming")
        scene.kube.put(agent_pod("node-a", ready=False))
        await scene.until(lambda: scene.reason("du-2") == "AgentUnavailable")
        scene.kube.put(agent_pod("node-a"))
        await scene.until(lambda: scene.reason("du-2") == "Resuming")


async def test_a_transfer_after_a_storage_outage_waits_until_the_location_answers() -> None:
    scene = open_scene("node-a", "node-b", limit=3)
    location = scene.add("probe")["spec"]["backupStorageLocation"]
    scene.silent.add(location)
    scene.add_interrupted("outage", creationTimestamp=OLDER)
    scene.add_interrupted("evicted")
    scene.set_attempts("evicted", interrupted(InterruptionCause.EVICTED))
    async with scene.dispatching() as dispatcher:
        await scene.until(lambda: resumed(scene) == ["evicted"])
        await scene.until(lambda: scene.reason("outage") == "Resuming", seconds=15)
        assert scene.message("outage") == f"{ATTEMPT} begins once BackupStorageLocation {location} answers"
        scene.set_stage("evicted", AttemptStage.RUNNING)
        await asyncio.sleep(60)
        assert resumed(scene) == []
        scene.silent.clear()
        dispatcher.request_pass()
        await scene.until(lambda: resumed(scene) == ["outage"], seconds=1)


async def test_a_resumption_of_a_paused_leader_comes_too_late() -> None:
    scene = open_scene(limit=1)
    scene.add_interrupted("du-1")
    async with scene.paused(is_resumption) as gate:
        scene.add("du-2")
        async with scene.dispatching():
            # It has the reservation, so the new leader resumes it and admits no other.
            await scene.until(lambda: resumed(scene) == ["du-1"])
            # The attempt goes on, is interrupted, and the next one is ready.
            scene.set_attempts("du-1", interrupted().interrupt(interrupted().interruptions[0]))
            await scene.until(lambda: scene.accepted == ["du-2"])
            scene.set_stage("du-1", AttemptStage.READY)
            gate.open.set()
            await asyncio.sleep(20)
            assert (resumed(scene), scene.ledger()) == ([], {"uid-of-du-2"})
            scene.set_status("du-2", phase="InProgress")
            await scene.until(lambda: resumed(scene) == ["du-1"])
    assert scene.attempts("du-1").number == 3
    assert most_held(scene.kube) == 1


async def test_the_reservation_of_a_canceled_transfer_is_released_behind_a_fence() -> None:
    scene = open_scene(limit=1)
    scene.add_interrupted("du-1")
    async with scene.paused(is_resumption) as gate:
        scene.add("du-2")
        await scene.client.patch(DATA_UPLOADS, NAMESPACE, "du-1", {"spec": {"cancel": True}})
        async with scene.dispatching():
            await scene.until(lambda: scene.accepted == ["du-2"])
            assert ACCEPT_FENCE_ANNOTATION in scene.transfer("du-1")["metadata"]["annotations"]
            gate.open.set()
            await asyncio.sleep(5)
    assert (resumed(scene), scene.ledger()) == ([], {"uid-of-du-2"})
    assert most_held(scene.kube) == 1


async def _carry(scene: Scene, chance: random.Random) -> None:
    """Move transfers on as their agents would, at random times; most are interrupted twice."""
    following = {"Accepted": "Prepared", "Prepared": "InProgress"}
    while True:
        for name, phase in scene.phases().items():
            if chance.random() >= 0.3:
                continue
            if phase in following:
                scene.set_status(name, phase=following[phase])
            elif phase == "InProgress":
                _carry_attempt(scene, name, chance)
        await asyncio.sleep(0.4)


def _carry_attempt(scene: Scene, name: str, chance: random.Random) -> None:
    attempts = scene.attempts(name)
    if attempts.stage is AttemptStage.WAITING:
        scene.set_stage(name, AttemptStage.READY)
    elif attempts.stage is AttemptStage.EXPOSING:
        scene.set_stage(name, AttemptStage.RUNNING)
    elif attempts.stage is AttemptStage.RUNNING and attempts.number < 3 and chance.random() < 0.7:
        scene.set_attempts(name, attempts.interrupt(interrupted().interruptions[0]))
    elif attempts.stage is AttemptStage.RUNNING:
        scene.set_status(name, phase="Completed")


@pytest.mark.parametrize("seed", range(3))
async def test_two_leaders_at_a_time_never_exceed_the_limit(seed: int) -> None:
    chance = random.Random(seed)
    scene = open_scene("node-a", "node-b", limit=3)
    scene.others += [ScriptedKind(model) for model in RESOURCES if model is not DataUpload]
    for number in range(20):
        scene.add_kind(list(RESOURCES)[number % 4], f"transfer-{number:02}", queue=f"ns-{number % 3}")
    faults: list[Fault] = ["lost", "lost-applied", 409, 500]
    async with running(_carry(scene, chance)), scene.dispatching(), scene.dispatching():
        for _ in range(15):
            await asyncio.sleep(chance.uniform(0, 4))
            part = chance.choice(["datauploads", "podvolume", "configmaps"])
            scene.kube.fail_next("PATCH", part, chance.choice(faults), times=chance.randint(1, 6))
        await scene.until(lambda: set(scene.phases().values()) == {"Completed"}, seconds=1200)
    assert most_held(scene.kube) == 3
    assert max(scene.attempts(name).number for name in scene.phases()) == 3

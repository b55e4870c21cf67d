"""The quota is never exceeded: lost answers, paused leaders, two leaders at a time, crashes."""

import asyncio
import random
from typing import Literal

import pytest

from core.models.names import ACCEPT_FENCE_ANNOTATION, NODE_LABEL
from core.models.transfers import DataUpload
from nodeagent.transfers.kinds.base import Admission, AdmissionState
from tests.nodeagent.support.dispatching import RESOURCES, Gate, Scene, ScriptedKind, is_accept, most_held, open_scene

pytestmark = pytest.mark.looptime

Fault = Literal["lost", "lost-applied"] | int
NOT_READY = Admission(AdmissionState.PENDING, "SnapshotNotReady", "the snapshot is not ready")


async def test_an_accept_of_a_paused_leader_comes_too_late() -> None:
    scene = open_scene(limit=1)
    scene.add("du-1")
    gate = Gate(scene.kube, is_accept)
    async with scene.dispatching(scene.dispatcher(gate)):
        await scene.until(lambda: gate.waiting == 1)
        scene.add("du-2")
        async with scene.dispatching():
            # It has the reservation, so the new leader admits it and no other.
            await scene.until(lambda: scene.phase("du-1") == "Accepted")
            assert scene.accepted == ["du-1"]
            gate.open.set()
            await asyncio.sleep(20)
    assert scene.accepted == ["du-1"]
    assert most_held(scene.kube) == 1


async def test_a_reservation_is_released_only_behind_a_fence() -> None:
    scene = open_scene(limit=1)
    scene.add("du-1")
    # Paused right after the reservation: whatever it sends about the transfer comes late.
    gate = Gate(scene.kube, lambda request: "datauploads/du-1" in request.path and bool(scene.ledger()))
    async with scene.dispatching(scene.dispatcher(gate)):
        await scene.until(lambda: gate.waiting == 1)
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
    gate = Gate(scene.kube, is_accept)
    async with scene.dispatching(scene.dispatcher(gate)):
        await scene.until(lambda: gate.waiting == 1)
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
@pytest.mark.parametrize("ledger", [[], ["lost-applied"], [500] * 5])
async def test_a_transfer_whose_accept_is_rejected_holds_no_reservation(status: int, ledger: list[Fault]) -> None:
    """As by an admission policy; others go on, and it is accepted once that is changed."""
    scene = open_scene(limit=1)
    async with scene.dispatching():
        await asyncio.sleep(1)
        for fault in ledger:
            scene.kube.fail_next("PATCH", "configmaps", fault)
        scene.add("du-1")
        scene.add("du-2")
        scene.kube.fail_next("PATCH", "datauploads/du-1", status, times=12)
        await scene.until(lambda: scene.phase("du-2") == "Accepted", seconds=20)
        assert scene.reasons("du-1") == ["Rejected"]
        scene.set_status("du-2", phase="InProgress")
        await scene.until(lambda: scene.phase("du-1") == "Accepted", seconds=500)
    assert len(scene.kube.requests) < 100
    assert (scene.message("du-1"), most_held(scene.kube)) == ("", 1)


@pytest.mark.parametrize("what", ["lost", "lost-applied", 409, 500])
async def test_an_accept_without_an_answer_is_resolved(what: Fault) -> None:
    scene = open_scene(limit=1)
    scene.add("du-1")
    scene.add("du-2")
    scene.kube.fail_next("PATCH", "datauploads/du-1", what)
    async with scene.dispatching():
        await scene.until(lambda: scene.phase("du-1") == "Accepted")
        await asyncio.sleep(10)
        # With or without an answer, one Event is recorded.
        assert scene.accepted == ["du-1"]
        assert scene.reasons("du-1") == ["Accepted"]
        assert scene.ledger() == {"uid-of-du-1"}
        scene.set_status("du-1", phase="InProgress")
        await scene.until(lambda: scene.phase("du-2") == "Accepted")
    assert most_held(scene.kube) == 1


@pytest.mark.parametrize("what", ["lost", "lost-applied", 409, 500])
@pytest.mark.parametrize("times", [1, 7])
async def test_a_ledger_write_without_an_answer_delays_but_loses_nothing(what: Fault, times: int) -> None:
    scene = open_scene(limit=1)
    async with scene.dispatching():
        await asyncio.sleep(1)
        scene.kube.fail_next("PATCH", "configmaps", what, times=times)
        scene.add("du-1")
        scene.add("du-2")
        await scene.until(lambda: scene.phase("du-1") == "Accepted")
        scene.set_status("du-1", phase="InProgress")
        await scene.until(lambda: scene.phase("du-2") == "Accepted")
    assert most_held(scene.kube) == 1


async def test_accepted_transfers_count_and_a_lowered_limit_admits_nothing() -> None:
    scene = open_scene(limit=2)
    for number in range(3):
        scene.add(f"old-{number}", status={"phase": "Prepared"}, labels={NODE_LABEL: "node-a"})
    scene.add("new")
    async with scene.dispatching():
        await scene.until(lambda: scene.message("new") != "")
        assert len(scene.ledger()) == 3
        scene.set_status("old-0", phase="InProgress")
        await asyncio.sleep(10)
        assert scene.phase("new") == ""
        scene.set_status("old-1", phase="Failed")
        await scene.until(lambda: scene.phase("new") == "Accepted")


async def test_the_ledger_of_a_crashed_leader_is_settled() -> None:
    scene = open_scene(limit=3)
    for name in ("done", "gone", "taken", "reserved"):
        scene.add(name)
    gate = Gate(scene.kube, is_accept)
    async with scene.dispatching(scene.dispatcher(gate)):
        await scene.until(lambda: gate.waiting == 1)
    assert scene.ledger() == {"uid-of-done", "uid-of-gone", "uid-of-reserved"}
    scene.set_status("done", phase="Completed")
    scene.kube.put(scene.transfer("taken") | {"status": {"phase": "Accepted"}})
    await scene.client.delete(scene.kind.spec.resource, "velero", "gone")
    async with scene.dispatching():
        await scene.until(lambda: scene.accepted == ["reserved"])
    assert scene.ledger() == {"uid-of-taken", "uid-of-reserved"}


async def _carry(scene: Scene, chance: random.Random) -> None:
    """Move accepted transfers on as their agents would, at random times."""
    following = {"Accepted": "Prepared", "Prepared": "InProgress", "InProgress": "Completed"}
    while True:
        for name, phase in scene.phases().items():
            if phase in following and chance.random() < 0.3:
                scene.set_status(name, phase=following[phase])
        await asyncio.sleep(0.4)


@pytest.mark.parametrize("seed", range(3))
async def test_two_leaders_at_a_time_never_exceed_the_limit(seed: int) -> None:
    chance = random.Random(seed)
    scene = open_scene("node-a", "node-b", limit=3)
    scene.others += [ScriptedKind(model) for model in RESOURCES if model is not DataUpload]
    for number in range(24):
        scene.add_kind(list(RESOURCES)[number % 4], f"transfer-{number:02}", queue=f"ns-{number % 3}")
    carrying = asyncio.create_task(_carry(scene, chance))
    faults: list[Fault] = ["lost", "lost-applied", 409, 500]
    async with scene.dispatching(), scene.dispatching():
        for _ in range(15):
            await asyncio.sleep(chance.uniform(0, 4))
            part = chance.choice(["datauploads", "podvolume", "configmaps"])
            scene.kube.fail_next("PATCH", part, chance.choice(faults), times=chance.randint(1, 6))
        await scene.until(lambda: set(scene.phases().values()) == {"Completed"}, seconds=900)
    carrying.cancel()
    await asyncio.gather(carrying, return_exceptions=True)
    assert most_held(scene.kube) == 3


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

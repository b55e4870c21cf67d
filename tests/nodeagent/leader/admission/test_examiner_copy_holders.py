"""Copy holders: one transfer at a time has the copy of a Secret or ConfigMap, and the others queue for it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from core.kube.transport import Request
from core.models.base import JsonDict
from core.models.names import COPIES_ANNOTATION, DATA_MOVER_FINALIZER, NODE_LABEL
from core.models.phases import Phase
from nodeagent.leader.admission.examiner import CopyHolders
from nodeagent.transfers.kinds.base import Admission, AdmissionState
from tests.nodeagent.support.dispatching import Gate, Scene, entry, open_scene

pytestmark = pytest.mark.looptime

TOKEN, KMS = "Secret/token", "ConfigMap/kms"
OWNED = {NODE_LABEL: "node-a"}
IN_USE = "the copy of Secret token is in use by another transfer, until that is cleaned up"


def ready(*copies: str) -> Admission:
    return Admission(AdmissionState.READY, copies=copies)


PENDING = Admission(AdmissionState.PENDING, "CopyInUse", IN_USE, indefinite=True)


def test_the_first_that_is_ready_gets_the_copy_and_keeps_it_while_its_accept_is_under_way() -> None:
    holders, first, second = CopyHolders(), entry("first"), entry("second")
    assert holders.admit(first, ready(TOKEN, KMS)) == ready(TOKEN, KMS)
    assert holders.admit(second, ready(TOKEN)) == PENDING
    assert holders.count([first, second]) == []
    assert holders.admit(second, ready(TOKEN)) == PENDING
    assert holders.admit(first, ready(TOKEN)) == ready(TOKEN)
    # Another object, and none.
    assert [holders.admit(second, each) for each in (ready("Secret/b"), ready())] == [ready("Secret/b"), ready()]


@pytest.mark.parametrize(
    ("phase", "finalizer", "holds"),
    [
        (Phase.ACCEPTED, True, True),
        (Phase.ACCEPTED, False, True),
        (Phase.IN_PROGRESS, True, True),
        (Phase.COMPLETED, True, True),
        (Phase.FAILED, False, False),
        # What it was copied from another transfer with.
        (Phase.NEW, True, False),
    ],
)
def test_what_it_was_accepted_with_is_in_use_until_its_cleanup(phase: Phase, finalizer: bool, holds: bool) -> None:
    """Also for a leader that did not accept it."""
    holders, second = CopyHolders(), entry("second")
    holders.count([entry("first", phase=phase, finalizer=finalizer, copies=(TOKEN,)), second])
    assert holders.admit(second, ready(TOKEN)) == (PENDING if holds else ready(TOKEN))


@pytest.mark.parametrize(
    "gone",
    [[], [entry("first", managed=False)], [entry("first", phase=Phase.FAILED)]],
    ids=["deleted", "not managed", "failed"],
)
def test_a_new_transfer_that_is_gone_holds_nothing(gone: list[object]) -> None:
    holders, second = CopyHolders(), entry("second")
    holders.admit(entry("first"), ready(TOKEN))
    holders.admit(second, ready(TOKEN))
    assert holders.count([*gone, second]) == ["second"]  # type: ignore[list-item] # entries
    assert holders.admit(second, ready(TOKEN)) == ready(TOKEN)


def test_those_that_need_it_are_woken_once_when_it_is_free_also_if_the_copy_itself_was_found() -> None:
    holders, others = CopyHolders(), [entry("second"), entry("third"), entry("other")]
    first = entry("first", phase=Phase.COMPLETED, finalizer=True, copies=(TOKEN, KMS))
    holders.count([first, *others])
    holders.admit(others[0], ready(TOKEN))
    holders.admit(others[1], Admission(AdmissionState.PENDING, "CopyInUse", "found", copies=(KMS,)))
    holders.admit(others[2], Admission(AdmissionState.PENDING, "SnapshotNotReady", "not yet", copies=(KMS,)))
    assert holders.count([first, *others]) == []
    assert holders.count(others) == ["second", "third"]
    assert holders.count(others) == []


def phases(scene: Scene) -> list[str]:
    return [scene.phase(name) or "New" for name in ("a", "b", "c")]


def open_copies(limit: int | None = 1) -> Scene:
    """Return a scene with three transfers in order, of which `a` and `b` need the same Secret."""
    scene = open_scene("node-a", limit=limit)
    for second, name in enumerate("abc"):
        scene.kind.answers[name] = ready() if name == "c" else ready(TOKEN)
        scene.add(name, creationTimestamp=f"2026-11-21T12:00:0{second}Z")
    return scene


@pytest.mark.cause("copy-in-use")
async def test_a_transfer_stays_new_and_uses_no_quota_while_another_one_has_its_copy() -> None:
    scene = open_copies()
    async with scene.dispatching():
        await scene.until(lambda: phases(scene) == ["Accepted", "New", "New"], seconds=5)
        assert scene.transfer("a")["metadata"]["annotations"][COPIES_ANNOTATION] == TOKEN
        scene.set_status("a", phase="InProgress")
        await scene.until(lambda: phases(scene) == ["InProgress", "New", "Accepted"], seconds=10)
        await scene.until(lambda: scene.reason("b") == "CopyInUse", seconds=10)
        assert scene.message("b") == IN_USE
        # For longer than the prepare timeout.
        await asyncio.sleep(3600)
        assert scene.reasons("b") == ["CopyInUse"]
        scene.set_status("c", phase="InProgress")
        scene.set_status("a", phase="Completed")
        await asyncio.sleep(60)
        assert phases(scene) == ["Completed", "New", "InProgress"]
        patch = {"metadata": {"finalizers": None, "annotations": {COPIES_ANNOTATION: None}}}
        await scene.client.patch(scene.kind.spec.resource, "velero", "a", patch)
        await scene.until(lambda: scene.phase("b") == "Accepted", seconds=6)
    assert COPIES_ANNOTATION not in (scene.transfer("c")["metadata"].get("annotations") or {})


class LateWatch(Gate):
    """A transport whose watches are late by five seconds for each change."""

    @asynccontextmanager
    async def stream(self, request: Request) -> AsyncIterator[AsyncIterator[bytes]]:
        async with self.inner.stream(request) as lines:
            yield self._delay(lines)

    async def _delay(self, lines: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async for line in lines:
            await asyncio.sleep(5)
            yield line


async def test_never_two_transfers_are_accepted_with_the_same_copy_however_late_an_accept_is_observed() -> None:
    scene = open_scene("node-a", limit=None)
    for number in range(12):
        scene.kind.answers[f"t{number}"] = ready(TOKEN)
        scene.add(f"t{number}")
    async with scene.dispatching(scene.dispatcher(LateWatch(scene.kube, lambda _: False))):
        await asyncio.sleep(60)
    assert sorted(scene.phases().values()) == [""] * 11 + ["Accepted"]


async def test_a_queued_transfer_that_is_not_ready_any_more_lets_another_one_have_the_copy() -> None:
    scene = open_copies(limit=1)
    scene.add("x", status={"phase": "Accepted"}, labels=OWNED, finalizers=[DATA_MOVER_FINALIZER])
    async with scene.dispatching():
        await scene.until(lambda: (scene.reason("a"), scene.reason("b")) == ("Queued", "CopyInUse"), seconds=10)
        scene.kind.answers["a"] = Admission(AdmissionState.PENDING, "SnapshotError", "broken", blocked=True)
        scene.set_status("x", phase="InProgress")
        await scene.until(lambda: scene.phase("c") == "Accepted", seconds=10)
        scene.set_status("c", phase="InProgress")
        await scene.until(lambda: scene.phase("b") == "Accepted", seconds=10)
        assert scene.reason("a") == "SnapshotError"


@pytest.mark.parametrize("seconds", [0.5 * step for step in range(11)])
async def test_the_next_one_is_the_first_in_the_queue_whenever_the_copy_is_free(seconds: float) -> None:
    """The pauses between the checks of pending transfers differ, and decide nothing."""
    scene = open_scene("node-a", limit=None)
    meta: JsonDict = {"labels": OWNED, "finalizers": [DATA_MOVER_FINALIZER], "annotations": {COPIES_ANNOTATION: TOKEN}}
    scene.add("holder", status={"phase": "Completed"}, **meta)
    scene.kind.answers.update(old=ready(TOKEN), young=ready(TOKEN))
    scene.add("old")
    async with scene.dispatching():
        await asyncio.sleep(2.5)
        scene.add("young", creationTimestamp="2026-11-21T12:00:01Z")
        await scene.until(lambda: (scene.reason("old"), scene.reason("young")) == ("CopyInUse", "CopyInUse"))
        await asyncio.sleep(seconds)
        await scene.client.patch(scene.kind.spec.resource, "velero", "holder", {"metadata": {"finalizers": None}})
        await scene.until(lambda: scene.accepted != [], seconds=6)
    assert scene.accepted == ["old"]

"""What the Events of a mover say: what it is pending for is the message of its transfer, and its progress."""

import asyncio
import json

import pytest

from core.contract import ProgressMessage
from core.kube.resources import EVENTS
from core.models.names import NODE_LABEL, OUTCOME_ANNOTATION
from core.models.transfers import Progress
from nodeagent.metrics import Metrics
from nodeagent.node.mover_events import MoverPending, Reported
from tests.nodeagent.support.dispatching import Gate
from tests.nodeagent.support.harness import Fault, Fuse, World, accepted, open_world
from tests.nodeagent.support.simulation import Mover
from tests.nodeagent.support.transfers import NODE, TRANSFERS, data_upload
from tests.support.objects import JsonDict, build_object

pytestmark = pytest.mark.looptime

NOT_READY = "waiting for BackupRepository velero/app-default-kopia: its controller has not made it ready yet"
UNSCHEDULED = "waiting for BackupRepository velero/app-default-kopia: no node takes its pod"


def event(transfer: JsonDict, reason: str, message: str, *, number: int = 1) -> JsonDict:
    """Return an Event of the transfer's mover, with that number."""
    meta = transfer["metadata"]
    return build_object(
        EVENTS,
        f"{meta['name']}.{number:03}",
        meta["namespace"],
        metadata={"labels": {NODE_LABEL: NODE}},
        involvedObject={"kind": transfer["kind"], "name": meta["name"], "uid": meta["uid"]},
        reason=f"Data-Path-{reason}",
        message=message,
        lastTimestamp=f"2026-11-21T12:00:{number:02}Z",
    )


def message_of(world: World, kind: str) -> str | None:
    message = world.transfer(kind)["status"].get("message")
    return None if message is None else str(message)


@pytest.mark.parametrize("kind", TRANSFERS)
@pytest.mark.cause("repository-not-ready")
async def test_a_pending_mover_is_reported_until_it_is_ready(kind: str) -> None:
    transfer = accepted(TRANSFERS[kind]())
    async with open_world(transfer, mover=Mover(stubborn=True)) as world, world.agent():
        await world.until(lambda: world.phase(kind) == "InProgress")
        for number, text in enumerate((NOT_READY, UNSCHEDULED, NOT_READY), start=1):
            world.kube.put(event(transfer, "Waiting", text, number=number))
            await asyncio.sleep(2)
            assert message_of(world, kind) == text
        world.kube.put(event(transfer, "Progress", "{}", number=4))
        await asyncio.sleep(2)
        assert message_of(world, kind) == NOT_READY
        world.kube.put(event(transfer, "Ready", "it is there", number=5))
        await world.until(lambda: message_of(world, kind) is None, seconds=2)
        world.kube.put(event(transfer, "Waiting", NOT_READY, number=6))
        await world.until(lambda: message_of(world, kind) == NOT_READY, seconds=2)
        # It moves data.
        world.kube.put(event(transfer, "Progress", json.dumps({"totalBytes": 10, "doneBytes": 5}), number=7))
        await world.until(lambda: message_of(world, kind) is None, seconds=2)
        assert world.transfer(kind)["status"]["progress"] == {"totalBytes": 10, "bytesDone": 5}
        world.cluster.mover.stubborn = False
        await world.until(lambda: world.done(kind))
    assert (world.phase(kind), message_of(world, kind)) == ("Completed", None)


async def test_a_restarted_agent_removes_an_outdated_message_and_reports_none() -> None:
    transfer = accepted(data_upload())
    async with open_world(transfer, mover=Mover(stubborn=True)) as world:
        async with world.agent():
            await world.until(lambda: world.phase() == "InProgress")
            world.kube.put(event(transfer, "Waiting", NOT_READY))
            await world.until(lambda: message_of(world, "DataUpload") == NOT_READY, seconds=2)
        world.kube.put(event(transfer, "Ready", "it is there", number=2))
        async with world.agent():
            await world.until(lambda: message_of(world, "DataUpload") is None, seconds=5)
        tally = Fuse(world.kube, lambda request: request.method == "PATCH")
        async with world.agent(tally):
            await asyncio.sleep(10)
        assert tally.counted == []


async def test_a_message_that_could_not_be_written_is_retried() -> None:
    """No other Event may follow for long."""
    transfer = accepted(data_upload())
    async with open_world(transfer, mover=Mover(stubborn=True)) as world:
        fuse = Fuse(world.kube, lambda request: b"waiting for Backup" in (request.body or b""), at=0)
        fuse.fault = Fault.CONFLICT
        async with world.agent(fuse):
            await world.until(lambda: world.phase() == "InProgress")
            world.kube.put(event(transfer, "Waiting", NOT_READY))
            await world.until(lambda: message_of(world, "DataUpload") == NOT_READY, seconds=5)
    assert len(fuse.counted) == 2


async def test_a_message_does_not_conflict_with_the_outcome() -> None:
    """A write in progress while the mover ends is finished first, and none follows it."""
    transfer = accepted(data_upload())
    async with open_world(transfer, mover=Mover(stubborn=True)) as world:
        gate = Gate(world.kube, lambda request: b"waiting for Backup" in (request.body or b""))
        async with world.agent(gate):
            await world.until(lambda: world.phase() == "InProgress")
            world.kube.put(event(transfer, "Waiting", NOT_READY))
            await world.until(lambda: gate.waiting == 1)
            world.cluster.mover = Mover(seconds=0, exit_code=12, message="BackupRepository x is not ready: no bucket")
            await asyncio.sleep(5)
            assert world.phase() == "InProgress"
            assert OUTCOME_ANNOTATION not in world.transfer()["metadata"].get("annotations", {})
            gate.open.set()
            await world.until(world.done)
    assert message_of(world, "DataUpload") == "BackupRepository x is not ready: no bucket"


async def test_only_bytes_that_move_are_a_sign_of_life() -> None:
    metrics, transfer = Metrics(NODE), accepted(data_upload())

    def last_progress() -> float:
        lines = [line for line in metrics.render().decode().splitlines() if line.startswith("nodeagent_last_progress")]
        return float(lines[0].rsplit(" ", 1)[1]) if lines else 0.0

    async with open_world(transfer, mover=Mover(stubborn=True)) as world, world.agent(metrics=metrics):
        await world.until(lambda: last_progress() > 0)
        began = last_progress()
        for number, message in enumerate(({"doneBytes": 5}, {"doneBytes": 5}, {"doneBytes": 5, "sentBytes": 1})):
            await asyncio.sleep(60)
            world.kube.put(event(transfer, "Progress", json.dumps(message), number=number + 1))
            await asyncio.sleep(1)
            moved = (60, 60, 182)[number]
            assert last_progress() - began == pytest.approx(moved, abs=2)


@pytest.mark.parametrize(
    ("shown", "events", "written"),
    [
        pytest.param("", [("Waiting", "a")], "a", id="first"),
        pytest.param("a", [("Waiting", "a")], None, id="unchanged"),
        pytest.param("a", [("Waiting", "a"), ("Waiting", "b")], "b", id="another cause"),
        pytest.param("a", [("Waiting", "a"), ("Ready", "")], "", id="ready"),
        pytest.param("", [("Waiting", "a"), ("Ready", "")], None, id="ready before it was reported"),
        pytest.param("of another writer", [("Waiting", "a"), ("Ready", "")], None, id="another message is kept"),
        pytest.param("of another writer", [("Warning", "a")], None, id="another reason"),
    ],
)
def test_the_message_follows_the_events(shown: str, events: list[tuple[str, str]], written: str | None) -> None:
    pending = MoverPending()
    for number, (reason, text) in enumerate(events):
        pending.observe_event(event(data_upload(), reason, text, number=number))
    assert pending.correct(shown) == written


def test_an_event_that_was_written_late_changes_nothing() -> None:
    pending = MoverPending()
    pending.observe_event(event(data_upload(), "Ready", "", number=2))
    pending.observe_event(event(data_upload(), "Waiting", "a", number=1))
    pending.observe_progress(ProgressMessage())
    assert pending.correct("") is None


def test_a_mover_that_says_ever_more_takes_no_more_memory() -> None:
    pending = MoverPending()
    for number in range(1000):
        pending.observe_event(event(data_upload(), "Waiting", f"cause {number}", number=number % 10))
        pending.at = ""
    assert len(pending.reported) == 100
    assert pending.correct("cause 998") == "cause 999"


def test_what_is_shown_never_decreases_over_attempts() -> None:
    first = Reported().take(ProgressMessage(done_bytes=7, total_bytes=9, sent_bytes=5))
    second = first.begin(2)
    assert second.message == ProgressMessage(done_bytes=7, total_bytes=9)
    third = second.take(ProgressMessage(done_bytes=3, total_bytes=4, sent_bytes=2, attempt=2))
    assert (third.message.done_bytes, third.message.total_bytes, third.message.sent_bytes) == (7, 7, 2)
    assert (third.attempt_bytes, third.earlier_bytes) == (3, 7)
    numbers = ((9, 1), (2, 2), (3, 2))
    older = [ProgressMessage(done_bytes=done, attempt=attempt) for done, attempt in numbers]
    assert [third.is_newer_than(each) for each in older] == [True, True, False]


def test_what_an_earlier_process_wrote_into_the_status_is_shown() -> None:
    reported = Reported(message=ProgressMessage(done_bytes=3, total_bytes=9)).resume(
        Progress(bytes_done=5, total_bytes=8)
    )
    assert (reported.message.done_bytes, reported.message.total_bytes, reported.earlier_bytes) == (5, 8, 5)
    assert reported.resume(Progress(bytes_done=4, total_bytes=8)) == reported

"""The dialogue with `kopia mover-backup`, which a coroutine plays, and what a signal does to a backup."""

import asyncio
import json
import logging
import os
import signal
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, Final
from unittest.mock import AsyncMock, MagicMock

import pytest

from core.clock import SystemClock
from core.errors import AgentError, CanceledError, FencedError
from datamover.kopia.backup_process import GracefulStop, MoverBackup, Offer, keep_checkpoint
from datamover.kopia.process import KopiaAnswer, KopiaFiles
from datamover.kopia.progress import Direction, Meter
from datamover.runtime.cancellation import Canceler
from datamover.runtime.signals import StopSignal

_OFFER = {"unique_id": "ab", "policy": {"a": 1}, "defined": None}
_COUNTERS: Any = {"kopia_content_hashed_bytes_total": 20.0, "kopia_blob_upload_bytes_total": 7.0}
_PROGRESS = {"hashed_files": 1, "hashed_bytes": 20, "cached_files": 2, "cached_bytes": 30, "estimated_bytes": 60}
_PROGRESS |= {"counters": _COUNTERS}


class _Program:
    """Writes an offer, and waits for a decision, unless it ends with an exit code; `decided` is what it read."""

    def __init__(self, exit_code: int = 0, *, offers: bool = True, last_line: str = "") -> None:
        self.exit_code = exit_code
        self.offers = offers
        self.last_line = last_line
        self.decided: Any = None
        self.ended = False

    def redact(self, text: str) -> str:
        return text.replace("s3cret", "***")

    async def move_data(self, attempted: str, *_: str, files: KopiaFiles, listener: Any) -> KopiaAnswer:
        assert files.on_output is not None
        assert files.stdin_fd is not None
        try:
            listener.keep("a line")
            if self.offers:
                files.on_output(json.dumps({"offer": _OFFER}))
            if not self.exit_code:
                self.decided = json.loads(await asyncio.to_thread(os.read, files.stdin_fd, 1 << 16))
                result = {"snapshot": {"id": "s"}, "copied": True, "parent_fault": "is s3cret"}
                for message in ({"progress": _PROGRESS}, {"result": result}):
                    files.on_output(json.dumps(message))
            if self.last_line:
                files.on_output(self.last_line)
            return KopiaAnswer(attempted, self.exit_code, b"", ["a line"])
        finally:
            self.ended = True


def _backup(program: _Program, meter: Meter | None = None) -> MoverBackup:
    meter = meter or Meter(SystemClock(), Direction.BACKUP)
    return MoverBackup(program, "u@h:/p", "back up", files=KopiaFiles(), listener=MagicMock(), meter=meter)  # type: ignore[arg-type]


async def test_the_decision_is_sent_after_the_offer_and_the_answer_has_the_snapshot() -> None:
    program, meter = _Program(), Meter(SystemClock(), Direction.BACKUP)
    backup = _backup(program, meter)
    opened = await backup.open()
    assert (opened.exit_code, opened.lines, backup.offer) == (0, ["a line"], Offer("ab", {"a": 1}, None))
    assert program.decided is None
    answer = await backup.carry_out({"parents": []})
    assert program.decided == {"parents": []}
    assert (answer.document(), backup.result["copied"]) == ({"id": "s"}, True)
    assert backup.result["parent_fault"] == "is ***"
    assert (meter.hashed_bytes, meter.cached_bytes, meter.total_bytes) == (20, 30, 60)
    assert (await meter.read()).done_bytes == 50
    await backup.end()


async def test_another_kopia_has_an_offer_of_its_own() -> None:
    program = _Program(1)
    backup = _backup(program)
    await backup.open()
    # This one has only its answer.
    program.offers = False
    assert ((await backup.open()).exit_code, program.ended) == (1, True)
    program.exit_code, program.ended = 0, False
    opening = asyncio.create_task(backup.open())
    for _ in range(9):
        await asyncio.sleep(0)
    assert (opening.done(), program.ended) == (False, False)
    # It ends without an offer.
    os.write(backup._decision_fd, b"{}")
    assert (await opening).lines == ["a line"]
    assert program.ended
    # What still runs is ended.
    program.offers, program.ended = True, False
    await backup.open()
    os.write(backup._decision_fd, b"{}")
    await backup.end()
    assert program.ended


@pytest.mark.parametrize(
    ("exit_code", "last_line"),
    [(1, ""), (-signal.SIGKILL, '{"progress": {"hashed')],
    ids=["fails", "is killed within a line"],
)
async def test_a_kopia_that_ends_before_it_has_read_the_decision_is_no_snapshot(exit_code: int, last_line: str) -> None:
    backup = _backup(_Program(exit_code, last_line=last_line))
    await backup.open()
    answer = await backup.carry_out({"delete": ["0" * 32] * 5000})
    assert (answer.exit_code, answer.output, backup.result) == (exit_code, b"", {})
    await backup.end()


_GRACE = timedelta(seconds=25)
_STOPPED = "the data mover was stopped by SIGTERM"
_KILLED = f"{_STOPPED}; it was killed before kopia had saved a checkpoint: data path is canceled"
_LATE = f"{_STOPPED}; kopia did not save a checkpoint within 25s: data path is canceled"


class _Mover:
    """The signals of a process, and what they do to its transfer."""

    def __init__(self, grace: timedelta = _GRACE) -> None:
        self.signals = StopSignal()
        self.canceler = Canceler()
        self.announced: list[str] = []
        self.stop = GracefulStop(self.canceler, grace, lambda error: self.announced.append(str(error)))
        self.stop.listen(self.signals)

    async def signal(self) -> None:
        self.signals._take(signal.SIGTERM, None)
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def error(self) -> AgentError:
        return await self.canceler.wait()


@pytest.mark.parametrize("grace", [_GRACE, timedelta()], ids=["kopia has ended", "no grace"])
async def test_a_signal_cancels_at_once_when_no_checkpoint_can_be_saved(grace: timedelta) -> None:
    mover = _Mover(grace)
    with mover.stop.saving():
        if not grace:
            await mover.signal()
    if grace:
        await mover.signal()
    assert str(await mover.error()) == f"{_STOPPED}: data path is canceled"
    assert (mover.announced, mover.stop.signaled, mover.stop.interrupted) == ([], False, True)


def test_a_signal_after_the_end_of_the_work_changes_nothing() -> None:
    """A pod may be deleted while its interpreter exits."""
    signals = StopSignal()

    async def work() -> None:
        Canceler().cancel_on(signals)

    asyncio.run(work())
    signals._take(signal.SIGTERM, None)
    assert signals.received == "SIGTERM"


@pytest.mark.looptime
async def test_the_transfer_is_canceled_after_the_grace_whatever_else_arrives() -> None:
    mover, loop = _Mover(), asyncio.get_running_loop()
    with mover.stop.saving() as terminate:
        await mover.signal()
        assert terminate.is_set()
        assert mover.announced == [_KILLED]
        await asyncio.sleep(10)
        await mover.signal()
        assert not mover.canceler.requested
        assert str(await mover.error()) == _LATE
    assert loop.time() == pytest.approx(25)
    assert mover.announced == [_KILLED]


async def test_a_cancel_request_counts_also_during_the_grace_and_a_signal_after_it_changes_nothing() -> None:
    mover, canceled, overtaken = _Mover(), _Mover(), _Mover()
    with mover.stop.saving():
        await mover.signal()
        assert mover.stop.interrupted
        mover.canceler.cancel("the transfer was canceled")
        assert str(await mover.error()) == "the transfer was canceled: data path is canceled"
    with canceled.stop.saving() as terminate:
        canceled.canceler.cancel("the transfer was canceled")
        await canceled.signal()
    assert not terminate.is_set()
    assert canceled.announced == []
    overtaken.canceler.fail(FencedError("another attempt has begun"))
    assert [one.stop.interrupted for one in (mover, canceled, overtaken)] == [False, False, True]


_PINNED: Final = {"id": "k1", "incomplete": "canceled", "pins": ["velero-pin"]}
_UNPIN: Final = ("unpin incomplete snapshot k1", "snapshot", "pin", "k1", "--remove=velero-pin")
_SAVED: Final = "kopia saved a checkpoint, so the next backup of the volume does not send again what was sent"


@pytest.mark.parametrize(
    ("document", "exit_code", "unpinned", "ending"),
    [
        (_PINNED, 0, 0, _SAVED),
        (_PINNED, 2, 0, _SAVED),
        # The next backup deletes the snapshot all the same.
        (_PINNED, 0, 1, _SAVED),
        (_PINNED, 2, 1, "kopia saved no checkpoint: kopia exited with code 2"),
        ({"id": "k1", "incomplete": "canceled"}, 0, None, _SAVED),
        (None, -15, None, "kopia saved no checkpoint: kopia was killed by signal 15"),
        # kopia had read everything when it got the signal: the backup goes on to its result.
        ({"id": "k1"}, 0, None, None),
    ],
)
async def test_a_transfer_after_a_signal_ends_with_what_became_of_its_checkpoint(
    caplog: pytest.LogCaptureFixture, document: object, exit_code: int, unpinned: int | None, ending: str | None
) -> None:
    mover, kopia = _Mover(), AsyncMock()
    kopia.call.return_value = KopiaAnswer(_UNPIN[0], unpinned or 0, b"")
    with mover.stop.saving():
        await mover.signal()
    message = f"^{_STOPPED}; {ending}: data path is canceled$"
    raises: AbstractContextManager[object] = pytest.raises(CanceledError, match=message) if ending else nullcontext()
    with caplog.at_level(logging.WARNING), raises:
        output = json.dumps(document).encode() if document else b""
        await keep_checkpoint(kopia, KopiaAnswer("back up /volume", exit_code, output), mover.stop)
    assert [call.args for call in kopia.call.await_args_list] == ([] if unpinned is None else [_UNPIN])
    assert caplog.messages == ([f"{_UNPIN[0]}: kopia exited with code 1"] if unpinned else [])

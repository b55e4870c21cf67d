import asyncio
import json
import logging
import signal
from datetime import timedelta
from typing import Final
from unittest.mock import AsyncMock

import pytest

from core.errors import AgentError, CanceledError, ConfigError, FencedError
from datamover.kopia.backup_process import GracefulStop, keep_checkpoint, read_checkpoint_grace
from datamover.kopia.process import KopiaAnswer
from datamover.runtime.cancellation import Canceler
from datamover.runtime.signals import StopSignal

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


@pytest.mark.parametrize(
    ("text", "seconds"), [("", 25), ("10s", 10), ("0", 0), ("29999ms", 29.999)], ids=["default", "10s", "off", "most"]
)
def test_the_grace_is_a_duration(text: str, seconds: float) -> None:
    assert read_checkpoint_grace({"DATA_MOVER_CHECKPOINT_GRACE": text}).total_seconds() == seconds


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("soon", "not a duration"),
        ("-1s", "must not be negative"),
        ("30s", 'must be less than the grace period of the pod, 30s: "30s"$'),
    ],
)
def test_an_invalid_grace_is_rejected(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^DATA_MOVER_CHECKPOINT_GRACE: {message}"):
        read_checkpoint_grace({"DATA_MOVER_CHECKPOINT_GRACE": text})


async def test_a_signal_cancels_at_once_when_no_kopia_can_save_a_checkpoint() -> None:
    mover = _Mover()
    with mover.stop.saving():
        pass
    await mover.signal()
    assert str(await mover.error()) == f"{_STOPPED}: data path is canceled"
    assert (mover.announced, mover.stop.signaled) == ([], False)


async def test_a_signal_cancels_at_once_without_a_grace() -> None:
    mover = _Mover(timedelta())
    with mover.stop.saving() as terminate:
        await mover.signal()
    assert str(await mover.error()) == f"{_STOPPED}: data path is canceled"
    assert not terminate.is_set()


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


async def test_a_cancel_request_during_the_grace_counts() -> None:
    mover = _Mover()
    with mover.stop.saving():
        await mover.signal()
        mover.canceler.cancel("the transfer was canceled")
        assert str(await mover.error()) == "the transfer was canceled: data path is canceled"


async def test_a_signal_after_a_cancel_request_changes_nothing() -> None:
    mover = _Mover()
    with mover.stop.saving() as terminate:
        mover.canceler.cancel("the transfer was canceled")
        await mover.signal()
    assert not terminate.is_set()
    assert mover.announced == []


def _answer(document: object, exit_code: int = 0) -> KopiaAnswer:
    return KopiaAnswer("back up /volume", exit_code, json.dumps(document).encode() if document else b"")


_INCOMPLETE: Final = {"id": "k1", "incomplete": "canceled", "pins": ["velero-pin"]}


async def _stopped() -> GracefulStop:
    mover = _Mover()
    with mover.stop.saving():
        await mover.signal()
    return mover.stop


async def test_an_incomplete_snapshot_is_unpinned_and_no_result() -> None:
    kopia = AsyncMock()
    kopia.call.return_value = _answer(None)
    with pytest.raises(CanceledError, match=f"^{_STOPPED}; kopia saved a checkpoint, .*: data path is canceled$"):
        await keep_checkpoint(kopia, _answer(_INCOMPLETE), await _stopped())
    assert kopia.call.await_args.args[1:] == ("snapshot", "pin", "k1", "--remove=velero-pin")


async def test_an_incomplete_snapshot_without_a_pin_stays_as_it_is() -> None:
    kopia = AsyncMock()
    with pytest.raises(CanceledError, match="kopia saved a checkpoint"):
        await keep_checkpoint(kopia, _answer({"id": "k1", "incomplete": "canceled"}), await _stopped())
    kopia.call.assert_not_awaited()


async def test_a_pin_that_cannot_be_removed_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """The next backup deletes the snapshot all the same."""
    kopia = AsyncMock()
    kopia.call.return_value = KopiaAnswer("unpin incomplete snapshot k1", 1, b"")
    with caplog.at_level(logging.WARNING), pytest.raises(CanceledError, match="kopia saved a checkpoint"):
        await keep_checkpoint(kopia, _answer(_INCOMPLETE), await _stopped())
    assert caplog.messages == ["unpin incomplete snapshot k1: kopia exited with code 1"]


async def test_a_kopia_that_left_no_snapshot_has_saved_none() -> None:
    kopia = AsyncMock()
    message = f"^{_STOPPED}; kopia saved no checkpoint: kopia was killed by signal 15: data path is canceled$"
    with pytest.raises(CanceledError, match=message):
        await keep_checkpoint(kopia, _answer(None, -15), await _stopped())
    kopia.call.assert_not_awaited()


@pytest.mark.parametrize(
    ("found", "ending"),
    [(False, "kopia saved no checkpoint: kopia exited with code 2"), (True, "kopia saved a checkpoint, .*")],
)
async def test_the_snapshot_of_a_kopia_that_failed_counts_as_saved_only_if_it_is_found(
    found: bool, ending: str
) -> None:
    kopia = AsyncMock()
    kopia.call.return_value = _answer(None, 0 if found else 1)
    with pytest.raises(CanceledError, match=f"^{_STOPPED}; {ending}: data path is canceled$"):
        await keep_checkpoint(kopia, _answer(_INCOMPLETE, 2), await _stopped())
    assert kopia.call.await_args.args[1:] == ("snapshot", "pin", "k1", "--remove=velero-pin")


async def test_a_complete_snapshot_is_left_as_it_is() -> None:
    """kopia had read everything when it got the signal: the backup goes on to its result."""
    kopia = AsyncMock()
    await keep_checkpoint(kopia, _answer({"id": "k1"}), await _stopped())
    kopia.call.assert_not_awaited()


@pytest.mark.parametrize("grace", [_GRACE, timedelta()])
async def test_a_signal_is_an_interruption_with_and_without_a_grace(grace: timedelta) -> None:
    mover = _Mover(grace)
    assert not mover.stop.interrupted
    await mover.signal()
    assert mover.stop.interrupted


async def test_another_attempt_is_an_interruption_and_a_cancel_request_is_none() -> None:
    overtaken, canceled = _Mover(), _Mover()
    overtaken.canceler.fail(FencedError("another attempt has begun"))
    canceled.canceler.cancel("DataUpload velero/a was canceled")
    assert (overtaken.stop.interrupted, canceled.stop.interrupted) == (True, False)

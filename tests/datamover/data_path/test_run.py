"""A stalled data path, and a volume that hangs, as of an NFS server: reported, inspected, failed after the timeout."""

import asyncio
import errno
import logging
import os
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from core.contract import MoverMethod, VolumeMode
from core.errors import AgentError, DataPathError, RepositoryError, StorageOutageError
from core.models.units import format_duration
from core.redact import Redactor
from datamover.data_path.backup import back_up
from datamover.data_path.restore import RestoreParameters, restore
from datamover.data_path.run import DataPath
from datamover.data_path.snapshot_runs import BackupParameters
from datamover.kopia.process import Kopia, KopiaAnswer, Listener
from datamover.kopia.progress import Direction, Meter
from datamover.kopia.snapshots import Snapshot
from datamover.kopia.stalls import Reachability, StallLimits, Watchdog
from datamover.runtime.work_dir import WorkDir
from tests.datamover.support.data_paths import build_data_path
from tests.support.clock import LoopClock
from tests.support.tasks import interrupt

pytestmark = pytest.mark.processes

_UNREACHABLE = Reachability(reachable=False, message="repository r does not answer: connection refused", outage=True)
_MOVED = replace(_UNREACHABLE, message="the location was edited: connection refused", moved=True)
_NO_BUCKET = Reachability(reachable=False, message="repository r does not answer: the bucket does not exist")
_REACHABLE = Reachability(reachable=True, message="repository r (s3://b) answers")


class _FakeMeter(Meter):
    """Reads what a test sets, and no port."""

    moved = 0

    @property
    def activity(self) -> int:
        return self.moved

    async def refresh(self) -> None:
        pass


class _HangingKopia(Kopia):
    """Writes one line, and never exits."""

    def __init__(self) -> None:
        super().__init__({}, Redactor())

    async def move_data(self, attempted: str, *arguments: str, files: Any, listener: Listener) -> KopiaAnswer:
        del attempted, arguments, files
        listener.keep("the last line")
        await asyncio.Event().wait()
        raise AssertionError


async def _error_of(data_path: DataPath) -> AgentError:
    with pytest.raises(AgentError) as failed:
        await data_path.run(_HangingKopia(), "back up /volume", "snapshot", "create")
    return failed.value


def _hang(found: Reachability | Exception, warn: AsyncMock) -> DataPath:
    """Return a data path without progress, whose repository a probe finds so."""
    probe = AsyncMock(side_effect=[found] * 1000)
    return DataPath(_FakeMeter(LoopClock(), Direction.BACKUP), Watchdog(LoopClock(), warn, probe))


def _warnings(warn: AsyncMock) -> list[str]:
    return [call.args[0] for call in warn.await_args_list]


@pytest.mark.looptime
@pytest.mark.parametrize(
    ("found", "kind", "seconds", "warnings"),
    [
        (_UNREACHABLE, StorageOutageError, 600, ["2m0s", "4m0s", "8m0s"]),
        (_MOVED, StorageOutageError, 120, []),
        (_NO_BUCKET, RepositoryError, 600, ["2m0s", "4m0s", "8m0s"]),
        (_REACHABLE, DataPathError, 3600, ["2m0s", "4m0s", "8m0s", "10m0s", "20m0s", "40m0s"]),
    ],
    ids=["unreachable", "moved", "no bucket", "reachable"],
)
async def test_a_stalled_data_path_is_reported_and_fails_after_the_timeout(
    found: Reachability, kind: type[AgentError], seconds: int, warnings: list[str]
) -> None:
    started, warn = LoopClock().monotonic(), AsyncMock()
    error = await _error_of(_hang(found, warn))
    assert type(error) is kind
    assert LoopClock().monotonic() - started == pytest.approx(seconds, abs=10)
    shown = format_duration(timedelta(seconds=seconds))
    assert str(error) == f"back up /volume: no progress for {shown}: {found.message}\nthe last line"
    output = "; last output of kopia: the last line"
    assert _warnings(warn) == [f"no progress for {idle}: {found.message}{output}" for idle in warnings]


@pytest.mark.looptime
async def test_activity_during_the_probe_ends_the_stall() -> None:
    """The result of the probe does not matter then."""
    meter, probed, warn = _FakeMeter(LoopClock(), Direction.BACKUP), asyncio.Event(), AsyncMock()

    async def probe() -> Reachability:
        meter.moved += 1
        probed.set()
        return _UNREACHABLE

    data_path = DataPath(meter, Watchdog(LoopClock(), warn, probe))
    await interrupt(data_path.run(_HangingKopia(), "back up /volume"), asyncio.sleep(1000))
    assert probed.is_set()
    warn.assert_not_awaited()


@pytest.mark.looptime
async def test_an_unexpected_error_does_not_end_the_watchdog(caplog: pytest.LogCaptureFixture) -> None:
    error = await _error_of(_hang(_UNREACHABLE, AsyncMock(side_effect=ZeroDivisionError)))
    assert isinstance(error, RepositoryError)
    assert "back up /volume: cannot check for a stall" in caplog.messages
    # A repository that cannot be probed counts as one that answers.
    started, warn = LoopClock().monotonic(), AsyncMock()
    error = await _error_of(_hang(ZeroDivisionError("full"), warn))
    assert str(error).startswith("back up /volume: no progress for 1h0m0s: cannot probe the repository: ZeroDivision")
    assert LoopClock().monotonic() - started == pytest.approx(3600, abs=10)
    assert len(_warnings(warn)) == 6
    assert "cannot probe the repository" in [one.message for one in caplog.records if one.levelno == logging.ERROR]


@pytest.mark.looptime
async def test_a_wait_without_progress_is_reported_and_fails_after_the_timeout() -> None:
    started, warn, entries = LoopClock().monotonic(), AsyncMock(), 0

    async def progress_for_an_hour() -> None:
        nonlocal entries
        for _ in range(60):
            await asyncio.sleep(60)
            entries += 1
        await asyncio.Event().wait()

    data_path = _hang(_REACHABLE, warn)
    with pytest.raises(DataPathError, match=r"^checking names: no progress for 10m0s$"):
        await data_path.wait_for_progress(progress_for_an_hour(), "checking names", lambda: entries)
    assert LoopClock().monotonic() - started == pytest.approx(3600 + 600, abs=10)
    assert _warnings(warn)[:2] == ["still checking names after 2m0s", "still checking names after 4m0s"]
    working = asyncio.sleep(300, result="done")
    assert await data_path.wait_for_progress(working, "working", lambda: 0) == "done"


_DEVICE = b'{"entries": [{"name": "device", "type": "f", "obj": "1"}]}'


@pytest.fixture
async def hang(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[[object, str, Path], None]]:
    """Let a function hang for a path; it fails at the end of the test."""
    released = threading.Event()

    def replace(owner: object, name: str, volume: Path) -> None:
        real = getattr(owner, name)

        def function(path: Any, *arguments: Any, **more: Any) -> Any:
            if os.fspath(path) == str(volume):
                released.wait(60)
                raise OSError(errno.EIO, "Input/output error")
            return real(path, *arguments, **more)

        monkeypatch.setattr(owner, name, function)

    yield replace
    released.set()


def _data_path(warn: AsyncMock) -> DataPath:
    return build_data_path(Direction.RESTORE, warn, limits=StallLimits(timedelta(seconds=1)))


def _repository(volume: Path) -> Mock:
    repository = Mock()
    repository.work_dir = WorkDir(volume.parent, volume.parent)
    repository.open = AsyncMock(return_value=Snapshot("id", "s", "", "k0", 0, 0))
    repository.call = _show
    return repository


async def _show(*_: str, output_fd: int | None = None) -> KopiaAnswer:
    if output_fd is not None:
        os.write(output_fd, _DEVICE)
    return KopiaAnswer("show", 0, b"")


async def _back_up(volume: Path, mode: VolumeMode, data_path: DataPath) -> None:
    await back_up(_repository(volume), BackupParameters(volume, mode, "some/volume", parallel=1), data_path)


async def _restore(volume: Path, mode: VolumeMode, data_path: DataPath, **more: Any) -> None:
    await restore(_repository(volume), RestoreParameters("id", volume, mode, workers=1, **more), data_path)


async def test_a_volume_that_cannot_be_opened_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "is_dir", Mock(side_effect=OSError(errno.ESTALE, "Stale file handle")))
    with pytest.raises(DataPathError, match=rf"^cannot open volume {tmp_path}: Stale file handle$"):
        await _back_up(tmp_path, VolumeMode.FILESYSTEM, _data_path(AsyncMock()))


@pytest.mark.parametrize(
    ("run", "mode", "function", "doing"),
    [
        (_back_up, VolumeMode.FILESYSTEM, (Path, "is_dir"), "opening volume"),
        (_back_up, VolumeMode.BLOCK, (os, "open"), "opening device"),
        (_restore, VolumeMode.FILESYSTEM, (Path, "mkdir"), "opening target"),
        (_restore, VolumeMode.FILESYSTEM, (os, "open"), "opening target"),
        (partial(_restore, mover=MoverMethod.ONE_OPEN), VolumeMode.FILESYSTEM, (os.path, "exists"), "opening target"),
        (_restore, VolumeMode.BLOCK, (os, "open"), "opening device"),
    ],
)
async def test_a_volume_that_hangs_is_reported_and_fails_the_transfer(
    tmp_path: Path,
    hang: Callable[[object, str, Path], None],
    run: Callable[[Path, VolumeMode, DataPath], Coroutine[Any, Any, None]],
    mode: VolumeMode,
    function: tuple[object, str],
    doing: str,
) -> None:
    hang(*function, tmp_path)
    warn = AsyncMock()
    with pytest.raises(DataPathError, match=rf"^{doing} .*: no progress for \ds$"):
        await run(tmp_path, mode, _data_path(warn))
    assert warn.await_args_list[0].args[0].startswith(f"still {doing}")

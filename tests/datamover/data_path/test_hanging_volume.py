"""A volume that hangs, such as one of an NFS server that does not answer: reported, bounded, and the mover goes on."""

import errno
import os
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from core.contract import MoverMethod, VolumeMode
from core.errors import DataPathError
from datamover.data_path.backup import back_up
from datamover.data_path.restore import RestoreParameters, restore
from datamover.data_path.run import DataPath
from datamover.data_path.snapshot_runs import BackupParameters
from datamover.kopia.process import KopiaAnswer
from datamover.kopia.progress import Direction
from datamover.kopia.snapshots import Snapshot
from datamover.kopia.stalls import StallLimits
from datamover.runtime.work_dir import WorkDir
from tests.datamover.support.data_paths import build_data_path

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


async def _restore(volume: Path, mode: VolumeMode, data_path: DataPath) -> None:
    await restore(_repository(volume), RestoreParameters("id", volume, mode, workers=1), data_path)


async def _restore_with_one_open(volume: Path, mode: VolumeMode, data_path: DataPath) -> None:
    parameters = RestoreParameters("id", volume, mode, workers=1, mover=MoverMethod.ONE_OPEN)
    await restore(_repository(volume), parameters, data_path)


async def test_a_volume_that_cannot_be_opened_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "is_dir", Mock(side_effect=OSError(errno.ESTALE, "Stale file handle")))
    with pytest.raises(DataPathError, match=rf"^cannot open volume {tmp_path}: Stale file handle$"):
        await _back_up(tmp_path, VolumeMode.FILESYSTEM, _data_path(AsyncMock()))


@pytest.mark.parametrize(
    ("transfer", "function", "doing"),
    [
        ((_back_up, VolumeMode.FILESYSTEM), (Path, "is_dir"), "opening volume"),
        ((_back_up, VolumeMode.BLOCK), (os, "open"), "opening device"),
        ((_restore, VolumeMode.FILESYSTEM), (Path, "mkdir"), "opening target"),
        ((_restore, VolumeMode.FILESYSTEM), (os, "open"), "opening target"),
        ((_restore_with_one_open, VolumeMode.FILESYSTEM), (os.path, "exists"), "opening target"),
        ((_restore, VolumeMode.BLOCK), (os, "open"), "opening device"),
    ],
    ids=["backup", "backup of a device", "restore", "opened", "restore with one open", "restore of a device"],
)
async def test_a_volume_that_hangs_is_reported_and_fails_the_transfer(
    tmp_path: Path,
    hang: Callable[[object, str, Path], None],
    transfer: tuple[Callable[[Path, VolumeMode, DataPath], Coroutine[Any, Any, None]], VolumeMode],
    function: tuple[object, str],
    doing: str,
) -> None:
    hang(*function, tmp_path)
    (run, mode), warn = transfer, AsyncMock()
    with pytest.raises(DataPathError, match=rf"^{doing} .*: no progress for \ds$"):
        await run(tmp_path, mode, _data_path(warn))
    assert warn.await_args_list[0].args[0].startswith(f"still {doing}")

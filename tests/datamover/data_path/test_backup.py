"""The check of names beside a backup: one that hangs, and placeholders of kopia; how often a checkpoint is saved."""

import asyncio
import json
import os
import re
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from core.contract import MoverMethod, VolumeMode
from core.errors import DataPathError, KopiaError, StorageOutageError
from datamover.data_path.backup import _check_complete
from datamover.data_path.one_open_runs import open_run
from datamover.kopia.process import KopiaAnswer
from datamover.kopia.progress import Direction
from datamover.kopia.repository import Repository
from datamover.kopia.stalls import StallLimits
from datamover.local.command import LocalMover
from datamover.runtime.resources import ResourceLimits
from tests.datamover.support.backup_movers import plain_only
from tests.datamover.support.data_paths import back_up_volume, build_data_path
from tests.datamover.support.plainkopia import PlainKopia

pytestmark = pytest.mark.processes


async def test_a_walk_that_hangs_is_reported_and_fails_the_backup(
    mover_repository: Repository, tmp_path: Path, kopia: PlainKopia, monkeypatch: pytest.MonkeyPatch
) -> None:
    hang, scandir = threading.Event(), os.scandir
    volume = tmp_path / "volume"
    volume.mkdir()

    def hang_in_volume(folder: int) -> object:
        if os.path.samestat(os.stat(folder), volume.stat()):
            hang.wait(60)
        return scandir(folder)

    monkeypatch.setattr("os.scandir", hang_in_volume)
    warn = AsyncMock()
    data_path = build_data_path(Direction.BACKUP, warn, limits=StallLimits(timedelta(seconds=3)))
    try:
        with pytest.raises(DataPathError, match=r"^checking the names of files: no progress for \d+s$"):
            await back_up_volume(mover_repository, volume, data_path)
    finally:
        hang.set()
    assert any(re.match(r"still checking the names of files after \d+s", one.args[0]) for one in warn.await_args_list)
    assert kopia.snapshots() == []


async def test_a_walk_that_fails_leaves_no_snapshot(
    mover_repository: Repository, tmp_path: Path, kopia: PlainKopia, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "volume").mkdir()
    monkeypatch.setattr("datamover.data_path.file_names.walk_tree", Mock(side_effect=RuntimeError("broken")))
    with pytest.raises(RuntimeError, match="broken"):
        await back_up_volume(mover_repository, tmp_path / "volume")
    assert kopia.snapshots() == []


_ABSENT = {"mode": "0644", "size": 5, "mtime": "2024-01-01T00:00:00Z"}


@pytest.mark.sample("file", "empty")
@pytest.mark.parametrize(
    ("file", "entry"),
    [
        ("sub/x.kopia-entry", {"name": "x", "type": "f", "obj": "0123456789abcdef0123456789abcdef", **_ABSENT}),
        ("sub/x.kopia-entry/.kopia-entry", {"name": "x", "type": "d", "obj": "k0123456789abcdef0123456789abcdef"}),
        ("sub/x.kopia-entry/.kopia-entry", {}),
    ],
    ids=["file", "folder", "empty"],
)
async def test_a_placeholder_of_what_is_not_in_the_repository_fails_the_backup_and_is_named(
    local_mover: LocalMover, tmp_path: Path, kopia: PlainKopia, file: str, entry: dict[str, object]
) -> None:
    """Otherwise the restore would end at it."""
    volume = tmp_path / "volume"
    (volume / file).parent.mkdir(parents=True)
    (volume / file).write_text(json.dumps(entry))
    with pytest.raises(
        KopiaError, match=r"(?s)^back up .*(sub/x: invalid placeholder|placeholders .*sub/x.kopia-entry)"
    ):
        await local_mover.back_up(volume, "", None)
    assert kopia.snapshots() == []


_SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "no limit": ({}, "10m0s"),
    "enough memory": ({"limits": ResourceLimits(2, 1 << 40)}, "10m0s"),
    "little memory": ({"limits": ResourceLimits(2, 4096)}, "5s"),
    "set": ({"limits": ResourceLimits(2, 4096), "checkpoint_interval": timedelta(minutes=3)}, "3m0s"),
    "device": ({"limits": ResourceLimits(2, 4096), "mode": VolumeMode.BLOCK}, "10m0s"),
}


@plain_only
@pytest.mark.parametrize("settings", _SETTINGS)
async def test_checkpoints_are_frequent_if_the_memory_limit_does_not_suffice_for_the_files_of_a_volume(
    settings: str, record: Path, mover_repository: Repository, tmp_path: Path
) -> None:
    more, interval = _SETTINGS[settings]
    (tmp_path / "volume").mkdir()
    device = tmp_path / "volume" / "device"
    device.write_bytes(bytes(4096))
    await back_up_volume(mover_repository, device if "mode" in more else device.parent, **more)
    assert f" --checkpoint-interval={interval} " in record.read_text()


_UNANSWERED = (
    "error checkpointing: error flushing after checkpoint: dial tcp 10.0.0.1:9000: connect: connection refused"
)


@pytest.mark.parametrize(
    ("exit_code", "found", "line", "fault", "kind"),
    [
        (1, {}, "", "kopia exited with code 1", KopiaError),
        (1, {}, "flush error: Access Denied", "the credentials have no access", KopiaError),
        (0, {"size": 6}, "", "read 6 of the device's 7 bytes", KopiaError),
        (0, {"incomplete": "canceled"}, _UNANSWERED, r"it is incomplete \(canceled\)\n.*refused$", StorageOutageError),
    ],
)
async def test_a_snapshot_that_may_lack_data_is_deleted_and_no_result(
    exit_code: int, found: dict[str, Any], line: str, fault: str, kind: type[Exception]
) -> None:
    root = {"obj": "k2", "summ": {"files": 1, "dirs": 1, "size": 7} | found}
    manifest = {"id": "k1", "source": {"path": "some/volume"}, "rootEntry": root}
    kopia = AsyncMock()
    kopia.call.return_value = KopiaAnswer("delete snapshot", 0, b"")
    with pytest.raises(kind, match=fault):
        await _check_complete(kopia, KopiaAnswer("back up", exit_code, json.dumps(manifest).encode(), [line]), 7)
    assert "k1" in kopia.call.await_args.args


async def test_a_snapshot_is_deleted_if_a_cancel_request_comes_before_its_exclusions_are_taken_back(
    mover_repository: Repository, tree: Path, kopia: PlainKopia, monkeypatch: pytest.MonkeyPatch
) -> None:
    @asynccontextmanager
    async def excluding(*_: object) -> AsyncIterator[None]:
        yield
        assert len(kopia.snapshots()) == 1
        running.cancel()
        await asyncio.Event().wait()

    monkeypatch.setattr("datamover.data_path.snapshot_runs.excluding", excluding)
    # Whatever other tests use.
    monkeypatch.setattr("datamover.data_path.backup.open_run", open_run)
    running = asyncio.create_task(back_up_volume(mover_repository, tree, mover=MoverMethod.PLAIN))
    with pytest.raises(asyncio.CancelledError):
        await running
    assert kopia.snapshots() == []

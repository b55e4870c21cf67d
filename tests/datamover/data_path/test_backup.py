"""The check of names beside a backup, placeholders of kopia, checkpoints, and what of a backup is incremental."""

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
from unittest.mock import AsyncMock

import pytest

from core.clock import SystemClock
from core.contract import MoverMethod, VolumeMode
from core.errors import DataPathError, KopiaError, StorageOutageError
from datamover.data_path.backup import _check_complete, count_incremental
from datamover.data_path.checkpoints import Inheritance
from datamover.data_path.one_open_runs import open_run
from datamover.kopia.process import KopiaAnswer
from datamover.kopia.progress import Direction, Meter
from datamover.kopia.repository import Repository
from datamover.kopia.snapshots import Snapshot, list_source, parse_snapshot
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


_ABSENT = {"mode": "0644", "size": 5, "mtime": "2024-01-01T00:00:00Z"}
_FILE = {"name": "x", "type": "f", "obj": "0123456789abcdef0123456789abcdef", **_ABSENT}
_FOLDER = {"name": "x", "type": "d", "obj": "k0123456789abcdef0123456789abcdef"}


@pytest.mark.sample("file", "empty")
@pytest.mark.parametrize(
    ("file", "entry"),
    [
        pytest.param("sub/x.kopia-entry", _FILE, id="file"),
        pytest.param("sub/x.kopia-entry/.kopia-entry", _FOLDER, id="folder"),
        pytest.param("sub/x.kopia-entry/.kopia-entry", {}, id="empty"),
    ],
)
async def test_a_placeholder_of_what_is_not_in_the_repository_fails_the_backup_and_is_named(
    local_mover: LocalMover, tmp_path: Path, kopia: PlainKopia, file: str, entry: dict[str, object]
) -> None:
    """Otherwise the restore would end at it."""
    (path := tmp_path / "volume" / file).parent.mkdir(parents=True)
    path.write_text(json.dumps(entry))
    named = r"(?s)^back up .*(sub/x: invalid placeholder|placeholders .*sub/x.kopia-entry)"
    with pytest.raises(KopiaError, match=named):
        await local_mover.back_up(tmp_path / "volume", "", None)
    assert kopia.snapshots() == []


_LITTLE = ResourceLimits(2, 4096)
_SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "no limit": ({}, "10m0s"),
    "enough memory": ({"limits": ResourceLimits(2, 1 << 40)}, "10m0s"),
    "little memory": ({"limits": _LITTLE}, "5s"),
    "set": ({"limits": _LITTLE, "checkpoint_interval": timedelta(minutes=3)}, "3m0s"),
    "device": ({"limits": _LITTLE, "mode": VolumeMode.BLOCK}, "10m0s"),
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


_UNANSWERED = "error flushing after checkpoint: dial tcp 10.0.0.1:9000: connect: connection refused"


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


_TARGET = "default@default:some/volume"


def _meter(hashed_bytes: int, cached_bytes: int) -> Meter:
    meter = Meter(SystemClock(), Direction.BACKUP)
    meter.hashed_bytes, meter.cached_bytes = hashed_bytes, cached_bytes
    return meter


async def _back_up(movers: Repository, volume: Path) -> Snapshot:
    await back_up_volume(movers, volume)
    return parse_snapshot((await list_source(movers.kopia, _TARGET))[-1])


async def test_changed_and_new_files_count_and_touched_do_not(mover_repository: Repository, tmp_path: Path) -> None:
    """Names that look like kopia's report count for what they are; a folder in place of a file is not seen into."""
    volume = tmp_path / "volume"
    for name, size in {"same": 1000, "changed": 2000, "gone": 4000, "touched": 8000, "deep/down/changed": 1}.items():
        (volume / name).parent.mkdir(parents=True, exist_ok=True)
        (volume / name).write_bytes(b"a" * size)
    old = await _back_up(mover_repository, volume)
    (volume / "changed").write_bytes(b"b" * 16_000)
    (volume / "gone").unlink()
    os.utime(volume / "touched", (1, 1))
    (volume / "deep/down/changed").write_bytes(b"b" * 32_000)
    (volume / "new (5 bytes)").mkdir()
    (volume / "new (5 bytes)" / "added file (7 bytes)").write_bytes(b"c" * 64_000)
    new = await _back_up(mover_repository, volume)
    found = await count_incremental(mover_repository, new, Inheritance(old, continued=True), _meter(10, 10))
    assert found == 16_000 + 32_000 + 64_000


_CASES = {
    "parent": (True, False, 600, 400, 600),
    "rounded": (True, False, 1004, 1, 1000),
    "no parent": (True, False, 0, 0, 1000),
    "first backup": (False, True, 600, 400, 1000),
    "nothing new in the checkpoint": (True, True, 600, 400, 600),
    "everything read": (True, True, 600, 0, 1000),
}
"""Whether a backup of 1000 bytes has a latest snapshot, and continued; what it read; what is incremental."""


@pytest.mark.parametrize("case", _CASES.values(), ids=_CASES)
async def test_what_kopia_read_counts(mover_repository: Repository, tmp_path: Path, case: tuple[Any, ...]) -> None:
    has_latest, continued, hashed, cached, expected = case
    snapshot = await _back_up_file(mover_repository, tmp_path)
    inheritance = Inheritance(snapshot if has_latest else None, continued)
    assert await count_incremental(mover_repository, snapshot, inheritance, _meter(hashed, cached)) == expected


async def _back_up_file(movers: Repository, folder: Path) -> Snapshot:
    (folder / "volume").mkdir()
    (folder / "volume" / "file").write_bytes(b"a" * 1000)
    return await _back_up(movers, folder / "volume")


async def test_the_increment_is_not_known_where_the_snapshots_cannot_be_compared(
    mover_repository: Repository, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    snapshot = await _back_up_file(mover_repository, tmp_path)
    lost = Snapshot("lost", "some/volume", "", "kffffffffffffffffffffffffffffffff", 1, 1)
    assert await count_incremental(mover_repository, snapshot, Inheritance(lost, True), _meter(600, 400)) is None
    assert "incrementalBytes is not known: compare with snapshot lost: " in caplog.text

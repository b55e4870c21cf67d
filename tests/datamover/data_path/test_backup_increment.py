"""`incrementalBytes` of a backup that continued from a checkpoint: what the last complete snapshot has not."""

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from core.clock import SystemClock
from datamover.data_path.backup import count_incremental
from datamover.data_path.checkpoints import Inheritance
from datamover.kopia.progress import Direction, Meter
from datamover.kopia.repository import Repository
from datamover.kopia.snapshots import Snapshot, list_source
from tests.datamover.support.data_paths import back_up_volume

pytestmark = pytest.mark.processes

_TARGET = "default@default:some/volume"


def _meter(hashed_bytes: int, cached_bytes: int) -> Meter:
    meter = Meter(SystemClock(), Direction.BACKUP)
    meter.hashed_bytes, meter.cached_bytes = hashed_bytes, cached_bytes
    return meter


async def _back_up(movers: Repository, volume: Path) -> Snapshot:
    await back_up_volume(movers, volume)
    found = (await list_source(movers.kopia, _TARGET)).latest
    assert found is not None
    return found


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


@dataclass(frozen=True)
class _Case:
    """What a backup of 1000 bytes found, and what it read; `expected` bytes are incremental."""

    has_latest: bool
    continued: bool
    hashed_bytes: int
    cached_bytes: int
    expected: int


_CASES = {
    "parent": _Case(True, False, 600, 400, 600),
    "rounded": _Case(True, False, 1004, 1, 1000),
    "no parent": _Case(True, False, 0, 0, 1000),
    "first backup": _Case(False, True, 600, 400, 1000),
    "nothing new in the checkpoint": _Case(True, True, 600, 400, 600),
    "everything read": _Case(True, True, 600, 0, 1000),
}


@pytest.mark.parametrize("case", _CASES.values(), ids=_CASES)
async def test_what_kopia_read_counts(mover_repository: Repository, tmp_path: Path, case: _Case) -> None:
    volume = tmp_path / "volume"
    volume.mkdir()
    (volume / "file").write_bytes(b"a" * 1000)
    snapshot = await _back_up(mover_repository, volume)
    inheritance = Inheritance(snapshot if case.has_latest else None, case.continued)
    meter = _meter(case.hashed_bytes, case.cached_bytes)
    assert await count_incremental(mover_repository, snapshot, inheritance, meter) == case.expected


async def test_the_increment_is_not_known_where_the_snapshots_cannot_be_compared(
    mover_repository: Repository, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    volume = tmp_path / "volume"
    volume.mkdir()
    (volume / "file").write_bytes(b"a" * 1000)
    snapshot = await _back_up(mover_repository, volume)
    lost = Snapshot("lost", "some/volume", "", "kffffffffffffffffffffffffffffffff", 1, 1)
    assert await count_incremental(mover_repository, snapshot, Inheritance(lost, True), _meter(600, 400)) is None
    assert "incrementalBytes is not known: compare with snapshot lost: " in caplog.text

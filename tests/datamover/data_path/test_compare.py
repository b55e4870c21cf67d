"""A comparison passes only if it has seen the whole archive, with all entries of the snapshot."""

import asyncio
import tarfile
import threading
from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import cast
from unittest.mock import AsyncMock

import pytest

from core.clock import SystemClock
from core.contract import VolumeMode
from core.errors import DataPathError, KopiaError
from core.models.verification import VerifiedSnapshot
from datamover.data_path.compare import compare_volume
from datamover.kopia.process import KopiaAnswer
from datamover.kopia.repository import Repository
from datamover.kopia.snapshots import Snapshot
from datamover.kopia.stalls import StallLimits, Watchdog


async def _compare(
    folder: Path, archive: bytes, *, entries: int, block: bool = False, timeout: timedelta = timedelta(minutes=10)
) -> VerifiedSnapshot:
    """Compare a volume with what a kopia writes that sends this archive."""
    volume = folder / "volume"
    if block:
        volume.touch()
    else:
        volume.mkdir()

    async def call_guarded(attempted: str, _command: str, _id: str, pipe: str, *_: str) -> KopiaAnswer:
        await asyncio.to_thread(Path(pipe).write_bytes, archive)
        return KopiaAnswer(attempted, 0, b"")

    async def run(attempt: Callable[[], Awaitable[KopiaAnswer]]) -> KopiaAnswer:
        return await attempt()

    called = SimpleNamespace(work_dir=SimpleNamespace(path=folder), call_guarded=call_guarded, run=run)
    called.watchdog = Watchdog(SystemClock(), AsyncMock(), AsyncMock(), StallLimits(timeout))
    repository = SimpleNamespace(description="repository", restore_flags=lambda _: [], **vars(called))
    return await compare_volume(
        cast("Repository", repository),
        Snapshot("s1", "/data", "", "k1", 0, entries),
        volume,
        VolumeMode.BLOCK if block else VolumeMode.FILESYSTEM,
    )


@pytest.mark.parametrize(
    "rest", [b"y" * 10_000, b"y" * 100, b""], ids=["an invalid header", "a header cut off", "no header"]
)
async def test_an_archive_that_does_not_end_is_no_verification(tmp_path: Path, rest: bytes) -> None:
    """It has the header of an empty file, and no end marker."""
    with pytest.raises(KopiaError, match=r"kopia's archive is invalid: .* header at byte 512"):
        await _compare(tmp_path, tarfile.TarInfo("a").tobuf() + rest, entries=1)


@pytest.mark.parametrize(
    ("entries", "block", "faults"),
    [
        (1, False, ["the snapshot has 0 entries instead of 1"]),
        (1, True, ["the snapshot has 0 entries instead of 1"]),
        (0, False, []),
    ],
    ids=["directory", "device", "empty volume"],
)
async def test_an_archive_that_lacks_an_entry_is_a_fault(
    tmp_path: Path, entries: int, block: bool, faults: list[str]
) -> None:
    found = await _compare(tmp_path, bytes(10240), entries=entries, block=block)
    assert (found.outcome, found.faults) == ("failed" if faults else "passed", faults)


async def test_a_volume_that_hangs_once_kopia_has_sent_everything_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A snapshot of up to a MiB is in the pipe as a whole before its first entry is compared."""
    hung = threading.Event()
    monkeypatch.setattr("datamover.data_path.compare.open_below", lambda *_: hung.wait(60))
    archive = tarfile.TarInfo("a").tobuf() + bytes(10240)
    with pytest.raises(DataPathError, match=rf"^comparing {tmp_path}/volume with snapshot s1: no progress for \ds$"):
        await asyncio.wait_for(_compare(tmp_path, archive, entries=1, timeout=timedelta(milliseconds=100)), 30)
    hung.set()

"""A comparison passes only if it has seen the whole archive, with all entries of the snapshot."""

import asyncio
import io
import tarfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from core.contract import VolumeMode
from core.errors import KopiaError
from core.models.verification import VerifiedSnapshot
from datamover.data_path.compare import compare_volume
from datamover.kopia.process import KopiaAnswer
from datamover.kopia.repository import Repository
from datamover.kopia.snapshots import Snapshot
from datamover.kopia.stalls import Watchdog


async def _compare(folder: Path, archive: bytes, *, entries: int, block: bool = False) -> VerifiedSnapshot:
    """Compare a volume with what a kopia writes that sends this archive."""
    volume = folder / "volume"
    if block:
        volume.touch()
    else:
        volume.mkdir()

    async def call_guarded(
        _watchdog: object, attempted: str, _command: str, _id: str, pipe: str, *_: str
    ) -> KopiaAnswer:
        await asyncio.to_thread(Path(pipe).write_bytes, archive)
        return KopiaAnswer(attempted, 0, b"")

    async def run(attempt: Callable[[], Awaitable[KopiaAnswer]]) -> KopiaAnswer:
        return await attempt()

    work_dir = SimpleNamespace(path=folder)
    repository = SimpleNamespace(description="repository", work_dir=work_dir, call_guarded=call_guarded, run=run)
    return await compare_volume(
        cast("Repository", repository),
        cast("Watchdog", None),
        Snapshot("s1", "/data", "", "k1", 0, entries),
        volume,
        VolumeMode.BLOCK if block else VolumeMode.FILESYSTEM,
    )


def _empty() -> bytes:
    content = io.BytesIO()
    tarfile.open(fileobj=content, mode="w").close()
    return content.getvalue()


def _file() -> bytes:
    """Return the header of an empty file, and no end marker."""
    return tarfile.TarInfo("a").tobuf()


@pytest.mark.parametrize(
    "rest", [b"y" * 10_000, b"y" * 100, b""], ids=["an invalid header", "a header cut off", "no header"]
)
async def test_an_archive_that_does_not_end_is_no_verification(tmp_path: Path, rest: bytes) -> None:
    with pytest.raises(KopiaError, match=r"kopia's archive is invalid: .* header at byte 512"):
        await _compare(tmp_path, _file() + rest, entries=1)


@pytest.mark.parametrize("block", [False, True], ids=["directory", "device"])
async def test_an_archive_without_an_entry_of_the_snapshot_is_a_fault(tmp_path: Path, *, block: bool) -> None:
    found = await _compare(tmp_path, _empty(), entries=1, block=block)
    assert (found.outcome, found.faults) == ("failed", ["the snapshot has 0 entries instead of 1"])


async def test_an_empty_snapshot_is_that_of_an_empty_volume(tmp_path: Path) -> None:
    found = await _compare(tmp_path, _empty(), entries=0)
    assert (found.outcome, found.faults) == ("passed", [])

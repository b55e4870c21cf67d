"""A comparison passes only if it has seen the whole archive, with all entries of the snapshot."""

import asyncio
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


async def _compare(folder: Path, archive: bytes, *, entries: int, block: bool = False) -> VerifiedSnapshot:
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

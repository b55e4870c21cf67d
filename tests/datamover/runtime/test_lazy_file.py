"""A file that is fetched when a child reads it; the child is debugfs."""

import asyncio
import os
from pathlib import Path

import pytest

from core.errors import DataPathError
from datamover.runtime import lazy_file
from datamover.runtime.lazy_file import LazyFile
from tests.datamover.support.disks import make_disk, opened_disk, read_file

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_disk(tmp_path_factory.mktemp("disk"))[1]


async def test_only_what_is_read_is_fetched(disk: Path, tmp_path: Path) -> None:
    async with opened_disk(disk, tmp_path / "look") as (files, fetched):
        assert await read_file(files, "small") == b"one"
        assert 0 < len(set(fetched)) < 8
        assert (tmp_path / "look" / "device" / "image").stat().st_blocks * 512 < 8 << 20


async def test_a_block_that_cannot_be_fetched_is_the_cause(disk: Path, tmp_path: Path) -> None:
    async def fail(first: int, count: int) -> None:
        raise DataPathError(f"blocks {first} and {count} more are gone")

    async with opened_disk(disk, tmp_path / "look") as (files, _):
        files.debugfs._image.fetch = fail
        files.debugfs._image._fetched.clear()
        with pytest.raises(DataPathError, match=r"blocks \d+ and 1 more are gone"):
            await files.find("sub/deep/link")


async def test_more_than_is_kept_is_not_read_at_once(tmp_path: Path) -> None:
    with LazyFile.create(tmp_path / "file", 1 << 40) as file:

        async def fetch(first: int, count: int) -> None:
            raise AssertionError((first, count))

        file.fetch = fetch
        with pytest.raises(DataPathError, match="is not expected: the file system is damaged"):
            await file.read(0, 1 << 30)


@pytest.mark.parametrize(
    ("name", "replaced", "error"),
    [
        ("notify_reads", lambda _: [], "cannot be read on this architecture"),
        ("notify_reads", lambda _: [("seccomp", lambda: -1)], "cannot confine seccomp: "),
        ("_CONTINUE", 1 << 20, r"older than Linux 5\.5"),
    ],
)
async def test_a_machine_that_cannot_do_it_says_so(
    name: str, replaced: object, error: str, disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lazy_file, name, replaced)
    with pytest.raises(DataPathError, match=error):
        async with opened_disk(disk, tmp_path / "look"):
            pass


async def test_a_read_that_makes_room_gets_all_its_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazy_file, "_KEPT_BLOCKS", 2)
    with LazyFile.create(tmp_path / "file", 8 << 20) as file:

        async def fetch(first: int, count: int) -> None:
            assert file.fetching
            os.pwrite(file.fd, b"x" * (count << 20), first << 20)

        file.fetch = fetch
        for offset in (5 << 20, 4 << 20):
            await file.read(offset, 1)
            assert not file.fetching
        # The first of its two blocks is missing, the second one is there.
        assert await file.read((4 << 20) - 1, 2) == b"xx"


async def test_little_is_kept_however_much_is_read(tmp_path: Path) -> None:
    with LazyFile.create(tmp_path / "file", 100 << 20) as file:
        kept = []

        async def fetch(first: int, count: int) -> None:
            os.pwrite(file.fd, b"x" * (count << 20), first << 20)
            kept.append(os.fstat(file.fd).st_blocks >> 11)

        file.fetch = fetch
        for block in range(100):
            assert await file.read(block << 20, 1) == b"x"
        assert 16 <= max(kept) <= 32
        # One read may ask for more.
        assert await file.read(1 << 20, 60 << 20) == b"x" * (60 << 20)
        assert await file.read(0, 1) == b"x"
        assert kept[-1] <= 32


async def test_of_a_file_whose_blocks_cannot_be_fetched_no_zeros_arrive(disk: Path, tmp_path: Path) -> None:
    async def fail(*_: int) -> None:
        raise RuntimeError

    async with opened_disk(disk, tmp_path / "look") as (files, _):
        large = await files.find("sub/large")
        files.debugfs._image.fetch = fail
        files.debugfs._image._fetched.clear()
        ours, theirs = files.open_pipe()
        try:
            with pytest.raises(DataPathError, match="cannot read file large: debugfs: "):
                async with asyncio.timeout(5):
                    await files.copy_content(large, theirs)
            with pytest.raises(BlockingIOError):
                os.read(ours, 1)
        finally:
            os.close(ours)
            os.close(theirs)

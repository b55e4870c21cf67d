"""What kopia keeps of an entry of a directory, as a command gets it."""

import asyncio
import random
import tracemalloc
from datetime import timedelta
from functools import partial
from pathlib import Path

import msgspec
import pytest

from core.contract import VolumeMode
from core.errors import DataPathError, KopiaError, StorageOutageError
from datamover.kopia.snapshot_files import StoredEntry, fetch_blocks, find_entry, find_only_file
from datamover.kopia.snapshots import Snapshot, read_snapshot
from datamover.kopia.stalls import StallLimits
from datamover.kopia.storage_calls import Waits
from datamover.runtime.lazy_file import LazyFile
from datamover.runtime.work_dir import WorkDir
from tests.datamover.support.data_paths import back_up_volume
from tests.datamover.support.repositories import opened, s3_storage
from tests.datamover.support.s3proxy import Fault, S3Proxy
from tests.datamover.support.s3server import S3Server
from tests.datamover.support.stored_directories import StoredDirectories


@pytest.mark.parametrize(
    ("kept", "described"),
    [
        ("0644", "0644"),
        ("040000755", "4755"),
        ("020000770", "2770"),
        ("04001777", "1777"),
        ("", ""),
        ("0899", ""),
        ("-7", ""),
        ("0" * 12, ""),
    ],
)
def test_the_mode_is_that_of_a_file_and_none_if_it_is_no_octal_number(kept: str, described: str) -> None:
    entry = msgspec.json.decode(f'{{"name":"a","type":"f","mode":"{kept}"}}', type=StoredEntry)
    assert (entry.mode, entry.describe().mode) == (described, described or None)


async def test_a_directory_of_any_size_takes_little_memory(tmp_path: Path) -> None:
    stored = StoredDirectories(
        {"kroot": [{"name": f"file {number}", "type": "f"} for number in range(20_000)]}, WorkDir(tmp_path, tmp_path)
    )
    snapshot = Snapshot("id", "s", "", "kroot", 1, 20_000, root_entry={})
    tracemalloc.start()
    try:
        with pytest.raises(DataPathError, match="no single file"):
            await find_only_file(stored, snapshot)
        assert (await find_entry(stored, snapshot, "file 19999")).name == "file 19999"
        with pytest.raises(DataPathError, match=r"has no absent$"):
            await find_entry(stored, snapshot, "absent/file")
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 5 << 20
    stored.objects["kroot"] = [{"name": 7}]
    with pytest.raises(KopiaError, match="not a directory"):
        await find_only_file(stored, snapshot)


@pytest.mark.processes
@pytest.mark.parametrize("when", ["opening", "reading"])
async def test_blocks_are_not_waited_for_without_end(when: str, s3: S3Server, proxy: S3Proxy, tmp_path: Path) -> None:
    device = tmp_path / "device"
    device.write_bytes(random.Random(1).randbytes(40 << 20))
    storage = s3_storage(s3, s3.make_bucket("blocks"), url=proxy.url)
    waits = Waits(limits=StallLimits(timedelta(seconds=1)))
    with opened(storage) as repository:
        await repository.ensure()
        backup = await back_up_volume(repository, device, mode=VolumeMode.BLOCK, by_block=True)
    image_file = LazyFile.create(tmp_path / "image", device.stat().st_size)
    with opened(storage, waits=waits) as repository, image_file as image:
        snapshot = await repository.open(partial(read_snapshot, repository, backup.snapshot_id))
        file = await find_only_file(repository, snapshot)
        async with fetch_blocks(repository, file, image):
            if when == "reading":
                assert await image.read(0, 100) == device.read_bytes()[:100]
            proxy.fail(Fault.SILENCE)
            async with asyncio.timeout(60):
                with pytest.raises(StorageOutageError, match=r"read blocks of .*: no progress for \d+s: .* not "):
                    await image.read(30 << 20, 100)

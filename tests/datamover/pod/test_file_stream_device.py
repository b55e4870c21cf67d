"""Files in the file system of a device, out of a real repository: as it is stored by block, and as a stream."""

import asyncio
import os
from pathlib import Path

import pytest

from core.contract import VolumeMode, parse_result
from core.mover_specs import ListFiles
from core.snapshot_contract import ENTRY_LINE, FileEntry, FileListing, FileType
from datamover.pod.storage_commands import run_storage_command
from datamover.storage.providers import FileStorage
from tests.datamover.support.data_paths import back_up_volume
from tests.datamover.support.disks import LONG, ODD, make_disk
from tests.datamover.support.plainkopia import PlainKopia
from tests.datamover.support.repositories import opened
from tests.datamover.support.stored_files import SnapshotBed, receive

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

_TAGS = {"snapshot-requester": "snapshot-data-upload-download", "snapshot-uploader": "velero-block"}
_SOURCE = "snapshot-data-upload-download/velero-block/app/data"


@pytest.fixture(scope="module", params=["stream", "block"])
def _stored(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, kopia_program: Path
) -> SnapshotBed:
    folder = tmp_path_factory.mktemp("stored-device")
    _, disk = make_disk(folder)
    return _store(request.param, disk, folder, kopia_program)


@pytest.fixture
def bed(_stored: SnapshotBed, tmp_path: Path) -> SnapshotBed:
    """The snapshot of a device with a file system; `volume` is the directory of the device."""
    return _stored.copy(tmp_path)


def _store(form: str, disk: Path, folder: Path, kopia_program: Path) -> SnapshotBed:
    (folder / "device").mkdir()
    disk = disk.rename(folder / "device" / "disk")
    bed = SnapshotBed.make(PlainKopia(kopia_program, folder), folder, disk.parent)
    if form == "block":
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PATH", str(kopia_program.parent), prepend=os.pathsep)
            patch.setenv("VELERO_SCRATCH_DIR", str(folder))
            bed.snapshot_id = asyncio.run(_back_up(disk, bed.pod.repository))
    return bed


async def _back_up(disk: Path, place: Path) -> str:
    with opened(FileStorage(place)) as repository:
        backup = await back_up_volume(
            repository, disk, mode=VolumeMode.BLOCK, source=_SOURCE, tags=_TAGS, by_block=True
        )
        return backup.snapshot_id


async def _list(bed: SnapshotBed, path: str, capsys: pytest.CaptureFixture[str], limit: int = 100) -> list[FileEntry]:
    spec = ListFiles(**bed.place(path, device=True), limit=limit)
    assert await run_storage_command(spec, bed.pod.context) == 0, bed.pod.message
    return [one for line in capsys.readouterr().out.splitlines() if (one := ENTRY_LINE.parse(line)) is not None]


async def test_a_directory_of_a_device_arrives(bed: SnapshotBed, capsys: pytest.CaptureFixture[str]) -> None:
    assert [one.name for one in await _list(bed, "/", capsys)] == ["long", "lost+found", ODD, "small", "sub"]
    assert parse_result(FileListing, bed.pod.message).type is FileType.DIRECTORY
    (small,) = await _list(bed, "/small", capsys)
    assert (small.name, small.size_bytes) == ("small", 3)
    received = await receive(bed, "/", device=True)
    assert (received.code, received.whole) == (0, True)
    files = bed.volume.parent / "files"
    with received.open() as tar:
        members = {one.name: one for one in tar}
        expected = {str(one.relative_to(files)) for one in files.rglob("*")}
        assert members.keys() == {*expected, "lost+found"}
        assert (members["long"].linkname, members["sub/pipe"].isfifo()) == (LONG, True)
        for name in ("small", ODD, "sub/large", "sub/sparse"):
            content = tar.extractfile(members[name])
            assert content is not None
            assert content.read() == (files / name).read_bytes()


async def test_a_device_arrives_with_its_own_size(bed: SnapshotBed) -> None:
    received = await receive(bed, device=True)
    assert (received.code, received.whole) == (0, True)
    with received.open() as tar:
        (member,) = tar
        content = tar.extractfile(member)
        assert content is not None
        assert content.read() == (bed.volume / "disk").read_bytes()


async def test_a_repository_that_lost_blocks_is_the_cause(bed: SnapshotBed) -> None:
    for blob in bed.pod.repository.glob("p*/**/*.f"):
        blob.unlink()
    assert await run_storage_command(ListFiles(**bed.place("/", device=True)), bed.pod.context) == 11
    assert "read blocks of" in bed.pod.message


async def test_another_file_system_is_refused_by_name(
    tmp_path: Path, kopia_program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    disk = tmp_path / "disk"
    disk.write_bytes(b"XFSB" + bytes(100_000))
    bed = _store("stream", disk, tmp_path, kopia_program)
    assert await run_storage_command(ListFiles(**bed.place("/etc", device=True)), bed.pod.context) == 10
    assert "the device has xfs: only files in ext2, ext3 or ext4 can be read" in bed.pod.message
    (device,) = await _list(bed, "", capsys)
    assert (device.name, device.size_bytes) == ("disk", 100_004)

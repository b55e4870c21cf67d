"""Files of a snapshot, and of a device in one, with a real kopia: lists, the plan of a restore, and as a stream."""

import asyncio
import os
import socket
import stat
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from core.contract import VolumeMode, parse_result
from core.models.transfer_settings import PLAN_LINE, EndedPlan
from core.mover_specs import ListFiles, PlanRestore
from core.snapshot_contract import ENTRY_LINE, FileEntry, FileListing, FileType, SentFiles
from datamover.pod import file_relay, file_stream
from datamover.pod.file_relay import SOCKET_NAME, relay
from datamover.pod.storage_commands import run_storage_command
from datamover.storage.providers import FileStorage
from tests.datamover.support.data_paths import back_up_volume
from tests.datamover.support.disks import LONG, ODD, make_disk
from tests.datamover.support.plainkopia import PlainKopia
from tests.datamover.support.repositories import opened
from tests.datamover.support.stored_files import SnapshotBed, build_sender, receive, relay_in_process
from tests.support.tasks import until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]


async def test_a_directory_arrives_with_all_that_kopia_keeps(bed: SnapshotBed) -> None:
    received = await receive(bed)
    assert (received.code, received.whole) == (0, True)
    assert received.entry is not None
    assert (received.entry.type, received.entry.name) == (FileType.DIRECTORY, "")
    with received.open() as tar:
        members = {one.name: one for one in tar}
        assert sorted(members) == [
            *("a", "bad\ufffd", "empty", "new\nline\x1b[31m", "sparse", "sub", "sub/deep"),
            *("sub/deep/$(HOME) ü%41", "sub/hard", "sub/link"),
        ]
        assert members["sub/link"].linkname == "../a"
        assert members["empty"].isdir()
        assert members["a"].mode & 0o777 == 0o640
        for name in ("a", "new\nline\x1b[31m", "sparse", "sub/deep/$(HOME) ü%41", "sub/hard"):
            assert _content(tar, members[name]) == (bed.volume / name).read_bytes()


@pytest.mark.parametrize("path", ["sparse", "sub/deep/$(HOME) ü%41", "sub/link"])
async def test_a_file_or_link_arrives_alone(bed: SnapshotBed, path: str) -> None:
    received = await receive(bed, path)
    assert (received.code, received.whole) == (0, True)
    with received.open() as tar:
        (member,) = tar
        assert member.name == Path(path).name
        if member.issym():
            assert member.linkname == "../a"
        else:
            assert _content(tar, member) == (bed.volume / path).read_bytes()


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    content = tar.extractfile(member)
    assert content is not None
    return content.read()


async def _connect(bed: SnapshotBed) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    path = bed.pod.folder / SOCKET_NAME
    async with asyncio.timeout(60):
        while True:
            try:
                return await asyncio.open_unix_connection(path, limit=1)
            except (FileNotFoundError, ConnectionRefusedError):
                await asyncio.sleep(0.05)


async def test_a_command_that_is_early_is_not_refused(bed: SnapshotBed, monkeypatch: pytest.MonkeyPatch) -> None:
    path, start, listen = bed.pod.folder / SOCKET_NAME, asyncio.start_unix_server, socket.socket.listen
    named: list[bool] = []

    def look(self: socket.socket, *backlog: int) -> None:
        named.append(path.exists())
        listen(self, *backlog)

    async def connect_first(*arguments: Any, **options: Any) -> asyncio.Server:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with socket.socket(socket.AF_UNIX) as command:
            command.connect(str(path))
        return await start(*arguments, **options)

    monkeypatch.setattr(socket.socket, "listen", look)
    monkeypatch.setattr(asyncio, "start_unix_server", connect_first)
    with pytest.raises(Exception, match="does not read them any more"):
        await build_sender(bed, "sparse").run()
    assert named[0] is False
    assert not path.exists()


@pytest.mark.parametrize("header_bytes", [512, 8 << 20], ids=["content", "header"])
async def test_a_pod_whose_reader_stops_ends(
    bed: SnapshotBed, monkeypatch: pytest.MonkeyPatch, header_bytes: int
) -> None:
    monkeypatch.setattr("datamover.pod.file_stream._header", lambda *_: bytes(header_bytes))
    sending = asyncio.create_task(build_sender(bed, "sparse", idle_seconds=1).run(), name="sending")
    _, writer = await _connect(bed)
    with pytest.raises(Exception, match="no byte was read or sent for 1 s"):
        await sending
    writer.close()


async def test_a_pod_whose_reader_goes_away_ends(bed: SnapshotBed) -> None:
    sending = asyncio.create_task(build_sender(bed, "sparse").run(), name="sending")
    reader, writer = await _connect(bed)
    await reader.read(1)
    writer.transport.abort()
    with pytest.raises(Exception, match="does not read them any more"):
        await sending


async def test_content_that_cannot_be_read_is_an_error_at_both_ends(bed: SnapshotBed) -> None:
    sending = asyncio.create_task(build_sender(bed, "sparse").run(), name="sending")
    await until((bed.pod.folder / SOCKET_NAME).exists, seconds=60)
    # The mover has found the file.
    for blob in bed.pod.repository.glob("p*/**/*.f"):
        blob.unlink()
    received = await relay_in_process()
    with pytest.raises(Exception, match="read file 'sparse'"):
        await sending
    assert received.code == 1
    assert "read file 'sparse'" in (received.result.error or "")


async def test_a_relay_without_a_mover_and_a_pod_that_is_not_read_give_up(bed: SnapshotBed, tmp_path: Path) -> None:
    result, code = relay({"VELERO_SCRATCH_DIR": str(tmp_path)}, 1, wait_seconds=0)
    assert (code, SentFiles.from_json(result).error) == (1, "the mover sends nothing")
    with pytest.raises(Exception, match="the files were not requested within 0 s"):
        await build_sender(bed, wait_seconds=0.1).run()
    assert not (bed.pod.folder / SOCKET_NAME).exists()


def test_a_relay_outlives_its_mover(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path, result = tmp_path / SOCKET_NAME, '{"bytes":3}'

    def look(_: float) -> None:
        assert result in capfd.readouterr().err
        path.unlink()

    monkeypatch.setattr(file_relay, "relay", lambda *_: (result, 0))
    monkeypatch.setattr(file_relay, "time", SimpleNamespace(sleep=look))
    monkeypatch.setenv("VELERO_SCRATCH_DIR", str(tmp_path))
    path.touch()
    assert file_relay.main() == 0
    assert not path.exists()


class Lister:
    """Lists, and reads what was printed."""

    def __init__(self, bed: SnapshotBed, capsys: pytest.CaptureFixture[str]) -> None:
        self.bed = bed
        self._capsys = capsys
        self.printed: dict[str, FileEntry] = {}

    async def list(self, path: str = "", *, device: bool = False, limit: int = 100, after: str = "") -> int:
        spec = ListFiles(**self.bed.place(path, device=device), limit=limit, after=after)
        code = await run_storage_command(spec, self.bed.pod.context)
        self.printed = {one.name: one for one in ENTRY_LINE.find(self._capsys.readouterr().out)}
        return code

    @property
    def listing(self) -> FileListing:
        return parse_result(FileListing, self.bed.pod.message)


@pytest.fixture
def lister(bed: SnapshotBed, capsys: pytest.CaptureFixture[str]) -> Lister:
    return Lister(bed, capsys)


async def test_the_volume_is_listed_with_attributes_in_the_order_of_names(lister: Lister) -> None:
    assert await lister.list() == 0, lister.bed.pod.message
    assert lister.listing == FileListing(type=FileType.DIRECTORY, entries=6, listed=6)
    assert list(lister.printed) == ["a", "bad\ufffd", "empty", "new\nline\x1b[31m", "sparse", "sub"]
    file = lister.printed["a"]
    assert (file.type, file.mode, file.size_bytes) == (FileType.FILE, "0640", 3)
    assert file.modified is not None
    assert file.modified[:4] == "2026" or file.modified.endswith("Z")
    assert (lister.printed["sub"].type, lister.printed["sub"].size_bytes) == (FileType.DIRECTORY, 7)
    assert lister.printed["sub"].files == 2
    assert lister.printed["empty"].mode == "2770"


async def test_the_list_is_cut_and_goes_on_after_a_name(lister: Lister, monkeypatch: pytest.MonkeyPatch) -> None:
    assert await lister.list(limit=2) == 0
    assert (lister.listing.entries, lister.listing.listed, list(lister.printed)) == (6, 2, ["a", "bad\ufffd"])
    assert await lister.list(after="new\nline\x1b[31m") == 0
    assert (lister.listing.entries, list(lister.printed)) == (2, ["sparse", "sub"])
    # At the size of a log, too.
    monkeypatch.setattr(file_stream, "_LISTED_BYTES", 300)
    assert await lister.list() == 0
    assert lister.listing.entries == 6
    assert 0 < lister.listing.listed == len(lister.printed) < 6


async def test_a_path_leads_to_a_file_and_through_no_link(lister: Lister) -> None:
    assert await lister.list("/sub//deep/$(HOME) ü%41") == 0
    assert lister.listing == FileListing(type=FileType.FILE, entries=1, listed=1)
    assert lister.printed["$(HOME) ü%41"].size_bytes == 4
    assert await lister.list("sub") == 0
    assert lister.printed["link"].type is FileType.LINK
    for path, error in {
        "sub/link/x": "sub/link is no directory but a link, which is not followed",
        "sbu": "the snapshot has no sbu (did you mean sub?)",
        "sub/../a": '".." is no name of a file',
    }.items():
        assert await lister.list(path) == 10
        assert error in lister.bed.pod.message
    assert await lister.list(device=True) == 10
    assert "is not one of a block device" in lister.bed.pod.message


async def test_a_plan_is_one_line_and_changes_nothing(
    bed: SnapshotBed, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    volume = tmp_path / "scratch"
    volume.mkdir()
    (volume / "extra").write_text("12345")
    spec = PlanRestore(**bed.place(), volume_path=str(volume), delete_extra_files=True)
    assert await run_storage_command(spec, bed.pod.context) == 0, bed.pod.message
    (plan,) = (one for line in capsys.readouterr().out.splitlines() if (one := PLAN_LINE.parse(line)))
    assert (plan.to_delete.names, plan.to_delete.bytes) == (["extra"], 5)
    assert EndedPlan.from_json(bed.pod.message).entries == 6
    assert plan.to_write.directories == 3
    assert [*volume.iterdir()] == [volume / "extra"]
    assert await run_storage_command(PlanRestore(**bed.place()), bed.pod.context) != 0
    assert "plan-restore needs --volume-path" in bed.pod.message


_REQUESTER = "snapshot-data-upload-download"


@pytest.fixture(scope="module", params=["stream", "block"])
def _stored(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, kopia_program: Path
) -> SnapshotBed:
    folder = tmp_path_factory.mktemp("stored-device")
    _, disk = make_disk(folder)
    return _store(request.param, disk, folder, kopia_program)


@pytest.fixture
def device(_stored: SnapshotBed, tmp_path: Path) -> SnapshotBed:
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
            tags = {"snapshot-requester": _REQUESTER, "snapshot-uploader": "velero-block"}
            more: dict[str, Any] = {"mode": VolumeMode.BLOCK, "source": f"{_REQUESTER}/velero-block/app/data"}
            with opened(FileStorage(bed.pod.repository)) as repository:
                backup = asyncio.run(back_up_volume(repository, disk, tags=tags, by_block=True, **more))
            bed.snapshot_id = backup.snapshot_id
    return bed


async def _list(bed: SnapshotBed, path: str, capsys: pytest.CaptureFixture[str], limit: int = 100) -> list[FileEntry]:
    spec = ListFiles(**bed.place(path, device=True), limit=limit)
    assert await run_storage_command(spec, bed.pod.context) == 0, bed.pod.message
    return ENTRY_LINE.find(capsys.readouterr().out)


async def test_a_directory_of_a_device_arrives(device: SnapshotBed, capsys: pytest.CaptureFixture[str]) -> None:
    assert [one.name for one in await _list(device, "/", capsys)] == ["long", "lost+found", ODD, "small", "sub"]
    assert parse_result(FileListing, device.pod.message).type is FileType.DIRECTORY
    (small,) = await _list(device, "/small", capsys)
    assert (small.name, small.size_bytes) == ("small", 3)
    received = await receive(device, "/", device=True)
    assert (received.code, received.whole) == (0, True)
    files = device.volume.parent / "files"
    with received.open() as tar:
        members = {one.name: one for one in tar}
        expected = {str(one.relative_to(files)) for one in files.rglob("*")}
        assert members.keys() == {*expected, "lost+found"}
        assert (members["long"].linkname, members["sub/pipe"].isfifo()) == (LONG, True)
        for name in ("small", ODD, "sub/large", "sub/sparse"):
            assert _content(tar, members[name]) == (files / name).read_bytes()


async def test_a_device_arrives_with_its_own_size(device: SnapshotBed) -> None:
    received = await receive(device, device=True)
    assert (received.code, received.whole) == (0, True)
    with received.open() as tar:
        (member,) = tar
        assert _content(tar, member) == (device.volume / "disk").read_bytes()


async def test_a_repository_that_lost_blocks_is_the_cause(device: SnapshotBed) -> None:
    for blob in device.pod.repository.glob("p*/**/*.f"):
        blob.unlink()
    assert await run_storage_command(ListFiles(**device.place("/", device=True)), device.pod.context) == 11
    assert "read blocks of" in device.pod.message


async def test_another_file_system_is_refused(
    tmp_path: Path, kopia_program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    disk = tmp_path / "disk"
    disk.write_bytes(b"XFSB" + bytes(100_000))
    bed = _store("stream", disk, tmp_path, kopia_program)
    assert await run_storage_command(ListFiles(**bed.place("/etc", device=True)), bed.pod.context) == 10
    assert "the device has xfs: only files in ext2, ext3 or ext4 can be read" in bed.pod.message
    (entry,) = await _list(bed, "", capsys)
    assert (entry.name, entry.size_bytes) == ("disk", 100_004)

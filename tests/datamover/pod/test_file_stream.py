"""Files and directories of a snapshot as a stream, with a real kopia: what arrives, and how the pod ends."""

import asyncio
import socket
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from core.mover_specs import SendFiles
from core.snapshot_contract import FileType, SentFiles
from datamover.pod import file_relay
from datamover.pod.file_relay import SOCKET_NAME, relay
from datamover.pod.storage_commands import run_storage_command
from tests.datamover.support.stored_files import Received, SnapshotBed, build_sender, receive, relay_in_process

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
            content = tar.extractfile(members[name])
            assert content is not None
            assert content.read() == (bed.volume / name).read_bytes()


@pytest.mark.parametrize("path", ["sparse", "sub/deep/$(HOME) ü%41"])
async def test_a_file_arrives_alone(bed: SnapshotBed, path: str) -> None:
    received = await receive(bed, path)
    assert (received.code, received.whole) == (0, True)
    with received.open() as tar:
        (member,) = tar
        content = tar.extractfile(member)
        assert content is not None
        assert (member.name, content.read()) == (Path(path).name, (bed.volume / path).read_bytes())


async def test_a_link_arrives_as_a_link(bed: SnapshotBed) -> None:
    received = await receive(bed, "sub/link")
    with received.open() as tar:
        (member,) = tar
    assert (member.name, member.issym(), member.linkname) == ("link", True, "../a")


async def test_a_pod_that_is_not_read_ends_by_itself(bed: SnapshotBed) -> None:
    with pytest.raises(Exception, match="the files were not requested within 0 s"):
        await build_sender(bed, wait_seconds=0.1).run()
    assert not (bed.pod.folder / SOCKET_NAME).exists()


async def _connect(bed: SnapshotBed) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    path = bed.pod.folder / SOCKET_NAME
    async with asyncio.timeout(60):
        while True:
            try:
                return await asyncio.open_unix_connection(path, limit=1)
            except (FileNotFoundError, ConnectionRefusedError):
                await asyncio.sleep(0.05)


async def test_a_command_that_sees_the_socket_first_is_not_refused(
    bed: SnapshotBed, monkeypatch: pytest.MonkeyPatch
) -> None:
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
async def test_a_pod_whose_reader_stops_ends_by_itself(
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
    receiving = asyncio.create_task(_relay_after_damage(bed), name="receiving")
    with pytest.raises(Exception, match="read file 'sparse'"):
        await sending
    received = await receiving
    assert received.code == 1
    assert "read file 'sparse'" in (received.result.error or "")


async def _relay_after_damage(bed: SnapshotBed) -> Received:
    """Remove the content of the files once the mover has found the file."""
    async with asyncio.timeout(60):
        while not (bed.pod.folder / SOCKET_NAME).exists():
            await asyncio.sleep(0.05)
    for blob in bed.pod.repository.glob("p*/**/*.f"):
        blob.unlink()
    return await relay_in_process()


async def test_an_entry_that_is_not_there_ends_the_pod_with_the_cause(bed: SnapshotBed) -> None:
    context = bed.pod.context
    assert await run_storage_command(SendFiles(**bed.place("missing")), context) == 10
    assert "the snapshot has no missing" in bed.pod.message


def test_a_relay_without_a_mover_gives_up(tmp_path: Path) -> None:
    result, code = relay({"VELERO_SCRATCH_DIR": str(tmp_path)}, 1, wait_seconds=0)
    assert (code, SentFiles.from_json(result).error) == (1, "the mover sends nothing")


def test_a_relay_stays_until_the_mover_has_ended(
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

import errno
import os
import random
from itertools import pairwise
from pathlib import Path
from unittest.mock import Mock, patch

import pytest

from core.contract import BackupResult, VolumeMode
from core.errors import DataPathError
from datamover.data_path.block import HoleWriter, copy_stream, read_file_system
from datamover.kopia.repository import Repository
from datamover.runtime.cancellation import run_in_background
from tests.datamover.support.data_paths import back_up_volume, restore_data_path, restore_volume
from tests.datamover.support.loopdevice import attached
from tests.datamover.support.plainkopia import PlainKopia

pytestmark = pytest.mark.processes

_SIZE = 6 << 20


@pytest.fixture
def device(tmp_path: Path) -> Path:
    """A file instead of a device; its end is a hole."""
    path = tmp_path / "device"
    path.write_bytes(random.Random(1).randbytes(_SIZE - (1 << 20)))
    os.truncate(path, _SIZE)
    return path


async def _back_up(movers: Repository, device: Path) -> BackupResult:
    return await back_up_volume(movers, device, mode=VolumeMode.BLOCK)


async def _restore(movers: Repository, snapshot_id: str, target: Path, *, again: bool = False) -> None:
    await restore_volume(movers, snapshot_id, target, mode=VolumeMode.BLOCK, again=again)


async def test_a_device_is_stored_as_by_velero(mover_repository: Repository, device: Path, kopia: PlainKopia) -> None:
    await _back_up(mover_repository, device)
    root = kopia.snapshots()[0]["rootEntry"]
    assert (root["type"], root["mode"]) == ("d", "0777")
    counted = {"size": _SIZE, "files": 1, "symlinks": 0, "dirs": 1, "numFailed": 0}
    assert root["summ"] | {"maxTime": ""} == counted | {"maxTime": ""}


async def test_plain_kopia_restores_ours_and_vice_versa(
    mover_repository: Repository, device: Path, tmp_path: Path, kopia: PlainKopia
) -> None:
    backup = await _back_up(mover_repository, device)
    kopia.run("restore", backup.snapshot_id, str(tmp_path / "out"))
    assert (tmp_path / "out" / device.name).read_bytes() == device.read_bytes()
    with device.open("rb") as content:
        created = kopia.snapshot("/", "--stdin-file=of-velero", source="some/device", stdin=content)
    target = tmp_path / "target"
    target.write_bytes(b"\xff" * _SIZE)
    await _restore(mover_repository, created, target)
    assert target.read_bytes() == device.read_bytes()


async def test_a_smaller_device_is_not_written_to(mover_repository: Repository, device: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"\xff" * (_SIZE - 1))
    backup = await _back_up(mover_repository, device)
    with pytest.raises(DataPathError, match=f"has {_SIZE - 1} bytes, .* {_SIZE} \\(nothing was written"):
        await _restore(mover_repository, backup.snapshot_id, target)
    assert set(target.read_bytes()) == {0xFF}


async def test_a_directory_is_not_written_to_a_device(
    mover_repository: Repository, tree: Path, device: Path, kopia: PlainKopia
) -> None:
    with pytest.raises(DataPathError, match="is not one of a block device"):
        await _restore(mover_repository, kopia.snapshot(tree), device)
    with pytest.raises(DataPathError, match=r"cannot open device .*/nothing: No such file"):
        await _back_up(mover_repository, tree / "nothing")


async def test_a_real_device_is_restored_over_other_data(
    mover_repository: Repository, device: Path, tmp_path: Path
) -> None:
    """Zeros become holes below the device, none of its previous data remains, and the rest of a larger one is kept."""
    (tmp_path / "target").write_bytes(b"\xff" * (_SIZE + 4096))
    with attached(device) as source, attached(tmp_path / "target") as target:
        backup = await _back_up(mover_repository, source)
        await _restore(mover_repository, backup.snapshot_id, target)
    assert (tmp_path / "target").read_bytes() == device.read_bytes() + b"\xff" * 4096
    assert (backup.total_bytes, backup.source.volume_mode) == (_SIZE, "Block")
    assert (tmp_path / "target").stat().st_blocks * 512 <= _SIZE - (1 << 20) + 8192
    with attached(device, "--read-only") as target:
        error = f"to device {target}: cannot write to the device: Operation not perm"
        with pytest.raises(DataPathError, match=error):
            await _restore(mover_repository, backup.snapshot_id, target)


def _sectors_written(device: Path) -> int:
    """Source: Linux, Documentation/block/stat.rst."""
    return int(Path(f"/sys/block/{device.name}/stat").read_text().split()[6])


async def test_another_attempt_writes_what_is_missing(
    mover_repository: Repository, device: Path, tmp_path: Path
) -> None:
    backup = await _back_up(mover_repository, device)
    content = device.read_bytes()
    half = _SIZE // 2
    (tmp_path / "target").write_bytes(content[:half] + b"\xff" * half)
    with attached(tmp_path / "target") as target:
        before = _sectors_written(target)
        await _restore(mover_repository, backup.snapshot_id, target, again=True)
        written = _sectors_written(target) - before
    assert (tmp_path / "target").read_bytes() == content
    assert written * 512 == half


async def test_a_disk_error_of_an_earlier_attempt_fails_the_next_one(
    mover_repository: Repository, device: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backup = await _back_up(mover_repository, device)
    (tmp_path / "target").write_bytes(bytes(_SIZE))
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.EIO, "Input/output error")))
    with pytest.raises(DataPathError, match=r"cannot write restored data of .*target to the disk: Input/output error$"):
        await _restore(mover_repository, backup.snapshot_id, tmp_path / "target", again=True)


@pytest.mark.parametrize(
    ("magic", "at", "name"),
    [(b"XFSB", 0, "xfs"), (b"\x53\xef", 0x438, "ext4"), (b"_BHRfS_M", 0x10040, "btrfs"), (b"XFSB", 1, None)],
)
async def test_a_device_tells_its_file_system_unless_it_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, magic: bytes, at: int, name: str | None
) -> None:
    content, device = bytearray(1 << 17), tmp_path / "device"
    content[at : at + len(magic)] = magic
    device.write_bytes(content)
    assert await read_file_system(device, restore_data_path()) == name
    monkeypatch.setattr(os, "pread", Mock(side_effect=OSError(errno.EIO, "Input/output error")))
    with pytest.raises(DataPathError, match=rf"^cannot read device {device}: Input/output error$"):
        await read_file_system(device, restore_data_path())


_PIECE = 64 * 1024


def _content(*pieces: str, tail: bytes = b"") -> bytes:
    """Return pieces of data `d` and of zeros `0`, each of the size of the smallest hole."""
    rng = random.Random(1)
    return b"".join(rng.randbytes(_PIECE) if one == "d" else bytes(_PIECE) for one in "".join(pieces)) + tail


def _old(path: Path, content: bytes | bytearray) -> int:
    path.write_bytes(content)
    return os.open(path, os.O_RDWR)


def _write(writer: HoleWriter, content: bytes) -> int:
    """Write all of the content; return how many bytes were neither holes nor there already."""
    with patch("os.pwrite", side_effect=os.pwrite) as pwrite:
        for at in range(0, len(content), 16 * _PIECE):
            writer.write(memoryview(content)[at : at + 16 * _PIECE])
        assert writer.finish() == len(content)
    os.close(writer._fd)
    return sum(len(call.args[1]) for call in pwrite.call_args_list)


@pytest.mark.parametrize("holes", [True, False, None], ids=["holes", "none", "rejected"])
@pytest.mark.parametrize(
    "content",
    [
        _content("d00d0", "0" * 40, "d"),
        _content("0" * 20),
        _content("d" * 20, tail=b"short"),
        _content("0d", tail=bytes(100)),
        b"\0" + b"x" * 10,
        b"",
    ],
    ids=["mixed", "zeros", "data with a short end", "a short hole at the end", "tiny", "nothing"],
)
def test_old_data_is_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, holes: bool | None
) -> None:
    writer = HoleWriter(_old(tmp_path / "device", b"\xff" * (len(content) + 5000)))
    writer._holes = holes is not False
    if holes is None:
        monkeypatch.setattr(writer, "_fallocate", lambda *_: -1)
    written = _write(writer, content)
    assert (tmp_path / "device").read_bytes() == content + b"\xff" * 5000
    assert (written < len(content)) is (bool(holes) and bytes(100) in content)


def test_kopia_never_waits_for_a_whole_hole(tmp_path: Path) -> None:
    """Zeros of some TiB that are written at once would take longer than a stall may."""
    writer, piece, waiting = HoleWriter(_old(tmp_path / "device", b"x")), memoryview(bytes(1 << 20)), [0]
    for _ in range(520):
        writer.write(piece)
        waiting.append(writer.written_bytes)
    writer.close()
    assert max(now - before for before, now in pairwise(waiting)) == 256 << 20
    assert waiting[-1] == 512 << 20


async def test_a_full_target_is_reported_and_the_writer_is_notified() -> None:
    ours, theirs = os.pipe()
    full = os.open("/dev/full", os.O_WRONLY)
    async with run_in_background(lambda stop: copy_stream(ours, HoleWriter(full), stop), name="copy") as copying:
        os.write(theirs, b"x" * 100)
        os.close(theirs)
        with pytest.raises(OSError, match="No space left on device"):
            await copying
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(ours)


@pytest.mark.parametrize("holes", [True, False])
def test_what_the_device_has_already_is_not_written_again(tmp_path: Path, holes: bool) -> None:
    content = _content("ddd0dd00", "d" * 20, tail=b"short")
    there = bytearray(content)
    # A byte in each of three pieces, one of them of zeros.
    for at in (_PIECE - 1, 3 * _PIECE, 20 * _PIECE + 5):
        there[at] ^= 0xFF
    writer = HoleWriter(_old(tmp_path / "device", there), compare=True)
    writer._holes = holes
    written = _write(writer, content)
    assert (tmp_path / "device").read_bytes() == content
    assert written == _PIECE * (2 if holes else 3)

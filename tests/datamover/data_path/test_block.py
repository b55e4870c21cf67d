import errno
import os
import random
from pathlib import Path
from unittest.mock import Mock

import pytest

from core.contract import BackupResult, VolumeMode
from core.errors import DataPathError
from datamover.data_path.block import read_file_system
from datamover.kopia.repository import Repository
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


async def test_a_device_is_restored_bit_for_bit_and_the_rest_of_a_larger_one_is_kept(
    mover_repository: Repository, device: Path, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"\xff" * (_SIZE + 4096))
    backup = await _back_up(mover_repository, device)
    await _restore(mover_repository, backup.snapshot_id, target)
    assert target.read_bytes() == device.read_bytes() + b"\xff" * 4096
    assert (backup.total_bytes, backup.source.volume_mode) == (_SIZE, "Block")


async def test_a_device_is_stored_in_veleros_format(
    mover_repository: Repository, device: Path, kopia: PlainKopia
) -> None:
    await _back_up(mover_repository, device)
    (found,) = kopia.snapshots()
    assert {key: found["rootEntry"][key] for key in ("type", "mode")} == {"type": "d", "mode": "0777"}
    assert found["rootEntry"]["summ"] | {"maxTime": ""} == {
        "size": _SIZE,
        "files": 1,
        "symlinks": 0,
        "dirs": 1,
        "maxTime": "",
        "numFailed": 0,
    }


async def test_plain_kopia_restores_a_device_of_the_mover_and_vice_versa(
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


async def test_a_smaller_device_is_rejected_before_a_byte_is_written(
    mover_repository: Repository, device: Path, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"\xff" * (_SIZE - 1))
    backup = await _back_up(mover_repository, device)
    with pytest.raises(DataPathError, match=f"has {_SIZE - 1} bytes, .* {_SIZE} \\(nothing was written"):
        await _restore(mover_repository, backup.snapshot_id, target)
    assert set(target.read_bytes()) == {0xFF}


async def test_a_snapshot_of_a_directory_is_not_written_to_a_device(
    mover_repository: Repository, tree: Path, device: Path, kopia: PlainKopia
) -> None:
    with pytest.raises(DataPathError, match="is not one of a block device"):
        await _restore(mover_repository, kopia.snapshot(tree), device)


async def test_a_missing_device_is_named(mover_repository: Repository, tmp_path: Path) -> None:
    with pytest.raises(DataPathError, match=r"cannot open device .*/nothing: No such file"):
        await _back_up(mover_repository, tmp_path / "nothing")


async def test_a_real_device_is_restored_over_other_data(
    mover_repository: Repository, device: Path, tmp_path: Path
) -> None:
    """Zeros become holes below the device, and none of its previous data remains."""
    (tmp_path / "target").write_bytes(b"\xff" * (_SIZE + 4096))
    with attached(device) as source, attached(tmp_path / "target") as target:
        backup = await _back_up(mover_repository, source)
        await _restore(mover_repository, backup.snapshot_id, target)
    assert (tmp_path / "target").read_bytes() == device.read_bytes() + b"\xff" * 4096
    assert backup.total_bytes == _SIZE
    assert (tmp_path / "target").stat().st_blocks * 512 <= _SIZE - (1 << 20) + 8192


async def test_a_read_only_device_is_reported(mover_repository: Repository, device: Path) -> None:
    backup = await _back_up(mover_repository, device)
    with (
        attached(device, "--read-only") as target,
        pytest.raises(DataPathError, match=f"to device {target}: cannot write to the device: Operation not perm"),
    ):
        await _restore(mover_repository, backup.snapshot_id, target)


def _sectors_written(device: Path) -> int:
    """Source: Linux, Documentation/block/stat.rst."""
    return int(Path(f"/sys/block/{device.name}/stat").read_text().split()[6])


async def test_another_attempt_writes_only_what_the_device_does_not_have(
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
    ids=["xfs", "ext4", "btrfs", "none"],
)
async def test_a_device_tells_its_file_system(tmp_path: Path, magic: bytes, at: int, name: str | None) -> None:
    content = bytearray(1 << 17)
    content[at : at + len(magic)] = magic
    (tmp_path / "device").write_bytes(content)
    assert await read_file_system(tmp_path / "device", restore_data_path()) == name


async def test_a_device_that_cannot_be_read_after_a_restore_is_named(
    device: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pread", Mock(side_effect=OSError(errno.EIO, "Input/output error")))
    with pytest.raises(DataPathError, match=rf"^cannot read device {device}: Input/output error$"):
        await read_file_system(device, restore_data_path())

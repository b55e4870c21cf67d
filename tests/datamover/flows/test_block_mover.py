"""Backups of devices by block, and their restores: a file takes the place of the device."""

import json
import os
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
from msgspec import UNSET

from core.contract import BackupResult, RestoreResult, VolumeMode
from core.errors import DataPathError, KopiaError
from core.models.transfer_settings import InPlace
from datamover.data_path.backup import back_up
from datamover.data_path.checkpoints import BackupAttempt
from datamover.data_path.compare import compare_volume
from datamover.data_path.parents import BlockChanges
from datamover.data_path.run import DataPath
from datamover.data_path.snapshot_runs import BackupParameters
from datamover.kopia.backup_process import read_blocks
from datamover.kopia.repository import Repository
from datamover.kopia.snapshots import read_snapshot
from datamover.kopia.verification import verify_snapshot
from datamover.runtime.resources import ResourceLimits
from datamover.storage.providers import FileStorage
from tests.datamover.support.confining import use_means
from tests.datamover.support.data_paths import back_up_volume, backup_data_path, restore_volume
from tests.datamover.support.loopdevice import attached, make_ext4, mounted_image
from tests.datamover.support.plainkopia import PlainKopia
from tests.datamover.support.repositories import opened, s3_storage
from tests.datamover.support.s3server import S3Server

pytestmark = pytest.mark.processes

_MIB = 1 << 20
_BYTES = 5 * _MIB + _MIB // 2
_SOURCE = "snapshot-data-upload-download/velero-block/app/data"
_TAGS = {
    "snapshot-requester": "snapshot-data-upload-download",
    "snapshot-uploader": "velero-block",
    "velero.io/async-operation-id": "du-1",
}
_EXISTING = InPlace(incremental=True)


@dataclass(frozen=True)
class _Bed:
    """A repository, as two movers open it and kopia by itself, a device to back up, and a target to restore it to."""

    movers: Repository
    others: Repository
    kopia: PlainKopia
    device: Path
    target: Path

    async def back_up(self, data_path: DataPath | None = None, **more: Any) -> BackupResult:
        given: dict[str, Any] = {"volume": self.device, "mode": VolumeMode.BLOCK, "by_block": True}
        parameters = BackupParameters(source=_SOURCE, parallel=2, tags=_TAGS, **given | more)
        return await back_up(self.movers, parameters, data_path or backup_data_path())

    async def restore(self, snapshot_id: str, target: Path | None = None, **more: Any) -> RestoreResult:
        given = {"mode": VolumeMode.BLOCK, **more}
        return await restore_volume(self.others, snapshot_id, target or self.target, **given)


@pytest.fixture
def bed(mover_repository: Repository, repository: Path, kopia: PlainKopia, tmp_path: Path) -> Iterator[_Bed]:
    """The device has three blocks of data, a hole of two, and half a block."""
    device = tmp_path / "device"
    device.write_bytes(random.Random(1).randbytes(3 * _MIB))
    os.truncate(device, _BYTES)
    with opened(FileStorage(repository)) as others:
        yield _Bed(mover_repository, others, kopia, device, tmp_path / "target")


async def test_more_blocks_are_restored_in_parallel_from_a_storage_that_is_far_away(
    bed: _Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    backup, read = await bed.back_up(), AsyncMock(side_effect=read_blocks)
    monkeypatch.setattr("datamover.data_path.block.read_blocks", read)
    for seconds in (0.0, 0.042):
        monkeypatch.setattr(Repository, "request_seconds", seconds)
        bed.target.write_bytes(bytes(_BYTES))
        await bed.restore(backup.snapshot_id, limits=ResourceLimits(2))
        assert bed.target.read_bytes() == bed.device.read_bytes()
    workers = [word for call in read.await_args_list for word in call.args if "--parallel" in str(word)]
    assert workers == ["--parallel=4", "--parallel=17"]


async def test_a_chain_of_backups_is_restored_byte_for_byte(bed: _Bed) -> None:
    first = await bed.back_up()
    assert (first.total_bytes, first.incremental_bytes, first.fallback_full) == (_BYTES, 3 * _MIB, UNSET)
    made = [(first.snapshot_id, bed.device.read_bytes())]
    # A write into one block and a discard, growth, and a device that is smaller.
    for write_at, discard_at, size, changed in ((_MIB + 5, 2, 6, 2), (6 * _MIB, 7, 8, 1), (0, 1, 2, 2)):
        with bed.device.open("r+b") as file:
            file.seek(write_at)
            file.write(b"changed")
            file.seek(discard_at * _MIB)
            file.write(bytes(_MIB))
        os.truncate(bed.device, size * _MIB)
        backup = await bed.back_up()
        assert (backup.total_bytes, backup.incremental_bytes) == (size * _MIB, changed * _MIB)
        assert backup.fallback_full is True
        made.append((backup.snapshot_id, bed.device.read_bytes()))
    for snapshot_id, content in made:
        bed.target.write_bytes(b"\xff" * (9 * _MIB))
        result = await bed.restore(snapshot_id)
        assert bed.target.read_bytes() == content + b"\xff" * (9 * _MIB - len(content))
        assert result.total_bytes == len(content)
    bed.kopia.run("snapshot", "verify", "--verify-files-percent=100")


async def test_a_restore_tells_which_file_system_the_device_has(bed: _Bed) -> None:
    """Also if an earlier attempt has written it: its PersistentVolume has to name the file system."""
    bed.device.write_bytes(b"XFSB" + bytes(_MIB))
    bed.target.write_bytes(bytes(2 * _MIB))
    backup = await bed.back_up()
    for done in (False, True):
        assert (await bed.restore(backup.snapshot_id, done=done)).fs_type == "xfs"


async def test_a_restored_device_is_compared_to_its_last_byte(bed: _Bed) -> None:
    backup = await bed.back_up()
    snapshot = await bed.others.open(partial(read_snapshot, bed.others, backup.snapshot_id), read_only=True)
    same = await compare_volume(bed.others, snapshot, bed.device, VolumeMode.BLOCK)
    assert (same.outcome, same.bytes, same.faults) == ("passed", _BYTES, [])
    with bed.device.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"1")
    changed = await compare_volume(bed.others, snapshot, bed.device, VolumeMode.BLOCK)
    assert (changed.outcome, changed.fault_count) == ("failed", 1)


async def test_a_verification_reads_and_decrypts_every_block(bed: _Bed, repository: Path) -> None:
    backup = await bed.back_up()
    pack = max(repository.glob("p*/**/*.f"), key=lambda one: one.stat().st_size)
    content = pack.read_bytes()
    for damaged_at in (None, *(_MIB // 2 + block * _MIB for block in range(3))):
        changed = bytearray(content)
        if damaged_at is not None:
            changed[damaged_at] ^= 1
        pack.write_bytes(changed)
        # Another client, so that no cache has it.
        with opened(FileStorage(repository)) as found:
            snapshot = await found.open(partial(read_snapshot, found, backup.snapshot_id), read_only=True)
            verified = await verify_snapshot(found, snapshot, 1)
        if damaged_at is None:
            assert (verified.outcome, verified.percent, verified.bytes) == ("passed", 100.0, 6 * _MIB)
        else:
            assert (verified.outcome, verified.fault_count) == ("failed", 1)


async def test_the_snapshot_is_as_veleros(bed: _Bed) -> None:
    backup = await bed.back_up()
    (found,) = bed.kopia.snapshots()
    assert found["id"] == backup.snapshot_id
    assert found["source"] == {"host": "default", "userName": "default", "path": _SOURCE}
    assert (found["description"], found["pins"]) == ("Block Uploader", ["velero-pin"])
    bare = {key: value for key, value in found["tags"].items() if not key.startswith("tag:")}
    assert bare == _TAGS | {"cbt-change-id": "", "cbt-volume-id": "", "bdev-source-size": str(_BYTES)}
    # By these, kopia and ours find it.
    assert {key for key in found["tags"] if key.startswith("tag:")} == {f"tag:{key}" for key in _TAGS}
    (entry,) = json.loads(bed.kopia.run("show", found["rootEntry"]["obj"]))["entries"]
    assert (entry["name"], entry["size"]) == (_SOURCE.replace("/", "-"), 6 * _MIB)
    assert entry["obj"].startswith("Ix")
    # kopia itself pads the last block.
    assert bed.kopia.run("show", entry["obj"]) == bed.device.read_bytes() + bytes(_MIB // 2)


async def test_a_storage_in_doubt_means_that_all_is_read(bed: _Bed) -> None:
    query = {"address": "127.0.0.1:1", "ca": "", "token": "t", "namespace": "n", "snapshot": "s", "timeout_seconds": 9}
    warned: list[str] = []
    for change_id, fell_back, asked in (("snap-1", UNSET, "what is allocated"), ("snap-2", True, "what has changed")):
        data_path = backup_data_path(AsyncMock(side_effect=warned.append))
        backup = await bed.back_up(data_path, changes=BlockChanges(change_id, "volume", lambda: query))
        cause = f"{asked} is in doubt: there is no certificate of its authority"
        assert (backup.fallback_full, backup.fallback_cause) == (fell_back, cause)
        assert warned.pop() == f"read more than has changed: {cause}"
        tags = bed.kopia.snapshots()[-1]["tags"]
        assert (tags["cbt-change-id"], tags["cbt-volume-id"]) == (change_id, "volume")
    assert backup.incremental_bytes == 0


async def test_the_parent_is_the_one_that_is_named(bed: _Bed) -> None:
    first = (await bed.back_up()).snapshot_id
    with bed.device.open("r+b") as file:
        file.write(b"changed")
    await bed.back_up()
    unknown = ("0" * 32, 3, True, "has no complete snapshot")
    for parent, changed, fell_back, note in (("none", 3, UNSET, ""), (first, 1, True, ""), unknown):
        backup = await bed.back_up(parent=parent)
        assert (backup.incremental_bytes, backup.fallback_full) == (changed * _MIB, fell_back)
        assert note in str(backup.note)


async def test_a_parent_that_cannot_be_read_is_not_compared_with(bed: _Bed, tree: Path) -> None:
    bed.kopia.snapshot(tree, source=_SOURCE)
    backup = await bed.back_up()
    assert backup.incremental_bytes == 3 * _MIB
    assert "not one of a block device" in str(backup.note)


async def test_a_restore_in_place_writes_what_differs(bed: _Bed) -> None:
    backup, content = await bed.back_up(), bed.device.read_bytes()
    bed.target.write_bytes(b"\xff" + content[1:])
    result = await bed.restore(backup.snapshot_id, in_place=_EXISTING)
    assert bed.target.read_bytes() == content
    assert (result.incremental_bytes, result.fallback_full) == (_MIB, UNSET)


@pytest.mark.parametrize("means", ["landlock", "jail", "chroot"])
async def test_a_real_device_is_restored_over_other_data_whatever_confines_kopia(
    means: str, s3: S3Server, bed: _Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zeros become holes below the device, and none of its previous data remains."""
    use_means(means, monkeypatch)
    bed.target.write_bytes(b"\xff" * (6 * _MIB))
    with (
        attached(bed.device) as source,
        attached(bed.target) as target,
        opened(s3_storage(s3, s3.make_bucket(f"block-{means}"))) as repository,
    ):
        await repository.ensure()
        there = replace(bed, movers=repository, others=repository)
        backup = await there.back_up(volume=source)
        await there.restore(backup.snapshot_id, target)
    assert bed.target.read_bytes() == bed.device.read_bytes() + b"\xff" * (_MIB // 2)
    assert bed.target.stat().st_blocks * 512 <= 3 * _MIB + _MIB // 2 + 8192


@pytest.mark.cause("device-in-use")
async def test_a_device_that_is_mounted_is_not_restored_into(
    bed: _Bed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernel would write over the restored blocks what it remembers of the file system."""
    monkeypatch.setattr("datamover.data_path.block._BLOCK_DEVICES", tmp_path / "sys")
    backup = await bed.back_up()
    as_file = await back_up_volume(bed.movers, bed.device, mode=VolumeMode.BLOCK)
    make_ext4(bed.target, 8 * _MIB)
    with mounted_image(bed.target, tmp_path / "mounted"):
        mounts = Path("/proc/mounts").read_text().splitlines()
        (loop,) = [Path(line.split()[0]) for line in mounts if str(tmp_path) in line]
        before = loop.read_bytes()
        number = loop.stat().st_rdev
        place = tmp_path / "sys" / f"{os.major(number)}:{os.minor(number)}"
        (place / "loop0p1" / "holders" / "dm-3" / "dm").mkdir(parents=True)
        (place / "loop0p1" / "holders" / "dm-3" / "dm" / "name").write_text("vg-root\n")
        (place / "holders" / "md127").mkdir(parents=True)
        message = rf"^cannot open device {loop}: it is mounted or .* \(md127, dm-3 vg-root\), and must not be "
        for made in (backup, as_file):
            with pytest.raises(DataPathError, match=message):
                await bed.restore(made.snapshot_id, loop, in_place=_EXISTING)
        assert loop.read_bytes() == before
    # A process with mounts of its own, such as another test's, may have the file system mounted a little longer.
    free = tmp_path / "free"
    shutil.copyfile(bed.target, free)
    with attached(free) as target:
        await bed.restore(backup.snapshot_id, target, in_place=_EXISTING)
    assert free.read_bytes()[: backup.total_bytes] == bed.device.read_bytes()


@pytest.mark.parametrize("in_place", [None, _EXISTING], ids=["new", "existing"])
async def test_the_only_file_of_a_volume_is_never_written_as_a_device_by_block(
    bed: _Bed, tmp_path: Path, in_place: InPlace | None
) -> None:
    """Its backup looks like one of a device, and the device becomes, or has, a file system."""
    volume = tmp_path / "volume"
    volume.mkdir()
    (volume / "data.db").write_bytes(b"a" * _MIB)
    bed.target.write_bytes(b"\xff" * _MIB)
    backup = await back_up_volume(bed.movers, volume)
    with pytest.raises(DataPathError, match=r"was not backed up by block, .*: nothing was written$"):
        await bed.restore(backup.snapshot_id, in_place=in_place, by_block=True)
    assert bed.target.read_bytes() == b"\xff" * _MIB


async def test_what_does_not_fit_is_refused_before_a_byte_is_written(bed: _Bed, tmp_path: Path, tree: Path) -> None:
    backup = await bed.back_up()
    bed.target.write_bytes(b"\xff" * _MIB)
    with pytest.raises(DataPathError, match=r"is too small: .* \(nothing was written\)"):
        await bed.restore(backup.snapshot_id)
    assert set(bed.target.read_bytes()) == {0xFF}
    with pytest.raises(DataPathError, match="go into a volume of volumeMode Block"):
        await bed.restore(backup.snapshot_id, tmp_path / "files", mode=VolumeMode.FILESYSTEM)
    assert not (tmp_path / "files").exists()
    with pytest.raises(DataPathError, match="has a file system"):
        await bed.back_up(volume=tree, mode=VolumeMode.FILESYSTEM)


async def test_damage_in_the_repository_fails_the_restore(bed: _Bed, repository: Path) -> None:
    backup = await bed.back_up()
    for blob in (blobs := [*repository.glob("p*/**/*.f")]):
        blob.write_bytes(bytes(blob.stat().st_size))
    assert blobs
    bed.target.write_bytes(bytes(6 * _MIB))
    with pytest.raises(KopiaError, match="restore snapshot"):
        await bed.restore(backup.snapshot_id)


async def test_another_attempt_begins_anew_and_replaces_the_snapshot_of_the_first(bed: _Bed) -> None:
    results = []
    for number in (1, 2):
        attempt = BackupAttempt("du-1", number, AsyncMock(return_value=True), AsyncMock())
        results.append(await bed.back_up(attempt=attempt))
    # The first one is no parent of the second.
    assert [result.incremental_bytes for result in results] == [3 * _MIB, 3 * _MIB]
    assert [one["id"] for one in bed.kopia.snapshots()] == [results[1].snapshot_id]

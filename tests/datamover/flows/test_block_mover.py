"""Backups of devices by block, and their restores: a file takes the place of the device."""

import json
import os
import random
from collections.abc import Iterator
from dataclasses import replace
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
from datamover.data_path.snapshot_runs import BackupParameters
from datamover.kinds import AUTO_PARENT
from datamover.kopia.backup_process import read_blocks
from datamover.kopia.repository import Repository
from datamover.kopia.snapshots import read_snapshot
from datamover.kopia.verification import verify_snapshot
from datamover.runtime.resources import ResourceLimits
from datamover.storage.providers import FileStorage
from tests.datamover.support.confining import use_means
from tests.datamover.support.data_paths import back_up_volume, backup_data_path, restore_data_path, restore_volume
from tests.datamover.support.loopdevice import attached, make_ext4, mounted_image
from tests.datamover.support.plainkopia import PlainKopia
from tests.datamover.support.repositories import opened, s3_storage
from tests.datamover.support.s3server import S3Server

pytestmark = pytest.mark.processes

_MIB = 1 << 20
_SOURCE = "snapshot-data-upload-download/velero-block/app/data"
_TAGS = {
    "snapshot-requester": "snapshot-data-upload-download",
    "snapshot-uploader": "velero-block",
    "velero.io/async-operation-id": "du-1",
}


@pytest.fixture
def device(tmp_path: Path) -> Path:
    """Three blocks of data, a hole of two, and half a block."""
    path = tmp_path / "device"
    path.write_bytes(random.Random(1).randbytes(3 * _MIB))
    os.truncate(path, 5 * _MIB + _MIB // 2)
    return path


@pytest.fixture
def for_restores(repository: Path) -> Iterator[Repository]:
    """The repository as another mover opens it."""
    with opened(FileStorage(repository)) as found:
        yield found


def _parameters(device: Path) -> BackupParameters:
    return BackupParameters(device, VolumeMode.BLOCK, _SOURCE, parallel=2, tags=_TAGS, by_block=True)


async def _back_up(movers: Repository, device: Path, parent: str = AUTO_PARENT) -> BackupResult:
    return await back_up(movers, replace(_parameters(device), parent=parent), backup_data_path())


async def _restore(movers: Repository, snapshot_id: str, target: Path, **more: Any) -> RestoreResult:
    return await restore_volume(movers, snapshot_id, target, mode=VolumeMode.BLOCK, **more)


async def test_more_blocks_are_restored_in_parallel_from_a_storage_that_is_far_away(
    mover_repository: Repository, device: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backup, target, limits = await _back_up(mover_repository, device), tmp_path / "target", ResourceLimits(2)
    read = AsyncMock(side_effect=read_blocks)
    monkeypatch.setattr("datamover.data_path.block.read_blocks", read)
    for seconds in (0.0, 0.042):
        monkeypatch.setattr(Repository, "request_seconds", seconds)
        target.write_bytes(bytes(device.stat().st_size))
        await _restore(mover_repository, backup.snapshot_id, target, limits=limits)
        assert target.read_bytes() == device.read_bytes()
    workers = [word for call in read.await_args_list for word in call.args if "--parallel" in str(word)]
    assert workers == ["--parallel=4", "--parallel=17"]


async def test_a_chain_of_backups_is_restored_byte_for_byte(
    mover_repository: Repository, for_restores: Repository, device: Path, tmp_path: Path, kopia: PlainKopia
) -> None:
    target = tmp_path / "target"
    first = await _back_up(mover_repository, device)
    assert (first.total_bytes, first.incremental_bytes, first.fallback_full) == (5 * _MIB + _MIB // 2, 3 * _MIB, UNSET)
    made = [(first.snapshot_id, device.read_bytes())]
    # A write into one block and a discard, growth, and a device that is smaller.
    for write_at, discard_at, size, changed in ((_MIB + 5, 2, 6, 2), (6 * _MIB, 7, 8, 1), (0, 1, 2, 2)):
        with device.open("r+b") as file:
            file.seek(write_at)
            file.write(b"changed")
            file.seek(discard_at * _MIB)
            file.write(bytes(_MIB))
        os.truncate(device, size * _MIB)
        backup = await _back_up(mover_repository, device)
        assert (backup.total_bytes, backup.incremental_bytes) == (size * _MIB, changed * _MIB)
        assert backup.fallback_full is True
        made.append((backup.snapshot_id, device.read_bytes()))
    for snapshot_id, content in made:
        target.write_bytes(b"\xff" * (9 * _MIB))
        result = await _restore(for_restores, snapshot_id, target)
        assert target.read_bytes() == content + b"\xff" * (9 * _MIB - len(content))
        assert result.total_bytes == len(content)
    kopia.run("snapshot", "verify", "--verify-files-percent=100")


async def test_a_restore_tells_which_file_system_the_device_has(
    mover_repository: Repository, for_restores: Repository, device: Path, tmp_path: Path
) -> None:
    """Also if an earlier attempt has written it: its PersistentVolume has to name the file system."""
    device.write_bytes(b"XFSB" + bytes(_MIB))
    target = tmp_path / "target"
    target.write_bytes(bytes(2 * _MIB))
    backup = await _back_up(mover_repository, device)
    assert (await _restore(for_restores, backup.snapshot_id, target)).fs_type == "xfs"
    assert (await _restore(for_restores, backup.snapshot_id, target, done=True)).fs_type == "xfs"


async def test_a_restored_device_is_compared_to_its_last_byte(
    mover_repository: Repository, for_restores: Repository, device: Path
) -> None:
    backup = await _back_up(mover_repository, device)
    watchdog = restore_data_path().watchdog
    snapshot = await for_restores.open(partial(read_snapshot, for_restores, backup.snapshot_id), read_only=True)
    same = await compare_volume(for_restores, watchdog, snapshot, device, VolumeMode.BLOCK)
    assert (same.outcome, same.bytes, same.faults) == ("passed", 5 * _MIB + _MIB // 2, [])
    with device.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"1")
    changed = await compare_volume(for_restores, watchdog, snapshot, device, VolumeMode.BLOCK)
    assert (changed.outcome, changed.fault_count) == ("failed", 1)


async def test_a_verification_reads_and_decrypts_every_block(
    mover_repository: Repository, repository: Path, device: Path
) -> None:
    backup = await _back_up(mover_repository, device)
    pack = max((one for one in repository.glob("p*/**/*.f") if one.is_file()), key=lambda one: one.stat().st_size)
    content = pack.read_bytes()
    for damaged_at in (None, *(_MIB // 2 + block * _MIB for block in range(3))):
        changed = bytearray(content)
        if damaged_at is not None:
            changed[damaged_at] ^= 1
        pack.write_bytes(changed)
        # Another client, so that no cache has it.
        with opened(FileStorage(repository)) as found:
            snapshot = await found.open(partial(read_snapshot, found, backup.snapshot_id), read_only=True)
            verified = await verify_snapshot(found, restore_data_path().watchdog, snapshot, 1)
        if damaged_at is None:
            assert (verified.outcome, verified.percent, verified.bytes) == ("passed", 100.0, 6 * _MIB)
        else:
            assert (verified.outcome, verified.fault_count) == ("failed", 1)


async def test_the_snapshot_is_as_veleros(mover_repository: Repository, device: Path, kopia: PlainKopia) -> None:
    backup = await _back_up(mover_repository, device)
    (found,) = kopia.snapshots()
    assert found["id"] == backup.snapshot_id
    assert found["source"] == {"host": "default", "userName": "default", "path": _SOURCE}
    assert (found["description"], found["pins"]) == ("Block Uploader", ["velero-pin"])
    bare = {key: value for key, value in found["tags"].items() if not key.startswith("tag:")}
    assert bare == _TAGS | {"cbt-change-id": "", "cbt-volume-id": "", "bdev-source-size": str(5 * _MIB + _MIB // 2)}
    # By these, kopia and ours find it.
    assert {key for key in found["tags"] if key.startswith("tag:")} == {f"tag:{key}" for key in _TAGS}
    (entry,) = json.loads(kopia.run("show", found["rootEntry"]["obj"]))["entries"]
    assert (entry["name"], entry["size"]) == (_SOURCE.replace("/", "-"), 6 * _MIB)
    assert entry["obj"].startswith("Ix")
    # kopia itself pads the last block.
    assert kopia.run("show", entry["obj"]) == device.read_bytes() + bytes(_MIB // 2)


async def test_a_storage_in_doubt_means_that_all_is_read(
    mover_repository: Repository, device: Path, kopia: PlainKopia
) -> None:
    query = {"address": "127.0.0.1:1", "ca": "", "token": "t", "namespace": "n", "snapshot": "s", "timeout_seconds": 9}
    warned: list[str] = []
    for change_id, fell_back, asked in (("snap-1", UNSET, "what is allocated"), ("snap-2", True, "what has changed")):
        changes = BlockChanges(change_id, "volume", lambda: query)
        data_path = backup_data_path(AsyncMock(side_effect=warned.append))
        backup = await back_up(mover_repository, replace(_parameters(device), changes=changes), data_path)
        cause = f"{asked} is in doubt: there is no certificate of its authority"
        assert (backup.fallback_full, backup.fallback_cause, warned.pop()) == (
            fell_back,
            cause,
            f"read all of the device: {cause}",
        )
        tags = kopia.snapshots()[-1]["tags"]
        assert (tags["cbt-change-id"], tags["cbt-volume-id"]) == (change_id, "volume")
    assert backup.incremental_bytes == 0


@pytest.mark.parametrize(
    ("parent", "changed", "fell_back", "note"),
    [
        pytest.param("none", 3, False, "", id="none"),
        pytest.param("first", 1, True, "", id="older"),
        pytest.param("0" * 32, 3, True, "has no complete snapshot", id="unknown"),
    ],
)
async def test_the_parent_is_the_one_that_is_named(
    parent: str, changed: int, fell_back: bool, note: str, mover_repository: Repository, device: Path
) -> None:
    first = (await _back_up(mover_repository, device)).snapshot_id
    with device.open("r+b") as file:
        file.write(b"changed")
    await _back_up(mover_repository, device)
    backup = await _back_up(mover_repository, device, first if parent == "first" else parent)
    assert backup.incremental_bytes == changed * _MIB
    assert (backup.fallback_full is True, note in (backup.note or "")) == (fell_back, True)


async def test_a_parent_that_cannot_be_read_is_not_compared_with(
    mover_repository: Repository, device: Path, tree: Path, kopia: PlainKopia
) -> None:
    kopia.snapshot(tree, source=_SOURCE)
    backup = await _back_up(mover_repository, device)
    assert backup.incremental_bytes == 3 * _MIB
    assert "not one of a block device" in str(backup.note)


async def test_a_restore_in_place_writes_what_differs(
    mover_repository: Repository, for_restores: Repository, device: Path, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    backup = await _back_up(mover_repository, device)
    content = device.read_bytes()
    target.write_bytes(b"\xff" + content[1:])
    result = await _restore(for_restores, backup.snapshot_id, target, in_place=InPlace(incremental=True))
    assert target.read_bytes() == content
    assert (result.incremental_bytes, result.fallback_full) == (_MIB, UNSET)


@pytest.mark.parametrize("means", ["landlock", "jail", "chroot"])
async def test_a_real_device_is_restored_over_other_data_whatever_confines_kopia(
    means: str, s3: S3Server, device: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zeros become holes below the device, and none of its previous data remains."""
    use_means(means, monkeypatch)
    (tmp_path / "target").write_bytes(b"\xff" * (6 * _MIB))
    with (
        attached(device) as source,
        attached(tmp_path / "target") as target,
        opened(s3_storage(s3, s3.make_bucket(f"block-{means}"))) as repository,
    ):
        await repository.ensure()
        backup = await _back_up(repository, source)
        await _restore(repository, backup.snapshot_id, target)
    assert (tmp_path / "target").read_bytes() == device.read_bytes() + b"\xff" * (_MIB // 2)
    assert (tmp_path / "target").stat().st_blocks * 512 <= 3 * _MIB + _MIB // 2 + 8192


@pytest.mark.cause("device-in-use")
async def test_a_device_that_is_mounted_is_not_restored_into(
    mover_repository: Repository,
    for_restores: Repository,
    device: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its kernel would write over the restored blocks what it remembers of the file system."""
    monkeypatch.setattr("datamover.data_path.block._BLOCK_DEVICES", tmp_path / "sys")
    backup = await _back_up(mover_repository, device)
    as_file = await back_up_volume(mover_repository, device, mode=VolumeMode.BLOCK)
    image, existing = tmp_path / "target", InPlace(incremental=True)
    make_ext4(image, 8 * _MIB)
    with mounted_image(image, tmp_path / "mounted"):
        (loop,) = [
            Path(line.split()[0]) for line in Path("/proc/mounts").read_text().splitlines() if str(tmp_path) in line
        ]
        before = loop.read_bytes()
        number = loop.stat().st_rdev
        place = tmp_path / "sys" / f"{os.major(number)}:{os.minor(number)}"
        (place / "loop0p1" / "holders" / "dm-3" / "dm").mkdir(parents=True)
        (place / "loop0p1" / "holders" / "dm-3" / "dm" / "name").write_text("vg-root\n")
        (place / "holders" / "md127").mkdir(parents=True)
        for snapshot_id in (backup.snapshot_id, as_file.snapshot_id):
            with pytest.raises(
                DataPathError,
                match=rf"^cannot open device {loop}: it is mounted or .* \(md127, dm-3 vg-root\), and must not be ",
            ):
                await _restore(for_restores, snapshot_id, loop, in_place=existing)
        assert loop.read_bytes() == before
    with attached(image) as target:
        await _restore(for_restores, backup.snapshot_id, target, in_place=existing)
    assert image.read_bytes()[: backup.total_bytes] == device.read_bytes()


async def test_the_only_file_of_a_volume_is_never_written_over_an_existing_device(
    mover_repository: Repository, for_restores: Repository, tmp_path: Path
) -> None:
    """Its backup looks like one of a device, and the device may have a file system."""
    volume, target = tmp_path / "volume", tmp_path / "target"
    volume.mkdir()
    (volume / "data.db").write_bytes(b"a" * _MIB)
    target.write_bytes(b"\xff" * _MIB)
    backup = await back_up_volume(mover_repository, volume)
    with pytest.raises(DataPathError, match=r"was not backed up by block, .*: nothing was written$"):
        await _restore(for_restores, backup.snapshot_id, target, in_place=InPlace(incremental=True), by_block=True)
    assert target.read_bytes() == b"\xff" * _MIB


async def test_what_does_not_fit_is_refused_before_a_byte_is_written(
    mover_repository: Repository, for_restores: Repository, device: Path, tmp_path: Path, tree: Path
) -> None:
    backup = await _back_up(mover_repository, device)
    target = tmp_path / "target"
    target.write_bytes(b"\xff" * _MIB)
    with pytest.raises(DataPathError, match=r"is too small: .* \(nothing was written\)"):
        await _restore(for_restores, backup.snapshot_id, target)
    assert set(target.read_bytes()) == {0xFF}
    with pytest.raises(DataPathError, match="go into a volume of volumeMode Block"):
        await restore_volume(for_restores, backup.snapshot_id, tmp_path / "files")
    assert not (tmp_path / "files").exists()
    with pytest.raises(DataPathError, match="has a file system"):
        await back_up(mover_repository, replace(_parameters(tree), mode=VolumeMode.FILESYSTEM), backup_data_path())


async def test_damage_in_the_repository_fails_the_restore(
    mover_repository: Repository, for_restores: Repository, repository: Path, device: Path, tmp_path: Path
) -> None:
    backup = await _back_up(mover_repository, device)
    blobs = [file for file in repository.glob("p*/**/*.f") if file.is_file()]
    assert blobs
    for blob in blobs:
        blob.write_bytes(bytes(blob.stat().st_size))
    target = tmp_path / "target"
    target.write_bytes(bytes(6 * _MIB))
    with pytest.raises(KopiaError, match="restore snapshot"):
        await _restore(for_restores, backup.snapshot_id, target)


async def test_another_attempt_begins_anew_and_replaces_the_snapshot_of_the_first(
    mover_repository: Repository, device: Path, kopia: PlainKopia
) -> None:
    async def alone() -> bool:
        return True

    async def check() -> None:
        pass

    attempts = [BackupAttempt(uid="du-1", number=number, is_alone=alone, check=check) for number in (1, 2)]
    results = [
        await back_up(mover_repository, replace(_parameters(device), attempt=attempt), backup_data_path())
        for attempt in attempts
    ]
    # The first one is no parent of the second.
    assert [result.incremental_bytes for result in results] == [3 * _MIB, 3 * _MIB]
    assert [one["id"] for one in kopia.snapshots()] == [results[1].snapshot_id]

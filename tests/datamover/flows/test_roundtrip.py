import asyncio
import json
import os
import shutil
import socket
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
from msgspec import UNSET

from core.contract import MoverMethod
from core.errors import DataPathError, IncompleteRestoreError, UnsetAttributesError
from datamover.arguments import LocalBackup
from datamover.data_path.finished import take_done_file, write_done_file
from datamover.data_path.probe import Probe
from datamover.data_path.refused import Refused
from datamover.data_path.resume import LIST_INTERVAL, ResumeSettings
from datamover.kopia.repository import Repository
from datamover.kopia.stalls import EndlessFiles
from datamover.local.command import LocalMover
from tests.datamover.conftest import build_local_mover
from tests.datamover.support.backup_movers import BACKUP_VERB, plain_only
from tests.datamover.support.data_paths import back_up_volume, copy_volume, restore_volume
from tests.datamover.support.loopdevice import fill, make_ext4, mounted_image
from tests.datamover.support.plainkopia import PlainKopia
from tests.datamover.support.processes import running_kopia
from tests.datamover.support.trees import describe_tree, make_large_file, make_tree
from tests.support.tools import tool

pytestmark = pytest.mark.processes

_RECORDINGS = Path(__file__).parents[2] / "recordings" / "velero-1.18.2"


async def test_the_released_kopia_creates_a_repository_and_moves_everything(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which the other tests replace by a test build, see `kopia_program`."""
    monkeypatch.setenv("PATH", f"{tool('kopia', 'kopia').parent}:{os.environ['PATH']}")
    repository = tmp_path / "released"
    repository.mkdir()
    mover = build_local_mover(str(repository))
    _, out = await copy_volume(mover, tree)
    assert describe_tree(out) == describe_tree(tree)
    assert json.loads((repository / "kopia.repository.f").read_text())["keyAlgo"] == "scrypt-65536-8-1"


async def test_everything_that_kopia_keeps_is_restored(
    local_mover: LocalMover, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a comparison of target and snapshot finds no difference."""
    monkeypatch.setattr("datamover.data_path.restore.probe_target", lambda *_: Probe())
    backup = await local_mover.back_up(tree, "", None)
    # By default, kopia would write an archive to a target named like one.
    restored = await local_mover.restore(backup.snapshot_id, tmp_path / "out.zip", None)
    assert describe_tree(tmp_path / "out.zip") == describe_tree(tree)
    assert restored.total_bytes == backup.total_bytes == backup.incremental_bytes
    assert restored.note is UNSET
    assert backup.source.by_path == str(tree)
    assert not backup.empty_snapshot


async def test_the_backup_of_an_empty_volume_succeeds(local_mover: LocalMover, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "empty" / "pipe")
    backup, out = await copy_volume(local_mover, tmp_path / "empty")
    assert (backup.empty_snapshot, backup.total_bytes) == (True, 0)
    assert not list(out.iterdir())


async def test_a_later_backup_counts_only_what_changed(local_mover: LocalMover, tmp_path: Path) -> None:
    make_large_file(tmp_path / "volume" / "old", 8)
    first = await local_mover.back_up(tmp_path / "volume", "", None)
    make_large_file(tmp_path / "volume" / "new", 2)
    second = await local_mover.back_up(tmp_path / "volume", "", None)
    third = await local_mover.back_up(tmp_path / "volume", "", None)
    listed = await local_mover.list()
    assert first.incremental_bytes == 8 << 20
    assert second.incremental_bytes == pytest.approx(2 << 20, abs=second.total_bytes / 100)
    assert third.incremental_bytes == 0
    assert third.total_bytes == 10 << 20
    assert [one.snapshot_id for one in listed] == [one.snapshot_id for one in (first, second, third)]


async def test_a_snapshot_has_veleros_format_and_policy_and_plain_kopia_restores_it(
    local_mover: LocalMover, tree: Path, tmp_path: Path, kopia: PlainKopia
) -> None:
    source = "snapshot-data-upload-download/kopia/app/data"
    backup = await local_mover.back_up(tree, source, None)
    (found,) = kopia.snapshots()
    assert found["id"] == backup.snapshot_id
    assert found["source"] == {"host": "default", "userName": "default", "path": source}
    assert found["pins"] == ["velero-pin"]
    recorded = json.loads((_RECORDINGS / "kopia-policies.json").read_text())[0]
    recorded["retention"]["ignoreIdenticalSnapshots"] = False
    written = kopia.policy(source)
    assert written["files"] == {"ignoreCacheDirs": False, "ignoreDotFiles": ["."]}
    for part in ("retention", "errorHandling", "scheduling", "compression"):
        assert written[part] == recorded[part]
    kopia.run("restore", backup.snapshot_id, str(tmp_path / "out"))
    assert describe_tree(tmp_path / "out") == describe_tree(tree)


@plain_only
async def test_the_mover_restores_and_continues_a_backup_of_plain_kopia(
    local_mover: LocalMover, tree: Path, tmp_path: Path, kopia: PlainKopia
) -> None:
    shutil.rmtree(tree / "cache")
    await local_mover.restore(kopia.snapshot(tree, source="some/volume"), tmp_path / "out", None)
    next_one = await local_mover.back_up(tree, "some/volume", None)
    assert describe_tree(tmp_path / "out") == describe_tree(tree)
    assert next_one.incremental_bytes == 0


async def test_a_restore_overwrites_existing_files_and_keeps_others(
    local_mover: LocalMover, tree: Path, tmp_path: Path
) -> None:
    """As with Velero: files, links and directories of the same name are replaced, longer ones are truncated.

    Holes stay holes, also where data was.
    """
    (tree / "disk").touch()
    os.truncate(tree / "disk", 4 << 20)
    backup = await local_mover.back_up(tree, "", None)
    out = tmp_path / "out"
    (out / "a" / "b" / "c").mkdir(parents=True, mode=0o700)
    (out / "a" / "b" / "c" / "file 1").write_bytes(b"longer than what was backed up" * 1000)
    (out / "secret").write_text("to be written over, and its mode too")
    (out / "link").symlink_to("elsewhere")
    make_large_file(out / "disk", 4)
    (out / "a" / "other").write_text("not in the backup")
    await local_mover.restore(backup.snapshot_id, out, None)
    assert (out / "a" / "other").read_text() == "not in the backup"
    (out / "a" / "other").unlink()
    assert describe_tree(out) == describe_tree(tree)
    assert (out / "disk").stat().st_blocks == 0


@plain_only
@pytest.mark.parametrize("method", list(MoverMethod), ids=str)
async def test_a_restore_over_entries_of_another_type_restores_all_others_and_names_them(
    local_mover: LocalMover, tree: Path, tmp_path: Path, method: MoverMethod
) -> None:
    backup, out = await local_mover.back_up(tree, "", None), tmp_path / "out"
    (out / "a" / "b" / "c" / "file 1").mkdir(parents=True)
    (out / "sticky").touch()
    (out / "a" / "b" / "c").chmod(0o700)
    with pytest.raises(IncompleteRestoreError) as failed:
        await local_mover.restore(backup.snapshot_id, out, None, mover=method)
    begin = f"restore snapshot {backup.snapshot_id} to {out}: the target refused entries, all others are restored: "
    assert str(failed.value).startswith(begin)
    names = "sticky (something else is there); a/b/c/file 1 (something else is there)"
    assert f": 2 missing: {names} (kopia's first error: " in str(failed.value)
    assert "file 1: is a directory" in str(failed.value) or "it is not a directory" in str(failed.value)
    expected = describe_tree(tree)
    found = describe_tree(out)
    for name in ("sticky", "a/b/c/file 1"):
        del expected[name], found[name]
    assert found == expected


async def test_attributes_that_the_target_does_not_take_fail_a_restore_that_requires_them(
    mover_repository: Repository, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backup = await back_up_volume(mover_repository, tree)
    (refused := Refused()).add_unset(b"f", {"owner": "owner 0:0 instead of 1:1"})
    monkeypatch.setattr("datamover.data_path.restore.probe_target", lambda *_: Probe())
    monkeypatch.setattr("datamover.data_path.restore.TargetComparison.run", AsyncMock(return_value=refused))
    with pytest.raises(
        UnsetAttributesError, match=r"all data is restored, but the target did not take the owner of 1 "
    ):
        await restore_volume(mover_repository, backup.snapshot_id, tmp_path / "out", require_attributes=True)
    assert describe_tree(tmp_path / "out") == describe_tree(tree)


async def test_a_missing_volume_is_named(local_mover: LocalMover, tmp_path: Path) -> None:
    with pytest.raises(DataPathError, match=r"volume .*/nothing does not exist"):
        await local_mover.back_up(tmp_path / "nothing", "", None)


@pytest.mark.parametrize("left", ["nothing", "folder", "link"])
def test_the_done_file_replaces_earlier_files(tmp_path: Path, left: str) -> None:
    volume = make_tree(tmp_path / "volume")
    if left == "folder":
        (volume / ".velero").mkdir()
        (volume / ".velero" / "of-another-restore").touch()
    if left == "link":
        (volume / ".velero").symlink_to(volume / "a")
    write_done_file(volume, "uid-of-the-restore", "transfer")
    assert [path.name for path in (volume / ".velero").iterdir()] == ["uid-of-the-restore"]
    assert (volume / "a" / "b").is_dir()


@pytest.mark.parametrize(("mode", "made"), [(0o755, "0o755"), (0o2775, "0o775")])
def test_any_user_can_find_the_done_file_and_who_may_write_to_the_volume_may_remove_it(
    tmp_path: Path, mode: int, made: str
) -> None:
    """Whatever the umask."""
    group = 1234 if os.getuid() == 0 else os.getgroups()[-1]
    os.chown(tmp_path, -1, group)
    tmp_path.chmod(mode)
    before = os.umask(0o077)
    try:
        write_done_file(tmp_path, "uid-of-the-restore", "transfer")
    finally:
        os.umask(before)
    folder = (tmp_path / ".velero").stat()
    assert (oct(folder.st_mode & 0o777), folder.st_uid, folder.st_gid) == (made, tmp_path.stat().st_uid, group)
    assert oct((tmp_path / ".velero" / "uid-of-the-restore").stat().st_mode & 0o777) == "0o644"


def test_the_done_file_is_not_written_through_a_link_that_is_swapped_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume, outside = tmp_path / "volume", tmp_path / "OUT"
    for folder in (volume, outside):
        folder.mkdir()
    make_directory = os.mkdir

    def swap(*arguments: Any, **options: Any) -> None:
        make_directory(*arguments, **options)
        (volume / ".velero").rename(volume / "away")
        (volume / ".velero").symlink_to(outside)

    monkeypatch.setattr(os, "mkdir", swap)
    with pytest.raises(DataPathError, match="cannot write done file"):
        write_done_file(volume, "uid-of-the-restore", "transfer")
    assert list(outside.iterdir()) == []


@pytest.mark.parametrize(
    "left", ["nothing", "of another", "of another transfer", "folder", "link", "link above", "file above"]
)
def test_only_a_file_of_this_transfer_in_the_volume_itself_is_its_done_file(tmp_path: Path, left: str) -> None:
    """Any other one goes: the pod would start while the transfer writes."""
    volume, outside = tmp_path / "volume", tmp_path / "outside"
    for folder in (volume, outside):
        folder.mkdir()
    write_done_file(outside, "uid", "transfer")
    done = volume / ".velero"
    match left:
        case "of another":
            write_done_file(volume, "other", "transfer")
        case "of another transfer":
            write_done_file(volume, "uid", "transfer-2")
        case "folder":
            (done / "uid").mkdir(parents=True)
        case "link":
            done.mkdir()
            (done / "uid").symlink_to(outside / ".velero" / "uid")
        case "link above":
            done.symlink_to(outside / ".velero")
        case "file above":
            done.touch()
    assert not take_done_file(volume, "uid", "transfer")
    assert list(volume.iterdir()) == []
    assert take_done_file(outside, "uid", "transfer")
    assert (outside / ".velero" / "uid").exists()


async def test_zeros_become_holes_when_configured(mover_repository: Repository, tmp_path: Path) -> None:
    file = make_large_file(tmp_path / "volume" / "file", 1)
    os.truncate(file, 10 << 20)
    backup = await back_up_volume(mover_repository, file.parent)
    for sparse in (True, False):
        await restore_volume(mover_repository, backup.snapshot_id, tmp_path / str(sparse), sparse=sparse)
        assert (tmp_path / str(sparse) / "file").read_bytes() == file.read_bytes()
    assert (tmp_path / "True" / "file").stat().st_blocks * 512 < 2 << 20


async def test_a_volume_is_restored_that_its_data_fills(
    mover_repository: Repository, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The list of finished files takes a block until kopia has found none left."""
    images = [tmp_path / name for name in ("first", "second")]
    # The data itself never gets the last free block.
    for image, size_bytes in zip(images, (1 << 20, (1 << 20) - 4096), strict=True):
        make_ext4(image, size_bytes, "-m", "0")
    with mounted_image(images[0], tmp_path / "volume") as volume, mounted_image(images[1], tmp_path / "out") as target:
        fill(volume / "full")
        backup = await back_up_volume(mover_repository, volume)
        resume = ResumeSettings("uid", LIST_INTERVAL)
        with caplog.at_level("INFO"):
            await restore_volume(mover_repository, backup.snapshot_id, target, resume=resume)
        assert sorted(path.name for path in target.iterdir()) == ["full", "lost+found"]
        assert (target / "full").read_bytes() == (volume / "full").read_bytes()
        assert any("is full: writing all files again" in one.message for one in caplog.records)


@plain_only
async def test_content_that_changes_under_the_same_size_and_time_is_backed_up_where_all_files_are_read(
    local_mover: LocalMover, tmp_path: Path, kopia: PlainKopia
) -> None:
    file = tmp_path / "volume" / "file"
    file.parent.mkdir()
    for text, read_all in (("old", False), ("new", False), ("new", True)):
        file.write_text(text)
        os.utime(file, ns=(0, 0))
        await local_mover.back_up(file.parent, "", None, wanted=LocalBackup(file.parent, read_all_files=read_all))
    old, unnoticed, new = (one["rootEntry"]["obj"] for one in kopia.snapshots())
    assert old == unnoticed != new


async def test_it_is_known_what_a_confined_kopia_reads(local_mover: LocalMover, tmp_path: Path) -> None:
    file, files, seen = make_large_file(tmp_path / "volume" / "file", 40), EndlessFiles(), set[str]()
    running = asyncio.create_task(local_mover.back_up(file.parent, "", None))
    while not running.done():
        seen |= {one.path for one in files.observe()}
        await asyncio.sleep(0.02)
    await running
    assert str(file) in seen


async def test_files_that_are_deleted_or_grow_while_others_are_read_fail_no_backup(
    local_mover: LocalMover, tmp_path: Path
) -> None:
    """What is kept of a change depends on the moment, but the start of a file is unchanged."""
    file = make_large_file(tmp_path / "volume" / "a", 40)
    before, deleted = file.read_bytes(), [file.parent / f"z{number}" for number in range(500)]
    for path in deleted:
        path.touch()
    async with asyncio.TaskGroup() as group, asyncio.timeout(30):
        running = group.create_task(local_mover.back_up(file.parent, "", None))
        while not running_kopia(BACKUP_VERB):
            await asyncio.sleep(0.001)
        for path in deleted:
            path.unlink()
        with file.open("ab") as growing:
            growing.write(b"more")
    backup = running.result()
    await local_mover.restore(backup.snapshot_id, tmp_path / "out", None)
    kept = (tmp_path / "out" / "a").read_bytes()
    assert kept in (before, before + b"more")
    assert backup.total_bytes == len(kept)


async def test_sockets_pipes_and_devices_are_left_out_and_only_sockets_are_not_named(
    local_mover: LocalMover, tmp_path: Path
) -> None:
    volume = tmp_path / "volume"
    volume.mkdir()
    (volume / "file").write_text("kept")
    os.mkfifo(volume / "pipe")
    (volume / "link.kopia-entry").symlink_to("file")
    names = {"pipe", "link.kopia-entry"}
    if os.geteuid() == 0:
        os.mknod(volume / "null", 0o20666, os.makedev(1, 3))
        names.add("null")
    with socket.socket(socket.AF_UNIX) as here:
        here.bind(str(volume / "socket"))
    backup, out = await copy_volume(local_mover, volume)
    assert [path.name for path in out.iterdir()] == ["file"]
    note, _, examples = str(backup.note).partition(", for example ")
    assert note.startswith(f"left out {len(names)} pipes, devices, and links")
    assert set(examples.split(", ")) == names

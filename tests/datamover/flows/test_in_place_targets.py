"""Restores in place into volumes with little room, other volumes or immutable files, and of large directories."""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from core.errors import DataPathError, IncompleteRestoreError
from core.models.transfer_settings import Exclusions, InPlace
from datamover.data_path import in_place, stage
from datamover.kopia.repository import Repository
from tests.datamover.flows.test_in_place import INCREMENTAL, RULES, add, change, restore_in_place, snapshot
from tests.datamover.support.data_paths import back_up_volume, restore_volume
from tests.datamover.support.mounts import mounted, need_root
from tests.datamover.support.trees import describe_tree, make_large_file, make_tree

pytestmark = pytest.mark.processes

_DELETE = InPlace(incremental=True, delete_extra_files=True)


@pytest.mark.sample("incremental, delete")
@pytest.mark.parametrize("rule", RULES[1:4:2])
async def test_large_directories_are_restored_in_several_runs_of_kopia(
    mover_repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: InPlace
) -> None:
    volume = make_tree(tmp_path / "volume")
    before = describe_tree(volume)
    snapshot_id = await snapshot(mover_repository, volume)
    change(volume)
    extra = add(volume)
    monkeypatch.setattr(stage, "_RUN_UNITS", 7)
    monkeypatch.setattr(in_place, "_WHOLE_ENTRIES", 2)
    await restore_in_place(mover_repository, snapshot_id, volume, rule)
    assert not any(os.path.lexists(volume / name) for name in extra)
    assert describe_tree(volume) == before


async def test_a_file_without_room_beside_the_old_one_is_written_after_that_is_deleted(
    mover_repository: Repository, tmp_path: Path
) -> None:
    with mounted(tmp_path / "volume", "size=40m") as volume:
        make_large_file(volume / "large", 20)
        (volume / "small").write_text("small")
        before = describe_tree(volume)
        snapshot_id = await snapshot(mover_repository, volume)
        make_large_file(volume / "large", 20)
        (volume / "small").write_text("changed")
        await restore_in_place(mover_repository, snapshot_id, volume)
        assert describe_tree(volume) == before


async def test_what_is_mounted_in_the_volume_is_not_deleted(mover_repository: Repository, tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    volume.mkdir()
    (volume / "f").write_text("f")
    snapshot_id = await snapshot(mover_repository, volume)
    (volume / "extra").mkdir()
    with mounted(volume / "extra" / "other", "size=1m") as other:
        (other / "file").write_text("of another volume")
        with pytest.raises(DataPathError, match=r"^cannot delete extra: another volume is mounted in it$"):
            await restore_in_place(mover_repository, snapshot_id, volume, _DELETE)
        assert (other / "file").read_text() == "of another volume"


@pytest.mark.sample("incremental, delete")
@pytest.mark.parametrize("rule", RULES[:4])
async def test_nothing_changes_in_another_volume_that_is_mounted_where_the_snapshot_has_a_directory(
    mover_repository: Repository, tmp_path: Path, rule: InPlace
) -> None:
    volume = tmp_path / "volume"
    for name in ("m/d/f", "m/g", "n"):
        (volume / name).parent.mkdir(parents=True, exist_ok=True)
        (volume / name).write_text("of the snapshot")
    snapshot_id = await snapshot(mover_repository, volume)
    shutil.rmtree(volume / "m")
    (volume / "n").write_text("changed")
    with mounted(volume / "m", "size=1m") as other:
        (other / "d").mkdir(mode=0o700)
        (other / "d" / "extra").write_text("of another volume")
        (other / "g").write_text("of another volume")
        before = describe_tree(other)
        with pytest.raises(IncompleteRestoreError, match=r"4 missing: m \(another volume is mounted there\)$"):
            await restore_in_place(mover_repository, snapshot_id, volume, rule)
        assert describe_tree(other) == before
    assert (volume / "n").read_text() == "of the snapshot"


async def test_what_is_excluded_in_another_volume_does_not_let_the_rest_of_it_be_deleted(
    mover_repository: Repository, tmp_path: Path
) -> None:
    volume = tmp_path / "volume"
    volume.mkdir()
    snapshot_id = await snapshot(mover_repository, volume, exclude=Exclusions(patterns=("*.tmp",)))
    with mounted(volume / "m", "size=1m") as other:
        for name in ("a.tmp", "b"):
            (other / name).write_text("of another volume")
        with pytest.raises(DataPathError, match=r"^cannot delete m/b: another volume is mounted in it$"):
            await restore_in_place(mover_repository, snapshot_id, volume, _DELETE)
        assert sorted(path.name for path in other.iterdir()) == ["a.tmp", "b"]


@contextmanager
def _immutable(path: Path) -> Iterator[None]:
    """Have the file system refuse every change of a file: its time is the snapshot's, and only its content is not."""
    need_root("attributes of files")
    subprocess.run(["chattr", "+i", path], check=True)
    try:
        yield
    finally:
        subprocess.run(["chattr", "-i", path], check=True)


@pytest.mark.parametrize(("rule", "above"), [(INCREMENTAL, ""), (InPlace(), "d/e")], ids=["alone", "in a directory"])
async def test_an_old_file_that_cannot_be_replaced_is_missing_and_all_else_is_restored(
    mover_repository: Repository, tmp_path: Path, rule: InPlace, above: str
) -> None:
    volume = tmp_path / "volume"
    folder = volume / above
    folder.mkdir(parents=True)
    for name in ("a", "stale", "z"):
        (folder / name).write_text("new")
    os.utime(folder / "stale", ns=(5, 5))
    snapshot_id = await snapshot(mover_repository, volume)
    for name in ("a", "stale", "z"):
        (folder / name).write_text("old")
    with _immutable(folder / "stale"):
        name = str((folder / "stale").relative_to(volume))
        message = rf"all others are restored: 1 missing: {name} \(Operation not permitted\)"
        with pytest.raises(IncompleteRestoreError, match=message):
            await restore_in_place(mover_repository, snapshot_id, volume, rule)
    assert [(folder / name).read_text() for name in ("a", "stale", "z")] == ["new", "old", "new"]


@contextmanager
def _running(program: Path) -> Iterator[None]:
    """Have the kernel refuse to open a file for writing, but not to set its time."""
    with subprocess.Popen([program, "1000"]) as process:
        try:
            yield
        finally:
            process.kill()


@pytest.mark.parametrize(("name", "closed"), [("file", _running), ("link", lambda link: _immutable(link.parent))])
async def test_what_kopia_cannot_replace_fails_a_restore_and_is_replaced_by_an_incremental_one(
    mover_repository: Repository, tmp_path: Path, name: str, closed: Callable[[Path], AbstractContextManager[None]]
) -> None:
    (volume := tmp_path / "volume").mkdir()
    shutil.copy2("/bin/sleep", volume / "file")
    (volume / "link").symlink_to("old")
    shutil.copytree(volume, new := tmp_path / "new", symlinks=True)
    (new / "file").write_bytes(bytes((new / "file").stat().st_size))
    (new / "link").unlink()
    (new / "link").symlink_to("new")
    snapshot_id = await snapshot(mover_repository, new)
    message = rf"restored: not all are written \(kopia's first error: .* on {name}\)"
    with closed(volume / name), pytest.raises(IncompleteRestoreError, match=message):
        await restore_volume(mover_repository, snapshot_id, volume)
    await restore_in_place(mover_repository, snapshot_id, volume, INCREMENTAL)
    assert describe_tree(volume) == describe_tree(new)


@pytest.mark.parametrize("incremental", [True, False], ids=["incremental", "full"])
async def test_a_directory_that_the_backup_would_leave_out_stays_in_the_place_of_a_link(
    mover_repository: Repository, tmp_path: Path, incremental: bool
) -> None:
    volume = tmp_path / "volume"
    links = [volume / name for name in ("scratch", "deep/scratch")]
    for link in links:
        link.parent.mkdir(exist_ok=True)
        link.symlink_to("elsewhere")
    backup = await back_up_volume(mover_repository, volume, exclude=Exclusions(patterns=("scratch/",)))
    for link in links:
        link.unlink()
        link.mkdir()
        (link / "file").touch()
    rule = InPlace(incremental=incremental, delete_extra_files=True)
    with pytest.raises(IncompleteRestoreError, match="2 missing: ") as failed:
        await restore_in_place(mover_repository, backup.snapshot_id, volume, rule)
    assert all((link / "file").exists() for link in links)
    assert "setting DeleteExtraFiles" not in str(failed.value)


async def test_files_of_an_interrupted_restore_into_an_empty_volume_are_all_written_again(
    mover_repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power loss they may have size and time, which kopia sets, and zeros as content."""
    source, volume = make_tree(tmp_path / "source"), tmp_path / "volume"
    snapshot_id = await snapshot(mover_repository, source)
    volume.mkdir()

    async def lose_power(_: int, folder: Path) -> None:
        for path in folder.rglob("*"):
            if path.is_file() and not path.is_symlink():
                status = path.stat()
                path.write_bytes(bytes(status.st_size))
                os.utime(path, ns=(0, status.st_mtime_ns))
        raise DataPathError("the power failed")

    with monkeypatch.context() as patched:
        patched.setattr("datamover.data_path.restore.sync_file_system", lose_power)
        with pytest.raises(DataPathError, match="the power failed"):
            await restore_in_place(mover_repository, snapshot_id, volume)
    assert (await restore_in_place(mover_repository, snapshot_id, volume)).fallback_full is True
    assert describe_tree(volume) == describe_tree(source)
    assert (await restore_in_place(mover_repository, snapshot_id, volume)).incremental_bytes == 0

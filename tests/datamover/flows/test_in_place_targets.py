"""Restores in place into volumes with little room, other volumes or immutable files, and of large directories."""

import errno
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from core.errors import DataPathError, IncompleteRestoreError
from core.models.transfer_settings import Exclusions, InPlace
from datamover.data_path import in_place, stage
from tests.datamover.flows.test_in_place import RULES, add, change
from tests.datamover.support.data_paths import INCREMENTAL, VolumeBed
from tests.datamover.support.mounts import mounted, need_root
from tests.datamover.support.trees import describe_tree, make_large_file, make_tree

pytestmark = pytest.mark.processes

_DELETE = InPlace(incremental=True, delete_extra_files=True)


@pytest.mark.sample("incremental, delete")
@pytest.mark.parametrize("rule", RULES[1:4:2])
async def test_large_directories_are_restored_in_several_runs_of_kopia(
    bed: VolumeBed, monkeypatch: pytest.MonkeyPatch, rule: InPlace
) -> None:
    volume = make_tree(bed.volume)
    before = describe_tree(volume)
    snapshot_id = await bed.snapshot()
    change(volume)
    extra = add(volume)
    monkeypatch.setattr(stage, "_RUN_UNITS", 7)
    monkeypatch.setattr(in_place, "_WHOLE_ENTRIES", 2)
    await bed.restore_in_place(snapshot_id, rule)
    assert not any(os.path.lexists(volume / name) for name in extra)
    assert describe_tree(volume) == before


async def test_a_file_without_room_beside_the_old_one_is_written_after_that_is_deleted(
    bed: VolumeBed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that cannot be deleted keeps no other from being restored."""
    unlink = os.unlink

    def refuse(name: str | bytes, **more: Any) -> None:
        if name == b"large":
            raise PermissionError(errno.EPERM, "Operation not permitted")
        unlink(name, **more)

    with mounted(bed.volume, "size=40m") as volume:
        make_large_file(volume / "large", 20)
        (volume / "small").write_text("small")
        before = describe_tree(volume)
        snapshot_id = await bed.snapshot()
        make_large_file(volume / "large", 20)
        (volume / "small").write_text("changed")
        with monkeypatch.context() as patched:
            patched.setattr(os, "unlink", refuse)
            with pytest.raises(IncompleteRestoreError, match=r": 1 missing: large \(Operation not permitted\)"):
                await bed.restore_in_place(snapshot_id)
        assert (volume / "small").read_text() == "small"
        await bed.restore_in_place(snapshot_id)
        assert describe_tree(volume) == before


async def test_what_is_mounted_in_the_volume_is_not_deleted(bed: VolumeBed) -> None:
    """Nor the rest of it, where something in it is excluded."""
    bed.write("f")
    snapshot_id = await bed.snapshot(exclude=Exclusions(patterns=("*.tmp",)))
    (bed.volume / "extra").mkdir()
    for mount, path, names in (("extra/other", "extra", ["file"]), ("m", "m/b", ["a.tmp", "b"])):
        with mounted(bed.volume / mount, "size=1m") as other:
            bed.write(*(f"{mount}/{name}" for name in names))
            with pytest.raises(DataPathError, match=f"^cannot delete {path}: another volume is mounted in it$"):
                await bed.restore_in_place(snapshot_id, _DELETE)
            assert sorted(one.name for one in other.iterdir()) == names
        shutil.rmtree(bed.volume / mount.partition("/")[0])


@pytest.mark.sample("incremental, delete")
@pytest.mark.parametrize("rule", RULES[:4])
async def test_nothing_changes_in_another_volume_that_is_mounted_where_the_snapshot_has_a_directory(
    bed: VolumeBed, rule: InPlace
) -> None:
    bed.write("m/d/f", "m/g", "n", text="of the snapshot")
    snapshot_id = await bed.snapshot()
    shutil.rmtree(bed.volume / "m")
    bed.write("n", text="changed")
    with mounted(bed.volume / "m", "size=1m") as other:
        bed.write("m/d/extra", "m/g", text="of another volume")
        (other / "d").chmod(0o700)
        before = describe_tree(other)
        with pytest.raises(IncompleteRestoreError, match=r"4 missing: m \(another volume is mounted there\)$"):
            await bed.restore_in_place(snapshot_id, rule)
        assert describe_tree(other) == before
    assert (bed.volume / "n").read_text() == "of the snapshot"


@contextmanager
def _immutable(path: Path) -> Iterator[None]:
    """Have the file system refuse every change of a file: its time is the snapshot's, and only its content is not."""
    need_root("attributes of files")
    subprocess.run(["chattr", "+i", path], check=True)
    try:
        yield
    finally:
        subprocess.run(["chattr", "-i", path], check=True)


@pytest.mark.parametrize(("rule", "above"), [(INCREMENTAL, ""), (InPlace(), "d/e/")], ids=["alone", "in a directory"])
async def test_an_old_file_that_cannot_be_replaced_is_missing_and_all_else_is_restored(
    bed: VolumeBed, rule: InPlace, above: str
) -> None:
    names = [f"{above}{name}" for name in ("a", "stale", "z")]
    name = names[1]
    volume = bed.write(*names, text="new")
    os.utime(volume / name, ns=(5, 5))
    snapshot_id = await bed.snapshot()
    bed.write(*names, text="old")
    with _immutable(volume / name):
        message = rf"all others are restored: 1 missing: {name} \(Operation not permitted\)"
        with pytest.raises(IncompleteRestoreError, match=message):
            await bed.restore_in_place(snapshot_id, rule)
    assert [(volume / name).read_text() for name in names] == ["new", "old", "new"]


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
    bed: VolumeBed, name: str, closed: Callable[[Path], AbstractContextManager[None]]
) -> None:
    (volume := bed.volume).mkdir()
    shutil.copy2("/bin/sleep", volume / "file")
    (volume / "link").symlink_to("old")
    shutil.copytree(volume, new := bed.folder / "new", symlinks=True)
    (new / "file").write_bytes(bytes((new / "file").stat().st_size))
    (new / "link").unlink()
    (new / "link").symlink_to("new")
    snapshot_id = await bed.snapshot(new)
    message = rf"restored: not all are written \(kopia's first error: .* on {name}\)"
    with closed(volume / name), pytest.raises(IncompleteRestoreError, match=message):
        await bed.restore(snapshot_id, volume)
    await bed.restore_in_place(snapshot_id)
    assert describe_tree(volume) == describe_tree(new)


@pytest.mark.parametrize("incremental", [True, False], ids=["incremental", "full"])
async def test_a_directory_that_the_backup_would_leave_out_stays_in_the_place_of_a_link(
    bed: VolumeBed, incremental: bool
) -> None:
    links = [bed.volume / name for name in ("scratch", "deep/scratch")]
    for link in links:
        link.parent.mkdir(exist_ok=True)
        link.symlink_to("elsewhere")
    backup = await bed.back_up(exclude=Exclusions(patterns=("scratch/",)))
    for link in links:
        link.unlink()
        link.mkdir()
        (link / "file").touch()
    rule = InPlace(incremental=incremental, delete_extra_files=True)
    with pytest.raises(IncompleteRestoreError, match="2 missing: ") as failed:
        await bed.restore_in_place(backup.snapshot_id, rule)
    assert all((link / "file").exists() for link in links)
    assert "setting DeleteExtraFiles" not in str(failed.value)


@pytest.mark.parametrize("interrupted", [{"in_place": INCREMENTAL}, {"in_use": True}], ids=["in place", "of a pod"])
async def test_files_of_an_interrupted_restore_by_kopia_are_all_written_again(
    bed: VolumeBed, monkeypatch: pytest.MonkeyPatch, interrupted: dict[str, Any]
) -> None:
    """After a power loss they may have size and time, which kopia sets, and zeros as content."""
    source, volume = make_tree(bed.folder / "source"), bed.folder / "volume"
    snapshot_id = await bed.snapshot(source)
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
        for _ in range(2):
            with pytest.raises(DataPathError, match="the power failed"):
                await bed.restore(snapshot_id, volume, **interrupted)
    assert (await bed.restore_in_place(snapshot_id)).fallback_full is True
    assert describe_tree(volume) == describe_tree(source)
    assert (await bed.restore_in_place(snapshot_id)).incremental_bytes == 0

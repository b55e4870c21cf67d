"""Restores into a volume that has data: what is equal stays, all else becomes as in the snapshot."""

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from msgspec import UNSET

from core.errors import IncompleteRestoreError
from core.models.transfer_settings import InPlace
from tests.datamover.support.data_paths import VolumeBed
from tests.datamover.support.trees import describe_tree, make_tree

pytestmark = pytest.mark.processes

RULES = [
    pytest.param(InPlace(incremental=incremental, delete_extra_files=delete, compare_content=content), id=name)
    for name, incremental, delete, content in (
        ("full", False, False, False),
        ("full, delete", False, True, False),
        ("incremental", True, False, False),
        ("incremental, delete", True, True, False),
        ("content", True, False, True),
        ("content, delete", True, True, True),
    )
]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def stat_of(path: Path) -> tuple[int, ...]:
    """Return inode, mode, owner, and time, and what any write would change."""
    status = path.lstat()
    return status.st_ino, status.st_mode, status.st_uid, status.st_mtime_ns, status.st_size, status.st_ctime_ns


class Held:
    """The files and links of a volume, each kept open, so that no new one has its inode."""

    def __init__(self, volume: Path, stack: ExitStack) -> None:
        self._open: dict[str, int] = {}
        for path in volume.rglob("*"):
            if path.is_symlink() or not path.is_dir():
                fd = self._open[str(path.relative_to(volume))] = os.open(path, os.O_PATH | os.O_NOFOLLOW)
                stack.callback(os.close, fd)

    @property
    def names(self) -> set[str]:
        return set(self._open)

    @property
    def replaced(self) -> set[str]:
        """The names of those that are gone."""
        return {name for name, fd in self._open.items() if not os.fstat(fd).st_nlink}


def change(volume: Path) -> set[str]:
    """Change a tree in each way that a restore has to undo, and return the names of files and links that it writes."""
    deep = volume / "a" / "b" / "c"
    (deep / "file 1").write_bytes(b"another content")
    (deep / "file 2").unlink()
    same = (deep / "file 3").stat()
    (deep / "file 3").write_bytes(bytes(same.st_size))
    os.utime(deep / "file 3", ns=(same.st_mtime_ns + 1, same.st_mtime_ns + 1))
    (volume / "-dash").unlink()
    (volume / "-dash").symlink_to("secret")
    (volume / "link").unlink()
    (volume / "link").symlink_to("a/c")
    (volume / "dangling").unlink()
    (volume / "dangling").write_text("no link")
    shutil.rmtree(volume / "cache")
    (volume / "cache").write_text("in the way")
    (volume / "secret").chmod(0o777)
    files = {f"a/b/c/file {number}" for number in (1, 2, 3)}
    return files | {"-dash", "link", "dangling", "cache/CACHEDIR.TAG", "cache/kept"}


def add(volume: Path) -> set[str]:
    """Add what the snapshot does not have, and return its names."""
    (volume / "extra").mkdir()
    (volume / "extra" / "of mine").write_text("1")
    (volume / "a" / "b" / "more").write_text("2")
    (volume / "a" / "to").symlink_to("/etc/passwd")
    os.mkfifo(volume / "extra" / "pipe")
    return {"extra", "extra/of mine", "extra/pipe", "a/b/more", "a/to"}


@pytest.mark.sample("full, delete", "incremental", "content, delete")
@pytest.mark.parametrize("rule", RULES)
async def test_the_volume_becomes_the_snapshot_and_extra_files_stay_unless_they_are_deleted(
    bed: VolumeBed, stack: ExitStack, rule: InPlace
) -> None:
    volume = make_tree(bed.volume)
    before = describe_tree(volume)
    snapshot_id = await bed.snapshot()
    held = Held(volume, stack)
    changed, extra = change(volume), add(volume)
    kept = {name: stat_of(volume / name)[:4] for name in extra}
    result = await bed.restore_in_place(snapshot_id, rule)
    for name, status in kept.items():
        if rule.delete_extra_files:
            assert not os.path.lexists(volume / name)
        else:
            assert stat_of(volume / name)[:4] == status
    shutil.rmtree(volume / "extra", ignore_errors=True)
    for name in ("a/b/more", "a/to"):
        (volume / name).unlink(missing_ok=True)
    assert describe_tree(volume) == before
    assert held.replaced == (changed if rule.incremental else held.names)
    files = [volume / name for name in held.replaced if not (volume / name).is_symlink()]
    assert result.incremental_bytes == sum(file.stat().st_size for file in files)
    assert result.fallback_full is UNSET
    if rule.incremental:
        whole = {path: stat_of(path) for path in volume.rglob("*") if not path.is_dir()}
        again = await bed.restore_in_place(snapshot_id, rule)
        assert {path: stat_of(path) for path in volume.rglob("*") if not path.is_dir()} == whole
        assert (again.incremental_bytes, again.fallback_full, again.note) == (0, UNSET, UNSET)


@pytest.mark.parametrize("content", [False, True], ids=["times", "content"])
async def test_only_a_comparison_of_content_finds_what_neither_size_nor_time_show(
    bed: VolumeBed, content: bool
) -> None:
    bed.write("changed", "touched", "same")
    before = describe_tree(bed.volume)
    snapshot_id = await bed.snapshot()
    status = (bed.volume / "changed").stat()
    (bed.volume / "changed").write_text("CHANGED")
    os.utime(bed.volume / "changed", ns=(status.st_mtime_ns, status.st_mtime_ns))
    (bed.volume / "touched").touch()
    result = await bed.restore_in_place(snapshot_id, InPlace(incremental=True, compare_content=content))
    assert (bed.volume / "changed").read_text() == ("changed" if content else "CHANGED")
    assert result.incremental_bytes == len("changed" if content else "touched")
    assert (describe_tree(bed.volume) == before) is content


async def test_another_name_of_a_file_keeps_its_content_and_attributes(bed: VolumeBed) -> None:
    volume, elsewhere = bed.write("content", "mode", "time"), bed.folder / "elsewhere"
    elsewhere.mkdir()
    (volume / "link").symlink_to("target")
    before = describe_tree(volume)
    snapshot_id = await bed.snapshot()
    (volume / "content").write_text("other")
    (volume / "mode").chmod(0o4750)
    (volume / "time").touch()
    os.utime(volume / "link", ns=(1, 1), follow_symlinks=False)
    for name in ("content", "mode", "time", "link"):
        os.link(volume / name, elsewhere / name, follow_symlinks=False)
    after = {path: stat_of(path)[:4] for path in elsewhere.iterdir()}
    await bed.restore_in_place(snapshot_id)
    assert describe_tree(volume) == before
    assert {path: stat_of(path)[:4] for path in elsewhere.iterdir()} == after


async def test_a_directory_in_the_place_of_a_file_stays_with_its_files_and_all_else_is_restored(bed: VolumeBed) -> None:
    bed.write("f", "g", "h")
    snapshot_id = await bed.snapshot()
    for name in ("f", "g"):
        (bed.volume / name).unlink()
        (bed.volume / name).mkdir()
    (bed.volume / "f" / "extra").write_text("of mine")
    (bed.volume / "h").write_text("changed")
    hint = r"f \(something else is there\)\. setting DeleteExtraFiles deletes the directories that are in the way$"
    with pytest.raises(IncompleteRestoreError, match=f"all others are restored: 1 missing: {hint}"):
        await bed.restore_in_place(snapshot_id)
    assert (bed.volume / "f" / "extra").read_text() == "of mine"
    assert [(bed.volume / name).read_text() for name in "gh"] == ["g", "h"]
    await bed.restore_in_place(snapshot_id, InPlace(incremental=True, delete_extra_files=True))
    assert (bed.volume / "f").read_text() == "f"


@pytest.mark.parametrize("incremental", [True, False], ids=["incremental", "full"])
async def test_no_link_leads_out_of_the_volume_and_what_no_backup_has_stays(bed: VolumeBed, incremental: bool) -> None:
    volume, outside = bed.write("a/x", "b/y", "c"), bed.folder / "outside"
    before = describe_tree(volume)
    snapshot_id = await bed.snapshot()
    outside.mkdir()
    (outside / "x").write_text("outside")
    shutil.rmtree(volume / "a")
    (volume / "a").symlink_to(outside)
    (volume / "c").unlink()
    (volume / "c").symlink_to(outside / "x")
    (volume / "b" / "more").symlink_to(outside)
    ours = ("lost+found", ".velero", ".nodeagent-restore-1")
    bed.write(*(f"{name}/f" for name in ours))
    os.mkfifo(volume / "b" / "pipe")
    was = stat_of(outside), stat_of(outside / "x")
    await bed.restore_in_place(snapshot_id, InPlace(incremental=incremental, delete_extra_files=True))
    assert (stat_of(outside), stat_of(outside / "x"), (outside / "x").read_text()) == (*was, "outside")
    for name in ours:
        assert (volume / name / "f").exists()
        shutil.rmtree(volume / name)
    (volume / "b" / "pipe").unlink()
    assert describe_tree(volume) == before


async def test_into_a_new_volume_everything_is_written(bed: VolumeBed) -> None:
    volume, target = make_tree(bed.folder / "volume"), bed.folder / "target"
    snapshot_id = await bed.snapshot()
    (target / "lost+found").mkdir(parents=True)
    result = await bed.restore_in_place(snapshot_id, target=target)
    (target / "lost+found").rmdir()
    assert describe_tree(target) == describe_tree(volume)
    assert (result.incremental_bytes, result.fallback_full) == (result.total_bytes, True)

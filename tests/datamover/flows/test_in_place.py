"""Restores into a volume that has data: what is equal stays, all else becomes as in the snapshot."""

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from msgspec import UNSET

from core.contract import RestoreResult
from core.errors import IncompleteRestoreError
from core.models.transfer_settings import InPlace
from datamover.kopia.repository import Repository
from tests.datamover.support.data_paths import back_up_volume, restore_volume
from tests.datamover.support.trees import describe_tree, make_tree

pytestmark = pytest.mark.processes

INCREMENTAL = InPlace(incremental=True)
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


async def snapshot(repository: Repository, volume: Path, **more: Any) -> str:
    return (await back_up_volume(repository, volume, **more)).snapshot_id


async def restore_in_place(
    repository: Repository, snapshot_id: str, target: Path, rule: InPlace = INCREMENTAL
) -> RestoreResult:
    return await restore_volume(repository, snapshot_id, target, in_place=rule)


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
    return {
        *(f"a/b/c/file {number}" for number in (1, 2, 3)),
        "-dash",
        "link",
        "dangling",
        "cache/CACHEDIR.TAG",
        "cache/kept",
    }


def add(volume: Path) -> set[str]:
    """Add what the snapshot does not have, and return its names."""
    (volume / "extra").mkdir()
    (volume / "extra" / "of mine").write_text("1")
    (volume / "a" / "b" / "more").write_text("2")
    (volume / "a" / "to").symlink_to("/etc/passwd")
    os.mkfifo(volume / "a" / "pipe")
    return {"extra", "extra/of mine", "a/b/more", "a/to", "a/pipe"}


@pytest.mark.sample("full, delete", "incremental", "content, delete")
@pytest.mark.parametrize("rule", RULES)
async def test_the_volume_becomes_the_snapshot_and_extra_files_stay_unless_they_are_deleted(
    mover_repository: Repository, tmp_path: Path, stack: ExitStack, rule: InPlace
) -> None:
    volume = make_tree(tmp_path / "volume")
    before = describe_tree(volume)
    snapshot_id = await snapshot(mover_repository, volume)
    held = Held(volume, stack)
    changed, extra = change(volume), add(volume)
    kept = {name: (volume / name).lstat() for name in extra}

    result = await restore_in_place(mover_repository, snapshot_id, volume, rule)

    for name, status in kept.items():
        if rule.delete_extra_files:
            assert not os.path.lexists(volume / name)
        else:
            after = (volume / name).lstat()
            assert (after.st_ino, after.st_mtime_ns, after.st_mode) == (
                status.st_ino,
                status.st_mtime_ns,
                status.st_mode,
            )
    shutil.rmtree(volume / "extra", ignore_errors=True)
    for name in extra - {"extra", "extra/of mine"}:
        (volume / name).unlink(missing_ok=True)
    assert describe_tree(volume) == before
    assert held.replaced == (changed if rule.incremental else held.names)
    files = [volume / name for name in held.replaced if not (volume / name).is_symlink()]
    assert result.incremental_bytes == sum(file.stat().st_size for file in files)
    assert result.fallback_full is UNSET


def _stat(path: Path) -> tuple[int, ...]:
    status = path.lstat()
    return status.st_ino, status.st_mode, status.st_uid, status.st_mtime_ns, status.st_ctime_ns


@pytest.mark.sample("content")
@pytest.mark.parametrize("content", [False, True], ids=["times", "content"])
async def test_nothing_is_written_into_a_volume_that_is_equal(
    mover_repository: Repository, tmp_path: Path, content: bool
) -> None:
    volume = make_tree(tmp_path / "volume")
    snapshot_id = await snapshot(mover_repository, volume)
    before = {path: _stat(path) for path in volume.rglob("*") if not path.is_dir()}
    result = await restore_in_place(
        mover_repository,
        snapshot_id,
        volume,
        InPlace(incremental=True, delete_extra_files=True, compare_content=content),
    )
    assert {path: _stat(path) for path in volume.rglob("*") if not path.is_dir()} == before
    assert (result.incremental_bytes, result.fallback_full, result.note) == (0, UNSET, UNSET)


@pytest.mark.parametrize("content", [False, True], ids=["times", "content"])
async def test_only_a_comparison_of_content_finds_what_neither_size_nor_time_show(
    mover_repository: Repository, tmp_path: Path, content: bool
) -> None:
    volume = tmp_path / "volume"
    volume.mkdir()
    for name in ("changed", "touched", "same"):
        (volume / name).write_text(name)
    before = describe_tree(volume)
    snapshot_id = await snapshot(mover_repository, volume)
    status = (volume / "changed").stat()
    (volume / "changed").write_text("CHANGED")
    os.utime(volume / "changed", ns=(status.st_mtime_ns, status.st_mtime_ns))
    (volume / "touched").touch()
    result = await restore_in_place(
        mover_repository, snapshot_id, volume, InPlace(incremental=True, compare_content=content)
    )
    assert (volume / "changed").read_text() == ("changed" if content else "CHANGED")
    assert result.incremental_bytes == len("changed" if content else "touched")
    assert (describe_tree(volume) == before) is content


async def test_another_name_of_a_file_keeps_its_content_and_attributes(
    mover_repository: Repository, tmp_path: Path
) -> None:
    volume, elsewhere = tmp_path / "volume", tmp_path / "elsewhere"
    elsewhere.mkdir()
    volume.mkdir()
    for name in ("content", "mode", "time"):
        (volume / name).write_text("as backed up")
    (volume / "link").symlink_to("target")
    before = describe_tree(volume)
    snapshot_id = await snapshot(mover_repository, volume)
    (volume / "content").write_text("other")
    (volume / "mode").chmod(0o4750)
    (volume / "time").touch()
    os.utime(volume / "link", ns=(1, 1), follow_symlinks=False)
    for name in ("content", "mode", "time", "link"):
        os.link(volume / name, elsewhere / name, follow_symlinks=False)
    after = {path: _stat(path)[:4] for path in elsewhere.iterdir()}
    await restore_in_place(mover_repository, snapshot_id, volume)
    assert describe_tree(volume) == before
    assert {path: _stat(path)[:4] for path in elsewhere.iterdir()} == after


async def test_a_directory_in_the_place_of_a_file_stays_with_its_files_and_all_else_is_restored(
    mover_repository: Repository, tmp_path: Path
) -> None:
    volume = tmp_path / "volume"
    volume.mkdir()
    for name in ("f", "g", "h"):
        (volume / name).write_text(name)
    snapshot_id = await snapshot(mover_repository, volume)
    for name in ("f", "g"):
        (volume / name).unlink()
        (volume / name).mkdir()
    (volume / "f" / "extra").write_text("of mine")
    (volume / "h").write_text("changed")
    hint = r"f \(something else is there\)\. setting DeleteExtraFiles deletes the directories that are in the way$"
    with pytest.raises(IncompleteRestoreError, match=f"all others are restored: 1 missing: {hint}"):
        await restore_in_place(mover_repository, snapshot_id, volume)
    assert (volume / "f" / "extra").read_text() == "of mine"
    assert [(volume / name).read_text() for name in "gh"] == ["g", "h"]
    await restore_in_place(mover_repository, snapshot_id, volume, InPlace(incremental=True, delete_extra_files=True))
    assert (volume / "f").read_text() == "f"


async def test_no_link_leads_out_of_the_volume_and_what_is_not_the_tenants_stays(
    mover_repository: Repository, tmp_path: Path
) -> None:
    volume, outside = tmp_path / "volume", tmp_path / "outside"
    for name in ("a/x", "b/y", "c"):
        (volume / name).parent.mkdir(parents=True, exist_ok=True)
        (volume / name).write_text(name)
    before = describe_tree(volume)
    snapshot_id = await snapshot(mover_repository, volume)
    outside.mkdir()
    (outside / "x").write_text("outside")
    shutil.rmtree(volume / "a")
    (volume / "a").symlink_to(outside)
    (volume / "c").unlink()
    (volume / "c").symlink_to(outside / "x")
    (volume / "b" / "more").symlink_to(outside)
    for name in ("lost+found", ".velero", ".nodeagent-restore-1"):
        (volume / name).mkdir()
        (volume / name / "f").write_text("not the tenant's")
    was = _stat(outside), _stat(outside / "x")
    await restore_in_place(mover_repository, snapshot_id, volume, InPlace(incremental=True, delete_extra_files=True))
    assert (_stat(outside), _stat(outside / "x"), (outside / "x").read_text()) == (*was, "outside")
    for name in ("lost+found", ".velero", ".nodeagent-restore-1"):
        assert (volume / name / "f").read_text() == "not the tenant's"
        shutil.rmtree(volume / name)
    assert describe_tree(volume) == before


@pytest.mark.sample("lost+found")
@pytest.mark.parametrize("lost", [False, True], ids=["empty", "lost+found"])
async def test_into_a_new_volume_everything_is_written(
    mover_repository: Repository, tmp_path: Path, lost: bool
) -> None:
    volume, target = make_tree(tmp_path / "volume"), tmp_path / "target"
    snapshot_id = await snapshot(mover_repository, volume)
    target.mkdir()
    if lost:
        (target / "lost+found").mkdir()
    result = await restore_in_place(mover_repository, snapshot_id, target)
    if lost:
        (target / "lost+found").rmdir()
    assert describe_tree(target) == describe_tree(volume)
    assert (result.incremental_bytes, result.fallback_full) == (result.total_bytes, True)


async def test_with_one_percent_changed_at_most_five_are_written(mover_repository: Repository, tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    for number in range(400):
        (volume / str(number % 7)).mkdir(parents=True, exist_ok=True)
        (volume / str(number % 7) / str(number)).write_bytes(os.urandom(5000))
    before = describe_tree(volume)
    snapshot_id = await snapshot(mover_repository, volume)
    for number in range(4):
        (volume / str(number) / str(number)).write_text("changed")
    result = await restore_in_place(mover_repository, snapshot_id, volume)
    assert (result.total_bytes, result.incremental_bytes) == (400 * 5000, 4 * 5000)
    assert describe_tree(volume) == before

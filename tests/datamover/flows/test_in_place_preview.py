"""The plan of a restore in place: it counts and names what the restore then does, and writes nothing."""

import os
import shutil
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
from msgspec import UNSET

from core.models.transfer_settings import Exclusions, InPlace, InPlacePlan
from datamover.data_path.in_place_preview import RestorePlanner
from datamover.kopia.repository import Repository
from datamover.kopia.snapshots import read_snapshot
from tests.datamover.flows.test_in_place import RULES, Held, add, change, restore_in_place, snapshot
from tests.datamover.support.data_paths import restore_data_path
from tests.datamover.support.trees import make_tree

pytestmark = pytest.mark.processes

BOTH = InPlace(incremental=True, delete_extra_files=True)


async def _plan(repository: Repository, snapshot_id: str, volume: Path, rule: InPlace = BOTH) -> InPlacePlan:
    found = await repository.open(partial(read_snapshot, repository, snapshot_id), read_only=True)
    return await RestorePlanner(repository, found, volume, rule, restore_data_path()).plan()


def _all(volume: Path) -> dict[str, tuple[int, ...]]:
    """Everything in a volume, with what any write would change."""
    found: dict[str, tuple[int, ...]] = {}
    for path in sorted(volume.rglob("*")):
        status = path.lstat()
        found[str(path.relative_to(volume))] = (
            status.st_ino,
            status.st_mode,
            status.st_uid,
            status.st_size,
            status.st_mtime_ns,
            status.st_ctime_ns,
        )
    return found


@pytest.mark.sample("full, delete", "incremental, delete")
@pytest.mark.parametrize("rule", [row for row in RULES if "content" not in str(row.id)])
async def test_the_plan_is_what_the_restore_then_does(
    mover_repository: Repository, tmp_path: Path, rule: InPlace
) -> None:
    volume = make_tree(tmp_path / "volume")
    snapshot_id = await snapshot(mover_repository, volume)
    changed, extra = change(volume), add(volume)
    (volume / "emptied").write_text("extra")
    before = _all(volume)
    with ExitStack() as stack:
        held = Held(volume, stack)

        plan = await _plan(mover_repository, snapshot_id, volume, rule)

        assert _all(volume) == before
        result = await restore_in_place(mover_repository, snapshot_id, volume, rule)
        gone = held.replaced
    # One file is where the snapshot has a directory.
    expected = {*extra, "emptied"} if rule.delete_extra_files else set()
    files = {"cache", *expected} - {"extra"}
    assert (plan.to_delete.files, plan.to_delete.directories) == (len(files), len(expected & {"extra"}))
    assert {*plan.to_delete.names} == {"cache", *expected} - {"extra/of mine"}
    assert plan.to_write.bytes == result.incremental_bytes
    assert (plan.blocked.files, plan.kept.files, plan.refusal) == (0, 0, "")
    if rule.incremental:
        assert {*plan.to_write.names} == {name for name in changed if not name.startswith("cache/")} | {"cache"}
        assert "secret" in plan.to_set.names
        assert plan.to_write.files == len(changed)
        assert gone == (changed - {"a/b/c/file 2"} | files) & held.names
    else:
        assert (plan.to_set.files, plan.equal.files) == (0, 0)


async def test_what_is_equal_is_counted_and_links_are_compared_by_their_targets(
    mover_repository: Repository, tmp_path: Path
) -> None:
    volume = tmp_path / "volume"
    volume.mkdir()
    for name in ("one", "two", "three"):
        (volume / name).write_bytes(bytes(10))
        (volume / f"to {name}").symlink_to(name)
    snapshot_id = await snapshot(mover_repository, volume)
    status = (volume / "to two").lstat()
    (volume / "to two").unlink()
    (volume / "to two").symlink_to("one")
    os.utime(volume / "to two", ns=(status.st_mtime_ns, status.st_mtime_ns), follow_symlinks=False)
    os.utime(volume / "to three", ns=(1, 1), follow_symlinks=False)
    (volume / "three").chmod(0o600)

    plan = await _plan(mover_repository, snapshot_id, volume)

    assert (plan.equal.files, plan.equal.bytes) == (3, 20)
    assert plan.to_write.names == ["to two"]
    assert {*plan.to_set.names} == {"three", "to three"}


async def test_what_stays_is_named_and_so_is_what_the_restore_could_not_replace(
    mover_repository: Repository, tmp_path: Path
) -> None:
    volume = tmp_path / "volume"
    volume.mkdir()
    (volume / "f").write_text("a file")
    rules = Exclusions(patterns=("*.tmp",))
    snapshot_id = await snapshot(mover_repository, volume, exclude=rules)
    (volume / "f").unlink()
    for name in ("f/more/x", "lost+found/1", ".velero/done", ".nodeagent-restore-1/x", "old/kept.tmp", "old/gone"):
        (volume / name).parent.mkdir(parents=True, exist_ok=True)
        (volume / name).write_text(name)

    plan = await _plan(mover_repository, snapshot_id, volume)
    without = await _plan(mover_repository, snapshot_id, volume, InPlace(incremental=True))

    assert {*plan.to_delete.names} == {"f", "old/gone"}
    assert (plan.to_delete.files, plan.to_delete.directories) == (2, 2)
    assert {*plan.kept.names} == {"lost+found", ".velero", ".nodeagent-restore-1", "old/kept.tmp"}
    assert plan.to_write.names == ["f"]
    assert without.blocked.names == ["f (something else is there)"]
    assert (without.to_write.files, without.to_delete.files) == (0, 0)
    (volume / "f" / "more" / "held.tmp").write_text("stays")
    assert (await _plan(mover_repository, snapshot_id, volume)).blocked.names == ["f (something else is there)"]
    shutil.rmtree(volume / "f")
    (volume / "f").mkdir()
    assert (await _plan(mover_repository, snapshot_id, volume, InPlace())).to_delete.names == ["f"]


@pytest.mark.parametrize("empty", [False, True], ids=["with data", "empty"])
async def test_a_refused_deletion_is_told_in_the_plan(
    mover_repository: Repository, tmp_path: Path, empty: bool
) -> None:
    volume = tmp_path / "volume"
    volume.mkdir()
    (volume / ".kopiaignore").write_text("*.log\n")
    (volume / "a.log").write_text("left out")
    snapshot_id = await snapshot(mover_repository, volume, ignore_files=True)
    if empty:
        shutil.rmtree(volume)
        volume.mkdir()

    plan = await _plan(mover_repository, snapshot_id, volume)

    assert ("files and directories that its backup left out by policies" in plan.refusal) is not empty
    assert plan.to_write.files == (1 if empty else 0)
    if empty:
        result = await restore_in_place(mover_repository, snapshot_id, volume, BOTH)
        assert (result.incremental_bytes, result.note) == (plan.to_write.bytes, UNSET)

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
from datamover.kopia.snapshots import read_snapshot
from tests.datamover.flows.test_in_place import RULES, Held, add, change, stat_of
from tests.datamover.support.data_paths import VolumeBed, restore_data_path
from tests.datamover.support.trees import make_tree

pytestmark = pytest.mark.processes

BOTH = InPlace(incremental=True, delete_extra_files=True)


async def _plan(bed: VolumeBed, snapshot_id: str, rule: InPlace = BOTH) -> InPlacePlan:
    found = await bed.movers.open(partial(read_snapshot, bed.movers, snapshot_id), read_only=True)
    return await RestorePlanner(bed.movers, found, bed.volume, rule, restore_data_path()).plan()


def _all(volume: Path) -> dict[Path, tuple[int, ...]]:
    return {path: stat_of(path) for path in volume.rglob("*")}


@pytest.mark.sample("full, delete", "incremental, delete")
@pytest.mark.parametrize("rule", [row for row in RULES if "content" not in str(row.id)])
async def test_the_plan_is_what_the_restore_then_does(bed: VolumeBed, rule: InPlace) -> None:
    volume = make_tree(bed.volume)
    snapshot_id = await bed.snapshot()
    changed, extra = change(volume), add(volume)
    (volume / "emptied").write_text("extra")
    before = _all(volume)
    with ExitStack() as stack:
        held = Held(volume, stack)
        plan = await _plan(bed, snapshot_id, rule)
        assert _all(volume) == before
        result = await bed.restore_in_place(snapshot_id, rule)
        gone = held.replaced
    # One file is where the snapshot has a directory.
    expected = {*extra, "emptied"} if rule.delete_extra_files else set()
    files = {"cache", *expected} - {"extra"}
    assert (plan.to_delete.files, plan.to_delete.directories) == (len(files), len(expected & {"extra"}))
    assert {*plan.to_delete.names} == {"cache", *expected} - {"extra/of mine", "extra/pipe"}
    assert plan.to_write.bytes == result.incremental_bytes
    assert (plan.blocked.files, plan.kept.files, plan.refusal) == (0, 0, "")
    if rule.incremental:
        assert {*plan.to_write.names} == {name for name in changed if not name.startswith("cache/")} | {"cache"}
        assert "secret" in plan.to_set.names
        assert plan.to_write.files == len(changed)
        assert gone == (changed - {"a/b/c/file 2"} | files) & held.names
    else:
        assert (plan.to_set.files, plan.equal.files) == (0, 0)


async def test_what_is_equal_is_counted_and_links_are_compared_by_their_targets(bed: VolumeBed) -> None:
    for name in ("one", "two", "three"):
        bed.write(name, text="ten bytes.")
        (bed.volume / f"to {name}").symlink_to(name)
    snapshot_id = await bed.snapshot()
    status = (bed.volume / "to two").lstat()
    (bed.volume / "to two").unlink()
    (bed.volume / "to two").symlink_to("one")
    os.utime(bed.volume / "to two", ns=(status.st_mtime_ns, status.st_mtime_ns), follow_symlinks=False)
    os.utime(bed.volume / "to three", ns=(1, 1), follow_symlinks=False)
    (bed.volume / "three").chmod(0o600)
    plan = await _plan(bed, snapshot_id)
    assert (plan.equal.files, plan.equal.bytes) == (3, 20)
    assert plan.to_write.names == ["to two"]
    assert {*plan.to_set.names} == {"three", "to three"}


async def test_what_stays_is_named_and_so_is_what_the_restore_could_not_replace(bed: VolumeBed) -> None:
    bed.write("f", text="a file")
    rules = Exclusions(patterns=("*.tmp",))
    snapshot_id = await bed.snapshot(exclude=rules)
    (bed.volume / "f").unlink()
    bed.write("f/more/x", "lost+found/1", ".velero/done", ".nodeagent-restore-1/x", "old/kept.tmp", "old/gone")
    for folder in (bed.volume, bed.volume / "old"):
        os.mkfifo(folder / "pipe")
    plan = await _plan(bed, snapshot_id)
    without = await _plan(bed, snapshot_id, InPlace(incremental=True))
    assert {*plan.to_delete.names} == {"f", "old/gone", "old/pipe"}
    assert (plan.to_delete.files, plan.to_delete.directories) == (3, 2)
    assert {*plan.kept.names} == {"lost+found", ".velero", ".nodeagent-restore-1", "old/kept.tmp", "pipe"}
    assert plan.to_write.names == ["f"]
    assert without.blocked.names == ["f (something else is there)"]
    assert (without.to_write.files, without.to_delete.files) == (0, 0)
    bed.write("f/more/held.tmp")
    assert (await _plan(bed, snapshot_id)).blocked.names == ["f (something else is there)"]
    shutil.rmtree(bed.volume / "f")
    (bed.volume / "f").mkdir()
    assert (await _plan(bed, snapshot_id, InPlace())).to_delete.names == ["f"]


@pytest.mark.parametrize("empty", [False, True], ids=["with data", "empty"])
async def test_a_refused_deletion_is_told_in_the_plan(bed: VolumeBed, empty: bool) -> None:
    bed.write(".kopiaignore", "a.log", text="*.log\n")
    snapshot_id = await bed.snapshot(ignore_files=True)
    if empty:
        shutil.rmtree(bed.volume)
        bed.volume.mkdir()
    plan = await _plan(bed, snapshot_id)
    assert ("files and directories that its backup left out by policies" in plan.refusal) is not empty
    assert plan.to_write.files == (1 if empty else 0)
    if empty:
        result = await bed.restore_in_place(snapshot_id, BOTH)
        assert (result.incremental_bytes, result.note) == (plan.to_write.bytes, UNSET)

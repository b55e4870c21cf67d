"""Restores in place into volumes with little room, with other volumes mounted in them, and of large directories."""

import os
from pathlib import Path

import pytest

from core.errors import DataPathError
from core.models.in_place import InPlace
from datamover.data_path import in_place, units
from datamover.kopia.repository import Repository
from tests.datamover.flows.test_in_place import RULES, add, change, restore_in_place, snapshot
from tests.datamover.support.mounts import mounted
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
    monkeypatch.setattr(units, "_RUN_UNITS", 7)
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

"""The stage of a restore in place: what it takes away, and what it puts there."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from core.errors import DataPathError
from datamover.data_path.stage import OpenStage, Stage, is_kept_at_root


def _never() -> bool:
    return False


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    stage = Stage(tmp_path)
    stage.make(_never)
    return stage


@pytest.fixture
def opened(stage: Stage) -> Iterator[OpenStage]:
    with stage.open() as opened:
        yield opened


@pytest.mark.parametrize(
    ("name", "kept"),
    [("lost+found", True), (".velero", True), (".nodeagent-restore-x", True), (".nodeagent", False), ("a", False)],
)
def test_what_is_of_the_file_system_or_ours_is_kept(name: str, kept: bool) -> None:
    assert is_kept_at_root(name) is kept


def test_a_directory_is_deleted_however_deep_it_is(tmp_path: Path, stage: Stage, opened: OpenStage) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("d", dir_fd=fd)
        os.symlink("/etc", "link", dir_fd=fd)
        below = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)
    opened.delete("d", opened.root)
    opened.delete("link", opened.root)
    assert [*tmp_path.iterdir()] == [stage.files.parent]
    opened.empty(_never)
    assert not [*(stage.files.parent / "old").iterdir()]
    assert Path("/etc/passwd").exists()


def test_each_directory_that_is_deleted_is_progress(tmp_path: Path, stage: Stage, opened: OpenStage) -> None:
    """To delete a million empty ones may take longer than a stall may."""
    for name in "abc":
        (tmp_path / name).mkdir()
        opened.delete(name, opened.root)
    before = stage.steps
    opened.empty(_never)
    assert stage.steps == before + 3


@pytest.mark.parametrize("there", ["nothing", "file", "link", "empty", "entries"])
@pytest.mark.parametrize("delete", [True, False])
def test_a_file_comes_to_its_place_unless_entries_are_to_stay(
    tmp_path: Path, stage: Stage, opened: OpenStage, there: str, delete: bool
) -> None:
    place, outside = tmp_path / "place", tmp_path / "outside"
    outside.write_text("other")
    if there == "file":
        place.hardlink_to(outside)
    elif there == "link":
        place.symlink_to("outside")
    elif there != "nothing":
        place.mkdir()
    if there == "entries":
        (place / "extra").write_text("extra")
    (stage.files / "1").write_text("new")
    blocked = there == "entries" and not delete
    assert opened.place("1", "place", opened.root, delete=delete) is not blocked
    assert outside.read_text() == "other"
    assert (place / "extra").read_text() == "extra" if blocked else place.read_text() == "new"


@pytest.mark.parametrize(("there", "placed"), [("nothing", True), ("file", True), ("empty", True), ("entries", False)])
def test_a_directory_comes_to_its_place_unless_another_one_has_entries(
    tmp_path: Path, stage: Stage, opened: OpenStage, there: str, placed: bool
) -> None:
    place = tmp_path / "place"
    if there == "file":
        place.write_text("old")
    elif there != "nothing":
        place.mkdir()
    if there == "entries":
        (place / "extra").write_text("extra")
    (stage.files / "1").mkdir()
    (stage.files / "1" / "f").write_text("new")
    assert opened.place("1", "place", opened.root, delete=True) is placed
    assert (place / "f").exists() is placed


@pytest.mark.parametrize("left", ["file", "link", "stage"])
def test_what_was_left_goes_when_the_next_one_begins(tmp_path: Path, left: str) -> None:
    stage, outside = Stage(tmp_path / "volume"), tmp_path / "outside"
    outside.mkdir()
    (outside / "f").write_text("other")
    (tmp_path / "volume").mkdir()
    place = stage.files.parent
    if left == "file":
        place.write_text("x")
    elif left == "link":
        place.symlink_to(outside)
    else:
        Stage(tmp_path / "volume").make(_never)
        (place / "new" / "1").mkdir()
        (place / "new" / "1" / "deep").mkdir()
        (place / "new" / "1.kopia-entry").write_text("x")
        (place / "old" / "2").mkdir()
        (place / "old" / "2" / "f").write_text("x")
        (place / "old" / "3").write_text("x")
        (place / "of a tenant").symlink_to(outside)
    stage.make(_never)
    assert sorted(path.name for path in place.rglob("*")) == ["new", "old"]
    assert [*outside.iterdir()] == [outside / "f"]
    stage.remove(_never)
    assert not [*(tmp_path / "volume").iterdir()]


def test_a_volume_in_which_none_can_be_made_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        DataPathError, match=rf"^cannot make directory {tmp_path}/no/\.nodeagent-restore-files: No such"
    ):
        Stage(tmp_path / "no").make(_never)

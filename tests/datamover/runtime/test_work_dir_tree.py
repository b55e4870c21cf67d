import errno
import os
import tracemalloc
from pathlib import Path

import pytest

from core.errors import DataPathError
from datamover.runtime.work_dir import escape_controls, open_below, open_work_dir, walk_tree

_MORE_THAN_KEPT = 2500


def _names(root: Path) -> dict[bytes, set[str]]:
    return {directory: {entry.name for entry in entries} for directory, entries in walk_tree(root, lambda: False)}


def _make_many(root: Path, below: str = "") -> None:
    for number in range(_MORE_THAN_KEPT):
        (root / f"{number}" / below).mkdir(parents=True)


def test_every_directory_is_walked_and_no_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "v" / "a" / "b").mkdir(parents=True)
    (tmp_path / "v" / "a" / "b" / "file").touch()
    (tmp_path / "v" / "link").symlink_to(tmp_path / "v" / "a")
    assert _names(tmp_path / "v") == {b"": {"a", "link"}, b"a": {"b"}, b"a/b": {"file"}}


def test_a_directory_that_becomes_a_link_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "v" / "a" / "b").mkdir(parents=True)
    (tmp_path / "out" / "b").mkdir(parents=True)
    (tmp_path / "out" / "b" / "secret").touch()
    seen = []
    for directory, entries in walk_tree(tmp_path / "v", lambda: False):
        seen.append((directory, [entry.name for entry in entries]))
        if directory == b"a":
            (tmp_path / "v" / "a").rename(tmp_path / "away")
            (tmp_path / "v" / "a").symlink_to(tmp_path / "out")
    assert seen == [(b"", ["a"]), (b"a", ["b"])]


def test_no_part_of_a_path_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "link").symlink_to("a")
    root = os.open(tmp_path, os.O_RDONLY)
    try:
        with open_below(root, b"a/b") as fd:
            assert os.path.samestat(os.fstat(fd), (tmp_path / "a" / "b").stat())
        for path, error in {
            b"link/b": NotADirectoryError,
            b"link": NotADirectoryError,
            b"a/x": FileNotFoundError,
        }.items():
            with pytest.raises(error), open_below(root, path):
                pass
    finally:
        os.close(root)


def test_the_walk_can_be_stopped_and_a_missing_root_is_an_error(tmp_path: Path) -> None:
    assert list(walk_tree(tmp_path, lambda: True)) == []
    with pytest.raises(FileNotFoundError):
        list(walk_tree(tmp_path / "missing", lambda: False))


def test_what_could_control_a_terminal_is_escaped_and_nothing_else() -> None:
    assert escape_controls("\x1b[31mred\x9b1m\a\t\n\x7f") == r"\x1b[31mred\x9b1m\x07\t\n\x7f"
    assert escape_controls("naïve/名前 \\ \U0001f600\xa0") == "naïve/名前 \\ \U0001f600\xa0"


def test_skipped_directories_are_not_read_and_their_names_are_seen(tmp_path: Path) -> None:
    for name in ("a/b", "c/d"):
        (tmp_path / "v" / name).mkdir(parents=True)
    walk = walk_tree(tmp_path / "v", lambda: False, skip=lambda _, entry: entry.name == "a")
    assert {directory: {entry.name for entry in entries} for directory, entries in walk} == {
        b"": {"a", "c"},
        b"c": {"d"},
        b"c/d": set(),
    }


def test_a_strict_walk_fails_for_a_directory_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "v" / "a").mkdir(parents=True)
    with pytest.raises(FileNotFoundError):  # noqa: PT012 - the directory goes during the walk
        for _, entries in walk_tree(tmp_path / "v", lambda: False, strict=True):
            assert [entry.name for entry in entries] == ["a"]
            (tmp_path / "v" / "a").rmdir()


@pytest.mark.parametrize("levels", [0, 101], ids=["at the top", "far below"])
def test_each_of_many_directories_in_one_is_walked_once(tmp_path: Path, levels: int) -> None:
    """Far below, their names are kept: too many files would be open otherwise."""
    _make_many(tmp_path.joinpath(*["d"] * levels), "below")
    walked = [directory for directory, entries in walk_tree(tmp_path, lambda: False, strict=True) if not list(entries)]
    assert len(walked) == len(set(walked)) == _MORE_THAN_KEPT


def test_skipped_directories_are_left_out_of_many(tmp_path: Path) -> None:
    _make_many(tmp_path)
    walk = walk_tree(tmp_path, lambda: False, skip=lambda _, entry: entry.name != "7")
    assert [directory for directory, entries in walk if not list(entries)] == [b"7"]


def test_files_are_closed_when_a_walk_of_many_directories_ends_early(tmp_path: Path) -> None:
    _make_many(tmp_path)
    before = len(list(Path("/proc/self/fd").iterdir()))
    walk = walk_tree(tmp_path, lambda: False)
    assert len(list(next(walk)[1])) == _MORE_THAN_KEPT
    assert list(next(walk)[1]) == []
    del walk
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_walk_keeps_few_of_many_names(tmp_path: Path) -> None:
    for number in range(10 * _MORE_THAN_KEPT):
        os.mkdir(tmp_path / f"a name as long as that of a message in a mailbox {number}")  # noqa: PTH102 - faster
    tracemalloc.start()
    try:
        walked = sum(1 for _, entries in walk_tree(tmp_path, lambda: False) for _ in entries)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert walked == 10 * _MORE_THAN_KEPT
    assert peak_bytes < 10 * _MORE_THAN_KEPT * len("a name as long as that of a message in a mailbox") / 2


def test_the_work_directory_is_private_and_removed(tmp_path: Path) -> None:
    with open_work_dir({"VELERO_SCRATCH_DIR": str(tmp_path)}, cache_volume="/cache") as folder:
        assert folder.path.parent == tmp_path
        assert folder.path.stat().st_mode & 0o777 == 0o700
        assert folder.cache == Path("/cache/kopia-cache")
    assert not folder.path.exists()


def test_a_cache_on_its_own_volume_remains_and_nothing_else(tmp_path: Path) -> None:
    with open_work_dir({"VELERO_SCRATCH_DIR": str(tmp_path)}, keep_cache=True) as folder:
        folder.write("credentials", b"secret")
        folder.config_file.touch()
        (folder.path / "logs").mkdir()
        folder.cache.mkdir()
        (folder.cache / "block").touch()
    assert list(folder.path.rglob("*")) == [folder.cache, folder.cache / "block"]


def test_a_work_directory_that_cannot_be_removed_does_not_lose_the_result(tmp_path: Path) -> None:
    with open_work_dir({"VELERO_SCRATCH_DIR": str(tmp_path)}, keep_cache=True) as folder:
        folder.path.rmdir()


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (
            OSError(errno.EROFS, "Read-only file system", "/cache/kopia-cache"),
            "cannot use /cache/kopia-cache: Read",
        ),
        (OSError(errno.EACCES, "Permission denied", "/cache/kopia-cache"), "cannot use /cache/kopia-cache: Permission"),
        (OSError(errno.ENOSPC, "No space left on device"), "cannot use a file in /.*/datamover-[^/]*: No space left"),
    ],
)
def test_an_error_of_the_node_names_the_file(tmp_path: Path, error: OSError, shown: str) -> None:
    with (
        pytest.raises(DataPathError, match=f"^{shown}"),
        open_work_dir({"VELERO_SCRATCH_DIR": str(tmp_path)}),
    ):
        raise error


def test_any_other_error_is_a_defect(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), open_work_dir({"VELERO_SCRATCH_DIR": str(tmp_path)}):
        (tmp_path / "missing").read_bytes()

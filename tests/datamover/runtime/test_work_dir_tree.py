import errno
import os
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from core.errors import DataPathError
from datamover.runtime.work_dir import escape_controls, open_below, open_root, open_work_dir, walk_tree

_MORE_THAN_KEPT = 2500


def _names(walk: Iterator[tuple[bytes, Iterator["os.DirEntry[str]"]]]) -> dict[bytes, set[str]]:
    return {directory: {entry.name for entry in entries} for directory, entries in walk}


def _make_many(root: Path, below: str = "") -> None:
    for number in range(_MORE_THAN_KEPT):
        (root / f"{number}" / below).mkdir(parents=True)


def test_every_directory_is_walked_and_no_link_is_followed(tmp_path: Path) -> None:
    """The names of skipped ones are seen."""
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert _names(walk_tree(tmp_path, lambda: False)) == {b"": {"a", "link"}, b"a": {"b"}, b"a/b": {"file"}}
    skipping = walk_tree(tmp_path, lambda: False, skip=lambda directory, entry: (directory, entry.name) == (b"a", "b"))
    assert _names(skipping) == {b"": {"a", "link"}, b"a": {"b"}}


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
    errors = {b"link/b": NotADirectoryError, b"link": NotADirectoryError, b"a/x": FileNotFoundError}
    with open_root(tmp_path) as root:
        with open_below(root, b"a/b") as fd:
            assert os.path.samestat(os.fstat(fd), (tmp_path / "a" / "b").stat())
        for path, error in errors.items():
            with pytest.raises(error), open_below(root, path):
                pass


def test_the_walk_can_be_stopped_and_a_missing_root_is_an_error(tmp_path: Path) -> None:
    assert list(walk_tree(tmp_path, lambda: True)) == []
    with pytest.raises(FileNotFoundError):
        list(walk_tree(tmp_path / "missing", lambda: False))


def test_what_could_control_a_terminal_is_escaped_and_nothing_else() -> None:
    assert escape_controls("\x1b[31mred\x9b1m\a\t\n\x7f") == r"\x1b[31mred\x9b1m\x07\t\n\x7f"
    assert escape_controls("naïve/名前 \\ \U0001f600\xa0") == "naïve/名前 \\ \U0001f600\xa0"


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


def test_skipped_directories_are_left_out_of_many_and_files_are_closed_when_a_walk_ends_early(tmp_path: Path) -> None:
    _make_many(tmp_path)
    walk = walk_tree(tmp_path, lambda: False, skip=lambda _, entry: entry.name != "7")
    assert [directory for directory, entries in walk if not list(entries)] == [b"7"]
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


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {"VELERO_SCRATCH_DIR": str(tmp_path)}


def test_the_work_directory_is_private_and_removed(environment: dict[str, str]) -> None:
    with open_work_dir(environment, cache_volume="/cache") as folder:
        assert str(folder.path.parent) == environment["VELERO_SCRATCH_DIR"]
        assert folder.path.stat().st_mode & 0o777 == 0o700
        assert folder.cache == Path("/cache/kopia-cache")
    assert not folder.path.exists()


def test_a_cache_on_its_own_volume_remains_and_nothing_else(environment: dict[str, str]) -> None:
    with open_work_dir(environment, keep_cache=True) as folder:
        folder.write("credentials", b"secret")
        folder.config_file.touch()
        (folder.path / "logs").mkdir()
        folder.cache.mkdir()
        (folder.cache / "block").touch()
    assert list(folder.path.rglob("*")) == [folder.cache, folder.cache / "block"]
    # One that cannot be removed does not lose the result.
    with open_work_dir(environment, keep_cache=True) as folder:
        folder.path.rmdir()


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (OSError(errno.EROFS, "Read-only", "/cache/kopia-cache"), "cannot use /cache/kopia-cache: Read-only"),
        (OSError(errno.ENOSPC, "No space left"), "cannot use a file in /.*/datamover-[^/]*: No space left"),
    ],
)
def test_an_error_of_the_node_names_the_file(environment: dict[str, str], error: OSError, shown: str) -> None:
    with pytest.raises(DataPathError, match=f"^{shown}"), open_work_dir(environment):
        raise error
    with pytest.raises(FileNotFoundError), open_work_dir(environment):
        raise FileNotFoundError(errno.ENOENT, "missing")

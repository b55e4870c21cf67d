"""Which extra files a restore in place deletes, and which it leaves because of the exclusions of the backup."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final
from unittest.mock import AsyncMock, Mock

import pytest

from core.models.base import JsonDict
from core.models.transfer_settings import Exclusions
from datamover.data_path.in_place_compare import ExtraFiles, find_unexplained
from datamover.data_path.stage import Stage
from datamover.kopia.process import KopiaAnswer
from datamover.kopia.snapshots import Snapshot
from datamover.runtime.work_dir import open_root

_TMP = Exclusions(patterns=("*.tmp",))
_LEVELS = 520
"""More than the descriptors that a process may have open, with two for each level."""


@contextmanager
def _deleting(volume: Path, extra: ExtraFiles) -> Iterator[Callable[[Callable[[], bool]], None]]:
    """Yield what deletes all extra entries in the root."""
    stage = Stage(volume)
    stage.make(_never)
    with stage.open() as opened, open_root(volume) as fd:

        def delete(name: str, directory: int, _: bytes) -> bool:
            opened.delete(name, directory)
            return True

        extra.remove = delete
        yield partial(extra.delete, fd, b"", lambda _: False)
        opened.empty(_never)
    stage.remove(_never)


def _never() -> bool:
    return False


@pytest.mark.parametrize("holds", [True, False], ids=["with an excluded file", "without one"])
def test_a_deep_directory_goes_up_to_what_is_excluded(tmp_path: Path, holds: bool) -> None:
    bottom = tmp_path / "/".join("d" * _LEVELS)
    bottom.mkdir(parents=True)
    (bottom / "gone").touch()
    (bottom.parent / "beside").mkdir()
    if holds:
        (bottom / "x.tmp").touch()
    extra = ExtraFiles(_TMP, allowed=True, remove=Mock())
    with _deleting(tmp_path, extra) as delete:
        delete(_never)
    assert (bottom / "x.tmp").exists() is (tmp_path / "d").exists() is holds
    assert not (bottom / "gone").exists()
    assert not (bottom.parent / "beside").exists()
    assert extra.steps >= _LEVELS
    assert extra.deleted == (2 if holds else 1)


def test_nothing_goes_once_it_is_to_stop(tmp_path: Path) -> None:
    for number in range(9):
        (tmp_path / f"d/{number}").mkdir(parents=True)
    (tmp_path / "d/8/x.tmp").touch()
    extra = ExtraFiles(_TMP, allowed=True, remove=Mock())
    with _deleting(tmp_path, extra) as delete:
        delete(lambda: extra.steps > 3)
    assert (len(list((tmp_path / "d").iterdir())), extra.deleted) == (9, 0)


def test_of_many_excluded_files_only_the_directories_are_kept_in_memory(tmp_path: Path) -> None:
    (tmp_path / "d/e/excluded").mkdir(parents=True)
    for number in range(99):
        (tmp_path / f"d/e/{number}.tmp").touch()
    exclude = Exclusions(patterns=("*.tmp", "excluded/"))
    with open_root(tmp_path) as fd:
        holding = ExtraFiles(exclude, allowed=True, remove=Mock()).find_holding(fd, b"above", "d", _never)
    assert holding == {b"above/d", b"above/d/e", b"above/d/e/excluded"}


_STAGE: Final = '{"patterns": ["/.nodeagent-restore-files/"]}'
_PATTERNS: Final = '{"patterns": ["*.tmp"]}'
_COUNTED: Final[JsonDict] = {"ignore": ["*.bak"]}
_UNCOUNTED: Final[JsonDict] = {"maxFileSize": 5}


@pytest.mark.parametrize(
    ("excluded", "exclude", "explained", "ignored"),
    [
        (0, "", [True, True, False], 0),
        (2, _PATTERNS, [False, False, False], 1),
        (2, "", [False, False, False], 0),
        (2, _PATTERNS, [True, False, False], 0),
        (2, '{"maxBytes": 4096, "oneFileSystem": true}', [False, False, False], 0),
        (1, _STAGE, [True, True, False], 0),
        (2, _STAGE, [False, False, False], 0),
    ],
)
async def test_what_was_left_out_must_be_explained_by_patterns(
    excluded: int, exclude: str, explained: list[bool], ignored: int
) -> None:
    snapshot = Snapshot("k1", "c", "", "k2", 1, 1, excluded=excluded, exclude=exclude, ignored=ignored)
    for files, expected in zip(({}, _COUNTED, _UNCOUNTED), explained, strict=True):
        kopia = AsyncMock()
        kopia.call.return_value = KopiaAnswer("show", 0, json.dumps({"files": files}).encode())
        assert (not await find_unexplained(kopia, snapshot)) is expected
        assert all(one.args[-1] == "default@default:c" for one in kopia.call.await_args_list)

"""Any tree is restored as it was, apart from what a report names, into any target."""

import os
import re
import shutil
import stat
import tempfile
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Final
from unittest.mock import AsyncMock

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from msgspec import UNSET

from core.contract import BackupResult
from core.errors import DataPathError, IncompleteRestoreError
from core.models.transfer_settings import InPlace
from datamover.data_path.probe import TIME_TOLERANCE_NS, Probe
from datamover.data_path.restore import RestoreParameters, restore
from datamover.data_path.resume import LIST_INTERVAL, ResumeSettings
from datamover.data_path.stage import is_kept_at_root
from datamover.kopia.repository import Repository
from datamover.runtime.work_dir import show_path
from tests.datamover.support.data_paths import (
    back_up_volume,
    backup_data_path,
    restore_data_path,
    restore_parameters,
    restore_volume,
)
from tests.datamover.support.kept_trees import Outcome, Tree, differences, inspect, restorable
from tests.datamover.support.mounts import mounted_folding
from tests.datamover.support.random_trees import Folder, create, folders
from tests.datamover.support.thorough import EXAMPLES, SAME_EXAMPLES, TIMEOUT_SECONDS
from tests.datamover.support.unconfined import put_kopia_without_chown

pytestmark = [pytest.mark.processes, pytest.mark.timeout(TIMEOUT_SECONDS)]

_numbers = count(1)
_SHOWN: Final = 3
_FEW: Final = 30
_many = settings(
    max_examples=EXAMPLES,
    derandomize=SAME_EXAMPLES,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

_few = settings(_many, max_examples=EXAMPLES // 3)
"""Each is a restore more."""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short path, as the mounts in a mover pod have."""
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as name:
        yield Path(name)


@contextmanager
def _created(folder: Path, tree: Folder) -> Iterator[tuple[Path, Tree]]:
    here = folder / str(next(_numbers))
    here.mkdir()
    create(here / "v", tree)
    yield here, inspect(here / "v")
    shutil.rmtree(here)


async def _back_up(repository: Repository, here: Path) -> tuple[BackupResult, str]:
    """Back up the tree in a folder, and return the result with all that is reported."""
    warn = AsyncMock()
    result = await back_up_volume(repository, here / "v", backup_data_path(warn), source=f"any/{here.name}")
    warnings = [one.args[0] for one in warn.await_args_list]
    _check_note("" if result.note is UNSET else result.note, warnings)
    return result, "; ".join(warnings)


def _check_note(note: str, warnings: Sequence[str]) -> None:
    """Check that a note has nothing but the warnings, of which its limit may cut one at its end."""
    said = "; ".join(warnings)
    *whole, last = note.split("; ")
    assert all(part in said for part in (*whole, last.removesuffix("…"))), (note, warnings)


def _check_report(report: str, outcome: Outcome) -> None:
    """Check that a backup names what a restore will not have: how many, and the first of them."""
    for paths, text in (
        (outcome.mangled, r"(\d+) names are not UTF-8: .*?, for example in "),
        (outcome.far, r"(\d+) modification times are before .*?, for example of "),
        (outcome.unkept, r"left out (\d+) pipes, devices, and .*?, for example "),
    ):
        found = re.search(text, report)
        assert (int(found[1]) if found else 0) == len(paths), report
        named = report[found.end() :] if found else ""
        assert sum(_show(path) in named for path in paths) >= min(_SHOWN, len(paths)), report


def _show(path: bytes) -> str:
    """Return what a message has of a path at least: the end of its name."""
    return show_path(path.rpartition(b"/")[2])[-90:]


@dataclass(frozen=True)
class Way:
    """How a tree is restored: into which target, and with what options of a data mover.

    `compared`: all of the target is compared with the snapshot, as if it had not kept what a probe file has. `split`:
    the memory does not suffice for all entries at once. `blocked`: so many entries have something else in their place.
    `owners`: the target takes the owners of files. `folds`: the rules by which it takes names for one, or refuses them.
    """

    compared: bool
    sparse: bool
    resumable: bool
    split: bool
    blocked: int
    owners: bool
    folds: Collection[str]

    def parameters(self, snapshot_id: str, target: Path, entries: int) -> RestoreParameters:
        # Each file of a directory that is split has a kopia of its own.
        fitting = max(1, entries // 2) if self.split and entries < _FEW else None
        return restore_parameters(
            snapshot_id,
            target,
            sparse=self.sparse,
            resume=ResumeSettings("2", LIST_INTERVAL) if self.resumable else None,
            fitting_entries=fitting,
        )


def _ways(
    blocked: Sequence[int] = (0, 0, 0, 3),
    owners: Sequence[bool] = (True, True, True, os.geteuid() != 0),
    folds: Sequence[Collection[str]] = ((),),
) -> SearchStrategy[Way]:
    values = (st.booleans() for _ in range(4))
    return st.builds(Way, *values, st.sampled_from(blocked), st.sampled_from(owners), st.sampled_from(folds))


_FOLDS: Final = (("case",), ("form", "odd"), ("case", "form", "odd")) if os.geteuid() == 0 else ((),)
_any_tree = st.one_of(*[folders()] * 5, folders(unkept=True))
_cases = st.one_of(*[st.tuples(_any_tree, _ways())] * 2, st.tuples(folders(alike=True), _ways([0], [True], _FOLDS)))


@contextmanager
def _target(repository: Repository, way: Way, here: Path) -> Iterator[Path]:
    target = here / "t"
    with pytest.MonkeyPatch.context() as patch, mounted_folding(target, *way.folds) if way.folds else nullcontext():
        target.mkdir(exist_ok=True)
        if way.compared or not way.owners:
            patch.setattr("datamover.data_path.restore.probe_target", lambda *_: Probe())
        if not way.owners:
            patch.setattr(repository.kopia, "_program", str(put_kopia_without_chown(here, patch)))
        yield target


def _block(target: Path, wanted: Tree, number: int) -> set[bytes]:
    """Put something else in the place of some entries, and return them with what is below them."""
    blocked: set[bytes] = set()
    for path in sorted(wanted)[1 :: max(1, len(wanted) // (number or 1))][:number]:
        entry = Path(os.fsdecode(os.fsencode(target) + path))
        # A path may be too long for a single call.
        with suppress(OSError):
            if wanted[path].kind == stat.S_IFDIR:
                entry.parent.mkdir(parents=True, exist_ok=True)
                with entry.open("x") as file:
                    file.write("in the way")
            else:
                (entry / "in the way").mkdir(parents=True)
            blocked.add(path)
    return {path for path in wanted if _is_at(path, blocked)}


def _is_at(path: bytes, others: Collection[bytes]) -> bool:
    """Return whether a path is one of these, or below one."""
    return any((path + b"/").startswith(one + b"/") for one in others)


def _check_lost(wanted: Tree, lost: Collection[bytes], folds: Collection[str]) -> None:
    """Check that a target had a reason to refuse each of these: a character in a name, or one on the way is alike."""
    alike = Counter(map(_fold, wanted))
    for path in lost:
        above = [path[: found.end()] for found in re.finditer(rb"/[^/]+", path)]
        refused = "odd" in folds and re.search(rb'[\x00-\x1f:"*?<>|\\]', path)
        assert refused or any(alike[_fold(one)] > 1 for one in above), path


def _fold(path: bytes) -> str:
    return unicodedata.normalize("NFC", path.decode()).casefold()


def _check_restored(actual: Tree, wanted: Tree, report: str) -> None:
    """Check that a restore has all of a tree, apart from the attributes that the report counts and names."""
    # kopia gives a link a time in microseconds, and a restore of that link alone the exact one.
    found = [*differences(actual, wanted, tolerance_ns=TIME_TOLERANCE_NS if report else 1000)]
    expected = Counter(what for _, what in found)
    counts = Counter({kind: int(number) for kind, number in re.findall(r"the (owner|mode|time) of (\d+)", report)})
    # The target may not have the time either that kopia makes of one that it cannot keep.
    any_time = sum(one.mtime_ns is None for one in wanted.values())
    assert expected["time"] <= counts["time"] <= expected["time"] + any_time, report
    assert counts - Counter(time=counts["time"]) == expected - Counter(time=expected["time"]), report
    paths = {path for path, _ in found}
    assert sum(_show(path) in report for path in paths) >= min(_SHOWN, len(paths)), report


@_many
@given(case=_cases)
async def test_any_tree_is_restored_as_it_was_apart_from_what_is_reported(
    mover_repository: Repository, folder: Path, case: tuple[Folder, Way]
) -> None:
    tree, way = case
    with _created(folder, tree) as (here, before), _target(mover_repository, way, here) as target:
        outcome = restorable(before, here / "v")
        if outcome.refused:
            with pytest.raises(DataPathError) as failed:
                await _back_up(mover_repository, here)
            assert any(_show(path) in str(failed.value) for path in outcome.refused)
            return
        backup, report = await _back_up(mover_repository, here)
        _check_report(report, outcome)
        assert backup.empty_snapshot is (len(outcome.tree) == 1)
        assert backup.total_bytes == sum(found.size_bytes for found in outcome.tree.values())
        missing, incomplete = _block(target, outcome.tree, way.blocked), ""
        parameters = way.parameters(backup.snapshot_id, target, len(outcome.tree))
        try:
            report = (await restore(mover_repository, parameters, restore_data_path())).note or ""
        except IncompleteRestoreError as e:
            report = incomplete = str(e)
        actual = {path: found for path, found in inspect(target).items() if not _is_at(path, missing)}
        if way.folds:
            missing = outcome.tree.keys() - actual.keys()
            _check_lost(outcome.tree, missing, way.folds)
        assert bool(missing) is bool(incomplete)
        assert f": {len(missing)} missing: " in incomplete or not missing, incomplete
        _check_restored(actual, {path: one for path, one in outcome.tree.items() if path not in missing}, report)


@pytest.mark.thorough
@_few
@given(tree=folders(), other=folders(), incremental=st.booleans(), content=st.booleans())
async def test_any_tree_becomes_any_other_one_in_place_and_then_nothing_is_written(
    mover_repository: Repository, folder: Path, tree: Folder, other: Folder, *, incremental: bool, content: bool
) -> None:
    # In their place, the probe finds something that it did not make, so that nothing may be deleted.
    assume(not any(name.startswith(b".nodeagent-probe") for name in (*tree.entries, *other.entries)))
    with _created(folder, tree) as (here, before):
        outcome = restorable(before, here / "v")
        if outcome.refused:
            return
        backup, _ = await _back_up(mover_repository, here)
        create(here / "t", other)
        rule = InPlace(incremental=incremental, delete_extra_files=True, compare_content=content)
        for written in (None, 0) if incremental else (None,):
            result = await restore_volume(mover_repository, backup.snapshot_id, here / "t", in_place=rule)
            assert result.note is UNSET
            all_found = inspect(here / "t").items()
            found = {path: one for path, one in all_found if path in outcome.tree or not _stays(path, one.kind)}
            # kopia gives a link a time in microseconds, and a restore of that link alone the exact one.
            assert [*differences(found, outcome.tree, tolerance_ns=1000)] == []
            assert written is None or outcome.far or result.incremental_bytes == written


def _stays(path: bytes, kind: int) -> bool:
    return kind not in {stat.S_IFDIR, stat.S_IFREG, stat.S_IFLNK} or is_kept_at_root(os.fsdecode(path.split(b"/")[1]))

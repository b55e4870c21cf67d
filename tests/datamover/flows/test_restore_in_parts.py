"""A snapshot with more entries than the memory limit suffices for is restored in parts, with the same result."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import pytest

from core.errors import IncompleteRestoreError
from core.models.transfer_settings import InPlace
from datamover.data_path.restore import RestoreParameters, restore
from datamover.kopia.repository import Repository
from tests.datamover.support.backup_movers import ONE_OPEN
from tests.datamover.support.data_paths import back_up_volume, restore_data_path, restore_parameters
from tests.datamover.support.trees import describe_tree

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

_PLACEHOLDER = ".kopia-entry"


@pytest.fixture
async def parameters(record: Path, mover_repository: Repository, tree: Path, tmp_path: Path) -> RestoreParameters:
    """Restore a backup of the tree."""
    result = await back_up_volume(mover_repository, tree)
    record.write_text("")
    return restore_parameters(result.snapshot_id, tmp_path / "target")


def _restored(record: Path, parameters: RestoreParameters) -> Sequence[list[str]]:
    """Return the paths in the snapshot that each run of kopia restored, up to the first space in each."""
    runs = []
    for line in record.read_text().splitlines():
        words = line.split(" ")
        if "restore" in words:
            paths = words[words.index("restore") + 1 :]
            placeholders = [one for one in paths if one.endswith(_PLACEHOLDER)]
            target = f"{parameters.target}/"
            sources = [one.removeprefix(target).removesuffix(_PLACEHOLDER) for one in placeholders] or paths[:1]
            runs.append([one.removeprefix(parameters.snapshot_id).lstrip("/") for one in sources])
    return runs


_BELOW_A = {23: [["a"]], 22: [["a/b"]], 5: [["a/b/c/file"]] * 20}
"""What is restored of the directory by each run; kopia counts a directory itself."""


@pytest.mark.sample("22", "5")
@pytest.mark.parametrize("fitting", _BELOW_A)
async def test_the_result_is_that_of_one_kopia(
    record: Path, mover_repository: Repository, tree: Path, parameters: RestoreParameters, fitting: int
) -> None:
    data_path = restore_data_path(warn := AsyncMock())
    result = await restore(mover_repository, replace(parameters, fitting_entries=fitting), data_path)
    assert describe_tree(parameters.target) == describe_tree(tree)
    if not ONE_OPEN:
        runs = _restored(record, parameters)
        below = [[path for path in run if f"{path}/".startswith("a/")] for run in runs]
        assert list(filter(None, below)) == _BELOW_A[fitting]
        assert any({"sticky", "cache"} <= set(run) for run in runs)
    warn.assert_not_awaited()
    assert (await data_path.meter.read()).done_bytes == result.total_bytes


@pytest.mark.parametrize("fitting", [22, 5])
async def test_the_parts_around_an_entry_that_the_target_refuses_are_restored(
    mover_repository: Repository, tree: Path, parameters: RestoreParameters, fitting: int
) -> None:
    for name in ("cache/kept", "a/b/c/file 1"):
        (parameters.target / name).mkdir(parents=True)
    with pytest.raises(IncompleteRestoreError, match=r"2 missing: cache/kept .*; a/b/c/file 1 "):
        await restore(mover_repository, replace(parameters, fitting_entries=fitting), restore_data_path())
    assert not [*parameters.target.rglob(f"*{_PLACEHOLDER}")]
    found, expected = describe_tree(parameters.target), describe_tree(tree)
    for name in ("cache/kept", "a/b/c/file 1"):
        del found[name], expected[name]
    assert found == expected


@pytest.mark.parametrize("rule", [None, InPlace()], ids=["new volume", "in place"])
async def test_an_interrupted_restore_without_a_list_leaves_no_placeholder(
    mover_repository: Repository, tree: Path, parameters: RestoreParameters, rule: InPlace | None
) -> None:
    parameters = replace(parameters, fitting_entries=22, in_place=rule)
    data_path = restore_data_path()
    data_path.meter.finish_part = Mock(side_effect=RuntimeError("interrupted"))  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="interrupted"):
        await restore(mover_repository, parameters, data_path)
    # As a mover that was killed leaves them.
    (parameters.target / f"left{_PLACEHOLDER}").write_text('{"name": "left", "type": "d"}')
    if rule is not None:
        # And after a power loss.
        (parameters.target / "a" / f"left{_PLACEHOLDER}").write_text("")
    (mine := parameters.target / "a" / f"mine{_PLACEHOLDER}").write_text("{}")
    # Or another restore in place, after a canceled one.
    await restore(mover_repository, replace(parameters, again=rule is None), restore_data_path())
    mine.unlink()
    assert describe_tree(parameters.target) == describe_tree(tree)


async def test_the_next_attempt_leaves_files_alone_that_the_volume_had_before(
    mover_repository: Repository, parameters: RestoreParameters
) -> None:
    """They are named like placeholders."""
    parameters.target.mkdir()
    (empty := parameters.target / f"empty{_PLACEHOLDER}").touch()
    (full := parameters.target / f"full{_PLACEHOLDER}").write_text('{"name": "full", "type": "d"}')
    await restore(mover_repository, replace(parameters, in_place=InPlace(), again=True), restore_data_path())
    assert full.exists()
    await restore(mover_repository, replace(parameters, again=True), restore_data_path())
    assert empty.exists()

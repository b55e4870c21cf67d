"""A snapshot with more entries than the memory limit suffices for is restored in parts, with the same result."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import pytest

from core.contract import VolumeMode
from datamover.data_path.backup import BackupParameters, back_up
from datamover.data_path.restore import RestoreParameters, restore
from datamover.data_path.resume import ResumeSettings
from datamover.kopia.progress import Direction
from datamover.kopia.repository import Repository
from tests.datamover.support.commandlines import record_kopia
from tests.datamover.support.data_paths import backup_data_path, build_data_path
from tests.datamover.support.trees import describe_tree

pytestmark = pytest.mark.processes


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return record_kopia(tmp_path, monkeypatch)


@pytest.fixture
async def parameters(record: Path, mover_repository: Repository, tree: Path, tmp_path: Path) -> RestoreParameters:
    """Restore a backup of the tree."""
    request = BackupParameters(tree, VolumeMode.FILESYSTEM, "some/volume", parallel=2)
    result = await back_up(mover_repository, request, backup_data_path())
    record.write_text("")
    return RestoreParameters(result.snapshot_id, tmp_path / "target", VolumeMode.FILESYSTEM, workers=2)


def _restored(record: Path, snapshot_id: str) -> Sequence[str]:
    """Return the paths in the snapshot of the restores that kopia was run for."""
    words = [line.split(" ") for line in record.read_text().splitlines()]
    sources = [line[line.index("restore") + 1] for line in words if "restore" in line]
    return [source.removeprefix(snapshot_id).lstrip("/") for source in sources]


_PARTS_BELOW_A = {23: ["a"], 22: ["a/b"], 5: ["a/b/c/file"] * 20}
"""By how many entries fit; kopia counts the directory itself, and the line shows a path up to its first space."""


@pytest.mark.parametrize("fitting", _PARTS_BELOW_A)
async def test_the_result_is_that_of_one_kopia(
    record: Path, mover_repository: Repository, tree: Path, parameters: RestoreParameters, fitting: int
) -> None:
    data_path = build_data_path(Direction.RESTORE, warn := AsyncMock())
    result = await restore(mover_repository, replace(parameters, fitting_entries=fitting), data_path)
    assert describe_tree(parameters.target) == describe_tree(tree)
    paths = _restored(record, parameters.snapshot_id)
    assert [path for path in paths if f"{path}/".startswith("a/")] == _PARTS_BELOW_A[fitting]
    warn.assert_not_awaited()
    assert (await data_path.meter.read()).done_bytes == result.total_bytes


async def test_a_volume_that_a_pod_uses_is_restored_as_a_whole(
    record: Path, mover_repository: Repository, tree: Path, parameters: RestoreParameters
) -> None:
    """Between two parts, the pod could replace a directory."""
    data_path = build_data_path(Direction.RESTORE, warn := AsyncMock())
    await restore(mover_repository, replace(parameters, fitting_entries=5, in_use=True), data_path)
    assert describe_tree(parameters.target) == describe_tree(tree)
    assert _restored(record, parameters.snapshot_id) == [""]
    warn.assert_awaited_once()
    assert "the limit suffices for about 5" in warn.await_args_list[0].args[0]


async def test_an_interrupted_restore_in_parts_continues(
    record: Path, mover_repository: Repository, tree: Path, parameters: RestoreParameters
) -> None:
    parameters = replace(parameters, fitting_entries=5, resume=ResumeSettings("uid", timedelta(seconds=5)))
    data_path = build_data_path(Direction.RESTORE, AsyncMock())
    data_path.meter.finish_part = Mock(side_effect=RuntimeError("interrupted"))  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="interrupted"):
        await restore(mover_repository, parameters, data_path)
    await restore(mover_repository, replace(parameters, again=True), build_data_path(Direction.RESTORE, AsyncMock()))
    assert describe_tree(parameters.target) == describe_tree(tree)
    assert "--skip-existing" in record.read_text()

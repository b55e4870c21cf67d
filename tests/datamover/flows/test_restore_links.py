"""Links that are in the target of a restore, in the place of what the kopia snapshot has there."""

import shutil
from pathlib import Path

import pytest

from core.contract import VolumeMode
from datamover.data_path.backup import BackupParameters, back_up
from datamover.data_path.restore import RestoreParameters, restore
from datamover.kopia.repository import Repository
from tests.datamover.support.data_paths import backup_data_path, restore_data_path
from tests.datamover.support.unconfined import leave_unconfined

pytestmark = pytest.mark.processes


async def _snapshot(repository: Repository, volume: Path) -> str:
    parameters = BackupParameters(volume, VolumeMode.FILESYSTEM, "some/volume", parallel=2)
    return (await back_up(repository, parameters, backup_data_path())).snapshot_id


async def _restore(repository: Repository, snapshot_id: str, target: Path) -> None:
    parameters = RestoreParameters(snapshot_id, target, VolumeMode.FILESYSTEM, workers=2)
    await restore(repository, parameters, restore_data_path())


async def test_a_storage_that_does_not_answer_while_links_are_looked_up_is_waited_for(
    mover_repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume, program = tmp_path / "volume", tmp_path / "bin" / "kopia"
    (volume / "a").mkdir(parents=True)
    snapshot_id = await _snapshot(mover_repository, volume)
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "a").symlink_to("/etc")
    program.parent.mkdir()
    program.write_text(
        f"""#!/bin/sh
case " $* " in *" show k"*)
    if mkdir {tmp_path}/failed; then echo "dial tcp: connection refused" >&2; exit 1; fi
esac
exec {shutil.which("kopia")} "$@"
"""
    )
    program.chmod(0o755)
    leave_unconfined(monkeypatch)
    mover_repository.kopia._program = str(program)
    await _restore(mover_repository, snapshot_id, tmp_path / "target")
    assert (tmp_path / "failed").exists()
    assert not (tmp_path / "target" / "a").is_symlink()

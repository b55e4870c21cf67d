"""How data movers back files up in the tests: `MOVER_TESTS_BACKUP=one-open` replaces the default."""

import os
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Final

import pytest

from core.contract import BackupMover
from datamover.data_path import backup
from datamover.data_path.one_open_runs import open_run
from datamover.data_path.run import DataPath
from datamover.data_path.snapshot_runs import BackupParameters, SnapshotRun
from datamover.kopia.repository import Repository

_WANTED: Final = BackupMover(os.environ.get("MOVER_TESTS_BACKUP", BackupMover.PLAIN))

ONE_OPEN: Final = _WANTED is BackupMover.ONE_OPEN

BACKUP_VERB: Final = "mover-backup" if ONE_OPEN else "snapshot create"
"""The command of the kopia that reads the volume."""

plain_only = pytest.mark.skipif(ONE_OPEN, reason="the other way differs in this")


def use_backup_mover(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let backups that name no other way be of the wanted one."""

    def open_wanted(
        repository: Repository, parameters: BackupParameters, data_path: DataPath, device: tuple[int, int] | None
    ) -> AbstractAsyncContextManager[SnapshotRun]:
        if parameters.mover is BackupMover.PLAIN:
            parameters = replace(parameters, mover=_WANTED)
        return open_run(repository, parameters, data_path, device)

    monkeypatch.setattr(backup, "open_run", open_wanted)

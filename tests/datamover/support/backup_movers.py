"""How data movers run kopia in the tests: as by default, or by `MOVER_TESTS_BACKUP=plain`."""

import os
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Final

import pytest

from core.contract import MoverMethod
from datamover.data_path import backup, restore
from datamover.data_path.one_open_runs import open_run
from datamover.data_path.restore import RestoreParameters
from datamover.data_path.run import DataPath
from datamover.data_path.snapshot_runs import BackupParameters, SnapshotRun
from datamover.kopia.repository import Repository

_VARIABLE: Final = "MOVER_TESTS_BACKUP"

WANTED: Final = MoverMethod(os.environ.get(_VARIABLE, MoverMethod.ONE_OPEN))

ONE_OPEN: Final = WANTED is MoverMethod.ONE_OPEN

BACKUP_VERB: Final = "mover-backup" if ONE_OPEN else "snapshot create"
"""The command of the kopia that reads the volume."""

RESTORE_VERB: Final = "mover-restore" if ONE_OPEN else "restore"
"""The command of the kopia that writes files."""

plain_only = pytest.mark.plain
"""The other way differs in this."""


def use_plain_mover(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let transfers that name no other way be plain, also in processes that tests start."""
    monkeypatch.setenv(_VARIABLE, MoverMethod.PLAIN)


def use_backup_mover(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let transfers that name no other way be of the wanted one."""
    opening = restore._opening

    def open_wanted(
        repository: Repository, parameters: BackupParameters, data_path: DataPath, device: tuple[int, int] | None
    ) -> AbstractAsyncContextManager[SnapshotRun]:
        if parameters.mover is MoverMethod.PLAIN:
            parameters = replace(parameters, mover=WANTED)
        return open_run(repository, parameters, data_path, device)

    def open_restore(
        repository: Repository, parameters: RestoreParameters, data_path: DataPath
    ) -> AbstractAsyncContextManager[None]:
        if parameters.mover is MoverMethod.PLAIN:
            parameters = replace(parameters, mover=WANTED)
        return opening(repository, parameters, data_path)

    monkeypatch.setattr(backup, "open_run", open_wanted)
    monkeypatch.setattr(restore, "_opening", open_restore)

"""kopia's maintenance in one repository, by a real kopia."""

import fcntl
from pathlib import Path

import pytest

from core.clock import SystemClock
from core.contract import MaintenanceMode
from datamover.kopia.maintenance import Maintenance, MaintenanceError
from datamover.kopia.repository import Repository
from datamover.kopia.stalls import Watchdog
from datamover.kopia.storage_calls import WaitLog
from tests.datamover.support.plainkopia import PlainKopia

pytestmark = pytest.mark.processes


@pytest.fixture
async def maintenance(mover_repository: Repository) -> Maintenance:
    await mover_repository.connect()
    return Maintenance(mover_repository, Watchdog(SystemClock(), WaitLog().warn, mover_repository.probe))


async def test_a_lock_that_another_kopia_of_this_pod_holds_is_no_success(
    maintenance: Maintenance, mover_repository: Repository
) -> None:
    """kopia says nothing then, and exits with code 0."""
    lock = mover_repository._work_dir.config_file.with_suffix(".config.mlock")
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(MaintenanceError, match=r"^locked: another kopia of this pod holds the maintenance lock$"):
            await maintenance.run(MaintenanceMode.FULL, epochs=True)
    assert (await maintenance.read_info()).starts == []
    await maintenance.run(MaintenanceMode.FULL, epochs=True)


async def test_what_a_repository_holds_is_counted(
    maintenance: Maintenance, kopia: PlainKopia, tree: Path, repository: Path
) -> None:
    assert await maintenance.count_contents() == 1
    kopia.run("snapshot", "create", str(tree))
    files = [file for file in repository.rglob("*.f") if file.is_file()]
    assert await maintenance.measure_bucket() == (len(files), sum(file.stat().st_size for file in files))
    assert await maintenance.count_contents() > 20
    assert await maintenance.count_index_blobs() == 2

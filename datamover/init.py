"""The pod that makes a backup repository usable: connects to it, or creates it first.

Knows which BackupRepository, and that nothing is created in a read-only location. Does not
know who waits for the result.
"""

import logging

from core.contract import InitResult
from core.errors import AgentError, RepositoryError
from datamover.canceller import Canceller, run_unless_canceled
from datamover.ending import Ending, build_ending, build_failure, leave_message
from datamover.repository import NotInitializedError, Repository
from datamover.scrub import Scrubber
from datamover.surroundings import Surroundings, open_location
from datamover.workfolder import open_work_folder

__all__ = ["run_init"]

_logger = logging.getLogger(__name__)


async def run_init(name: str, around: Surroundings) -> int:
    """Make the BackupRepository's kopia repository usable; return the exit code.

    The termination message is the InitResult, or why there is none.
    """
    scrubber = Scrubber()
    canceller = Canceller()
    canceller.heed(around.stop)
    try:
        ending = await run_unless_canceled(lambda: _initialize(name, around, scrubber), canceller)
    except Exception as e:
        ending = build_failure(e, scrubber)
        _logger.log(logging.DEBUG if isinstance(e, AgentError) else logging.ERROR, "where it ended", exc_info=True)
    leave_message(ending, around.termination_file)
    return ending.exit_code


async def _initialize(name: str, around: Surroundings, scrubber: Scrubber) -> Ending:
    reader = around.reader
    wanted = await reader.repository(name)
    location = await reader.location(wanted.spec.backup_storage_location)
    with open_work_folder(around.environment) as folder:
        repository = await open_location(around.tuned(), location, wanted, folder=folder, scrubber=scrubber)
        if location.read_only:
            await _connect_read_only(repository)
            unique_id = await repository.unique_id()
        else:
            unique_id = await repository.ensure()
    return build_ending(InitResult(unique_id=unique_id).to_json())


async def _connect_read_only(repository: Repository) -> None:
    try:
        await repository.connect(read_only=True)
    except NotInitializedError as e:
        raise RepositoryError(f"{e}, and its BackupStorageLocation is read-only: none is created") from e

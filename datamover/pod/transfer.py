"""A mover pod's life: wait for its custom resource, open the repository, move the data, tell the end.

Knows the order of things and who is told what. Does not know kopia's arguments or the API's
forms: the modules it puts together do.
"""

import asyncio
import logging
from typing import Final

from core.clock import Deadline
from core.contract import BackupResult, DataPathReason, ProgressMessage, RestoreResult
from core.errors import AgentError, RepositoryError
from core.kube.events import EventRecorder, ObjectRef
from core.models.storage import BackupRepository
from core.models.transfers import Transfer
from datamover.arguments import PodOptions
from datamover.data_path.backup import BackupParameters, back_up
from datamover.data_path.restore import RestoreParameters, restore, restore_workers, write_done_file
from datamover.data_path.run import DataPath, Watchdog, read_stall_limits
from datamover.kinds import TRANSFER_KINDS, BackupPlan, RestorePlan, UploaderSettings, parse_settings, plan_of
from datamover.kopia.progress import Direction, Meter
from datamover.kopia.repository import Repository
from datamover.pod.cluster import Surroundings, open_location
from datamover.pod.follower import Followed, TransferFollower
from datamover.pod.reporting import Ending, Reporter, build_ending, build_failure, leave_message
from datamover.runtime.cancellation import Canceller, run_beside, run_unless_canceled
from datamover.runtime.redact import Redactor
from datamover.runtime.work_dir import WorkFolder, open_work_folder

__all__ = ["PodTransfer"]

_logger = logging.getLogger(__name__)

_CLOSING_SECONDS: Final = {DataPathReason.COMPLETED: 5.0, DataPathReason.FAILED: 5.0, DataPathReason.CANCELED: 1.0}
"""What telling the end by Events may take; the termination message is written before."""


class PodTransfer:
    """One load, from the pod's start to its termination message."""

    def __init__(self, options: PodOptions, around: Surroundings) -> None:
        self._options = options
        self._around = around
        self._redactor = Redactor()
        self._reporter: Reporter | None = None
        self._last: ProgressMessage | None = None

    async def run(self) -> int:
        """Move the data and return the exit code; the result is in the termination message."""
        around = self._around
        canceller = Canceller()
        canceller.heed(around.stop)
        try:
            # The cache lies in the pod's own volumes, and goes with them.
            with open_work_folder(around.environment, self._options.cache_volume, leaves_cache=True) as folder:
                ending = await run_unless_canceled(lambda: self._load(folder, canceller), canceller)
        except Exception as e:
            ending = build_failure(e, self._redactor)
            _logger.log(logging.DEBUG if isinstance(e, AgentError) else logging.ERROR, "where it ended", exc_info=True)
        leave_message(ending, around.termination_file)
        await self._tell(ending)
        return ending.exit_code

    async def _load(self, folder: WorkFolder, canceller: Canceller) -> Ending:
        """Follow the custom resource while the data is moved."""
        around = self._around
        followed = Followed(TRANSFER_KINDS[self._options.kind_flag], around.namespace, self._options.name)
        follower = TransferFollower(around.client, followed, clock=around.clock, canceller=canceller)
        return await run_beside(follower.run, self._move_when_started(follower, folder), name="load-follower")

    async def _move_when_started(self, follower: TransferFollower, folder: WorkFolder) -> Ending:
        around = self._around
        cr = await follower.wait_in_progress()
        recorder = EventRecorder(around.client, around.clock, component=cr.name, host=around.node)
        self._reporter = reporter = Reporter(recorder, ObjectRef.of(cr), around.clock)
        plan = plan_of(cr)
        meter = Meter(around.clock, Direction.UPLOAD if isinstance(plan, BackupPlan) else Direction.RESTORE)
        # From here on, so that a repository that takes long to open does not look like a mover that hangs.
        result = await run_beside(
            lambda: reporter.follow(meter), self._move(cr, plan, folder, meter=meter), name="reports"
        )
        return build_ending(result.to_json())

    async def _move(
        self, cr: Transfer, plan: BackupPlan | RestorePlan, folder: WorkFolder, *, meter: Meter
    ) -> BackupResult | RestoreResult:
        """Return the result of the load, once its data is where it belongs."""
        around = self._around
        settings = parse_settings(cr.settings)
        limits = read_stall_limits(around.environment)
        if settings.unknown:
            await self._warn(f"settings not known here are ignored: {', '.join(settings.unknown)}")
        workers = restore_workers(settings, around.limits) if isinstance(plan, RestorePlan) else 0
        repository = await self._open(cr, folder, workers)
        transfer = DataPath(meter, Watchdog(around.clock, self._warn, repository.ask, limits))
        result: BackupResult | RestoreResult
        match plan:
            case BackupPlan():
                result = await back_up(repository, self._backup_request(plan, settings), transfer)
            case RestorePlan():
                request = self._restore_request(plan, settings, workers)
                result = await restore(repository, request, transfer)
                if plan.done_owner_uid:
                    write_done_file(self._options.volume, plan.done_owner_uid)
        self._last = meter.finish(result.total_bytes)
        return result

    async def _open(self, cr: Transfer, folder: WorkFolder, workers: int) -> Repository:
        """Return the load's repository, not yet connected: for a restore by so many workers, or for a backup."""
        around = self._around
        reader = around.reader
        location = await reader.location(cr.spec.backup_storage_location)
        if not workers and location.read_only:
            raise RepositoryError(f"BackupStorageLocation {location.name} is read-only: nothing is backed up to it")
        ready = await self._ready_repository(cr.repository_namespace, location.name)
        return await open_location(around.tuned(workers), location, ready, folder=folder, redactor=self._redactor)

    async def _ready_repository(self, volume_namespace: str, location: str) -> BackupRepository:
        """Return the Ready BackupRepository; a wait for it is told, and its end too."""
        around, waited = self._around, False

        async def tell(message: str) -> None:
            nonlocal waited
            waited = True
            if self._reporter is not None:
                await self._reporter.waits(message)

        deadline = Deadline.after(around.clock, self._options.resource_timeout)
        ready = await around.reader.ensure_repository(volume_namespace, location, deadline=deadline, on_wait=tell)
        if waited and self._reporter is not None:
            await self._reporter.goes_on(f"BackupRepository {around.namespace}/{ready.name} is ready")
        return ready

    def _backup_request(self, plan: BackupPlan, settings: UploaderSettings) -> BackupParameters:
        return BackupParameters(
            volume=self._options.volume,
            mode=self._options.mode,
            source=plan.source,
            parallel=settings.parallel_upload or self._around.limits.cpus,
            tags=plan.tags,
            frugal=self._around.limits.frugal,
        )

    def _restore_request(self, plan: RestorePlan, settings: UploaderSettings, workers: int) -> RestoreParameters:
        return RestoreParameters(
            snapshot_id=plan.snapshot_id,
            target=self._options.volume,
            mode=self._options.mode,
            workers=workers,
            sparse=settings.write_sparse_files,
        )

    async def _warn(self, message: str) -> None:
        if self._reporter is not None:
            await self._reporter.warn(message)

    async def _tell(self, ending: Ending) -> None:
        """Tell the end by Events, as far as there is time for it."""
        reporter = self._reporter
        if reporter is None:
            return
        try:
            async with asyncio.timeout(_CLOSING_SECONDS[ending.reason]):
                if self._last is not None:
                    await reporter.progress(self._last)
                await reporter.ended(ending.reason, ending.message)
        except TimeoutError:
            _logger.warning("there was no time to tell the end by Events")

"""The commands that the node agent starts for a repository or a location, rather than for a transfer."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from core import mover_specs
from core.contract import InitResult, LocationResult
from core.errors import AgentError, ConfigError, DataPathError, RepositoryError
from core.kube.events import EventRecorder, ObjectRef
from core.models.job_output import JobOutput
from core.models.storage import BackupRepository
from core.models.transfer_settings import PLAN_LINE, EndedPlan, InPlace
from datamover.data_path.in_place_preview import RestorePlanner
from datamover.data_path.run import DataPath
from datamover.kopia.maintenance import Maintenance, parse_full_interval
from datamover.kopia.progress import Direction, Meter
from datamover.kopia.repository import NotInitializedError, Repository
from datamover.kopia.stalls import StallLimits
from datamover.kopia.storage_calls import Waits
from datamover.pod.cluster import PodContext, RepositoryAccess, open_access, resolve_storage
from datamover.pod.file_stream import FileSender, list_files, open_snapshot
from datamover.pod.maintenance import build_maintenance_failure, maintain
from datamover.pod.reporting import Reporter, Termination, build_failure, build_success, write_termination_message
from datamover.pod.snapshot_deletion import delete_transfers
from datamover.pod.snapshot_report import list_snapshots, report_snapshots
from datamover.pod.snapshot_verification import verify_snapshots
from datamover.runtime.cancellation import Canceler, run_unless_canceled
from datamover.runtime.work_dir import open_work_dir

_logger = logging.getLogger(__name__)

_VALIDATION_LIMITS: Final = StallLimits(timeout=timedelta(seconds=20))
"""How long a storage may not answer: the next validation follows soon."""

_VALIDATION_SECONDS: Final = 60.0
"""For the whole validation, also of a storage that answers slowly."""


async def run_storage_command(spec: mover_specs.MoverSpec, context: PodContext) -> int:
    """Run the command until a signal arrives, and return its exit code; the termination message is its result."""
    run, what = _COMMANDS[type(spec)]
    fail = build_maintenance_failure if isinstance(spec, mover_specs.MaintainRepository) else build_failure
    canceler = Canceler()
    canceler.cancel_on(context.stop)
    try:
        termination = await run_unless_canceled(lambda: run(spec, context), canceler)
    except Exception as e:
        termination = fail(e, context.redactor)
        _logger.log(logging.DEBUG if isinstance(e, AgentError) else logging.ERROR, "%s failed", what, exc_info=True)
    write_termination_message(termination, context.termination_file)
    return termination.exit_code


async def _initialize(spec: mover_specs.InitRepository, context: PodContext) -> Termination:
    wanted, location = await context.reader.place(spec.name)
    recorder = EventRecorder(context.client, context.clock, component=spec.name, host=context.node)
    reporter = Reporter(recorder, ObjectRef.of(wanted), context.clock)
    with open_access(context.with_go_settings(), reporter) as access:
        repository = await access.resolve(location, wanted)
        if location.read_only:
            await _connect_read_only(repository)
            unique_id = (await repository.status()).unique_id
        else:
            unique_id = await repository.ensure(spec.block_hash)
        if repository.created:
            await _set_full_interval(wanted, Maintenance(repository))
    return build_success(InitResult(unique_id=unique_id, created=repository.created).to_json())


async def _set_full_interval(wanted: BackupRepository, maintenance: Maintenance) -> None:
    """Set the full interval of the BackupRepository, if any; after a failure, the leader has maintenance set it."""
    if interval := parse_full_interval(wanted.spec.repository_config):
        try:
            await maintenance.set_full_interval(interval)
        except DataPathError as e:
            _logger.warning("cannot set the interval of full maintenance: %s", e)


async def _connect_read_only(repository: Repository) -> None:
    try:
        await repository.connect(read_only=True)
    except NotInitializedError as e:
        raise RepositoryError(f"{e}; cannot create it: its BackupStorageLocation is read-only") from e


async def _validate(spec: mover_specs.ValidateLocation, context: PodContext) -> Termination:
    location = await context.reader.location(spec.name)
    storage = await resolve_storage(context, location)
    if spec.keys_only and storage.needs_pod:
        return build_success(LocationResult(needs_pod=True).to_json())
    with open_work_dir(context.environment) as work_dir:
        access = RepositoryAccess(context, work_dir, Waits(context.clock, _VALIDATION_LIMITS))
        try:
            async with asyncio.timeout(_VALIDATION_SECONDS):
                await access.check_storage(storage)
        except TimeoutError as e:
            raise RepositoryError(f"{storage.description}: timed out after {_VALIDATION_SECONDS:.0f} s") from e
    return build_success(LocationResult().to_json())


async def _plan_restore(spec: mover_specs.PlanRestore, context: PodContext) -> Termination:
    """Write the RestorePlan as a line, and return the EndedPlan."""
    if spec.volume_path is None:
        raise ConfigError("plan-restore needs --volume-path")
    rule = InPlace(incremental=spec.incremental, delete_extra_files=spec.delete_extra_files)
    output = JobOutput()
    async with open_snapshot(spec, context) as (repository, snapshot):
        if snapshot.fault:
            raise DataPathError(f"cannot restore snapshot {spec.snapshot}: {snapshot.fault}")
        data_path = DataPath(Meter(context.clock, Direction.RESTORE), repository.watchdog)
        planner = RestorePlanner(repository, snapshot, Path(spec.volume_path), rule, data_path)
        output.write(PLAN_LINE, await planner.plan())
    return build_success(output.seal(EndedPlan(entries=planner.entries)))


_Command = Callable[[Any, PodContext], Coroutine[Any, Any, Termination]]
_COMMANDS: Final[Mapping[type[mover_specs.MoverSpec], tuple[_Command, str]]] = {
    mover_specs.InitRepository: (_initialize, "repository initialization"),
    mover_specs.ValidateLocation: (_validate, "validation"),
    mover_specs.MaintainRepository: (maintain, "repository maintenance"),
    mover_specs.ReportSnapshots: (report_snapshots, "snapshot report"),
    mover_specs.ListSnapshots: (list_snapshots, "list of snapshots"),
    mover_specs.VerifySnapshots: (verify_snapshots, "verification"),
    mover_specs.PlanRestore: (_plan_restore, "plan of a restore"),
    mover_specs.DeleteSnapshots: (delete_transfers, "deletion of snapshots"),
    mover_specs.ListFiles: (list_files, "list of files"),
    mover_specs.SendFiles: (lambda spec, context: FileSender(spec, context).run(), "sending of files"),
}

"""A pod's command, and of a transfer: wait for InProgress, open the repository, move the data, report the end."""

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Final

from core.clock import Deadline, SystemClock
from core.contract import (
    EVENTS_VARIABLE,
    BackupResult,
    DataPathReason,
    MoverVerb,
    ProgressMessage,
    RestoreResult,
    VolumeMode,
)
from core.errors import AgentError, CanceledError, ConfigError, FencedError, RepositoryError
from core.kube.client import KubeClient, Selection
from core.kube.events import EventRecorder, ObjectRef
from core.kube.transport import Retry
from core.models.backups import Shrinkage
from core.models.names import CLUSTER_TAG, NODE_LABEL
from core.models.phases import Phase
from core.models.storage import BackupStorageLocation
from core.models.transfer_settings import BandwidthLimits, Compression
from core.models.transfers import Transfer
from core.models.units import format_duration
from core.redact import Redactor
from datamover.arguments import PodOptions, StorageCommand
from datamover.bandwidth.proxy import MOST_PARALLEL, BandwidthProxy
from datamover.data_path.backup import back_up
from datamover.data_path.checkpoints import BackupAttempt
from datamover.data_path.finished import take_done_file, write_done_file
from datamover.data_path.restore import RestoreParameters, restore, restore_workers
from datamover.data_path.resume import ResumeSettings, read_list_interval
from datamover.data_path.run import DataPath
from datamover.data_path.snapshot_runs import BackupParameters
from datamover.kinds import NO_PARENT, TRANSFER_KINDS, BackupPlan, MoverKind, UploaderSettings, parse_settings, plan_of
from datamover.kopia.backup_process import GracefulStop, read_checkpoint_grace
from datamover.kopia.progress import Direction, Meter
from datamover.kopia.repository import Repository
from datamover.kopia.snapshots import START_TOLERANCE, read_checkpoint_interval
from datamover.kopia.stalls import read_stall_limits
from datamover.kopia.storage_calls import Waits
from datamover.pod.api_transport import pod_transport
from datamover.pod.cluster import FORBIDDEN_SECONDS, PodContext, RepositoryAccess, build_changes, check_mounted
from datamover.pod.follower import Fence, TransferFollower, WatchedTransfer, exit_fenced, read_fence_timeout
from datamover.pod.reporting import (
    Reporter,
    Termination,
    build_failure,
    build_success,
    store_termination_message,
    write_termination_message,
)
from datamover.runtime.cancellation import Canceler, run_beside, run_unless_canceled
from datamover.runtime.confinement import find_means, report_means
from datamover.runtime.resources import read_limits
from datamover.runtime.signals import StopSignal
from datamover.runtime.work_dir import WorkDir, open_work_dir

_logger = logging.getLogger(__name__)

_Move = Callable[[], Coroutine[Any, Any, BackupResult | RestoreResult]]

_FINAL_EVENTS_SECONDS: Final = {DataPathReason.COMPLETED: 5.0, DataPathReason.FAILED: 5.0, DataPathReason.CANCELED: 1.0}
"""How long recording the last Events may take; the termination message is written before."""


class PodTransfer:
    """One transfer, from the start of its pod to the termination message."""

    def __init__(self, options: PodOptions, context: PodContext) -> None:
        self._options = options
        self._kind = TRANSFER_KINDS[options.kind_flag]
        self._context = context
        self._reporter: Reporter | None = None
        self._last: ProgressMessage | None = None
        self._result: BackupResult | RestoreResult | None = None
        self._stop: GracefulStop | None = None

    async def run(self) -> int:
        """Move the data and return the exit code; the result is in the termination message."""
        context = self._context
        canceler = Canceler()
        try:
            self._stop = GracefulStop(canceler, self._read_grace(), self._announce)
            self._stop.listen(context.stop)
            options, in_place = self._options, find_means().in_place
            volume, limit = options.cache_volume, options.cache_limit_mib
            # The cache is in a volume of the pod and is deleted with it.
            with open_work_dir(
                context.environment, cache_volume=volume, cache_limit_mib=limit, keep_cache=True, apart=in_place
            ) as work_dir:
                try:
                    termination = await run_unless_canceled(lambda: self._run(work_dir, canceler), canceler)
                except AgentError as e:
                    # Too late, while the reports and the watch were ending. A later attempt deletes the snapshot.
                    if self._result is None or isinstance(e, FencedError):
                        raise
                    termination = build_success(self._result.to_json())
        except Exception as e:
            termination = build_failure(e, context.redactor)
            level = logging.DEBUG if isinstance(e, AgentError) else logging.ERROR
            _logger.log(level, "data mover failed", exc_info=True)
        write_termination_message(termination, context.termination_file)
        await self._report(termination)
        return termination.exit_code

    def _read_grace(self) -> timedelta:
        """Return how long kopia may save a checkpoint after a signal; zero unless it saves some."""
        saves = self._options.mode is VolumeMode.FILESYSTEM or self._options.tracked is not None
        if not saves or self._kind.verb is not MoverVerb.BACKUP:
            return timedelta()
        return read_checkpoint_grace(self._context.environment)

    def _announce(self, error: CanceledError) -> None:
        """Leave a termination message in case the pod is killed before the end, after a shorter grace period."""
        store_termination_message(build_failure(error, self._context.redactor), self._context.termination_file)

    async def _run(self, work_dir: WorkDir, canceler: Canceler) -> Termination:
        """Move the data while the custom resource is watched for a cancel request."""
        context, options = self._context, self._options
        watched = WatchedTransfer(self._kind, context.namespace, options.name, options.attempt)
        follower = TransferFollower(context.client, watched, clock=context.clock, canceler=canceler)
        return await run_beside(follower.run, self._move_when_started(follower, work_dir), name="transfer-follower")

    async def _move_when_started(self, follower: TransferFollower, work_dir: WorkDir) -> Termination:
        context = self._context
        cr = await follower.wait_in_progress()
        # An owning agent that does not see the files watches the Events of all its movers at once, by this label.
        labels = {NODE_LABEL: owner} if (owner := cr.metadata.labels.get(NODE_LABEL)) else {}
        recorder = EventRecorder(context.client, context.clock, component=cr.name, host=context.node, labels=labels)
        if directory := context.environment.get(EVENTS_VARIABLE, ""):
            recorder.write_to(Path(directory))
        about, attempt = ObjectRef.of(cr), self._options.attempt
        self._reporter = reporter = Reporter(recorder, about, context.clock, attempt=attempt)
        plan = plan_of(cr)
        meter = Meter(context.clock, Direction.BACKUP if isinstance(plan, BackupPlan) else Direction.RESTORE)
        move = self._limited(cr, follower, partial(self._move, cr, work_dir, follower, meter=meter, reporter=reporter))
        if isinstance(plan, str):
            move = partial(self._fence(follower).run, move)
        # Started before the repository is opened: that may take long, and must not look like a stalled mover.
        result = await run_beside(lambda: reporter.follow(meter), move(), name="reports")
        return build_success(result.to_json())

    def _limited(self, cr: Transfer, follower: TransferFollower, move: _Move) -> _Move:
        """Return `move` behind a proxy that limits its bandwidth, if the custom resource has limits."""
        limits, context = BandwidthLimits.from_annotations(cr.metadata.annotations), self._context
        if limits is None:
            return move
        proxy = BandwidthProxy(context.environment, context.clock, limits)
        context.redactor.add(proxy.password)
        self._context = replace(context, environment=proxy.environment)
        follower.listen(
            lambda seen: proxy.limit(BandwidthLimits.from_annotations(seen.metadata.annotations) or BandwidthLimits())
        )

        async def limited() -> BackupResult | RestoreResult:
            with closing(proxy):
                return await run_beside(proxy.run, move(), name="bandwidth")

        return limited

    def _fence(self, follower: TransferFollower) -> Fence:
        """Return the fence of a mover that writes a volume; a backup's writes nothing that another one could harm."""
        context = self._context
        timeout = read_fence_timeout(context.environment)

        def expire() -> None:
            text = f"no answer from the API server for {format_duration(timeout)}: another attempt may begin"
            termination = build_failure(FencedError(text), context.redactor)
            exit_fenced(lambda: write_termination_message(termination, context.termination_file))

        return Fence(timeout, follower.confirm, expire, clock=context.clock)

    async def _move(
        self, cr: Transfer, work_dir: WorkDir, follower: TransferFollower, *, meter: Meter, reporter: Reporter
    ) -> BackupResult | RestoreResult:
        context, plan = self._context, plan_of(cr)
        settings = parse_settings(cr.settings, self._kind.verb)
        waits = Waits(context.clock, read_stall_limits(context.environment), reporter)
        if settings.ignored:
            await reporter.warn(f"ignored settings: {', '.join(settings.ignored)}")
        workers = restore_workers(settings, context.limits) if isinstance(plan, str) else 0
        throttle = BandwidthLimits.from_annotations(cr.metadata.annotations)
        access = RepositoryAccess(context.with_go_settings(workers), work_dir, waits, throttle)
        repository = await self._resolve_repository(cr, access, reporter, backup=isinstance(plan, BackupPlan))
        data_path = DataPath(meter, repository.watchdog)
        result: BackupResult | RestoreResult
        self._check_mounted()
        match plan:
            case BackupPlan():
                backup = self._backup_parameters(cr, plan, settings, follower)
                result = await back_up(repository, backup, data_path)
            case str():
                volume, owner_uid, done = self._options.volume, cr.restore_uid, False
                if owner_uid:
                    take = partial(take_done_file, volume, owner_uid, cr.uid)
                    done = await data_path.run_in_thread(lambda _: take(), "looking for the done file")
                elif self._kind.in_use:
                    _logger.warning("the PodVolumeRestore has no Restore as owner or label: not writing a done file")
                parameters = replace(self._restore_parameters(cr, plan, settings, workers), done=done)
                result = await restore(repository, parameters, data_path)
                self._check_mounted()
                if owner_uid and not done and not self._options.followed:
                    write = partial(write_done_file, volume, owner_uid, cr.uid)
                    await data_path.run_in_thread(lambda _: write(), "writing the done file")
        self._last = meter.finish(result.total_bytes)
        self._result = result
        return result

    def _check_mounted(self) -> None:
        """Check that the volume of a workload pod is mounted, or the mover has a volume of its own."""
        if self._kind.in_use:
            check_mounted(self._options.volume, self._context.mounts)

    async def _resolve_repository(
        self, cr: Transfer, access: RepositoryAccess, reporter: Reporter, *, backup: bool
    ) -> Repository:
        """Return the repository of the transfer, not yet connected."""
        context, location = self._context, await self._read_location(cr, backup=backup)
        deadline = Deadline.after(context.clock, self._options.resource_timeout)
        ready = await context.reader.ensure_repository(
            cr.repository_namespace, location.name, deadline=deadline, reporter=reporter
        )
        # The location may have been corrected meanwhile: that is where the repository is ready.
        location = await self._read_location(cr, backup=backup)
        return await access.resolve(location, ready, recorded=backup)

    async def _read_location(self, cr: Transfer, *, backup: bool) -> BackupStorageLocation:
        """Return the location of the transfer; raises RepositoryError if it does not exist, or is not for backups."""
        location = await self._context.reader.location(cr.spec.backup_storage_location)
        if backup and location.read_only:
            raise RepositoryError(f"BackupStorageLocation {location.name} is read-only: cannot back up to it")
        return location

    def _backup_parameters(
        self, cr: Transfer, plan: BackupPlan, settings: UploaderSettings, follower: TransferFollower
    ) -> BackupParameters:
        context, kind = self._context, self._kind
        attempt = BackupAttempt(
            uid=cr.uid,
            number=self._options.attempt,
            is_alone=lambda: backs_up_alone(context.client, kind, cr, plan.source),
            check=follower.check,
            acknowledged=lambda: list_acknowledged(context.client, kind, cr, plan.source),
            starts=cr.attempts.starts,
        )
        parallel = context.limits.backup_workers
        if BandwidthLimits.from_annotations(cr.metadata.annotations) is not None:
            parallel = min(parallel, MOST_PARALLEL)
        return BackupParameters(
            volume=self._options.volume,
            mode=self._options.mode,
            source=plan.source,
            parallel=settings.parallel_upload or parallel,
            # As Velero's data mover.
            compression=Compression.NONE if plan.by_block else settings.compression or self._options.compression,
            tags={**plan.tags, **({CLUSTER_TAG: cluster} if (cluster := self._options.cluster) else {})},
            checkpoint_interval=read_checkpoint_interval(context.environment),
            limits=context.limits,
            parent=NO_PARENT if settings.read_all_files or self._options.read_all_files else plan.parent,
            in_use=kind.in_use,
            ignore_files=self._options.ignore_files,
            mover=self._options.mover,
            requested_at=cr.metadata.creation_timestamp,
            by_block=plan.by_block,
            changes=build_changes(context, self._options.tracked),
            exclude=self._options.exclude,
            stop=self._stop,
            attempt=attempt,
            confirm=self._check_mounted,
        )

    def _restore_parameters(
        self, cr: Transfer, snapshot_id: str, settings: UploaderSettings, workers: int
    ) -> RestoreParameters:
        # Also a mover of an agent of Velero has it from there alone.
        in_use, in_place = self._kind.in_use, cr.in_place
        interval = read_list_interval(self._context.environment)
        limits = self._context.limits
        packs = limits.restore_packs if self._options.mode is VolumeMode.FILESYSTEM else 0
        if BandwidthLimits.from_annotations(cr.metadata.annotations) is not None:
            # A pack takes long at a low rate, and shows no progress meanwhile.
            packs = 0
        return RestoreParameters(
            snapshot_id=snapshot_id,
            target=self._options.volume,
            mode=self._options.mode,
            workers=workers,
            limits=limits if settings.parallel_download is None else None,
            sparse=settings.write_sparse_files,
            in_use=in_use,
            # A tenant could write to a list in a volume that a pod uses.
            resume=None if in_use or in_place else ResumeSettings(cr.uid, interval),
            again=self._options.attempt > 1,
            fitting_entries=limits.fitting_entries,
            require_attributes=self._options.require_attributes,
            in_place=in_place,
            by_block=cr.by_block,
            mover=self._options.mover,
            packs=packs,
            entry_bytes=limits.entry_bytes(self._context.environment),
        )

    async def _report(self, termination: Termination) -> None:
        """Record the last Events, as far as the time suffices; none after another attempt has begun."""
        reporter = self._reporter
        if reporter is None or termination.exit_code == FencedError.exit_code:
            return
        try:
            async with asyncio.timeout(_FINAL_EVENTS_SECONDS[termination.reason]):
                if self._last is not None:
                    await reporter.progress(self._last)
                await reporter.finished(termination)
        except TimeoutError:
            _logger.warning("could not record the last Events in time")


async def run_in_pod(options: PodOptions | StorageCommand, stop: StopSignal, redactor: Redactor) -> int:
    """Run the command of this pod, and return the exit code; secrets that it learns are added to `redactor`."""
    clock = SystemClock()
    namespace, node = os.environ.get("VELERO_NAMESPACE", ""), os.environ.get("NODE_NAME", "")
    if not namespace:
        raise ConfigError("VELERO_NAMESPACE is not set: it names the namespace of the custom resources")
    transport = pod_transport(os.environ, clock)
    report_means(find_means())
    context = PodContext(
        client=KubeClient(transport, Retry(clock, forbidden_seconds=FORBIDDEN_SECONDS)),
        clock=clock,
        namespace=namespace,
        node=node,
        environment=os.environ,
        limits=read_limits(),
        stop=stop,
        termination_file=options.termination_file,
        redactor=redactor,
    )
    try:
        if isinstance(options, PodOptions):
            return await PodTransfer(options, context).run()
        from datamover.pod.storage_commands import run_storage_command  # noqa: PLC0415 - not needed for a transfer

        return await run_storage_command(options.spec, context)
    finally:
        await transport.close()


# Whether a backup is the only one of its source: it may then continue from checkpoints of its own.
# A checkpoint is known by the time at which its backup began, and another transfer's may have begun at the same
# time: it may have ended since.

_RUNNING = frozenset({Phase.IN_PROGRESS, Phase.CANCELING})


async def backs_up_alone(client: KubeClient, kind: MoverKind, cr: Transfer, source: str) -> bool:
    """Return whether no other transfer of the kind backs up `source`; False if that cannot be found out.

    One counts if it moves data at present, or has ever begun a snapshot when an attempt of `cr` did.
    """
    try:
        async for page in client.pages(Selection(kind.resource, cr.metadata.namespace)):
            others = [other for raw in page.items if (other := kind.model.parse(raw)).uid != cr.uid]
            if page.malformed or any(_may_mix(other, cr, source) for other in others):
                return False
    except AgentError as e:
        _logger.warning("cannot list the transfers of the same source: %s", e)
        return False
    return True


def _may_mix(other: Transfer, cr: Transfer, source: str) -> bool:
    """Return whether one of the two may take a checkpoint of the other for its own."""
    pairs = product(other.attempts.starts, cr.attempts.starts)
    # What has ended may have left a checkpoint. Each of the two starts may differ from the start of its checkpoint.
    if other.phase not in _RUNNING and not any(abs(one - own) <= 2 * START_TOLERANCE for one, own in pairs):
        return False
    plan = plan_of(other)
    return isinstance(plan, BackupPlan) and plan.source == source


async def list_acknowledged(client: KubeClient, kind: MoverKind, cr: Transfer, source: str) -> frozenset[str]:
    """Return the IDs of the acknowledged Shrunk snapshots of `source`, as far as known."""
    found = set()
    try:
        async for page in client.pages(Selection(kind.resource, cr.metadata.namespace)):
            for raw in page.items:
                shrinkage = Shrinkage.from_annotations(raw["metadata"].get("annotations") or {})
                if shrinkage is not None and shrinkage.acknowledged is not None:
                    other = kind.model.parse(raw)
                    plan, named = plan_of(other), other.status.snapshot_id
                    if isinstance(plan, BackupPlan) and plan.source == source and named is not None:
                        found.add(named)
    except AgentError as e:
        _logger.warning("cannot list the backups that were acknowledged: %s", e)
    return frozenset(found)

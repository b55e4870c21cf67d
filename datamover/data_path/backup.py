"""Backup of a volume into a kopia snapshot.

Knows the policy of the source, the arguments of `snapshot create`, and when a snapshot is
complete.
Source: kopia 0.23.1, cli/command_snapshot_create.go; tests/recordings/velero-1.18.2/kopia-policies.json.
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Final

from msgspec import UNSET

from core.contract import BackupResult, VolumeMode, VolumePath
from core.errors import DataPathError, KopiaError
from core.models.base import JsonDict
from core.models.units import format_duration
from datamover.data_path.block import open_device
from datamover.data_path.file_names import NameReport, inspect_names
from datamover.data_path.run import DataPath
from datamover.kinds import AUTO_PARENT, NO_PARENT
from datamover.kopia.graceful_stop import GracefulStop, keep_checkpoint
from datamover.kopia.private_run import VolumeAccess
from datamover.kopia.process import Kopia, KopiaAnswer, KopiaFiles
from datamover.kopia.progress import Meter
from datamover.kopia.repository import Repository
from datamover.kopia.snapshots import (
    CHECKPOINT_INTERVAL,
    PIN,
    Snapshot,
    delete_snapshot,
    find_latest,
    parse_snapshot,
    read_snapshot,
    remove_incomplete,
    remove_own_incomplete,
)
from datamover.kopia.storage_calls import KopiaCaller
from datamover.runtime.cancellation import ShouldStop, run_in_background

__all__ = ["BackupParameters", "back_up"]

_logger = logging.getLogger(__name__)

_CANCELED_CLEANUP: Final = timedelta(seconds=1)
"""A canceled transfer ends within 2 seconds; if this does not suffice, the next backup of the source cleans up."""

_FAILED_CLEANUP: Final = timedelta(seconds=20)

_CHECKING: Final = "checking the names of files"
"""The operation, for messages about a long wait."""

_DIRECTORY_ERROR: Final = "upload error:"
"""kopia's error for a directory, without its path. Source: kopia 0.23.1, cli/command_snapshot_create.go."""

_WaitForNames = Callable[[], Awaitable[NameReport]]

_UNLIMITED: Final = 2**31 - 1
_PERIODS: Final = ("Latest", "Hourly", "Daily", "Weekly", "Monthly", "Annual")


@dataclass(frozen=True)
class BackupParameters:
    """What to back up: the volume's path, its source path in the repository, tags, number of files read in parallel.

    `checkpoint_interval` is how often kopia saves an incomplete snapshot, at most every 45 minutes.
    `low_memory`: the memory suffices for one kopia process at a time.
    `in_use`: a workload pod may change the volume meanwhile.
    `parent`: the snapshot that unchanged files are taken from, as in `BackupPlan`.
    `stop` gives kopia time for a checkpoint after a signal; None: it gets none.
    """

    volume: Path
    mode: VolumeMode
    source: str
    parallel: int
    tags: Mapping[str, str] = field(default_factory=dict)
    checkpoint_interval: timedelta = CHECKPOINT_INTERVAL
    low_memory: bool = False
    in_use: bool = False
    parent: str = AUTO_PARENT
    stop: GracefulStop | None = None

    @property
    def target(self) -> str:
        """The source in kopia's format, with the identity that Velero uses."""
        return f"default@default:{self.source}"


async def back_up(repository: Repository, parameters: BackupParameters, data_path: DataPath) -> BackupResult:
    """Take a snapshot of the volume and return its result.

    An incomplete snapshot is deleted, unless it is the checkpoint after a signal. Cancellation kills kopia, which then
    saves none.

    Raises:
        CanceledError: a signal ended it; says whether kopia saved a checkpoint.
        KopiaError: there is no complete snapshot; names the cause.
        RepositoryError: the data path stalled, and the repository does not answer.
        DataPathError: the volume cannot be read, or kopia cannot keep all of its names.
    """
    kopia, meter = repository.kopia, data_path.meter
    async with _open_volume(parameters, data_path) as (fd, device_bytes):
        meter.total_bytes = device_bytes or 0
        if warning := await repository.open(partial(_prepare, repository, parameters)):
            await data_path.warn(warning)
        if note := await _check_parent(repository, parameters):
            await data_path.warn(note)
        report = NameReport()
        inspect = _skip_names if fd is not None else partial(inspect_names, parameters.volume, report=report)
        async with run_in_background(inspect, name="names") as names, _cleanup_on_error(kopia, parameters, data_path):
            volume = VolumeAccess(parameters.volume if fd is None else None, in_use=parameters.in_use)
            arguments, files = _create_arguments(parameters, note), KopiaFiles(stdin_fd=fd, volume=volume)
            answer = await repository.run(
                partial(_run_kopia, kopia, parameters, data_path, arguments=arguments, files=files)
            )
            # The last parts are uploaded after the last reading.
            meter.take_counters(answer.counters)
            wait_for_names = partial(data_path.wait_for_progress, names, _CHECKING, lambda: report.entries)
            try:
                snapshot = await _check_complete(kopia, answer, device_bytes)
            except KopiaError as e:
                raise await _name_placeholders(e, wait_for_names) from e
            await _check_names(kopia, snapshot, wait_for_names, data_path)
    return BackupResult(
        snapshot_id=snapshot.snapshot_id,
        empty_snapshot=snapshot.entries == 0,
        source=VolumePath(by_path=str(parameters.volume), volume_mode=str(parameters.mode)),
        total_bytes=snapshot.size_bytes,
        incremental_bytes=_incremental(meter, snapshot),
        note=note or UNSET,
    )


async def _run_kopia(
    kopia: Kopia, parameters: BackupParameters, data_path: DataPath, *, arguments: list[str], files: KopiaFiles
) -> KopiaAnswer:
    """Run kopia and return its answer; a signal lets it save a checkpoint."""
    attempted, stop = f"back up {parameters.volume}", parameters.stop
    if stop is None:
        return await data_path.run(kopia, attempted, *arguments, files=files)
    with stop.saving() as terminate:
        answer = await data_path.run(kopia, attempted, *arguments, files=replace(files, terminate=terminate))
    if stop.signaled:
        await keep_checkpoint(kopia, answer, stop)
    return answer


async def _check_parent(kopia: KopiaCaller, parameters: BackupParameters) -> str:
    """Return why everything is read although a snapshot was named as parent; empty if it is the one that kopia uses.

    kopia always takes the last complete snapshot of the source, and has no flag for another one.
    Source: kopia 0.23.1, snapshot/manager.go (FindPreviousManifests).
    """
    wanted = parameters.parent
    if wanted in {AUTO_PARENT, NO_PARENT}:
        return ""
    try:
        found = await read_snapshot(kopia, wanted)
        latest = await find_latest(kopia, parameters.target)
    except KopiaError as e:
        cause = str(e)
    else:
        if latest is not None and latest.snapshot_id == wanted:
            return ""
        cause = found.fault or (
            f"it is of the source {found.source}"
            if found.source != parameters.source
            else "it is not the last complete one of its source"
        )
        cause = f"snapshot {wanted}: {cause}"
    return f"read everything, since spec.parentSnapshot is not usable: {cause}"


async def _prepare(kopia: KopiaCaller, parameters: BackupParameters) -> str:
    """Ensure the policy and delete incomplete snapshots of earlier backups; in parallel if memory allows.

    Returns:
        A warning about the incomplete snapshots, if there were any.
    """
    if parameters.low_memory:
        await _ensure_policy(kopia, parameters)
        return await _remove_earlier_incomplete(kopia, parameters)
    try:
        async with asyncio.TaskGroup() as both:
            both.create_task(_ensure_policy(kopia, parameters), name="policy")
            warning = both.create_task(_remove_earlier_incomplete(kopia, parameters), name="incomplete")
    except ExceptionGroup as e:
        raise e.exceptions[0] from None
    return warning.result()


async def _remove_earlier_incomplete(kopia: KopiaCaller, parameters: BackupParameters) -> str:
    try:
        count = await remove_incomplete(kopia, parameters.target)
    except KopiaError as e:
        # It only makes `incrementalBytes` of the next backups less precise.
        return f"could not remove incomplete snapshots of earlier backups: {e}"
    return f"removed {count} incomplete snapshots of earlier backups" if count else ""


@asynccontextmanager
async def _cleanup_on_error(kopia: Kopia, parameters: BackupParameters, data_path: DataPath) -> AsyncIterator[None]:
    """Delete the incomplete snapshots of this backup if it fails or is canceled within the block.

    They stay after a signal that gave kopia time for one.
    """
    clock = data_path.clock
    started = clock.monotonic()
    since = clock.now().replace(microsecond=0)
    try:
        yield
    except BaseException as e:
        keep = parameters.stop is not None and parameters.stop.signaled
        if not keep and clock.monotonic() - started >= parameters.checkpoint_interval.total_seconds():
            within = _CANCELED_CLEANUP if isinstance(e, asyncio.CancelledError) else _FAILED_CLEANUP
            await remove_own_incomplete(kopia, parameters.target, since=since, within=within)
        raise


def _skip_names(_: ShouldStop) -> NameReport:
    """Return an empty report: a device has no names."""
    return NameReport()


async def _name_placeholders(error: KopiaError, wait_for_names: _WaitForNames) -> KopiaError:
    """Return the error with the placeholders in the volume if one of them may have caused it: kopia names none."""
    if _DIRECTORY_ERROR not in str(error) or not (placeholders := (await wait_for_names()).placeholders):
        return error
    head, _, lines = str(error).partition("\n")
    paths = ", ".join(placeholders)
    return KopiaError(
        f"{head}: the volume has placeholders of kopia, whose data must be in the repository: {paths}\n{lines}"
    )


async def _check_names(kopia: Kopia, snapshot: Snapshot, wait_for_names: _WaitForNames, data_path: DataPath) -> None:
    """Warn about names that kopia changed; delete the snapshot if it lost some, or on cancellation."""
    try:
        report = await wait_for_names()
        if report.warning:
            await data_path.warn(report.warning)
        report.check()
    except asyncio.CancelledError:
        await _delete_snapshot(kopia, snapshot)
        raise
    except DataPathError as e:
        raise DataPathError(f"{e}{await _delete_snapshot(kopia, snapshot)}") from e


@asynccontextmanager
async def _open_volume(
    parameters: BackupParameters, data_path: DataPath
) -> AsyncIterator[tuple[int, int] | tuple[None, None]]:
    """Open the device, and yield its descriptor and size; for a directory, only check that it exists."""
    volume = parameters.volume
    if parameters.mode is VolumeMode.BLOCK:
        async with open_device(volume, os.O_RDONLY, data_path) as device:
            yield device
        return
    if not await data_path.run_in_thread(lambda _: volume.is_dir(), f"opening volume {volume}"):
        raise DataPathError(f"volume {volume} does not exist or is not a directory")
    yield None, None


def _create_arguments(parameters: BackupParameters, parent_fault: str) -> list[str]:
    read_everything = parent_fault or parameters.parent == NO_PARENT
    device = parameters.mode is VolumeMode.BLOCK
    return [
        "snapshot",
        "create",
        "/" if device else str(parameters.volume),
        *([f"--stdin-file={parameters.volume.name}"] if device else []),
        f"--override-source={parameters.target}",
        f"--pin={PIN}",
        *(f"--tags={key}:{value}" for key, value in parameters.tags.items()),
        f"--parallel={parameters.parallel}",
        *(["--force-hash=100"] if read_everything else []),
        f"--checkpoint-interval={format_duration(parameters.checkpoint_interval)}",
        "--fail-fast",
        "--no-send-snapshot-report",
        "--json",
    ]


async def _check_complete(kopia: Kopia, answer: KopiaAnswer, device_bytes: int | None) -> Snapshot:
    """Return the snapshot if it is complete; otherwise delete it and raise."""
    try:
        snapshot = parse_snapshot(answer.document())
    except KopiaError as e:
        raise (e if answer.succeeded else answer.error()) from e
    fault = snapshot.fault
    if not fault and not answer.succeeded:
        fault = answer.exit_status
    if not fault and device_bytes is not None and snapshot.size_bytes != device_bytes:
        fault = f"read {snapshot.size_bytes} of the device's {device_bytes} bytes"
    if not fault:
        return snapshot
    raise answer.error(f"{fault}{await _delete_snapshot(kopia, snapshot)}")


async def _delete_snapshot(kopia: Kopia, snapshot: Snapshot) -> str:
    """Delete an incomplete snapshot; return what to append to the message if that fails."""
    try:
        await delete_snapshot(kopia, snapshot.snapshot_id)
    except KopiaError as e:
        _logger.warning("%s", e)
        return f"; {e}"
    return ""


def _incremental(meter: Meter, snapshot: Snapshot) -> int:
    """Return the size of the files that changed since the parent snapshot, within half a percent."""
    if meter.cached_bytes == 0:
        return snapshot.size_bytes
    return min(meter.hashed_bytes, snapshot.size_bytes)


async def _ensure_policy(kopia: KopiaCaller, parameters: BackupParameters) -> None:
    """Set the policy that Velero sets, unless the source has it already.

    Different from Velero's: directories marked as caches are kept, or their content would be missing.
    """
    attempted = f"policy of {parameters.source}"
    shown = await kopia.call(attempted, "policy", "show", "--json", parameters.target)
    if _policy_matches(shown.check().document()):
        return
    change = await kopia.call(
        attempted,
        "policy",
        "set",
        parameters.target,
        *(f"--keep-{period.lower()}={_UNLIMITED}" for period in _PERIODS),
        "--manual",
        "--compression=none",
        "--ignore-unknown-types=true",
        "--ignore-cache-dirs=false",
        f"--max-parallel-file-reads={parameters.parallel}",
        "--parallel-upload-above-size-mib=2048",
    )
    change.check()


def _policy_matches(policy: JsonDict) -> bool:
    retention = policy.get("retention") or {}
    return (
        all(retention.get(f"keep{period}") == _UNLIMITED for period in _PERIODS)
        and (policy.get("scheduling") or {}).get("manual") is True
        and (policy.get("compression") or {}).get("compressorName") == "none"
        and (policy.get("errorHandling") or {}).get("ignoreUnknownTypes") is True
        and (policy.get("files") or {}).get("ignoreCacheDirs") is False
    )

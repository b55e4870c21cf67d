"""A volume becomes a snapshot.

Knows the source's policy, the arguments of `snapshot create`, and when a snapshot may be
trusted. Does not know custom resources or who waits for the result.
Source: kopia 0.23.1, cli/command_snapshot_create.go; tests/recordings/velero-1.18.2/kopia-policies.json.
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Final

from core.contract import BackupResult, VolumeMode, VolumePath
from core.errors import DataPathError, KopiaError
from core.models.base import JsonDict
from core.models.units import format_duration
from datamover.data_path.block import device_size, open_device
from datamover.data_path.file_names import NameReport, examine_names
from datamover.data_path.run import DataPath
from datamover.kopia.process import Kopia, KopiaAnswer, KopiaFiles
from datamover.kopia.progress import Meter
from datamover.kopia.repository import Repository
from datamover.kopia.snapshots import (
    CHECKPOINT_INTERVAL,
    Snapshot,
    delete_snapshot,
    parse_snapshot,
    remove_incomplete,
    remove_own_incomplete,
)
from datamover.runtime.cancellation import ShouldStop, run_in_background

__all__ = ["BackupParameters", "back_up"]

_logger = logging.getLogger(__name__)

_CANCELED_TIME: Final = timedelta(seconds=1)
"""A canceled load ends within 2 seconds; where this is not enough, the next backup of the source finishes it."""

_FAILED_TIME: Final = timedelta(seconds=20)

_PIN: Final = "velero-pin"
"""kopia's retention never expires a pinned snapshot; the backup's owner deletes it."""

_UNLIMITED: Final = 2**31 - 1
_PERIODS: Final = ("Latest", "Hourly", "Daily", "Weekly", "Monthly", "Annual")


@dataclass(frozen=True)
class BackupParameters:
    """What to back up: the volume's path, its source path in the repository, tags, files read at a time.

    `checkpoints` is how often kopia saves what it has so far; it takes 45 minutes at most.
    `frugal`: the memory holds one kopia at a time.
    """

    volume: Path
    mode: VolumeMode
    source: str
    parallel: int
    tags: Mapping[str, str] = field(default_factory=dict)
    checkpoints: timedelta = CHECKPOINT_INTERVAL
    frugal: bool = False

    @property
    def target(self) -> str:
        """The source as kopia spells it, with the interop identity."""
        return f"default@default:{self.source}"


async def back_up(repository: Repository, request: BackupParameters, transfer: DataPath) -> BackupResult:
    """Take a snapshot of the volume and return its result.

    A snapshot that cannot be trusted is taken away again. Cancellation kills kopia, which
    then saves none.

    Raises:
        KopiaError: there is no trustworthy snapshot; names the cause.
        RepositoryError: the repository went away for good.
        DataPathError: the volume cannot be read, or kopia cannot keep all of its names.
    """
    kopia, meter = repository.kopia, transfer.meter
    with _opened(request) as fd:
        device_bytes = None if fd is None else device_size(fd)
        meter.total_bytes = device_bytes or 0
        if told := await repository.open(partial(_prepare, kopia, request)):
            await transfer.warn(told)
        examine = _no_names if fd is not None else partial(examine_names, request.volume)
        async with run_in_background(examine, name="names") as names, _nothing_left(kopia, request, transfer):
            answer = await transfer.run(
                kopia, f"back up {request.volume}", *_create_arguments(request), files=KopiaFiles(stdin_fd=fd)
            )
            # The last parts are sent after the last reading.
            meter.take_counters(answer.counters)
            snapshot = await _trusted(kopia, answer, device_bytes)
            await _check_names(kopia, snapshot, names, transfer)
    return BackupResult(
        snapshot_id=snapshot.snapshot_id,
        empty_snapshot=snapshot.entries == 0,
        source=VolumePath(by_path=str(request.volume), volume_mode=str(request.mode)),
        total_bytes=snapshot.size_bytes,
        incremental_bytes=_incremental(meter, snapshot),
    )


async def _prepare(kopia: Kopia, request: BackupParameters) -> str:
    """Let the policy be in force, and nothing be left of uploads that were killed; both at a time if that may be.

    Returns:
        What is to be told of those uploads, if anything.
    """
    if request.frugal:
        await _ensure_policy(kopia, request)
        return await _clear(kopia, request)
    try:
        async with asyncio.TaskGroup() as both:
            both.create_task(_ensure_policy(kopia, request), name="policy")
            cleared = both.create_task(_clear(kopia, request), name="incomplete")
    except ExceptionGroup as e:
        raise e.exceptions[0] from None
    return cleared.result()


async def _clear(kopia: Kopia, request: BackupParameters) -> str:
    try:
        count = await remove_incomplete(kopia, request.target)
    except KopiaError as e:
        # It costs the next backups some precision, and this one nothing.
        return f"what broken uploads left may still be there: {e}"
    return f"{count} incomplete snapshots that broken uploads had left were removed" if count else ""


@asynccontextmanager
async def _nothing_left(kopia: Kopia, request: BackupParameters, transfer: DataPath) -> AsyncIterator[None]:
    """Take away what kopia saved in the meantime of an upload that breaks or is canceled within the block."""
    began, clock = transfer.clock.monotonic(), transfer.clock
    since = clock.now().replace(microsecond=0)
    try:
        yield
    except BaseException as e:
        if clock.monotonic() - began >= request.checkpoints.total_seconds():
            span = _CANCELED_TIME if isinstance(e, asyncio.CancelledError) else _FAILED_TIME
            await remove_own_incomplete(kopia, request.target, since=since, span=span)
        raise


def _no_names(_: ShouldStop) -> NameReport:
    """A device has none."""
    return NameReport()


async def _check_names(
    kopia: Kopia, snapshot: Snapshot, names: "asyncio.Future[NameReport]", transfer: DataPath
) -> None:
    """Warn of names that kopia changed; a snapshot that lost some, or that nobody waits for, is taken away."""
    try:
        report = await names
        if report.warning:
            await transfer.warn(report.warning)
        report.check()
    except asyncio.CancelledError:
        await _take_away(kopia, snapshot)
        raise
    except DataPathError as e:
        raise DataPathError(f"{e}{await _take_away(kopia, snapshot)}") from e


def _opened(request: BackupParameters) -> AbstractContextManager[int | None]:
    """Return the open device; nothing is opened for a folder, which only must be there."""
    if request.mode is VolumeMode.BLOCK:
        return open_device(request.volume, os.O_RDONLY)
    if not request.volume.is_dir():
        raise DataPathError(f"volume {request.volume} is not there, or is no folder")
    return nullcontext()


def _create_arguments(request: BackupParameters) -> list[str]:
    device = request.mode is VolumeMode.BLOCK
    return [
        "snapshot",
        "create",
        "/" if device else str(request.volume),
        *([f"--stdin-file={request.volume.name}"] if device else []),
        f"--override-source={request.target}",
        f"--pin={_PIN}",
        *(f"--tags={key}:{value}" for key, value in request.tags.items()),
        f"--parallel={request.parallel}",
        f"--checkpoint-interval={format_duration(request.checkpoints)}",
        "--fail-fast",
        "--no-send-snapshot-report",
        "--json",
    ]


async def _trusted(kopia: Kopia, answer: KopiaAnswer, device_bytes: int | None) -> Snapshot:
    """Return the snapshot if all of it is there; otherwise take away what kopia saved, and raise."""
    try:
        snapshot = parse_snapshot(answer.document())
    except KopiaError as e:
        raise (e if answer.succeeded else answer.error()) from e
    fault = snapshot.fault
    if not fault and not answer.succeeded:
        fault = answer.end
    if not fault and device_bytes is not None and snapshot.size_bytes != device_bytes:
        fault = f"{snapshot.size_bytes} bytes of the device's {device_bytes} were read"
    if not fault:
        return snapshot
    raise answer.error(f"{fault}{await _take_away(kopia, snapshot)}")


async def _take_away(kopia: Kopia, snapshot: Snapshot) -> str:
    """Take a snapshot away that must not stay; return what to add to the message where that failed."""
    try:
        await delete_snapshot(kopia, snapshot.snapshot_id)
    except KopiaError as e:
        _logger.warning("%s", e)
        return f"; and {e}"
    return ""


def _incremental(meter: Meter, snapshot: Snapshot) -> int:
    """Return the bytes of files that had changed since the parent snapshot, within half a percent."""
    if meter.cached_bytes == 0:
        return snapshot.size_bytes
    return min(meter.hashed_bytes, snapshot.size_bytes)


async def _ensure_policy(kopia: Kopia, request: BackupParameters) -> None:
    """Give the source the peers' policy unless that is in force already.

    Beyond the peers': folders marked as caches are kept, or their content would be missing.
    """
    attempted = f"policy of {request.source}"
    shown = await kopia.call(attempted, "policy", "show", "--json", request.target)
    if _policy_in_force(shown.check().document()):
        return
    change = await kopia.call(
        attempted,
        "policy",
        "set",
        request.target,
        *(f"--keep-{period.lower()}={_UNLIMITED}" for period in _PERIODS),
        "--manual",
        "--compression=none",
        "--ignore-unknown-types=true",
        "--ignore-cache-dirs=false",
        f"--max-parallel-file-reads={request.parallel}",
        "--parallel-upload-above-size-mib=2048",
    )
    change.check()


def _policy_in_force(policy: JsonDict) -> bool:
    retention = policy.get("retention") or {}
    return (
        all(retention.get(f"keep{period}") == _UNLIMITED for period in _PERIODS)
        and (policy.get("scheduling") or {}).get("manual") is True
        and (policy.get("compression") or {}).get("compressorName") == "none"
        and (policy.get("errorHandling") or {}).get("ignoreUnknownTypes") is True
        and (policy.get("files") or {}).get("ignoreCacheDirs") is False
    )

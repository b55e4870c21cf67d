"""Backup of a volume into a kopia snapshot: when it is complete, what is deleted when it is not, and what has changed.

kopia counts the files that it read. One that continues from an earlier attempt's checkpoint or complete snapshot takes
those from it that the attempt has read, so the snapshots are compared then.
Source: kopia 0.23.1, internal/diff/diff.go.
"""

import asyncio
import logging
import math
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Final

from msgspec import UNSET

from core.contract import BackupResult, VolumeMode, VolumePath
from core.errors import DataPathError, KopiaCrashError, KopiaError, StorageOutageError
from core.models.backups import SavedSize, Shrinkage, find_full
from core.models.names import BLOCK_DATA_MOVER
from core.models.transfer_settings import Compression, Exclusions
from datamover.data_path.block import open_device
from datamover.data_path.checkpoints import BackupAttempt, Inheritance, remove_overtaken
from datamover.data_path.file_names import NameReport, inspect_names
from datamover.data_path.one_open_runs import open_run
from datamover.data_path.run import DataPath
from datamover.data_path.snapshot_runs import BackupParameters, RunReport, SnapshotRun
from datamover.data_path.stage import STAGE, STAGE_PATTERN
from datamover.kinds import NO_PARENT
from datamover.kopia.location_files import open_output
from datamover.kopia.policy import describe_exclusions, read_policy
from datamover.kopia.process import Kopia, KopiaAnswer
from datamover.kopia.progress import Meter
from datamover.kopia.repository import Repository
from datamover.kopia.snapshots import Snapshot, delete_snapshot, fit_checkpoint_interval, parse_snapshot
from datamover.runtime.cancellation import ShouldStop, run_in_background
from datamover.runtime.work_dir import attempting

_logger = logging.getLogger(__name__)

_CHANGED: Final = re.compile(rb"(?:added file \./.* \(|changed \./.* at .* \(size \d+ -> )(\d+)(?: bytes)?\)$")
"""A line about one file, with its size now."""


async def count_incremental(
    repository: Repository, snapshot: Snapshot, inheritance: Inheritance, meter: Meter
) -> int | None:
    """Return the size of the files that changed since the last complete snapshot, within half a percent; None: unknown.

    Of a backup that continued from an earlier attempt, it does not include files that this one read only because their
    owner, mode or time had changed.
    """
    if meter.cached_bytes == 0 or (inheritance.continued and inheritance.latest is None):
        return snapshot.size_bytes
    read_bytes = meter.hashed_bytes
    if inheritance.continued and inheritance.latest is not None:
        compared_bytes = await _compare(repository, inheritance.latest, snapshot)
        if compared_bytes is None:
            return None
        read_bytes = max(read_bytes, compared_bytes)
    return min(read_bytes, snapshot.size_bytes)


async def _compare(repository: Repository, old: Snapshot, new: Snapshot) -> int | None:
    """Return the size of the files in `new` whose content `old` does not have there; None: unknown."""
    with open_output(repository.work_dir) as file:
        attempted = f"compare with snapshot {old.snapshot_id}"
        try:
            answer = await repository.call(attempted, "diff", old.root_object, new.root_object, output_fd=file.fileno())
            answer.check()
        except DataPathError as e:
            _logger.warning("incrementalBytes is not known: %s", e)
            return None
        file.seek(0)
        return sum(int(found[1]) for line in file if (found := _CHANGED.match(line.rstrip(b"\n"))))


async def find_shrinkage(size: SavedSize, inheritance: Inheritance, attempt: BackupAttempt | None) -> Shrinkage | None:
    """Return from what a file system has shrunk, or None; what was acknowledged is only read if it matters."""
    found = find_full(inheritance.sizes, size)
    if found is None or attempt is None or attempt.acknowledged is None:
        return found
    return find_full(inheritance.sizes, size, await attempt.acknowledged())


_CANCELED_CLEANUP: Final = timedelta(seconds=1)
"""A canceled transfer ends within 2 seconds; if this does not suffice, the next backup of the source cleans up."""

_FAILED_CLEANUP: Final = timedelta(seconds=20)

_PLACEHOLDER_ERRORS: Final = ("upload error:", "placeholder")
"""kopia's errors for a directory, without its path, and for a file, without the end of its name. Source: kopia 0.23.1,
cli/command_snapshot_create.go, snapshot/upload/upload.go (uploadFileInternal)."""

_BLOCK_NOTE: Final = "exclusions are for file systems: the block device is backed up as a whole"


async def back_up(repository: Repository, parameters: BackupParameters, data_path: DataPath) -> BackupResult:
    """Take a snapshot of the volume and return its result.

    An incomplete snapshot is deleted, unless another attempt may continue from it. Cancellation kills kopia, which then
    saves none.

    Raises:
        CanceledError: a signal ended it; says whether kopia saved a checkpoint.
        KopiaError: there is no complete snapshot; names the cause.
        RepositoryError: the data path stalled, and the repository does not answer.
        DataPathError: the volume cannot be read, or kopia cannot keep all of its names.
    """
    if parameters.by_block and parameters.mode is not VolumeMode.BLOCK:
        raise DataPathError(
            f"volume {parameters.volume} has a file system: data mover {BLOCK_DATA_MOVER} cannot read it"
        )
    return await _Backup(repository, await _leave_out_stage(parameters, data_path), data_path).run()


async def _leave_out_stage(parameters: BackupParameters, data_path: DataPath) -> BackupParameters:
    """Return the parameters with an exclusion of what a restore in place that was killed has left in the volume."""
    volume = parameters.volume
    left = volume / STAGE
    # It raises no error.
    if not await data_path.run_in_thread(lambda _: os.path.isdir(left), f"opening volume {volume}"):  # noqa: PTH112
        return parameters
    # There may be no room for another pattern.
    with suppress(ValueError):
        return replace(parameters, exclude=parameters.exclude | Exclusions(patterns=(STAGE_PATTERN,)))
    return parameters


@dataclass
class _Backup:
    """One backup: what is known of names in the volume, why no parent is used, and its complete snapshot, `saved`."""

    repository: Repository
    parameters: BackupParameters
    data_path: DataPath
    names: NameReport = field(default_factory=NameReport)
    parent_fault: str | None = None
    saved: Snapshot | None = None

    async def run(self) -> BackupResult:
        repository, parameters, data_path = self.repository, self.parameters, self.data_path
        meter = data_path.meter
        async with (
            self._delete_on_error(),
            self._open_volume() as (device, files_at_most),
            open_run(repository, parameters, data_path, device) as run,
            # Meanwhile kopia derives the repository's key, which takes one processor a quarter of a second.
            run_in_background(self._inspect_names, name="names") as inspecting,
        ):
            device_bytes = meter.total_bytes = device[1] if device else 0
            index_seconds = parameters.limits.index_seconds(files_at_most) if parameters.limits else math.inf
            interval = parameters.checkpoint_interval or fit_checkpoint_interval(index_seconds)
            inheritance = await run.prepare()
            if inheritance.warning:
                await data_path.warn(inheritance.warning)
            self.parent_fault = await run.check_parent(inheritance.latest)
            if self.parent_fault:
                await data_path.warn(self.parent_fault)
            async with self._cleanup_on_error(run, interval):
                read_all = bool(self.parent_fault) or parameters.parent == NO_PARENT
                answer = await run.back_up(interval, read_all=read_all)
                # The last parts are uploaded after the last reading.
                meter.take_counters(answer.counters)
                doing = "checking the names of files"
                wait = partial(data_path.wait_for_progress, inspecting, doing, lambda: self.names.entries)
                try:
                    snapshot = await _check_complete(repository.kopia, answer, device_bytes if device else None)
                except KopiaError as e:
                    raise await self._name_placeholders(e, wait) from e
                self.saved = snapshot
                for warning in run.report.warnings:
                    await data_path.warn(warning)
                await wait()
                parameters.confirm()
                await self._check_names()
                return await self._build_result(snapshot, inheritance, run.report)

    @asynccontextmanager
    async def _delete_on_error(self) -> AsyncIterator[None]:
        """Delete a complete snapshot if its backup fails or is canceled after all: nothing will refer to it."""
        try:
            yield
        except BaseException as e:
            if self.saved is None:
                raise
            failed = await _delete_snapshot(self.repository.kopia, self.saved)
            if isinstance(e, DataPathError):
                raise DataPathError(f"{e}{failed}") from e
            raise

    def _inspect_names(self, stop: ShouldStop) -> None:
        if self.parameters.mode is not VolumeMode.BLOCK:
            inspect_names(self.parameters.volume, stop, self.names, self.parameters.rules)

    async def _build_result(self, snapshot: Snapshot, inheritance: Inheritance, run: RunReport) -> BackupResult:
        """Return the result, after the snapshots of overtaken attempts are deleted."""
        repository, parameters, names, meter = self.repository, self.parameters, self.names, self.data_path.meter
        compressed, block = parameters.compression is not Compression.NONE, parameters.mode is VolumeMode.BLOCK
        if left_out := await self._describe_left_out(snapshot):
            await self.data_path.warn(left_out)
        incremental_bytes = run.changed_bytes
        if incremental_bytes is None:
            incremental_bytes = await count_incremental(repository, snapshot, inheritance, meter)
        excluded = names.excluded
        left_out_size = (excluded.files, excluded.bytes) if excluded else (0, 0)
        size = replace(snapshot.size, left_out=None if names.uncounted else left_out_size)
        attempt = parameters.attempt
        shrunk = None if block else await find_shrinkage(size, inheritance, attempt)
        if attempt and attempt.number > 1:
            warning = await remove_overtaken(repository, parameters.target, attempt)
            if warning:
                await self.data_path.warn(warning)
        own = excluded.text if excluded else _BLOCK_NOTE if parameters.exclude else None
        shrunk_note = shrunk.text if shrunk else None
        notes = (shrunk_note, self.parent_fault, run.note, own, left_out, *names.notes)
        return BackupResult(
            snapshot_id=snapshot.snapshot_id,
            empty_snapshot=snapshot.entries == 0,
            source=VolumePath(by_path=str(parameters.volume), volume_mode=str(parameters.mode)),
            total_bytes=snapshot.size_bytes,
            incremental_bytes=UNSET if incremental_bytes is None else incremental_bytes,
            note="; ".join(filter(None, notes)) or UNSET,
            new_bytes=meter.new_bytes if compressed else UNSET,
            stored_bytes=meter.stored_bytes if compressed else UNSET,
            fallback_full=True if self.parent_fault or run.fell_back else UNSET,
            fallback_cause=self.parent_fault or run.cause or UNSET,
            restart_cause=run.restart_cause or UNSET,
            files=UNSET if block or snapshot.files is None else snapshot.files,
            shrunk=shrunk or UNSET,
            left_out=excluded or UNSET,
        )

    @asynccontextmanager
    async def _cleanup_on_error(self, run: SnapshotRun, interval: timedelta) -> AsyncIterator[None]:
        """Delete incomplete snapshots if the block fails, unless an attempt may continue from them."""
        clock = self.data_path.clock
        began = clock.monotonic()
        try:
            yield
        except BaseException as e:
            if not self._is_interruption(e):
                within = _CANCELED_CLEANUP if isinstance(e, asyncio.CancelledError) else _FAILED_CLEANUP
                await run.discard_checkpoints(within, due=clock.monotonic() - began >= interval.total_seconds())
            raise

    def _is_interruption(self, error: BaseException) -> bool:
        """Return whether another attempt may follow."""
        if self.parameters.stop is not None and self.parameters.stop.interrupted:
            return True
        return self.parameters.attempt is not None and isinstance(error, (KopiaCrashError, StorageOutageError))

    async def _name_placeholders(self, error: KopiaError, wait: Callable[[], Awaitable[None]]) -> KopiaError:
        """Return the error with the placeholders in the volume if one of them may have caused it: kopia names none."""
        if not any(text in str(error) for text in _PLACEHOLDER_ERRORS):
            return error
        await wait()
        if not (placeholders := self.names.placeholders.show()):
            return error
        head, _, lines = str(error).partition("\n")
        return KopiaError(
            f"{head}: the volume has placeholders of kopia, whose data must be in the repository: "
            f"{placeholders}\n{lines}"
        )

    async def _check_names(self) -> None:
        """Warn about names and times that kopia changed, and what it left out; lost names are an error."""
        for warning in filter(None, (self.names.warning, *self.names.notes)):
            await self.data_path.warn(warning)
        self.names.check()

    async def _describe_left_out(self, snapshot: Snapshot) -> str | None:
        """Return how many entries of the volume policies have left out of the snapshot, and which rules, or None.

        kopia does not count what its size limit leaves out, nor other file systems. In a volume that is in use, files
        that came and went meanwhile make the count inexact.
        """
        names, parameters = self.names, self.parameters
        count = names.kept - names.unfound.count - snapshot.entries if names.complete else 0
        count = max(count, snapshot.ignored) or (0 if parameters.rules else snapshot.excluded)
        if not count:
            return None
        try:
            rules = describe_exclusions(await read_policy(self.repository, parameters.target))
        except DataPathError as e:
            return f"{count} entries of the volume are not in the snapshot, for an unknown reason: {e}"
        if rules:
            about = "about " if parameters.in_use else ""
            return f"left out {about}{count} entries of the volume, by policies of the repository: {', '.join(rules)}"
        if snapshot.excluded or snapshot.ignored or (parameters.requested_at and not parameters.in_use):
            return f"left out {count} entries of the volume, by policies of the repository for directories in it"
        return None

    @asynccontextmanager
    async def _open_volume(self) -> AsyncIterator[tuple[tuple[int, int] | None, float]]:
        """Open a device, and yield its descriptor and size; for a directory None, after a check that it exists.

        The last value is how many files the volume may have; it is infinite if its file system does not count them.
        """
        volume = self.parameters.volume
        if self.parameters.mode is VolumeMode.BLOCK:
            async with open_device(volume, os.O_RDONLY, self.data_path) as device:
                yield device, 1
            return
        with attempting(f"open volume {volume}"):
            files = await self.data_path.run_in_thread(lambda _: _count_inodes(volume), f"opening volume {volume}")
        if files is None:
            raise DataPathError(f"volume {volume} does not exist or is not a directory")
        yield None, files


def _count_inodes(volume: Path) -> float | None:
    """Return how many inodes the file system of a volume has in use; None: the volume is not a directory."""
    if not volume.is_dir():
        return None
    try:
        space = os.statvfs(volume)
    except OSError:
        return math.inf
    used = space.f_files - space.f_ffree
    # The root is one: a file system that has none in use does not count them.
    return used if used > 0 else math.inf


async def _check_complete(kopia: Kopia, answer: KopiaAnswer, device_bytes: int | None) -> Snapshot:
    """Return the snapshot if it is complete; otherwise delete it and raise."""
    try:
        snapshot = parse_snapshot(answer.document())
    except KopiaError as e:
        raise (e if answer.succeeded else answer.error()) from e
    fault = snapshot.fault or (None if answer.succeeded else answer.cause)
    if not fault and device_bytes is not None and snapshot.size_bytes != device_bytes:
        fault = f"read {snapshot.size_bytes} of the device's {device_bytes} bytes"
    if not fault:
        return snapshot
    # kopia exits with 0 after it has ended a backup because the storage did not take a checkpoint.
    failed = replace(answer, exit_code=answer.exit_code or 1)
    raise failed.error(f"{fault}{await _delete_snapshot(kopia, snapshot)}")


async def _delete_snapshot(kopia: Kopia, snapshot: Snapshot) -> str:
    """Delete an incomplete snapshot; return what to append to the message if that fails."""
    try:
        await delete_snapshot(kopia, snapshot.snapshot_id)
    except KopiaError as e:
        _logger.warning("%s", e)
        return f"; {e}"
    return ""

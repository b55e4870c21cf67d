"""Local mode: back up, restore and list snapshots without a cluster, show the progress, and print the result."""

import json
import os
import sys
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, TextIO, TypeVar
from urllib.parse import urlsplit

from msgspec import UNSET

from core.clock import Clock, SystemClock
from core.contract import BackupResult, MoverMethod, ProgressMessage, RestoreResult, VolumeMode
from core.errors import ConfigError, UnsetAttributesError
from core.redact import Redactor
from datamover.arguments import LocalBackup, LocalList, LocalOptions, LocalRestore, RepositoryOptions
from datamover.data_path.backup import back_up
from datamover.data_path.restore import RestoreParameters, restore
from datamover.data_path.run import DataPath
from datamover.data_path.snapshot_runs import BackupParameters
from datamover.kinds import AUTO_PARENT, NO_PARENT
from datamover.kopia.progress import Direction, Meter
from datamover.kopia.repository import NotInitializedError, Repository, RepositoryAddress, build_kopia
from datamover.kopia.snapshots import Snapshot, list_snapshots
from datamover.kopia.stalls import read_stall_limits
from datamover.kopia.storage_calls import Waits
from datamover.runtime.cancellation import Canceler, run_beside, run_unless_canceled
from datamover.runtime.confinement import find_means, report_means
from datamover.runtime.resources import ResourceLimits, read_limits
from datamover.runtime.signals import StopSignal
from datamover.runtime.work_dir import WorkDir, escape_controls, open_work_dir
from datamover.storage.providers import FileStorage, Storage, read_inherited
from datamover.storage.s3 import S3Storage, find_aws_identity

_BAR_WIDTH: Final = 30
_TERMINAL_SECONDS: Final = 0.5
_LINE_SECONDS: Final = 10.0
_UNITS: Final = ("B", "KB", "MB", "GB", "TB", "PB")
_STEP: Final = 1000


def format_bytes(count: float) -> str:
    """Return `count` in a readable unit, such as `1.2 GB`."""
    unit, *larger = _UNITS
    while count >= _STEP and larger:
        count, unit = count / _STEP, larger.pop(0)
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"


class ProgressBar:
    """Writes the progress of one data path to `stream`."""

    def __init__(self, stream: TextIO, clock: Clock) -> None:
        self._stream = stream
        self._clock = clock
        self._terminal = stream.isatty()

    async def follow(self, meter: Meter) -> None:
        """Draw the progress, forever."""
        while True:
            await self._clock.sleep(_TERMINAL_SECONDS if self._terminal else _LINE_SECONDS)
            self.draw(await meter.read())

    def draw(self, reading: ProgressMessage, *, last: bool = False) -> None:
        """Draw one reading; the last one ends the line."""
        text = _format_text(reading)
        if self._terminal:
            end = "\n" if last else ""
            self._stream.write(f"\r\x1b[K{_format_bar(reading)} {text}{end}")
        else:
            self._stream.write(f"{text}\n")
        self._stream.flush()


def _format_bar(reading: ProgressMessage) -> str:
    if not reading.total_bytes:
        return "[" + " " * _BAR_WIDTH + "]"
    filled = _BAR_WIDTH * reading.done_bytes // reading.total_bytes
    return "[" + "#" * filled + "." * (_BAR_WIDTH - filled) + "]"


def _format_text(reading: ProgressMessage) -> str:
    done, total = format_bytes(reading.done_bytes), reading.total_bytes
    parts = [f"{done} of {format_bytes(total)}", f"{100 * reading.done_bytes // total} %"] if total else [done]
    if reading.bytes_per_second:
        parts.append(f"{format_bytes(reading.bytes_per_second)}/s")
        if total > reading.done_bytes:
            left = (total - reading.done_bytes) / reading.bytes_per_second
            parts.append(f"{left:.0f} s left")
    return ", ".join(parts)


_S3: Final = "s3"
_LOST_AND_FOUND: Final = "lost+found"
_T = TypeVar("_T")
_R = TypeVar("_R", BackupResult, RestoreResult)


def parse_storage(options: RepositoryOptions, environment: Mapping[str, str]) -> Storage:
    """Return the storage that the options describe; raises ConfigError."""
    parts = urlsplit(options.name)
    if not parts.scheme:
        return FileStorage(Path(options.name).absolute())
    if parts.scheme != _S3 or not parts.netloc:
        raise ConfigError(f'--repository: must be a directory or s3://bucket/prefix: "{options.name}"')
    try:
        ca_pem = Path(options.ca_file).read_bytes() if options.ca_file else b""
    except OSError as e:
        raise ConfigError(f"--s3-ca-file: cannot read {options.ca_file}: {e.strerror}") from e
    source = read_inherited(environment, "AWS_SHARED_CREDENTIALS_FILE")
    prefix = parts.path.strip("/")
    return S3Storage(
        bucket=parts.netloc,
        prefix=f"{prefix}/" if prefix else "",
        url=options.endpoint,
        region=options.region,
        keys=find_aws_identity(source, environment, profile=options.profile),
        verify_tls=options.verify_tls,
        ca_pem=ca_pem,
    )


@dataclass(frozen=True)
class LocalMover:
    """Runs the commands of local mode on one repository."""

    options: RepositoryOptions
    environment: Mapping[str, str] = field(repr=False)
    limits: ResourceLimits
    clock: Clock
    stop: StopSignal
    redactor: Redactor = field(default_factory=Redactor, repr=False)

    async def back_up(
        self, source: Path, name: str, bar: ProgressBar | None, *, wanted: LocalBackup | None = None
    ) -> BackupResult:
        """Back up a directory or device under the path `name`, as `wanted`; create the repository if there is none."""
        (volume, mode), wanted = _locate(source), wanted or LocalBackup(source)
        if wanted.exclude and mode is VolumeMode.BLOCK:
            raise ConfigError(f"--exclude is for file systems, and {volume} is a block device")
        parameters = BackupParameters(
            volume,
            mode,
            name or str(volume),
            parallel=self.limits.backup_workers,
            compression=wanted.compression,
            limits=self.limits,
            ignore_files=wanted.ignore_files,
            exclude=wanted.exclude,
            parent=NO_PARENT if wanted.read_all_files else AUTO_PARENT,
            mover=wanted.mover,
        )
        meter = Meter(self.clock, Direction.BACKUP)

        async def work(repository: Repository) -> BackupResult:
            try:
                await repository.connect()
            except NotInitializedError:
                await repository.ensure()
            moving = back_up(repository, parameters, DataPath(meter, repository.watchdog))
            return await _with_bar(moving, meter, bar)

        return await self._with_repository(work)

    async def restore(
        self, snapshot_id: str, target: Path, bar: ProgressBar | None, *, mover: MoverMethod = MoverMethod.PLAIN
    ) -> RestoreResult:
        """Restore a snapshot to a directory or device."""
        (volume, mode), limits = _locate(target), self.limits
        # A disk image would otherwise take its full size.
        parameters = RestoreParameters(
            snapshot_id, volume, mode, limits.restore_workers, limits, sparse=True, mover=mover
        )
        meter = Meter(self.clock, Direction.RESTORE)

        async def work(repository: Repository) -> RestoreResult:
            moving = restore(repository, parameters, DataPath(meter, repository.watchdog))
            return await _with_bar(moving, meter, bar)

        return await self._with_repository(work, parameters.workers)

    async def list(self) -> list[Snapshot]:
        """Return the snapshots of the repository."""
        return await self._with_repository(
            lambda repository: repository.open(partial(list_snapshots, repository), read_only=True)
        )

    async def _with_repository(
        self, work: Callable[[Repository], Coroutine[None, None, _T]], restore_workers: int = 0
    ) -> _T:
        """Return what `work` returns for the repository, unless a signal cancels it."""
        canceler = Canceler()
        canceler.cancel_on(self.stop)
        with open_work_dir(self.environment) as work_dir:
            repository = self._build_repository(work_dir, restore_workers)
            return await run_unless_canceled(lambda: work(repository), canceler)

    def _build_repository(self, work_dir: WorkDir, restore_workers: int) -> Repository:
        storage = parse_storage(self.options, self.environment)
        settings = self.limits.go_settings(self.environment, restore_workers=restore_workers)
        environment = {**self.environment, **settings}
        kopia = build_kopia(storage, work_dir, environment, self.options.password, self.redactor)
        address = RepositoryAddress(f"repository {storage.description}", storage)
        return Repository(kopia, address, work_dir, waits=Waits(self.clock, read_stall_limits(self.environment)))


async def _with_bar(moving: Coroutine[None, None, _R], meter: Meter, bar: ProgressBar | None) -> _R:
    if bar is None:
        return await moving
    result = await run_beside(lambda: bar.follow(meter), moving, name="progress-bar")
    bar.draw(meter.finish(result.total_bytes), last=True)
    return result


def _locate(path: Path) -> tuple[Path, VolumeMode]:
    """Return the absolute path for kopia, with symbolic links unresolved, and what is there."""
    return path.absolute(), VolumeMode.BLOCK if path.is_block_device() else VolumeMode.FILESYSTEM


def _check_empty(target: Path) -> None:
    """Check that a restore replaces nothing; a directory that `mkfs` makes does not count."""
    try:
        found = min((one.name for one in target.iterdir() if one.name != _LOST_AND_FOUND), default=None)
    except (FileNotFoundError, NotADirectoryError):
        # It is created, or refused later; a device has no names.
        return
    except OSError as e:
        raise ConfigError(f"--target: cannot read {target}: {e.strerror}") from e
    if found is not None:
        raise ConfigError(
            f"--target: {target} is not empty, it has {escape_controls(found)}: choose another directory, or set "
            "--overwrite to replace what the snapshot has too, and to keep the rest"
        )


async def run_local(options: LocalOptions, stop: StopSignal, redactor: Redactor) -> int:
    """Run the command, print its result, and return the exit code; its secrets are added to `redactor`."""
    report_means(find_means())
    clock = SystemClock()
    mover = LocalMover(options.repository, os.environ, limits=read_limits(), clock=clock, stop=stop, redactor=redactor)
    bar, code = None if options.json else ProgressBar(sys.stderr, clock), 0
    match options.command:
        case LocalBackup() as backup:
            result = await mover.back_up(backup.source, backup.name, bar, wanted=backup)
            text = result.to_json() if options.json else _describe_backup(result)
        case LocalRestore(snapshot_id, target, overwrite, method):
            if not overwrite:
                _check_empty(target)
            restored = await mover.restore(snapshot_id, target, bar, mover=method)
            size, path = format_bytes(restored.total_bytes), escape_controls(restored.target.by_path)
            text = restored.to_json() if options.json else f"restored {size} to {path}"
            code = UnsetAttributesError.exit_code if restored.note else 0
        case LocalList():
            found = await mover.list()
            text = json.dumps([asdict(one) for one in found]) if options.json else _describe_list(found)
    sys.stdout.write(f"{text}\n")
    return code


def _describe_backup(result: BackupResult) -> str:
    changed_bytes, changed = result.incremental_bytes, ""
    if changed_bytes is not UNSET and changed_bytes != result.total_bytes:
        changed = f", {format_bytes(changed_bytes)} changed"
    source = escape_controls(result.source.by_path)
    return f"snapshot {result.snapshot_id} of {source}: {format_bytes(result.total_bytes)}{changed}"


def _describe_list(snapshots: list[Snapshot]) -> str:
    lines = (
        f"{one.snapshot_id}  {one.started[:19]}Z  {format_bytes(one.size_bytes):>10}  {escape_controls(one.source)}"
        for one in snapshots
    )
    return "\n".join(lines) or "no snapshots in the repository"

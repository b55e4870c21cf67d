"""The commands that a person gives, and what is printed.

Does not know flags, or how data is moved.

Backup and restore by hand: a folder or device, a repository, and no cluster.

Knows how a repository is named on a command line. Does not know the command line itself, or
what is printed of a result.
"""

import json
import logging
import os
import stat
import sys
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Final, TypeVar
from urllib.parse import urlsplit

from core.clock import Clock, SystemClock
from core.contract import BackupResult, RestoreResult, VolumeMode
from core.errors import ConfigError
from datamover.arguments import LocalBackup, LocalList, LocalOptions, LocalRestore, RepositoryOptions
from datamover.data_path.backup import BackupParameters, back_up
from datamover.data_path.restore import RestoreParameters, restore
from datamover.data_path.run import DataPath, Watchdog, read_stall_limits
from datamover.kopia.process import Kopia, kopia_environment
from datamover.kopia.progress import Direction, Meter
from datamover.kopia.repository import NotInitializedError, Repository, RepositoryPlace
from datamover.kopia.snapshots import Snapshot, list_snapshots
from datamover.local.progress_bar import Bar, format_bytes
from datamover.runtime.cancellation import Canceller, run_beside, run_unless_canceled
from datamover.runtime.redact import Redactor
from datamover.runtime.resources import ResourceLimits, read_limits
from datamover.runtime.signals import StopSignal
from datamover.runtime.work_dir import WorkFolder, open_work_folder
from datamover.storage.credentials import find_aws_identity, read_inherited
from datamover.storage.providers import FileStorage, S3Storage, Storage

__all__ = ["LocalMover", "run_local", "storage_named"]


_logger = logging.getLogger(__name__)


_S3: Final = "s3"


_T = TypeVar("_T")


def storage_named(options: RepositoryOptions, environment: Mapping[str, str]) -> Storage:
    """Return the storage that the options name.

    Raises:
        ConfigError: they name none, or its CA cannot be read.
    """
    parts = urlsplit(options.name)
    if not parts.scheme:
        return FileStorage(Path(options.name).absolute())
    if parts.scheme != _S3 or not parts.netloc:
        raise ConfigError(f"--repository {options.name!r} is neither a folder nor s3://bucket/prefix")
    try:
        ca_pem = Path(options.ca_file).read_bytes() if options.ca_file else b""
    except OSError as e:
        raise ConfigError(f"--s3-ca-file {options.ca_file} cannot be read: {e.strerror}") from e
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


class LocalMover:
    """Runs one command against one repository."""

    def __init__(
        self,
        options: RepositoryOptions,
        environment: Mapping[str, str],
        *,
        limits: ResourceLimits,
        clock: Clock,
        stop: StopSignal,
    ) -> None:
        self._options = options
        self._environment = environment
        self._limits = limits
        self._clock = clock
        self._stop = stop

    async def back_up(self, source: Path, name: str, bar: Bar | None) -> BackupResult:
        """Back a folder or device up under the source path `name`; an empty repository is created first."""
        volume = _absolute(source)
        limits = self._limits
        request = BackupParameters(
            volume, _mode(volume), name or str(volume), parallel=limits.cpus, frugal=limits.frugal
        )
        meter = Meter(self._clock, Direction.UPLOAD)

        async def work(repository: Repository) -> BackupResult:
            try:
                await repository.connect()
            except NotInitializedError:
                await repository.ensure()
            return await _drawn(back_up(repository, request, self._transfer(meter, repository)), meter, bar)

        result = await self._with_repository(work)
        if bar is not None:
            bar.draw(meter.finish(result.total_bytes), last=True)
        return result

    async def restore(self, snapshot_id: str, target: Path, bar: Bar | None) -> RestoreResult:
        """Restore a snapshot into a folder or onto a device."""
        volume = _absolute(target)
        request = RestoreParameters(snapshot_id, volume, _mode(volume), self._limits.restore_workers)
        meter = Meter(self._clock, Direction.RESTORE)

        async def work(repository: Repository) -> RestoreResult:
            return await _drawn(restore(repository, request, self._transfer(meter, repository)), meter, bar)

        result = await self._with_repository(work, request.workers)
        if bar is not None:
            bar.draw(meter.finish(result.total_bytes), last=True)
        return result

    async def list(self) -> list[Snapshot]:
        """Return the snapshots of the repository."""

        async def work(repository: Repository) -> list[Snapshot]:
            return await repository.open(partial(list_snapshots, repository.kopia), read_only=True)

        return await self._with_repository(work)

    def _transfer(self, meter: Meter, repository: Repository) -> DataPath:
        limits = read_stall_limits(self._environment)
        return DataPath(meter, Watchdog(self._clock, _warn, repository.ask, limits))

    async def _with_repository(
        self, work: Callable[[Repository], Coroutine[None, None, _T]], restore_workers: int = 0
    ) -> _T:
        """Return what `work` makes of the repository, unless a signal comes first."""
        canceller = Canceller()
        canceller.heed(self._stop)
        with open_work_folder(self._environment) as folder:
            repository = self._repository(folder, restore_workers)
            return await run_unless_canceled(lambda: work(repository), canceller)

    def _repository(self, folder: WorkFolder, restore_workers: int) -> Repository:
        storage = storage_named(self._options, self._environment)
        reach = storage.reach(folder)
        redactor = Redactor([self._options.password, *reach.secrets(self._environment)])
        secrets = {
            **self._limits.go_settings(self._environment, restore_workers=restore_workers),
            **reach.environment,
            "KOPIA_PASSWORD": self._options.password,
        }
        kopia = Kopia(kopia_environment(self._environment, folder, secrets), redactor)
        return Repository(kopia, RepositoryPlace(f"repository {storage.description}", storage, reach), folder)


async def _warn(message: str) -> None:
    _logger.warning("%s", message)


async def _drawn(moving: Coroutine[None, None, _T], meter: Meter, bar: Bar | None) -> _T:
    if bar is None:
        return await moving
    return await run_beside(lambda: bar.follow(meter), moving, name="bar")


def _absolute(path: Path) -> Path:
    """Return the path as kopia shall see it: symbolic links in it stay."""
    return path.absolute()


def _mode(volume: Path) -> VolumeMode:
    device = volume.exists() and stat.S_ISBLK(volume.stat().st_mode)
    return VolumeMode.BLOCK if device else VolumeMode.FILESYSTEM


async def run_local(options: LocalOptions, stop: StopSignal) -> int:
    """Carry out the command, print its result, and return the exit code."""
    clock = SystemClock()
    mover = LocalMover(options.repository, os.environ, limits=read_limits(), clock=clock, stop=stop)
    bar = None if options.json else Bar(sys.stderr, clock)
    match options.command:
        case LocalBackup(source, name):
            _print_backup(await mover.back_up(source, name, bar), as_json=options.json)
        case LocalRestore(snapshot_id, target):
            _print_restore(await mover.restore(snapshot_id, target, bar), as_json=options.json)
        case LocalList():
            _print_list(await mover.list(), as_json=options.json)
    return 0


def _print_backup(result: BackupResult, *, as_json: bool) -> None:
    if as_json:
        _print(result.to_json())
        return
    changed = (
        "" if result.incremental_bytes == result.total_bytes else f", {format_bytes(result.incremental_bytes)} changed"
    )
    _print(f"snapshot {result.snapshot_id} of {result.source.by_path}: {format_bytes(result.total_bytes)}{changed}")


def _print_restore(result: RestoreResult, *, as_json: bool) -> None:
    if as_json:
        _print(result.to_json())
        return
    _print(f"restored {format_bytes(result.total_bytes)} to {result.target.by_path}")


def _print_list(snapshots: list[Snapshot], *, as_json: bool) -> None:
    if as_json:
        _print(json.dumps([asdict(snapshot) for snapshot in snapshots]))
        return
    for one in snapshots:
        _print(f"{one.snapshot_id}  {one.started[:19]}Z  {format_bytes(one.size_bytes):>10}  {one.source}")
    if not snapshots:
        _print("the repository holds no snapshot")


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")

"""The data mover's parsed command line: one type of options for each mode, and what each requires.

Does not know the flags' help and defaults (`datamover.flags`). Imports no code of either mode: so a
pod loads nothing for terminals, and local mode nothing for clusters.
"""

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from core.contract import MoverVerb, VolumeMode
from core.errors import ConfigError
from core.file_contract import decode_path
from core.models.compression import Compression
from core.models.verification import WHOLE_PERCENT
from core.snapshot_contract import CopyToCheck, TransferToDelete
from datamover.flags import DEFAULT_RESOURCE_TIMEOUT, LIST, build_parser
from datamover.kinds import TRANSFER_KINDS

__all__ = [
    "DeletionOptions",
    "FileOptions",
    "FileSource",
    "InitOptions",
    "ListOptions",
    "LocalBackup",
    "LocalList",
    "LocalOptions",
    "LocalRestore",
    "LogOptions",
    "MaintenanceOptions",
    "PodCommand",
    "PodOptions",
    "ReportOptions",
    "RepositoryOptions",
    "SendOptions",
    "StorageCommand",
    "ValidationOptions",
    "VerifyOptions",
    "parse_arguments",
]


@dataclass(frozen=True)
class LogOptions:
    """Minimum level and format of the log."""

    level: str
    format: str = "text"


@dataclass(frozen=True, kw_only=True)
class PodOptions:
    """Backup or restore in a pod: the transfer's custom resource and its volume; paths are inside the pod.

    `cluster` identifies a backup's cluster; empty: it is not known. `compression` is for one that names none itself.
    `require_attributes`: owners, modes and times that the target does not take fail a restore.
    """

    kind_flag: str
    name: str
    volume: Path
    mode: VolumeMode
    resource_timeout: timedelta
    attempt: int = 1
    cluster: str = ""
    compression: Compression = Compression.NONE
    ignore_files: bool = False
    read_all_files: bool = False
    require_attributes: bool = False
    cache_volume: str = ""
    cache_limit_mib: int = 0
    termination_file: Path
    log: LogOptions


@dataclass(frozen=True, kw_only=True)
class InitOptions:
    """Initialization of the repository of a BackupRepository, in a pod."""

    name: str
    termination_file: Path
    log: LogOptions


@dataclass(frozen=True, kw_only=True)
class ValidationOptions:
    """Validation of a BackupStorageLocation.

    With `keys_only` a storage is left alone to which a pod gives access by its identity or a volume: this
    process may not be such a pod.
    """

    name: str
    keys_only: bool
    termination_file: Path
    log: LogOptions


@dataclass(frozen=True, kw_only=True)
class MaintenanceOptions:
    """Maintenance of the repository of a BackupRepository, in a pod of a Job.

    A full run checks that no blob is missing if there are fewer than `verify_blobs`. `full_interval` is to be
    kopia's; 0: it stays as it is. With `report_snapshots`, the report of its snapshots follows.
    """

    name: str
    job: str
    ignore_foreign: bool = False
    verify_blobs: int = 100_000
    full_interval: timedelta = timedelta()
    report_snapshots: bool = False
    termination_file: Path
    log: LogOptions


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """The report of the snapshots of a BackupRepository's repository, in a pod."""

    name: str
    termination_file: Path
    log: LogOptions


@dataclass(frozen=True, kw_only=True)
class ListOptions:
    """The list of the snapshots in a BackupStorageLocation, in a pod; without namespaces, of all repositories."""

    name: str
    volume_namespaces: tuple[str, ...] = ()
    termination_file: Path
    log: LogOptions


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """Verification of snapshots of a BackupRepository's repository, in a pod.

    `percent` of the files are read. With `volume`, a directory or device into which the only snapshot was restored, all
    are compared instead.
    """

    name: str
    snapshots: tuple[str, ...]
    percent: float = WHOLE_PERCENT
    volume: Path | None = None
    mode: VolumeMode = VolumeMode.FILESYSTEM
    termination_file: Path
    log: LogOptions


@dataclass(frozen=True, kw_only=True)
class DeletionOptions:
    """The deletion of the snapshots of transfers in a BackupStorageLocation, in a pod, or only the check before it.

    `cluster` is what identifies the cluster in the tags of its snapshots. Only a dry run has `checks`.
    """

    name: str
    cluster: str
    transfers: tuple[TransferToDelete, ...]
    dry_run: bool = False
    checks: tuple[CopyToCheck, ...] = ()
    termination_file: Path
    log: LogOptions

    @property
    def volume_namespaces(self) -> list[str]:
        """The namespaces whose repositories it opens."""
        transfers = {one.volume_namespace for one in self.transfers}
        return sorted(transfers | {one.volume_namespace for one in self.checks})


@dataclass(frozen=True, kw_only=True)
class FileSource:
    """A file or directory of a snapshot in the repository of a namespace; of a block `device`, there is no path."""

    location: str
    volume_namespace: str
    snapshot_id: str
    path: str = ""
    device: bool = False


@dataclass(frozen=True, kw_only=True)
class FileOptions:
    """The list of a directory in a snapshot, in a pod: at most `limit` entries, of names after `after`."""

    source: FileSource
    limit: int
    after: str = ""
    termination_file: Path
    log: LogOptions


@dataclass(frozen=True, kw_only=True)
class SendOptions:
    """A file or directory of a snapshot that is sent from a pod."""

    source: FileSource
    termination_file: Path
    log: LogOptions


StorageCommand = (
    InitOptions
    | ValidationOptions
    | MaintenanceOptions
    | ReportOptions
    | ListOptions
    | VerifyOptions
    | DeletionOptions
    | FileOptions
    | SendOptions
)
"""Something about a repository or a location, rather than a transfer."""

PodCommand = PodOptions | StorageCommand


@dataclass(frozen=True)
class RepositoryOptions:
    """The repository of local mode: a directory's path or `s3://bucket/prefix`, and how to access it."""

    name: str
    password: str = field(repr=False)
    endpoint: str = ""
    region: str = ""
    profile: str = ""
    ca_file: str = ""
    verify_tls: bool = True


@dataclass(frozen=True)
class LocalBackup:
    """Back up `source`; without a name, the source of its snapshots is the path."""

    source: Path
    name: str = ""
    compression: Compression = Compression.NONE
    ignore_files: bool = False
    read_all_files: bool = False


@dataclass(frozen=True)
class LocalRestore:
    """Restore a snapshot to `target`, with `overwrite` also to a directory that is not empty."""

    snapshot_id: str
    target: Path
    overwrite: bool = False


@dataclass(frozen=True)
class LocalList:
    """List the snapshots of the repository."""


@dataclass(frozen=True, kw_only=True)
class LocalOptions:
    """One command of local mode; `json` prints the result as JSON, and no progress."""

    command: LocalBackup | LocalRestore | LocalList
    repository: RepositoryOptions
    json: bool
    log: LogOptions


def parse_arguments(argv: Sequence[str], environment: Mapping[str, str]) -> PodCommand | LocalOptions:
    """Return the options of the command line's mode; `environment` may contain the repository password.

    Raises:
        ConfigError: the command line is invalid.
    """
    parsed = build_parser().parse_args(argv)
    log = LogOptions(parsed.log_level or "info", parsed.log_format)
    if parsed.command == MoverVerb.INIT_REPOSITORY:
        return InitOptions(name=parsed.backup_repository, termination_file=parsed.termination_message_path, log=log)
    if parsed.command == MoverVerb.REPORT_SNAPSHOTS:
        return ReportOptions(name=parsed.backup_repository, termination_file=parsed.termination_message_path, log=log)
    if parsed.command == MoverVerb.LIST_SNAPSHOTS:
        return ListOptions(
            name=parsed.backup_storage_location,
            volume_namespaces=tuple(parsed.volume_namespace),
            termination_file=parsed.termination_message_path,
            log=log,
        )
    if parsed.command == MoverVerb.VERIFY_SNAPSHOTS:
        return _parse_verify(parsed, log)
    if parsed.command == MoverVerb.DELETE_SNAPSHOTS:
        return _parse_deletion(parsed, log)
    if parsed.command == MoverVerb.LIST_FILES:
        return FileOptions(
            source=_parse_source(parsed),
            limit=parsed.limit,
            after=decode_path(parsed.after),
            termination_file=parsed.termination_message_path,
            log=log,
        )
    if parsed.command == MoverVerb.SEND_FILES:
        return SendOptions(source=_parse_source(parsed), termination_file=parsed.termination_message_path, log=log)
    if parsed.command == MoverVerb.VALIDATE_LOCATION:
        return ValidationOptions(
            name=parsed.backup_storage_location,
            keys_only=parsed.keys_only,
            termination_file=parsed.termination_message_path,
            log=log,
        )
    if parsed.command == MoverVerb.MAINTAIN_REPOSITORY:
        return MaintenanceOptions(
            name=parsed.backup_repository,
            job=parsed.job,
            ignore_foreign=parsed.ignore_foreign,
            verify_blobs=parsed.verify_blobs,
            full_interval=timedelta(seconds=parsed.full_interval),
            report_snapshots=parsed.report_snapshots,
            termination_file=parsed.termination_message_path,
            log=log,
        )
    return _parse_local(parsed, environment) if parsed.repository else _parse_pod(parsed)


def _parse_verify(parsed: argparse.Namespace, log: LogOptions) -> VerifyOptions:
    if parsed.volume_path and len(parsed.snapshot) > 1:
        raise ConfigError("--volume-path is for one --snapshot: that which was restored into the volume")
    return VerifyOptions(
        name=parsed.backup_repository,
        snapshots=tuple(parsed.snapshot),
        percent=parsed.percent,
        volume=Path(parsed.volume_path) if parsed.volume_path else None,
        mode=parsed.volume_mode,
        termination_file=parsed.termination_message_path,
        log=log,
    )


def _parse_deletion(parsed: argparse.Namespace, log: LogOptions) -> DeletionOptions:
    if parsed.check and not parsed.dry_run:
        raise ConfigError("--check is for --dry-run: what it finds is to be known before the deletion")
    return DeletionOptions(
        name=parsed.backup_storage_location,
        cluster=parsed.cluster,
        transfers=tuple(parsed.transfer),
        dry_run=parsed.dry_run,
        checks=tuple(parsed.check),
        termination_file=parsed.termination_message_path,
        log=log,
    )


def _parse_source(parsed: argparse.Namespace) -> FileSource:
    return FileSource(
        location=parsed.backup_storage_location,
        volume_namespace=parsed.volume_namespace,
        snapshot_id=parsed.snapshot,
        path=decode_path(parsed.path),
        device=parsed.device,
    )


def _parse_pod(parsed: argparse.Namespace) -> PodOptions:
    named = {flag: getattr(parsed, flag.replace("-", "_"), "") for flag in TRANSFER_KINDS}
    given = {flag: name for flag, name in named.items() if name}
    if len(given) != 1 or not parsed.volume_path:
        raise ConfigError(
            "required arguments: --repository (local mode), or one custom resource and --volume-path (pod mode)"
        )
    ((flag, name),) = given.items()
    return PodOptions(
        kind_flag=flag,
        name=name,
        volume=Path(parsed.volume_path),
        mode=parsed.volume_mode,
        # Velero's agents write 0s where the custom resource has no timeout.
        resource_timeout=parsed.resource_timeout or DEFAULT_RESOURCE_TIMEOUT,
        cache_volume=parsed.cache_volume_path,
        cache_limit_mib=parsed.cache_limit_mib,
        attempt=parsed.attempt,
        cluster=getattr(parsed, "cluster", ""),
        compression=getattr(parsed, "compression", Compression.NONE),
        ignore_files=getattr(parsed, "ignore_files", False),
        read_all_files=getattr(parsed, "read_all_files", False),
        require_attributes=getattr(parsed, "require_attributes", False),
        termination_file=parsed.termination_message_path,
        log=LogOptions(parsed.log_level or "info", parsed.log_format),
    )


def _parse_local(parsed: argparse.Namespace, environment: Mapping[str, str]) -> LocalOptions:
    repository = RepositoryOptions(
        name=parsed.repository,
        password=_read_password(parsed.password_file, environment),
        endpoint=parsed.s3_endpoint,
        region=parsed.s3_region,
        profile=parsed.s3_profile,
        ca_file=parsed.s3_ca_file,
        verify_tls=not parsed.s3_insecure,
    )
    log = LogOptions(parsed.log_level or "warning", parsed.log_format)
    return LocalOptions(command=_parse_local_command(parsed), repository=repository, json=parsed.json, log=log)


def _parse_local_command(parsed: argparse.Namespace) -> LocalBackup | LocalRestore | LocalList:
    for name in ("source", "name", "target"):
        _check_text(f"--{name}", str(getattr(parsed, name, "")))
    if parsed.command == LIST:
        return LocalList()
    if parsed.command == MoverVerb.BACKUP:
        if parsed.source is None:
            raise ConfigError("required argument: --source")
        return LocalBackup(parsed.source, parsed.name, parsed.compression, parsed.ignore_files, parsed.read_all_files)
    if parsed.target is None or not parsed.snapshot:
        raise ConfigError("required arguments: --snapshot and --target")
    return LocalRestore(parsed.snapshot, parsed.target, parsed.overwrite)


def _check_text(flag: str, value: str) -> None:
    """Check that kopia and JSON can keep a path or name.

    Raises:
        ConfigError: they cannot.
    """
    try:
        value.encode()
    except UnicodeEncodeError:
        shown = os.fsencode(value).decode(errors="backslashreplace")
        raise ConfigError(f'{flag}: not UTF-8, so that kopia cannot keep it: "{shown}"') from None


def _read_password(file: str, environment: Mapping[str, str]) -> str:
    try:
        text = Path(file).read_text() if file else ""
    except OSError as e:
        raise ConfigError(f"--password-file: cannot read {file}: {e.strerror}") from e
    password = (text or environment.get("KOPIA_PASSWORD", "")).strip()
    if not password:
        raise ConfigError("no repository password: set --password-file or KOPIA_PASSWORD")
    return password

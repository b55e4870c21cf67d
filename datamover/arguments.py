"""The data mover's parsed command line: one type of options for each mode, and what each requires.

Imports no code of either mode: so a pod loads nothing for terminals, and local mode nothing for clusters.
"""

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from core.contract import MoverMethod, MoverVerb, TrackedSnapshot, VolumeMode
from core.errors import ConfigError
from core.models.transfer_settings import Compression, Exclusions
from core.mover_specs import MoverSpec, parse_spec
from datamover.flags import DEFAULT_RESOURCE_TIMEOUT, LIST, TERMINATION_FILE, build_parser
from datamover.kinds import TRANSFER_KINDS


@dataclass(frozen=True)
class LogOptions:
    """Minimum level and format of the log."""

    level: str
    format: str = "text"


@dataclass(frozen=True, kw_only=True)
class PodOptions:
    """Backup or restore in a pod: the transfer's custom resource and its volume; paths are inside the pod.

    `cluster` identifies a backup's cluster. `compression` is for one that names none itself. `require_attributes`:
    owners, modes and times that the target does not take fail a restore. `followed`: it writes no done
    file. `tracked` is the snapshot that a backup reads; None: the storage has no handles of it.
    """

    kind_flag: str
    name: str
    volume: Path
    mode: VolumeMode
    resource_timeout: timedelta
    attempt: int = 1
    cluster: str | None = None
    compression: Compression = Compression.NONE
    ignore_files: bool = False
    exclude: Exclusions = field(default_factory=Exclusions)
    read_all_files: bool = False
    mover: MoverMethod = MoverMethod.PLAIN
    require_attributes: bool = False
    followed: bool = False
    tracked: TrackedSnapshot | None = None
    cache_volume: str | None = None
    cache_limit_mib: int | None = None
    termination_file: Path
    log: LogOptions


@dataclass(frozen=True, kw_only=True)
class StorageCommand:
    """What a pod does for a repository or a location, rather than for a transfer."""

    spec: MoverSpec
    termination_file: Path
    log: LogOptions


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
    mover: MoverMethod = MoverMethod.PLAIN
    exclude: Exclusions = field(default_factory=Exclusions)


@dataclass(frozen=True)
class LocalRestore:
    """Restore a snapshot to `target`, with `overwrite` also to a directory that is not empty."""

    snapshot_id: str
    target: Path
    overwrite: bool = False
    mover: MoverMethod = MoverMethod.PLAIN


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


def parse_arguments(argv: Sequence[str], environment: Mapping[str, str]) -> PodOptions | StorageCommand | LocalOptions:
    """Return the options of the mode; `environment` may have the repository password; raises ConfigError."""
    if (spec := parse_spec(argv)) is not None:
        file = Path(spec.termination_message_path or TERMINATION_FILE)
        return StorageCommand(spec=spec, termination_file=file, log=LogOptions(spec.log_level, spec.log_format))
    parsed = build_parser().parse_args(argv)
    return _parse_local(parsed, environment) if parsed.repository else _parse_pod(parsed)


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
        cache_volume=parsed.cache_volume_path or None,
        cache_limit_mib=parsed.cache_limit_mib or None,
        attempt=parsed.attempt,
        cluster=getattr(parsed, "cluster", None) or None,
        compression=getattr(parsed, "compression", Compression.NONE),
        ignore_files=getattr(parsed, "ignore_files", False),
        exclude=getattr(parsed, "exclude", Exclusions()),
        read_all_files=getattr(parsed, "read_all_files", False),
        mover=getattr(parsed, "mover", MoverMethod.PLAIN),
        require_attributes=getattr(parsed, "require_attributes", False),
        followed=getattr(parsed, "followed", False),
        tracked=_parse_tracked(parsed),
        termination_file=parsed.termination_message_path,
        log=LogOptions(parsed.log_level or "info", parsed.log_format),
    )


def _parse_tracked(parsed: argparse.Namespace) -> TrackedSnapshot | None:
    change_id, volume_id, snapshot_id = (getattr(parsed, f"{name}_id", "") for name in ("change", "volume", "snapshot"))
    if not (change_id and volume_id and snapshot_id):
        return None
    return TrackedSnapshot(change_id, volume_id, snapshot_id, parsed.snapshot_metadata)


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
        return LocalBackup(
            parsed.source,
            parsed.name,
            parsed.compression,
            parsed.ignore_files,
            parsed.read_all_files,
            parsed.mover,
            parsed.exclude,
        )
    if parsed.target is None or not parsed.snapshot:
        raise ConfigError("required arguments: --snapshot and --target")
    return LocalRestore(parsed.snapshot, parsed.target, parsed.overwrite, parsed.mover)


def _check_text(flag: str, value: str) -> None:
    """Check that kopia and JSON can keep a path or name. Raises ConfigError if they cannot."""
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

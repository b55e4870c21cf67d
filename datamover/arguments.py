"""The data mover's command line: one type of options for each mode, what each requires, and the flags with their help.

Imports no code of either mode: so a pod loads nothing for terminals, and local mode nothing for clusters.
"""

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

from core.contract import MoverMethod, MoverVerb, SnapshotMetadata, TrackedSnapshot, VolumeMode
from core.errors import ConfigError
from core.logs import LEVELS, LOG_FORMATS
from core.models.transfer_settings import Compression, Exclusions, parse_compression
from core.models.units import parse_duration
from core.mover_specs import MoverSpec, parse_spec
from core.version import VERSION
from datamover.kinds import TRANSFER_KINDS

_T = TypeVar("_T")

_LIST: Final = "list"
"""The command of local mode that is no verb of the node agent."""

_RESOURCE_TIMEOUT: Final = timedelta(minutes=10)
_TERMINATION_FILE: Final = Path("/dev/termination-log")


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
        file = Path(spec.termination_message_path or _TERMINATION_FILE)
        return StorageCommand(spec=spec, termination_file=file, log=LogOptions(spec.log_level, spec.log_format))
    parsed = _build_parser().parse_args(argv)
    return _parse_local(parsed, environment) if parsed.repository else _parse_pod(parsed)


def _parse_pod(parsed: argparse.Namespace) -> PodOptions:
    named = {flag: getattr(parsed, flag.replace("-", "_"), "") for flag in TRANSFER_KINDS}
    given = {flag: name for flag, name in named.items() if name}
    if len(given) != 1 or not parsed.volume_path:
        raise ConfigError(
            "required arguments: --repository (local mode), or one custom resource and --volume-path (pod mode)"
        )
    ((kind_flag, name),) = given.items()
    # A restore has no flags of a backup, and the other way round.
    own = {one.name: getattr(parsed, one.name) for one in fields(PodOptions) if hasattr(parsed, one.name)}
    own |= {
        "kind_flag": kind_flag,
        "name": name,
        "volume": Path(parsed.volume_path),
        "mode": parsed.volume_mode,
        # Velero's agents write 0s where the custom resource has no timeout.
        "resource_timeout": parsed.resource_timeout or _RESOURCE_TIMEOUT,
        "cache_volume": parsed.cache_volume_path or None,
        "cache_limit_mib": parsed.cache_limit_mib or None,
        "tracked": _parse_tracked(parsed),
        "termination_file": parsed.termination_message_path,
        "log": LogOptions(parsed.log_level or "info", parsed.log_format),
    }
    return PodOptions(**own)


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
    if parsed.command == _LIST:
        return LocalList()
    if parsed.command == MoverVerb.BACKUP:
        if parsed.source is None:
            raise ConfigError("required argument: --source")
        return LocalBackup(**{one.name: getattr(parsed, one.name) for one in fields(LocalBackup)})
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
    except (OSError, UnicodeDecodeError) as e:
        why = e.strerror if isinstance(e, OSError) else "not UTF-8"
        raise ConfigError(f"--password-file: cannot read {file}: {why}") from e
    password = (text or environment.get("KOPIA_PASSWORD", "")).strip()
    if not password:
        raise ConfigError("no repository password: set --password-file or KOPIA_PASSWORD")
    return password


_LOCAL_MODE: Final = "local mode"
_POD_MODE: Final = "pod mode (used by the node agent)"
_ABOUT: Final = """\
Backs up the data of one volume to a backup repository and restores it, through kopia.

In local mode (--repository) it needs a directory, a repository and a password, but no cluster.
In a pod, the node agent starts it with the name of a custom resource."""

_ACCOUNT_FLAGS: Final = ("cbt-sa-name", "csi-snapshot-metadata-service-sa")
_BLOCK_FLAGS: Final = {
    MoverVerb.BACKUP: ("change-id", "volume-id", "snapshot-id", *_ACCOUNT_FLAGS),
    MoverVerb.RESTORE: ("vs-namespace", *_ACCOUNT_FLAGS),
}
"""Flags of Velero 1.19 for its block data mover: the first three are set for every backup, empty for a file system; the
others are ignored. Its exposer and its command spell the account's differently. Source: Velero main at d2241adba and
093b61dc6 (restores into existing volumes), pkg/exposer/csi_snapshot.go and generic_restore.go, pkg/cmd/cli/datamover.
"""

_EXAMPLES: Final = """\
examples:
  Back up a directory to a repository on another disk (created on first use), and list its snapshots:
    export KOPIA_PASSWORD=…
    datamover backup --source /home/me --repository /mnt/disk/repository
    datamover list --repository /mnt/disk/repository

  Restore a snapshot:
    datamover restore --snapshot ID --target /home/me --repository /mnt/disk/repository

  Back up to a bucket, with keys from the environment or AWS_SHARED_CREDENTIALS_FILE:
    datamover backup --source /data --repository s3://bucket/prefix --s3-endpoint https://s3.example.com

exit codes:
  0 success   1 API request, maintenance or internal error   2 invalid usage or configuration   10 data path failed
  11 kopia failed   12 repository unusable   14 canceled, or stopped by a signal
  15 kopia was killed, or crashed   16 the storage does not answer   17 another attempt may write to the volume
  18 the target refused files, all others are restored   19 it did not take owners, modes or times of files"""


class _RaisingParser(argparse.ArgumentParser):
    """Raises an error where argparse would exit; its help ends in the examples."""

    def __init__(self, **more: Any) -> None:  # noqa: ANN401 - of the base class
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(epilog=_EXAMPLES, formatter_class=formatter, allow_abbrev=False, **more)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")


def _build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line; it raises a ConfigError instead of exiting on invalid usage."""
    parser = _RaisingParser(prog="datamover", description=_ABOUT)
    parser.add_argument("--version", action="version", version=f"datamover {VERSION}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)

    backup = _add_command(commands, MoverVerb.BACKUP, "back up a directory or device to a snapshot")
    local = backup.add_argument_group(_LOCAL_MODE)
    _add(local, "--source", "PATH", "directory or block device to back up", type=Path, default=None)
    _add(local, "--name", "NAME", "source of the snapshots in the repository (default: the path)")
    _add_repository(local, required=False)
    _add_transfer(backup, MoverVerb.BACKUP)
    _add(backup, "--cluster", "UID", "what identifies the cluster in the snapshot's tags (default: none)", default=None)
    about = "kopia's algorithm, unless the custom resource names one (default: none)"
    _add(backup, "--compression", "ALGORITHM", about, type=_explained(parse_compression), default=Compression.NONE)
    about = "leave out what files named .kopiaignore in the volume list (default: back it up)"
    _add_switch(backup, "--ignore-files", about)
    about = 'what to leave out, such as {"patterns": ["*.tmp"], "maxBytes": 1000000, "oneFileSystem": true}'
    _add(backup, "--exclude", "JSON", about, type=_explained(Exclusions.parse), default=Exclusions())
    _add_switch(backup, "--read-all-files", "also read files whose size and time are unchanged since the last backup")
    _add_method(backup)
    backup.add_argument("--snapshot-metadata", type=SnapshotMetadata.from_json, help=argparse.SUPPRESS)

    restore = _add_command(commands, MoverVerb.RESTORE, "restore a snapshot to a directory or device")
    local = restore.add_argument_group(_LOCAL_MODE)
    _add(local, "--snapshot", "ID", "ID of the snapshot, from `datamover list`")
    _add(local, "--target", "PATH", "directory or block device to restore to", type=Path, default=None)
    about = "restore also to a directory that is not empty: files of the snapshot replace files of the same name"
    _add_switch(local, "--overwrite", about)
    _add_repository(local, required=False)
    _add_transfer(restore, MoverVerb.RESTORE)
    _add_method(restore)

    listing = _add_command(commands, _LIST, "list the snapshots of a repository")
    _add_repository(listing.add_argument_group(_LOCAL_MODE), required=True)

    return parser


def _add_command(
    commands: "argparse._SubParsersAction[_RaisingParser]", name: str, about: str
) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=about, description=f"{about[0].upper()}{about[1:]}.")
    levels = f"{', '.join(LEVELS)} (default: info in a pod, warning in local mode)"
    _add(command, "--log-level", "NAME", f"minimum log level: {levels}")
    about = f"format of log lines: {', '.join(LOG_FORMATS)} (default: %(default)s)"
    _add(command, "--log-format", "NAME", about, default="text")
    return command


def _add(group: argparse._ActionsContainer, flag: str, metavar: str, about: str, **more: Any) -> None:  # noqa: ANN401
    """Add a flag with a value; without `type` and `default`, its text is empty by default."""
    group.add_argument(flag, metavar=metavar, help=about, **{"default": "", **more})


def _add_switch(group: argparse._ActionsContainer, flag: str, about: str) -> None:
    group.add_argument(flag, action="store_true", help=about)


def _add_repository(group: argparse._ArgumentGroup, *, required: bool) -> None:
    about = "directory, or s3://bucket/prefix with keys from the environment or AWS_SHARED_CREDENTIALS_FILE"
    _add(group, "--repository", "PATH", about, required=required)
    _add(group, "--password-file", "PATH", "file with the repository password (default: $KOPIA_PASSWORD)")
    _add(group, "--s3-endpoint", "URL", "S3 endpoint, such as https://s3.example.com (default: AWS)")
    _add(group, "--s3-region", "NAME", "region of the bucket")
    _add(group, "--s3-profile", "NAME", "profile in the credentials file (default: $AWS_PROFILE, else default)")
    _add(group, "--s3-ca-file", "PATH", "file with the certificate authority of the endpoint")
    _add_switch(group, "--s3-insecure", "do not verify the certificate of the endpoint")
    _add_switch(group, "--json", "print the result as JSON, without progress")


def _add_method(parser: argparse.ArgumentParser) -> None:
    about = (
        "how kopia is run: plain, by its own commands, or one-open, which opens the repository once, and in a backup "
        "also reads files that were changed without a new time (default: plain, for a kopia as released)"
    )
    choices, default = tuple(MoverMethod), MoverMethod.PLAIN
    _add(parser, "--mover", "NAME", about, type=MoverMethod, choices=choices, default=default)


def _add_transfer(parser: argparse.ArgumentParser, verb: MoverVerb) -> None:
    group = parser.add_argument_group(_POD_MODE)
    for flag in _BLOCK_FLAGS[verb]:
        group.add_argument(f"--{flag}", default="", help=argparse.SUPPRESS)
    for flag, kind in TRANSFER_KINDS.items():
        if kind.verb is verb:
            _add(group, f"--{flag}", "NAME", f"name of the {kind.resource.kind}")
    _add(group, "--volume-path", "PATH", "mount path of the volume, or path of the device")
    about = "volume mode: Filesystem or Block (default: %(default)s)"
    _add(group, "--volume-mode", "NAME", about, type=VolumeMode, default=VolumeMode.FILESYSTEM)
    if verb is MoverVerb.RESTORE:
        about = "fail if the target does not take the owner, mode or time of a file (default: report it)"
        _add_switch(group, "--require-attributes", about)
        about = "write no done file: another restore of the same volume follows (default: write it)"
        _add_switch(group, "--followed", about)
    about = "mount path of a volume for kopia's cache (default: the work directory)"
    _add(group, "--cache-volume-path", "PATH", about)
    about = "limit of kopia's cache in MiB, where the repository's is larger (default: none)"
    _add(group, "--cache-limit-mib", "NUMBER", about, type=int, default=0)
    about = (
        "number of the transfer's attempt; the data path starts only when the custom resource has the same one "
        "(default: %(default)s)"
    )
    _add(group, "--attempt", "NUMBER", about, type=_positive, default=1)
    about, default = "timeout for the BackupRepository to become Ready (default: 10m0s)", _RESOURCE_TIMEOUT
    _add(group, "--resource-timeout", "DURATION", about, type=parse_duration, default=default)
    about = "file to write the result to (default: %(default)s)"
    _add(group, "--termination-message-path", "PATH", about, type=Path, default=_TERMINATION_FILE)


def _explained(parse: Callable[[str], _T]) -> Callable[[str], _T]:
    """Return `parse` with an error whose text argparse shows."""

    def convert(text: str) -> _T:
        try:
            return parse(text)
        except (ValueError, ConfigError) as e:
            raise argparse.ArgumentTypeError(str(e)) from e

    return convert


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f'must be a positive integer: "{text}"')
    return int(text)

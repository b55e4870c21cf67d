"""The data mover's command line: flags, help, and the parsed options, one type for each mode.

Imports no code of either mode: so a pod loads nothing for terminals, and local mode nothing for
clusters.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Final, NoReturn

from core.contract import MoverVerb, VolumeMode
from core.errors import ConfigError
from core.logs import LEVELS, LOG_FORMATS
from core.models.units import parse_duration
from core.version import VERSION
from datamover.kinds import TRANSFER_KINDS

__all__ = [
    "InitOptions",
    "LocalBackup",
    "LocalList",
    "LocalOptions",
    "LocalRestore",
    "LogOptions",
    "PodOptions",
    "RepositoryOptions",
    "parse_arguments",
]


@dataclass(frozen=True)
class LogOptions:
    """Minimum level and format of the log."""

    level: str
    format: str = "text"


@dataclass(frozen=True, kw_only=True)
class PodOptions:
    """Backup or restore in a pod: the transfer's custom resource and its volume; paths are inside the pod."""

    kind_flag: str
    name: str
    volume: Path
    mode: VolumeMode
    resource_timeout: timedelta
    cache_volume: str = ""
    termination_file: Path
    log: LogOptions


@dataclass(frozen=True, kw_only=True)
class InitOptions:
    """Initialization of the repository of a BackupRepository, in a pod."""

    name: str
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


@dataclass(frozen=True)
class LocalRestore:
    """Restore a snapshot to `target`."""

    snapshot_id: str
    target: Path


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


_LIST: Final = "list"
_LOCAL_MODE: Final = "local mode"
_POD_MODE: Final = "pod mode (used by the node agent)"
_ABOUT: Final = """\
Backs up the data of one volume to a backup repository and restores it, through kopia.

In local mode (--repository) it needs a directory, a repository and a password, but no cluster.
In a pod, the node agent starts it with the name of a custom resource."""

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
  0 success   1 API request or internal error   2 invalid usage or configuration   10 data path failed
  11 kopia failed   12 repository unusable   14 canceled, or stopped by a signal"""


class _Parser(argparse.ArgumentParser):
    """Raises an error where argparse would exit."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")


def parse_arguments(argv: Sequence[str], environment: Mapping[str, str]) -> PodOptions | InitOptions | LocalOptions:
    """Return the options of the command line's mode; `environment` may contain the repository password.

    Raises:
        ConfigError: the command line is invalid.
    """
    parsed = _build_parser().parse_args(argv)
    if parsed.command == MoverVerb.INIT_REPOSITORY:
        return InitOptions(
            name=parsed.backup_repository,
            termination_file=parsed.termination_message_path,
            log=LogOptions(parsed.log_level or "info", parsed.log_format),
        )
    return _parse_local(parsed, environment) if parsed.repository else _parse_pod(parsed)


def _build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="datamover",
        description=_ABOUT,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"datamover {VERSION}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)

    backup = _add_command(commands, MoverVerb.BACKUP, "back up a directory or device to a snapshot")
    local = backup.add_argument_group(_LOCAL_MODE)
    local.add_argument("--source", metavar="PATH", type=Path, help="directory or block device to back up")
    local.add_argument(
        "--name", metavar="NAME", default="", help="source of the snapshots in the repository (default: the path)"
    )
    _add_repository(local, required=False)
    _add_transfer(backup, MoverVerb.BACKUP)

    restore = _add_command(commands, MoverVerb.RESTORE, "restore a snapshot to a directory or device")
    local = restore.add_argument_group(_LOCAL_MODE)
    local.add_argument("--snapshot", metavar="ID", default="", help="ID of the snapshot, from `datamover list`")
    local.add_argument("--target", metavar="PATH", type=Path, help="directory or block device to restore to")
    _add_repository(local, required=False)
    _add_transfer(restore, MoverVerb.RESTORE)

    listing = _add_command(commands, _LIST, "list the snapshots of a repository")
    _add_repository(listing.add_argument_group(_LOCAL_MODE), required=True)

    init = _add_command(commands, MoverVerb.INIT_REPOSITORY, "initialize the repository of a BackupRepository")
    in_pod = init.add_argument_group(_POD_MODE)
    in_pod.add_argument("--backup-repository", metavar="NAME", required=True, help="name of the BackupRepository")
    _add_pod(in_pod)
    return parser


def _add_command(commands: "argparse._SubParsersAction[_Parser]", name: str, about: str) -> argparse.ArgumentParser:
    command = commands.add_parser(
        name,
        help=about,
        description=f"{about[0].upper()}{about[1:]}.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.add_argument(
        "--log-level",
        metavar="NAME",
        default="",
        help=f"minimum log level: {', '.join(LEVELS)} (default: info in a pod, warning in local mode)",
    )
    command.add_argument(
        "--log-format",
        metavar="NAME",
        default="text",
        help=f"format of log lines: {', '.join(LOG_FORMATS)} (default: %(default)s)",
    )
    return command


def _add_repository(group: argparse._ArgumentGroup, *, required: bool) -> None:
    group.add_argument(
        "--repository",
        metavar="PATH",
        required=required,
        default="",
        help="directory, or s3://bucket/prefix with keys from the environment or AWS_SHARED_CREDENTIALS_FILE",
    )
    group.add_argument(
        "--password-file",
        metavar="PATH",
        default="",
        help="file with the repository password (default: $KOPIA_PASSWORD)",
    )
    group.add_argument(
        "--s3-endpoint", metavar="URL", default="", help="S3 endpoint, such as https://s3.example.com (default: AWS)"
    )
    group.add_argument("--s3-region", metavar="NAME", default="", help="region of the bucket")
    group.add_argument(
        "--s3-profile",
        metavar="NAME",
        default="",
        help="profile in the credentials file (default: $AWS_PROFILE, else default)",
    )
    group.add_argument(
        "--s3-ca-file", metavar="PATH", default="", help="file with the certificate authority of the endpoint"
    )
    group.add_argument("--s3-insecure", action="store_true", help="do not verify the certificate of the endpoint")
    group.add_argument("--json", action="store_true", help="print the result as JSON, without progress")


def _add_transfer(parser: argparse.ArgumentParser, verb: MoverVerb) -> None:
    group = parser.add_argument_group(_POD_MODE)
    for flag, kind in TRANSFER_KINDS.items():
        if kind.verb is verb:
            group.add_argument(f"--{flag}", metavar="NAME", default="", help=f"name of the {kind.resource.kind}")
    group.add_argument(
        "--volume-path", metavar="PATH", default="", help="mount path of the volume, or path of the device"
    )
    group.add_argument(
        "--volume-mode",
        metavar="NAME",
        type=VolumeMode,
        default=VolumeMode.FILESYSTEM,
        help="volume mode: Filesystem or Block (default: %(default)s)",
    )
    group.add_argument(
        "--cache-volume-path",
        metavar="PATH",
        default="",
        help="mount path of a volume for kopia's cache (default: the work directory)",
    )
    _add_pod(group)


def _add_pod(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--resource-timeout",
        metavar="DURATION",
        type=parse_duration,
        default=timedelta(minutes=10),
        help="timeout for the BackupRepository to become Ready (default: 10m0s)",
    )
    group.add_argument(
        "--termination-message-path",
        metavar="PATH",
        type=Path,
        default=Path("/dev/termination-log"),
        help="file to write the result to (default: %(default)s)",
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
        resource_timeout=parsed.resource_timeout,
        cache_volume=parsed.cache_volume_path,
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
    return LocalOptions(
        command=_parse_local_command(parsed),
        repository=repository,
        json=parsed.json,
        log=LogOptions(parsed.log_level or "warning", parsed.log_format),
    )


def _parse_local_command(parsed: argparse.Namespace) -> LocalBackup | LocalRestore | LocalList:
    if parsed.command == _LIST:
        return LocalList()
    if parsed.command == MoverVerb.BACKUP:
        if parsed.source is None:
            raise ConfigError("required argument: --source")
        return LocalBackup(parsed.source, parsed.name)
    if parsed.target is None or not parsed.snapshot:
        raise ConfigError("required arguments: --snapshot and --target")
    return LocalRestore(parsed.snapshot, parsed.target)


def _read_password(file: str, environment: Mapping[str, str]) -> str:
    try:
        text = Path(file).read_text() if file else ""
    except OSError as e:
        raise ConfigError(f"--password-file: cannot read {file}: {e.strerror}") from e
    password = (text or environment.get("KOPIA_PASSWORD", "")).strip()
    if not password:
        raise ConfigError("no repository password: set --password-file or KOPIA_PASSWORD")
    return password

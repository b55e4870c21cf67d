"""The data mover's command line: flags, help, and what they say as one type for each mode.

Imports nothing that carries a command out: so a pod loads nothing that serves a terminal, and
a terminal nothing that reaches a cluster.
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
    """Back up or restore in a pod: the transfer's custom resource, and its volume; paths are inside the pod."""

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
    """Initialize the repository of a BackupRepository, in a pod."""

    name: str
    termination_file: Path
    log: LogOptions


@dataclass(frozen=True)
class RepositoryOptions:
    """The repository of local mode: a folder's path or `s3://bucket/prefix`, and how it is reached."""

    name: str
    password: str = field(repr=False)
    endpoint: str = ""
    region: str = ""
    profile: str = ""
    ca_file: str = ""
    verify_tls: bool = True


@dataclass(frozen=True)
class LocalBackup:
    """What to back up; without a name, the snapshot's source is the path."""

    source: Path
    name: str = ""


@dataclass(frozen=True)
class LocalRestore:
    """Which snapshot to restore, and where to."""

    snapshot_id: str
    target: Path


@dataclass(frozen=True)
class LocalList:
    """List the snapshots."""


@dataclass(frozen=True, kw_only=True)
class LocalOptions:
    """One command of local mode; `json` prints the result as JSON, and no progress."""

    command: LocalBackup | LocalRestore | LocalList
    repository: RepositoryOptions
    json: bool
    log: LogOptions


_LIST: Final = "list"
_ABOUT: Final = """\
Moves the data of one volume into a backup repository and back, through kopia.

By hand it needs a folder, a repository and a password, and no cluster. In a pod the node
agent starts it with the name of a custom resource, and everything else is read from there."""


_EXAMPLES: Final = """\
examples:
  Keep a folder in a repository on another disk (created on first use), and look at it:
    export KOPIA_PASSWORD=…
    datamover backup --source /home/me --repository /mnt/disk/repository
    datamover list --repository /mnt/disk/repository

  Bring a snapshot back:
    datamover restore --snapshot ID --target /home/me --repository /mnt/disk/repository

  The same in a bucket, with keys from the environment or AWS_SHARED_CREDENTIALS_FILE:
    datamover backup --source /data --repository s3://bucket/prefix --s3-endpoint https://s3.example.com

exit codes:
  0 done   1 the cluster refused, or a fault   2 wrong use or configuration   10 the transfer failed
  11 kopia failed   12 the repository cannot be used   14 canceled, or stopped by a signal"""


class _Parser(argparse.ArgumentParser):
    """Raises where argparse would end the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")


def parse_arguments(argv: Sequence[str], environment: Mapping[str, str]) -> PodOptions | InitOptions | LocalOptions:
    """Return what the command line asks for; `environment` may hold the repository's password.

    Raises:
        ConfigError: it cannot be used as it is.
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

    backup = _add_command(commands, MoverVerb.BACKUP, "a folder or device becomes a snapshot")
    by_hand = backup.add_argument_group("by hand")
    by_hand.add_argument("--source", metavar="PATH", type=Path, help="folder or block device to back up")
    by_hand.add_argument("--name", default="", help="what its snapshots are kept under (default: its path)")
    _add_repository(by_hand, required=False)
    _add_load(backup, MoverVerb.BACKUP)

    restore = _add_command(commands, MoverVerb.RESTORE, "a snapshot becomes a folder or device again")
    by_hand = restore.add_argument_group("by hand")
    by_hand.add_argument("--snapshot", metavar="ID", default="", help="which snapshot: see `datamover list`")
    by_hand.add_argument("--target", metavar="PATH", type=Path, help="folder or block device to restore to")
    _add_repository(by_hand, required=False)
    _add_load(restore, MoverVerb.RESTORE)

    listing = _add_command(commands, _LIST, "show the snapshots of a repository")
    _add_repository(listing.add_argument_group("by hand"), required=True)

    init = _add_command(commands, MoverVerb.INIT_REPOSITORY, "make a BackupRepository usable")
    in_pod = init.add_argument_group("in a pod of the node agent")
    in_pod.add_argument("--backup-repository", metavar="NAME", required=True, help="which BackupRepository")
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
    command.add_argument("--log-level", metavar="LEVEL", default="", help=f"one of {', '.join(LEVELS)}")
    command.add_argument("--log-format", metavar="FORM", default="text", help=f"one of {', '.join(LOG_FORMATS)}")
    return command


def _add_repository(group: argparse._ArgumentGroup, *, required: bool) -> None:
    group.add_argument(
        "--repository",
        metavar="PLACE",
        required=required,
        default="",
        help="a folder, or s3://bucket/prefix; keys come from the environment or AWS_SHARED_CREDENTIALS_FILE",
    )
    group.add_argument(
        "--password-file", metavar="FILE", default="", help="the repository's password (default: $KOPIA_PASSWORD)"
    )
    group.add_argument("--s3-endpoint", metavar="URL", default="", help="such as https://s3.example.com (default: AWS)")
    group.add_argument("--s3-region", metavar="NAME", default="", help="the bucket's region")
    group.add_argument("--s3-profile", metavar="NAME", default="", help="profile in the credentials file")
    group.add_argument("--s3-ca-file", metavar="FILE", default="", help="certificate authority to trust")
    group.add_argument("--s3-insecure", action="store_true", help="do not check the endpoint's certificate")
    group.add_argument("--json", action="store_true", help="print the result as JSON, and no progress")


def _add_load(parser: argparse.ArgumentParser, verb: MoverVerb) -> None:
    group = parser.add_argument_group("in a pod of the node agent")
    for flag, kind in TRANSFER_KINDS.items():
        if kind.verb is verb:
            group.add_argument(f"--{flag}", metavar="NAME", default="", help=f"carry out this {kind.resource.kind}")
    group.add_argument("--volume-path", metavar="PATH", default="", help="where the volume is mounted")
    group.add_argument(
        "--volume-mode",
        metavar="MODE",
        type=VolumeMode,
        default=VolumeMode.FILESYSTEM,
        help="Filesystem or Block (default: %(default)s)",
    )
    group.add_argument("--cache-volume-path", metavar="PATH", default="", help="where kopia's cache may grow")
    _add_pod(group)


def _add_pod(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--resource-timeout",
        metavar="SPAN",
        type=parse_duration,
        default=timedelta(minutes=10),
        help="how long to wait for objects of the cluster, such as the BackupRepository (default: 10m0s)",
    )
    group.add_argument(
        "--termination-message-path",
        metavar="FILE",
        type=Path,
        default=Path("/dev/termination-log"),
        help="where the result is left (default: %(default)s)",
    )


def _parse_pod(parsed: argparse.Namespace) -> PodOptions:
    named = {flag: getattr(parsed, flag.replace("-", "_"), "") for flag in TRANSFER_KINDS}
    given = {flag: name for flag, name in named.items() if name}
    if len(given) != 1 or not parsed.volume_path:
        raise ConfigError("by hand, --repository is needed; in a pod, one custom resource and --volume-path")
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
            raise ConfigError("--source is needed: the folder or block device to back up")
        return LocalBackup(parsed.source, parsed.name)
    if parsed.target is None or not parsed.snapshot:
        raise ConfigError("--snapshot and --target are needed: which snapshot, and where it goes")
    return LocalRestore(parsed.snapshot, parsed.target)


def _read_password(file: str, environment: Mapping[str, str]) -> str:
    try:
        text = Path(file).read_text() if file else ""
    except OSError as e:
        raise ConfigError(f"--password-file {file} cannot be read: {e.strerror}") from e
    password = (text or environment.get("KOPIA_PASSWORD", "")).strip()
    if not password:
        raise ConfigError("the repository's password is not known: give --password-file, or set KOPIA_PASSWORD")
    return password

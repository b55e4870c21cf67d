"""The mover's flags and its help.

Knows which flags belong together. Does not know what any command does.

What the command line says, parsed: nothing here imports what carries it out.

So a pod loads nothing that serves a terminal, and a terminal nothing that reaches a cluster.
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

__all__ = ["LIST", "PodOptions", "RepositoryOptions", "hand_repository", "parse_arguments", "pod_load"]


@dataclass(frozen=True)
class PodOptions:
    """What the pod's command line says; paths are inside the pod."""

    kind_flag: str
    name: str
    volume: Path
    mode: VolumeMode
    resource_timeout: timedelta
    cache_volume: str = ""


@dataclass(frozen=True)
class RepositoryOptions:
    """What the command line says of the repository: a folder's path or `s3://bucket/prefix`."""

    name: str
    password: str = field(repr=False)
    endpoint: str = ""
    region: str = ""
    profile: str = ""
    ca_file: str = ""
    verify_tls: bool = True


LIST: Final = "list"


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


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Return what the command line says; `command` is the verb.

    Raises:
        ConfigError: it cannot be used as it is.
    """
    return _build_parser().parse_args(argv)


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

    listing = _add_command(commands, LIST, "show the snapshots of a repository")
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


def pod_load(arguments: argparse.Namespace) -> PodOptions:
    """Return the load that a pod's command line names.

    Raises:
        ConfigError: it names none, more than one, or no volume.
    """
    named = {flag: getattr(arguments, flag.replace("-", "_"), "") for flag in TRANSFER_KINDS}
    given = {flag: name for flag, name in named.items() if name}
    if len(given) != 1 or not arguments.volume_path:
        raise ConfigError("by hand, --repository is needed; in a pod, one custom resource and --volume-path")
    ((flag, name),) = given.items()
    return PodOptions(
        kind_flag=flag,
        name=name,
        volume=Path(arguments.volume_path),
        mode=arguments.volume_mode,
        resource_timeout=arguments.resource_timeout,
        cache_volume=arguments.cache_volume_path,
    )


def hand_repository(arguments: argparse.Namespace, environment: Mapping[str, str]) -> RepositoryOptions:
    """Return the repository that the command line names, and its password.

    Raises:
        ConfigError: there is no password.
    """
    try:
        text = Path(arguments.password_file).read_text() if arguments.password_file else ""
    except OSError as e:
        raise ConfigError(f"--password-file {arguments.password_file} cannot be read: {e.strerror}") from e
    password = (text or environment.get("KOPIA_PASSWORD", "")).strip()
    if not password:
        raise ConfigError("the repository's password is not known: give --password-file, or set KOPIA_PASSWORD")
    return RepositoryOptions(
        name=arguments.repository,
        password=password,
        endpoint=arguments.s3_endpoint,
        region=arguments.s3_region,
        profile=arguments.s3_profile,
        ca_file=arguments.s3_ca_file,
        verify_tls=not arguments.s3_insecure,
    )

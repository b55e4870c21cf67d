"""What a data mover does for a repository or a location: one specification for each command, written and read as flags.

The flags are a contract between versions: a Job has the image of the agents, and the arguments of the command that
started it, which a CronJob may have kept from an earlier version. So no field is renamed, and a new one has a default.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, ClassVar, Final, Self, TypeAlias, get_args, get_origin
from urllib.parse import quote, unquote

import msgspec
from msgspec import Meta, field

from core.contract import MoverVerb, VolumeMode
from core.errors import ConfigError
from core.models.base import WireModel, explain_invalid
from core.models.storage import BlockHash
from core.models.verification import SHARES, WHOLE_PERCENT, Percent
from core.snapshot_contract import CopyToCheck, TransferToDelete


class _Flags(WireModel, rename="kebab", forbid_unknown_fields=True):
    """The flags of all commands; the builder of a pod sets them.

    A command is about a repository or a location; only what compares a volume has one. `resource_timeout` is ignored.
    """

    verb: ClassVar[MoverVerb]

    backup_repository: str | None = None
    backup_storage_location: str | None = None
    volume_path: str | None = None
    volume_mode: VolumeMode | None = None
    resource_timeout: str | None = None
    log_level: str = "info"
    log_format: str = "text"
    termination_message_path: str | None = None

    @property
    def name(self) -> str:
        """The name of the BackupRepository or BackupStorageLocation."""
        return self.backup_repository or self.backup_storage_location or ""

    @property
    def argv(self) -> list[str]:
        """The arguments after `python -m datamover`.

        Values are percent-encoded, as Kubernetes replaces `$(NAME)` in arguments by a variable.
        """
        return [str(self.verb), *_format_flags(msgspec.to_builtins(self))]

    def mount(self, volume_path: str | None, mode: VolumeMode, cache_path: str | None) -> Self:  # noqa: ARG002 - only transfers have a cache volume
        """Return it with the volume of its pod."""
        return msgspec.structs.replace(self, volume_path=volume_path, volume_mode=mode) if volume_path else self


class InitRepository(_Flags):
    """Initialize the repository; a new one gets `block_hash`, None: kopia's default."""

    verb: ClassVar[MoverVerb] = MoverVerb.INIT_REPOSITORY

    block_hash: BlockHash | None = None


class ValidateLocation(_Flags):
    """Validate the location.

    With `keys_only`, skip a storage to which a pod's identity or volume gives access: the process may not be in one.
    """

    verb: ClassVar[MoverVerb] = MoverVerb.VALIDATE_LOCATION

    keys_only: bool = False


class MaintainRepository(_Flags):
    """Run the maintenance of the repository that is due, in the pod of `job`.

    With `ignore_foreign`, also if another cluster maintains it. A full run checks that no blob is missing if there are
    fewer than `verify_blobs`. `full_interval_seconds` is set in the repository before. The report of its snapshots
    follows if requested.
    """

    verb: ClassVar[MoverVerb] = MoverVerb.MAINTAIN_REPOSITORY

    job: str
    ignore_foreign: bool = False
    verify_blobs: int
    full_interval_seconds: int | None = field(name="full-interval", default=None)
    report_snapshots: bool = False


class ReportSnapshots(_Flags):
    """Report the snapshots of the repository that nothing refers to."""

    verb: ClassVar[MoverVerb] = MoverVerb.REPORT_SNAPSHOTS


class ListSnapshots(_Flags):
    """List the snapshots in the location: of the repositories of these namespaces, or of all."""

    verb: ClassVar[MoverVerb] = MoverVerb.LIST_SNAPSHOTS

    volume_namespaces: tuple[str, ...] = field(name="volume-namespace", default=())


class VerifySnapshots(_Flags):
    """Read `percent` of the files of snapshots of the repository; compare all of one with a volume, if there is one.

    With `shares`, read these shares of what all snapshots have instead: the first `least` of them in any case, the
    others as long as that took little time. If something is damaged, all snapshots are read.
    """

    verb: ClassVar[MoverVerb] = MoverVerb.VERIFY_SNAPSHOTS

    snapshots: tuple[str, ...] = field(name="snapshot", default=())
    percent: Percent = WHOLE_PERCENT
    shares: tuple[Annotated[int, Meta(ge=0, lt=SHARES)], ...] = field(name="share", default=())
    least: int | None = None

    def __post_init__(self) -> None:
        """Check that a volume is compared with one snapshot, and that either snapshots or shares are read."""
        if self.volume_path and len(self.snapshots) > 1:
            raise ValueError("--volume-path is for one --snapshot: that which was restored into the volume")
        if bool(self.snapshots) == bool(self.shares):
            raise ValueError("required: either --snapshot or --share")


class DeleteSnapshots(_Flags):
    """Delete the snapshots of transfers in the location, or only check and list them.

    `cluster` identifies the cluster in their tags. A dry run reads the root directories of the copies to check.
    """

    verb: ClassVar[MoverVerb] = MoverVerb.DELETE_SNAPSHOTS

    transfer: tuple[str, ...]
    check: tuple[str, ...] = ()
    cluster: str
    dry_run: bool = False

    def __post_init__(self) -> None:
        """Check the texts, and that copies are read before a deletion, not by it."""
        _ = self.volume_namespaces
        if self.check and not self.dry_run:
            raise ValueError("--check is for --dry-run: what it finds is to be known before the deletion")

    @property
    def transfers(self) -> list[TransferToDelete]:
        """The transfers."""
        return [TransferToDelete.parse(text) for text in self.transfer]

    @property
    def checks(self) -> list[CopyToCheck]:
        """The copies to check."""
        return [CopyToCheck.parse(text) for text in self.check]

    @property
    def volume_namespaces(self) -> list[str]:
        """The namespaces whose repositories it opens."""
        transfers = {one.volume_namespace for one in self.transfers}
        return sorted(transfers | {one.volume_namespace for one in self.checks})


class FilesSpec(_Flags):
    """A file or directory of a snapshot in the repository of a namespace.

    Without a path, a block `device` is itself meant; with one that begins with a slash, what its file system has there.
    """

    volume_namespace: str
    snapshot: str
    path: str = ""
    device: bool = False


class ListFiles(FilesSpec):
    """List a directory: at most `limit` entries, with names after `after`."""

    verb: ClassVar[MoverVerb] = MoverVerb.LIST_FILES

    limit: Annotated[int, Meta(ge=1)] = 5000
    after: str | None = None


class SendFiles(FilesSpec):
    """Send a file or directory as a tar."""

    verb: ClassVar[MoverVerb] = MoverVerb.SEND_FILES


class PlanRestore(FilesSpec):
    """Compare a volume with a snapshot as a restore into it does, and write nothing."""

    verb: ClassVar[MoverVerb] = MoverVerb.PLAN_RESTORE

    incremental: bool = False
    delete_extra_files: bool = False


MoverSpec: TypeAlias = (
    InitRepository
    | ValidateLocation
    | MaintainRepository
    | ReportSnapshots
    | ListSnapshots
    | VerifySnapshots
    | PlanRestore
    | DeleteSnapshots
    | ListFiles
    | SendFiles
)

_SPECS: Final[dict[str, type[MoverSpec]]] = {str(spec.verb): spec for spec in get_args(MoverSpec)}


def _format_flags(fields: dict[str, object]) -> Iterator[str]:
    for name, value in fields.items():
        for one in value if isinstance(value, tuple | list) else (value,):
            if one is True:
                yield f"--{name}"
            elif one is not None and one is not False and one != "":
                text = f"{one:g}" if isinstance(one, float) else str(one)
                yield f"--{name}={quote(text)}"


def parse_spec(argv: Sequence[str]) -> MoverSpec | None:
    """Return the specification in a command line, or None if it has the command of a transfer or of local mode.

    Raises:
        ConfigError: a flag is unknown, invalid or missing.
    """
    model = _SPECS.get(argv[0]) if argv else None
    if model is None:
        return None
    given: dict[str, list[str]] = {}
    for word in argv[1:]:
        name, is_value, text = word.removeprefix("--").partition("=")
        given.setdefault(name, []).append(unquote(text) if is_value else "true")
    repeated = {one.encode_name for one in msgspec.structs.fields(model) if get_origin(one.type) is tuple}
    values = {name: texts if name in repeated else texts[-1] for name, texts in given.items()}
    try:
        return msgspec.convert(values, model, strict=False)
    except ValueError as e:
        raise ConfigError(f"{model.verb}: {explain_invalid(e)}") from e

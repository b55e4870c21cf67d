"""The four kinds of transfers as a user names them, and what one row shows of each."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from core.errors import ConfigError
from core.kube import resources as kube
from core.kube.resources import Resource
from core.kube.types import UncheckedObject
from core.models.transfers import DataDownload, DataUpload, PodVolumeBackup, PodVolumeRestore, Transfer
from core.spelling import guess

__all__ = ["TRANSFER_KINDS", "TransferKind", "kind_named", "parse_target"]


@dataclass(frozen=True)
class TransferKind:
    """One kind: its resource, the model of its objects, the short name that commands accept, and its direction."""

    resource: Resource[UncheckedObject]
    model: type[Transfer]
    short: str
    restores: bool

    @property
    def name(self) -> str:
        """`kind` of its objects, such as `DataUpload`."""
        return self.resource.kind

    @property
    def words(self) -> tuple[str, ...]:
        """What a user may write for it, in lower case."""
        return (self.short, self.name.lower(), self.resource.plural, self.resource.full_name)


TRANSFER_KINDS: Final = (
    TransferKind(kube.DATA_UPLOADS, DataUpload, "du", restores=False),
    TransferKind(kube.DATA_DOWNLOADS, DataDownload, "dd", restores=True),
    TransferKind(kube.POD_VOLUME_BACKUPS, PodVolumeBackup, "pvb", restores=False),
    TransferKind(kube.POD_VOLUME_RESTORES, PodVolumeRestore, "pvr", restores=True),
)


class Target(NamedTuple):
    """One transfer as a user names it."""

    kind: TransferKind
    name: str


def kind_named(word: str) -> TransferKind:
    """Return the kind that `word` names: its name, its plural or its short name, in any case.

    Raises:
        ConfigError: it names none.
    """
    for kind in TRANSFER_KINDS:
        if word.lower() in kind.words:
            return kind
    hint = guess(word, [name for kind in TRANSFER_KINDS for name in kind.words])
    shown = ", ".join(f"{kind.name} ({kind.short})" for kind in TRANSFER_KINDS)
    raise ConfigError(f'"{word}" is no kind of transfer: {hint or shown}')


def parse_target(words: Sequence[str]) -> Target:
    """Return the transfer that `KIND/NAME`, or `KIND NAME`, names.

    Raises:
        ConfigError: they name none.
    """
    kind, slash, name = words[0].partition("/")
    if len(words) == 1 and slash and name and "/" not in name:
        return Target(kind_named(kind), name)
    if len(words) == 2 and not slash:  # noqa: PLR2004 - kind and name
        return Target(kind_named(kind), words[1])
    raise ConfigError(f'not KIND/NAME, such as du/backup-1: "{" ".join(words)}"')

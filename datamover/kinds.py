"""The four kinds of transfer as the data mover uses them: source paths, tags and snapshot IDs, and uploader's settings.

Source: Velero v1.18, pkg/datapath, pkg/uploader (util/uploader_config.go);
tests/recordings/velero-1.18.2/kopia-snapshots.json.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from core.contract import MoverVerb
from core.errors import ConfigError, ContractError
from core.kube.resources import DATA_DOWNLOADS, DATA_UPLOADS, POD_VOLUME_BACKUPS, POD_VOLUME_RESTORES, Resource
from core.kube.types import UncheckedObject
from core.models import names
from core.models.backups import SavedClaim
from core.models.transfer_settings import (
    COMPARE_CONTENT,
    DELETE_EXTRA_FILES,
    Compression,
    parse_compression,
    read_switch,
)
from core.models.transfers import READ_ALL_FILES, DataDownload, DataUpload, PodVolumeBackup, PodVolumeRestore, Transfer
from core.models.units import parse_count

AUTO_PARENT: Final = "auto"
"""`spec.parentSnapshot` for the last complete snapshot, as if it were empty. Source: Velero main at d2241adba,
pkg/datamover/backup_micro_service.go; its mover does not know this value."""

NO_PARENT: Final = "none"
"""`spec.parentSnapshot` for reading everything."""

_KOPIA: Final = "kopia"
_PARALLEL_UPLOAD: Final = "ParallelFilesUpload"
_PARALLEL_DOWNLOAD: Final = "ParallelFilesDownload"
_SPARSE: Final = "WriteSparseFiles"
_COMPRESSION: Final = "Compression"
"""Our own; Velero ignores it."""

_BACKUP: Final = frozenset({_PARALLEL_UPLOAD, _COMPRESSION, READ_ALL_FILES})
_RESTORE: Final = frozenset({_PARALLEL_DOWNLOAD, _SPARSE, DELETE_EXTRA_FILES, COMPARE_CONTENT})
"""The agent has made flags of the last two."""
_COUNTS: Final = frozenset({_PARALLEL_UPLOAD, _PARALLEL_DOWNLOAD})


@dataclass(frozen=True)
class MoverKind:
    """One kind of transfer, by its flag; `in_use`: a workload pod may change the volume during the transfer."""

    verb: MoverVerb
    resource: Resource[UncheckedObject]
    model: type[Transfer]
    in_use: bool = False


@dataclass(frozen=True)
class BackupPlan:
    """The source path of a volume, which is the same for each of its backups, and the snapshot's tags.

    `parent` is `AUTO_PARENT`, `NO_PARENT` or the ID of a snapshot. `by_block`: in the format of BLOCK_DATA_MOVER.
    """

    source: str
    tags: Mapping[str, str]
    parent: str = AUTO_PARENT
    by_block: bool = False


TRANSFER_KINDS: Final[Mapping[str, MoverKind]] = {
    "data-upload": MoverKind(MoverVerb.BACKUP, DATA_UPLOADS, DataUpload),
    "data-download": MoverKind(MoverVerb.RESTORE, DATA_DOWNLOADS, DataDownload),
    "pod-volume-backup": MoverKind(MoverVerb.BACKUP, POD_VOLUME_BACKUPS, PodVolumeBackup, in_use=True),
    "pod-volume-restore": MoverKind(MoverVerb.RESTORE, POD_VOLUME_RESTORES, PodVolumeRestore, in_use=True),
}


def plan_of(cr: Transfer) -> BackupPlan | str:
    """Return what the transfer backs up, or the snapshot that it restores. Raises ContractError for any other kind."""
    match cr:
        case DataUpload():
            uploader = names.BLOCK_DATA_MOVER if cr.by_block else _KOPIA
            source = f"{names.DATA_UPLOAD_REQUESTER}/{uploader}/{cr.spec.source_namespace}/{cr.spec.source_pvc}"
            operation = cr.metadata.labels.get(names.ASYNC_OPERATION_ID_LABEL, "")
            tags = _tags(cr, names.DATA_UPLOAD_REQUESTER, uploader) | {names.ASYNC_OPERATION_ID_LABEL: operation}
            return BackupPlan(source, tags, cr.spec.parent_snapshot or AUTO_PARENT, cr.by_block)
        case PodVolumeBackup():
            volume = cr.metadata.annotations.get(names.PVC_NAME_ANNOTATION) or cr.spec.volume
            source = f"{names.POD_VOLUME_REQUESTER}/{_KOPIA}/{cr.spec.pod.namespace}/{cr.spec.pod.name}/{volume}"
            uid = cr.spec.tags.get(names.BACKUP_UID_TAG, "")
            # Velero leaves it out, and does not know later whose snapshot it is.
            tags = _tags(cr, names.POD_VOLUME_REQUESTER, _KOPIA) | ({names.BACKUP_UID_TAG: uid} if uid else {})
            return BackupPlan(source, tags, cr.spec.parent_snapshot or AUTO_PARENT)
        case DataDownload() | PodVolumeRestore():
            return cr.spec.snapshot_id
    raise ContractError(f"{cr.kind} {cr.name}: not a transfer")


def _tags(cr: Transfer, requester: str, uploader: str) -> dict[str, str]:
    """Return the tags of both kinds; a backup's as the annotations of `cr` name them, as far as they are valid."""
    tags = {names.SNAPSHOT_REQUESTER_TAG: requester, names.UPLOADER_TAG: uploader}
    annotations = cr.metadata.annotations
    backup, claim = annotations.get(names.BACKUP_ANNOTATION, ""), SavedClaim.from_annotations(annotations)
    if names.OBJECT_NAME.fullmatch(backup):
        tags[names.BACKUP_TAG] = backup
        if count := parse_count(annotations.get(names.BACKUP_VOLUMES_ANNOTATION, "")):
            tags[names.BACKUP_VOLUMES_TAG] = str(count)
    if claim is not None:
        tags[names.CLAIM_TAG] = claim.text
    return tags


@dataclass(frozen=True)
class UploaderSettings:
    """The settings of a transfer; None: the data mover's default. `ignored` names others, with the reason."""

    parallel_upload: int | None = None
    parallel_download: int | None = None
    write_sparse_files: bool = False
    compression: Compression | None = None
    read_all_files: bool = False
    ignored: tuple[str, ...] = ()


def parse_settings(settings: Mapping[str, str], verb: MoverVerb) -> UploaderSettings:
    """Return the settings for a backup or a restore.

    Unknown ones, the other direction's and negative numbers have no effect, as with Velero.

    Raises:
        ConfigError: the value of a setting of this direction is invalid.
    """
    own, others = (_BACKUP, _RESTORE) if verb is MoverVerb.BACKUP else (_RESTORE, _BACKUP)
    counts = {name: _count(name, text) for name, text in settings.items() if name in own & _COUNTS}
    reasons = dict.fromkeys(settings.keys() - own, "unknown")
    reasons |= dict.fromkeys(settings.keys() & others, f"not of a {verb}")
    reasons |= {name: "negative" for name, count in counts.items() if count < 0}
    return UploaderSettings(
        parallel_upload=max(0, counts.get(_PARALLEL_UPLOAD, 0)) or None,
        compression=_algorithm(settings.get(_COMPRESSION, "")) if _COMPRESSION in own else None,
        read_all_files=READ_ALL_FILES in own and read_switch(settings, READ_ALL_FILES),
        parallel_download=max(0, counts.get(_PARALLEL_DOWNLOAD, 0)) or None,
        write_sparse_files=_SPARSE in own and read_switch(settings, _SPARSE),
        ignored=tuple(f"{name} ({reason})" for name, reason in sorted(reasons.items())),
    )


def _count(name: str, text: str) -> int:
    """Return a number of files, with a sign or without, as Go's strconv.Atoi; 0 is the default."""
    signed = text.strip()
    number = parse_count(signed[1:] if signed.startswith(("+", "-")) else signed)
    if number is None:
        raise ConfigError(f'setting {name}: must be a number of files, such as 4: "{text}"')
    return -number if signed.startswith("-") else number


def _algorithm(text: str) -> Compression | None:
    """Return the algorithm; None for an empty text."""
    if not text.strip():
        return None
    try:
        return parse_compression(text.strip())
    except ConfigError as e:
        raise ConfigError(f"setting {_COMPRESSION}: {e}") from None

"""The four kinds of transfer as the data mover uses them: what each one moves, and its settings.

Knows source paths, tags and snapshot IDs of each kind, and names, values and defaults of the
uploader's settings. Does not know how data is moved.
Source: Velero v1.18, pkg/datapath, pkg/uploader (util/uploader_config.go);
tests/recordings/velero-1.18.2/kopia-snapshots.json.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from core.contract import MoverVerb
from core.errors import ConfigError, ContractError
from core.kube.resources import DATA_DOWNLOADS, DATA_UPLOADS, POD_VOLUME_BACKUPS, POD_VOLUME_RESTORES, Resource
from core.models.names import ASYNC_OPERATION_ID_LABEL, PVC_NAME_ANNOTATION, RESTORE_UID_LABEL
from core.models.transfers import DataDownload, DataUpload, PodVolumeBackup, PodVolumeRestore, Transfer
from core.models.units import parse_count

__all__ = [
    "TRANSFER_KINDS",
    "BackupPlan",
    "RestorePlan",
    "TransferKind",
    "UploaderSettings",
    "parse_settings",
    "plan_of",
]

_logger = logging.getLogger(__name__)

_DATA_MOVER: Final = "snapshot-data-upload-download"
_POD_VOLUME: Final = "snapshot-pod-volume"
_RESTORE_KIND: Final = "Restore"
_PARALLEL_UPLOAD: Final = "ParallelFilesUpload"
_PARALLEL_DOWNLOAD: Final = "ParallelFilesDownload"
_SPARSE: Final = "WriteSparseFiles"

_BOOLEANS: Final = {
    **dict.fromkeys(("1", "t", "T", "true", "TRUE", "True"), True),
    **dict.fromkeys(("0", "f", "F", "false", "FALSE", "False", ""), False),
}
"""Source: Go, strconv.ParseBool."""


@dataclass(frozen=True)
class TransferKind:
    """One kind of transfer; its key in `TRANSFER_KINDS` is its flag on the command line."""

    verb: MoverVerb
    resource: Resource
    model: type[Transfer]


@dataclass(frozen=True)
class BackupPlan:
    """The source path of a volume, which is the same for each of its backups, and the snapshot's tags."""

    source: str
    tags: Mapping[str, str]


@dataclass(frozen=True)
class RestorePlan:
    """The snapshot to restore, and the UID that names the done file; empty for no such file."""

    snapshot_id: str
    done_owner_uid: str = ""


TRANSFER_KINDS: Final[Mapping[str, TransferKind]] = {
    "data-upload": TransferKind(MoverVerb.BACKUP, DATA_UPLOADS, DataUpload),
    "data-download": TransferKind(MoverVerb.RESTORE, DATA_DOWNLOADS, DataDownload),
    "pod-volume-backup": TransferKind(MoverVerb.BACKUP, POD_VOLUME_BACKUPS, PodVolumeBackup),
    "pod-volume-restore": TransferKind(MoverVerb.RESTORE, POD_VOLUME_RESTORES, PodVolumeRestore),
}


def plan_of(cr: Transfer) -> BackupPlan | RestorePlan:
    """Return what the transfer moves.

    Raises:
        ContractError: its kind is unknown.
    """
    match cr:
        case DataUpload():
            source = f"{_DATA_MOVER}/kopia/{cr.spec.source_namespace}/{cr.spec.source_pvc}"
            operation = cr.metadata.labels.get(ASYNC_OPERATION_ID_LABEL, "")
            return BackupPlan(source, _tags(_DATA_MOVER) | {ASYNC_OPERATION_ID_LABEL: operation})
        case PodVolumeBackup():
            volume = cr.metadata.annotations.get(PVC_NAME_ANNOTATION) or cr.spec.volume
            source = f"{_POD_VOLUME}/kopia/{cr.spec.pod.namespace}/{cr.spec.pod.name}/{volume}"
            return BackupPlan(source, _tags(_POD_VOLUME))
        case DataDownload():
            return RestorePlan(cr.spec.snapshot_id)
        case PodVolumeRestore():
            return RestorePlan(cr.spec.snapshot_id, _restore_uid(cr))
    raise ContractError(f"{cr.kind} {cr.name}: not a transfer")


def _tags(requester: str) -> dict[str, str]:
    return {"snapshot-requester": requester, "snapshot-uploader": "kopia"}


def _restore_uid(cr: PodVolumeRestore) -> str:
    """Return the UID that the workload's init container waits for.

    Velero uses the first owner, of any kind. A resource that a user writes may have no owner,
    since an owner must exist, but may have the label that Velero's server sets too.
    Source: Velero v1.18, writeCompletionMark in pkg/podvolume/restore_micro_service.go.
    """
    owners = cr.metadata.owner_references
    uids = [*(owner.uid for owner in owners if owner.kind == _RESTORE_KIND), *(owner.uid for owner in owners)]
    uid = next(iter(uids), "") or cr.metadata.labels.get(RESTORE_UID_LABEL, "")
    if not uid:
        _logger.warning("the PodVolumeRestore has no Restore as owner or label: not writing a done file")
    return uid


@dataclass(frozen=True)
class UploaderSettings:
    """The settings of a transfer; None: the data mover's default. `unknown` has the names of others."""

    parallel_upload: int | None = None
    parallel_download: int | None = None
    write_sparse_files: bool = False
    unknown: tuple[str, ...] = ()


def parse_settings(settings: Mapping[str, str]) -> UploaderSettings:
    """Return the parsed settings.

    Raises:
        ConfigError: the value of a known setting is invalid.
    """
    return UploaderSettings(
        parallel_upload=_count(settings, _PARALLEL_UPLOAD),
        parallel_download=_count(settings, _PARALLEL_DOWNLOAD),
        write_sparse_files=_boolean(settings, _SPARSE),
        unknown=tuple(sorted(settings.keys() - {_PARALLEL_UPLOAD, _PARALLEL_DOWNLOAD, _SPARSE})),
    )


def _count(settings: Mapping[str, str], name: str) -> int | None:
    """Return a number of files; None, the default, if it is 0 or not set."""
    text = settings.get(name, "0").strip()
    number = parse_count(text)
    if number is None:
        raise ConfigError(f'setting {name}: must be a number of files, such as 4: "{text}"')
    return number or None


def _boolean(settings: Mapping[str, str], name: str) -> bool:
    text = settings.get(name, "false").strip()
    if text not in _BOOLEANS:
        raise ConfigError(f'setting {name}: must be true or false: "{text}"')
    return _BOOLEANS[text]

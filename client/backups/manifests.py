"""The objects of a backup: a VolumeSnapshot and a DataUpload, or a PodVolumeBackup, for each PVC. Pure builders."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final

from client.backups.keep_policy import KeepPolicy, format_keep
from client.backups.methods import ChosenMethod, Method, MountingPod, SnapshotWay
from core.errors import ConfigError
from core.kube import resources as kube
from core.kube.resources import Resource
from core.kube.types import Manifest
from core.models.names import (
    BACKUP_ANNOTATION,
    BACKUP_KEEP_ANNOTATION,
    BACKUP_LABEL,
    BACKUP_TTL_ANNOTATION,
    BACKUP_VOLUMES_ANNOTATION,
    CLAIM_ANNOTATION,
    PVC_NAME_ANNOTATION,
    SCHEDULE_LABEL,
    label_value,
)
from core.models.saved_claim import SavedClaim
from core.models.transfers import READ_ALL_FILES
from core.models.units import format_duration

__all__ = [
    "OPERATION_TIMEOUT",
    "BackupRequest",
    "PlannedVolume",
    "check_pairs",
    "is_reserved",
    "parse_pairs",
    "transfer_name",
]

OPERATION_TIMEOUT: Final = "10m0s"
"""Source: Velero v1.18, the server's default of `csiSnapshotTimeout`."""

_RESERVED: Final = ("nodeagent.io/", "velero.io/")

_NAME_CHARACTERS: Final = 54
_HASH_DIGITS: Final = 8
"""Two of 1,000 PVCs have the same digits once in 10,000 backups."""


@dataclass(frozen=True)
class BackupRequest:
    """A backup as the user asked for it; `namespace` has the transfers, a `ttl` of None: it is kept.

    `schedule` is the one that it is a backup of, empty: none; `keep` is its policy, None: it has none.
    With `read_all_files`, files are also read whose size and
    time are unchanged since the last backup.
    """

    name: str
    namespace: str
    location: str
    ttl: timedelta | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    schedule: str = ""
    keep: KeepPolicy | None = None
    read_all_files: bool = False


def is_reserved(key: str) -> bool:
    """Return whether a label or an annotation of that key is Velero's or ours: neither set by users nor copied."""
    return f"{key.partition('/')[0]}/".endswith(_RESERVED)


def parse_pairs(flag: str, text: str) -> dict[str, str]:
    """Return the labels or annotations in the value of a flag: `KEY=VALUE,...`.

    Raises:
        ConfigError: a part is none.
    """
    pairs = {}
    for part in filter(None, text.split(",")):
        key, equals, value = part.partition("=")
        if not equals or not key:
            raise ConfigError(f'{flag}: "{part}" is not allowed: expected KEY=VALUE')
        pairs[key.strip()] = value.strip()
    return pairs


def check_pairs(labels: Mapping[str, str], annotations: Mapping[str, str]) -> None:
    """Check the labels and annotations that a user gives to transfers.

    Raises:
        ConfigError: a key is reserved.
    """
    for flag, given in (("--labels", labels), ("--annotations", annotations)):
        for key in given:
            if is_reserved(key):
                raise ConfigError(f"{flag}: {key} is reserved")


def transfer_name(backup: str, namespace: str, claim: str) -> str:
    """Return the name of the transfer of a PVC and of its VolumeSnapshot: always the same, at most 63 characters."""
    digits = hashlib.sha256(f"{backup}/{namespace}/{claim}".encode()).hexdigest()[:_HASH_DIGITS]
    return f"{backup[:_NAME_CHARACTERS].rstrip('.-')}-{digits}"


@dataclass(frozen=True)
class PlannedVolume:
    """One volume of a backup: its PVC, and how it is backed up. `volumes` is how many the backup has."""

    request: BackupRequest
    claim: SavedClaim
    way: ChosenMethod
    volumes: int

    @property
    def name(self) -> str:
        """The name of its transfer, and of its VolumeSnapshot."""
        return transfer_name(self.request.name, self.claim.namespace, self.claim.name)

    @property
    def method(self) -> Method:
        """How it is backed up."""
        return Method.CSI_SNAPSHOT if isinstance(self.way, SnapshotWay) else Method.FS_BACKUP

    @property
    def resource(self) -> Resource:
        """The kind of its transfer."""
        return kube.DATA_UPLOADS if isinstance(self.way, SnapshotWay) else kube.POD_VOLUME_BACKUPS

    def build_snapshot(self) -> Manifest | None:
        """Return the VolumeSnapshot; None: there is none."""
        if not isinstance(self.way, SnapshotWay):
            return None
        meta = {"name": self.name, "namespace": self.claim.namespace, "labels": self._label}
        spec = {
            "volumeSnapshotClassName": self.way.snapshot_class,
            "source": {"persistentVolumeClaimName": self.claim.name},
        }
        kind = kube.VOLUME_SNAPSHOTS
        return {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": meta, "spec": spec}

    def build_transfer(self) -> Manifest:
        """Return the DataUpload or the PodVolumeBackup."""
        request = self.request
        annotations = {
            **request.annotations,
            BACKUP_ANNOTATION: request.name,
            BACKUP_VOLUMES_ANNOTATION: str(self.volumes),
            CLAIM_ANNOTATION: self.claim.text,
        }
        if request.keep is not None:
            annotations[BACKUP_KEEP_ANNOTATION] = format_keep(request.keep, request.ttl)
        elif request.ttl is not None:
            annotations[BACKUP_TTL_ANNOTATION] = format_duration(request.ttl)
        if isinstance(self.way, MountingPod):
            annotations[PVC_NAME_ANNOTATION] = self.claim.name
        schedule = {SCHEDULE_LABEL: label_value(request.schedule)} if request.schedule else {}
        meta: Manifest = {
            "name": self.name,
            "namespace": request.namespace,
            "labels": {**request.labels, **self._label, **schedule},
            "annotations": annotations,
        }
        kind = self.resource
        return {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": meta, "spec": self._spec()}

    @property
    def _label(self) -> dict[str, str]:
        return {BACKUP_LABEL: label_value(self.request.name)}

    def _spec(self) -> Manifest:
        claim, location = self.claim, self.request.location
        settings = {READ_ALL_FILES: "true"} if self.request.read_all_files else {}
        match self.way:
            case SnapshotWay():
                return {
                    "snapshotType": "CSI",
                    "csiSnapshot": {
                        "volumeSnapshot": self.name,
                        "storageClass": claim.storage_class or "",
                        "snapshotClass": self.way.snapshot_class,
                        "driver": self.way.driver,
                    },
                    "sourceNamespace": claim.namespace,
                    "sourcePVC": claim.name,
                    "backupStorageLocation": location,
                    "operationTimeout": OPERATION_TIMEOUT,
                    **({"dataMoverConfig": settings} if settings else {}),
                }
            case MountingPod():
                pod = {"kind": "Pod", "namespace": claim.namespace, "name": self.way.name, "uid": self.way.uid}
                return {
                    "node": self.way.node,
                    "pod": pod,
                    "volume": self.way.volume,
                    "backupStorageLocation": location,
                    "repoIdentifier": "",
                    "uploaderType": "kopia",
                    **({"uploaderSettings": settings} if settings else {}),
                }

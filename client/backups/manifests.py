"""How each PVC can be backed up, and the objects of its backup. Pure builders.

Source: Velero v1.18, GetVolumeSnapshotClassForStorageClass in pkg/util/csi/volume_snapshot.go; Kubernetes v1.34,
pkg/controller/volume/persistentvolume (annotation of the provisioner); external-snapshotter v8 (default class).
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum
from typing import Final

from client.backups.copies import KeepPolicy, format_keep
from core.contract import VolumeMode
from core.errors import AgentError, ConfigError
from core.kube import resources as kube
from core.kube.types import Manifest, PersistentVolumeClaim, Pod, VolumeSnapshotClass
from core.models import names as wire
from core.models.backups import SavedClaim
from core.models.transfers import READ_ALL_FILES
from core.models.units import format_duration
from exposer.manifests import volume_mode
from exposer.workload import claim_of, list_containers

_PROVISIONER_ANNOTATIONS: Final = (
    "volume.kubernetes.io/storage-provisioner",
    "volume.beta.kubernetes.io/storage-provisioner",
)
"""On a PVC that was provisioned: its driver, also where its class names a volume plugin that was migrated to CSI."""

_VELERO_CLASS_LABEL: Final = "velero.io/csi-volumesnapshot-class"
_DEFAULT_CLASS: Final = "snapshot.storage.kubernetes.io/is-default-class"


class BackupError(AgentError):
    """A backup cannot be created as a whole, or did not complete."""


class Method(StrEnum):
    """Values of `--method`."""

    AUTO = "auto"
    CSI_SNAPSHOT = "csi-snapshot"
    FS_BACKUP = "fs-backup"


class DataMover(StrEnum):
    """Values of `--data-mover`."""

    BLOCK = "block"
    FS = "fs"


_DATA_MOVERS: Final = {DataMover.BLOCK: wire.BLOCK_DATA_MOVER, DataMover.FS: wire.FS_DATA_MOVER}


@dataclass(frozen=True)
class SnapshotWay:
    """By a snapshot of this class and driver."""

    snapshot_class: str
    driver: str


@dataclass(frozen=True)
class MountingPod:
    """By a Running pod that mounts the PVC as `volume`."""

    name: str
    uid: str
    node: str
    volume: str


ChosenMethod = SnapshotWay | MountingPod


@dataclass(frozen=True)
class ClusterClasses:
    """The provisioner of each StorageClass, and all VolumeSnapshotClasses as JSON dicts.

    `unread` is why some of them could not be read; None: all were.
    """

    provisioners: Mapping[str, str]
    snapshot_classes: Sequence[VolumeSnapshotClass]
    unread: str | None = None


def needs_pods(claim: PersistentVolumeClaim, method: Method, classes: ClusterClasses) -> bool:
    """Return whether it depends on pods how the PVC is backed up."""
    by_snapshot = method is not Method.FS_BACKUP and isinstance(_find_snapshot_way(claim, classes), SnapshotWay)
    return method is not Method.CSI_SNAPSHOT and not by_snapshot


def choose_method(
    claim: PersistentVolumeClaim, method: Method, classes: ClusterClasses, pods: Sequence[Pod]
) -> ChosenMethod:
    """Return how the PVC is backed up; `pods` are all of its namespace.

    Raises:
        BackupError: it cannot be; the message names the PVC and each cause.
    """
    name = f"PVC {claim['metadata']['namespace']}/{claim['metadata']['name']}"
    if claim["metadata"].get("deletionTimestamp"):
        raise BackupError(f"{name}: it is being deleted")
    if (phase := (claim.get("status") or {}).get("phase", "")) != "Bound":
        raise BackupError(f"{name}: it has no volume yet: it is {phase or 'not bound'}")
    causes = []
    if method is not Method.FS_BACKUP:
        found = _find_snapshot_way(claim, classes)
        if isinstance(found, SnapshotWay):
            return found
        causes.append(found)
    if method is not Method.CSI_SNAPSHOT:
        mounting = _find_pod(claim, pods)
        if isinstance(mounting, MountingPod):
            return mounting
        causes.append(mounting)
    raise BackupError(f"{name}: {'; '.join(causes)}")


def _find_snapshot_way(claim: PersistentVolumeClaim, classes: ClusterClasses) -> SnapshotWay | str:
    # The data mover's PVC is of that class.
    if not (storage_class := (claim.get("spec") or {}).get("storageClassName")):
        return "no CSI snapshot: it names no storage class"
    annotations = claim["metadata"].get("annotations") or {}
    provisioners = map(annotations.get, _PROVISIONER_ANNOTATIONS)
    driver = next(filter(None, provisioners), None) or classes.provisioners.get(storage_class)
    if classes.unread:
        return f"no CSI snapshot: {classes.unread}"
    if not driver:
        return "no CSI snapshot: its storage class does not say which driver its volume has"
    fitting = [one for one in classes.snapshot_classes if one.get("driver") == driver]
    if not fitting:
        return f"no CSI snapshot: no VolumeSnapshotClass has its driver {driver}"
    if chosen := choose_snapshot_class(fitting):
        return SnapshotWay(chosen["metadata"]["name"], driver)
    names = ", ".join(sorted(one["metadata"]["name"] for one in fitting))
    return f"no CSI snapshot: label one VolumeSnapshotClass of driver {driver} {_VELERO_CLASS_LABEL}=true: {names}"


def choose_snapshot_class(fitting: Sequence[VolumeSnapshotClass]) -> VolumeSnapshotClass | None:
    """Return the class of a driver by which backups take snapshots, of all that it has; None: several are possible."""
    marked = [one for one in fitting if _VELERO_CLASS_LABEL in (one["metadata"].get("labels") or {})]
    default = [one for one in fitting if (one["metadata"].get("annotations") or {}).get(_DEFAULT_CLASS) == "true"]
    return next((chosen[0] for chosen in (marked, default, fitting) if len(chosen) == 1), None)


def _find_pod(claim: PersistentVolumeClaim, pods: Sequence[Pod]) -> MountingPod | str:
    """Return the first Running pod that mounts the PVC, by name, or why there is none."""
    if volume_mode(claim) is VolumeMode.BLOCK:
        return "no backup of files: its volume is a block device"
    for pod in sorted(pods, key=lambda one: str(one["metadata"]["name"])):
        if found := _mounting(pod, claim["metadata"]["name"]):
            return found
    return "no backup of files: no Running pod mounts it"


def _mounting(pod: Pod, claim_name: str) -> MountingPod | None:
    meta, spec = pod["metadata"], pod.get("spec") or {}
    if (pod.get("status") or {}).get("phase") != "Running" or meta.get("deletionTimestamp"):
        return None
    mounted = {mount["name"] for one in list_containers(pod) for mount in one.get("volumeMounts") or []}
    for volume in spec.get("volumes") or []:
        if claim_of(pod, volume) == claim_name and volume["name"] in mounted:
            return MountingPod(meta["name"], meta["uid"], spec.get("nodeName", ""), volume["name"])
    return None


OPERATION_TIMEOUT: Final = "10m0s"
"""Source: Velero v1.18, the server's default of `csiSnapshotTimeout`."""

_RESERVED: Final = ("nodeagent.io/", "velero.io/")

_NAME_CHARACTERS: Final = 54
_HASH_DIGITS: Final = 8
"""Two of 1,000 PVCs have the same digits once in 10,000 backups."""


@dataclass(frozen=True)
class BackupRequest:
    """A backup as the user asked for it; `namespace` has the transfers, a `ttl` of None: it is kept.

    `schedule` is the one that it is a backup of, and `keep` its policy, if there are any.
    With `read_all_files`, files are also read whose size and
    time are unchanged since the last backup.
    """

    name: str
    namespace: str
    location: str
    ttl: timedelta | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    schedule: str | None = None
    keep: KeepPolicy | None = None
    read_all_files: bool = False


def is_reserved(key: str) -> bool:
    """Return whether a label or an annotation of that key is Velero's or ours: neither set by users nor copied."""
    return f"{key.partition('/')[0]}/".endswith(_RESERVED)


def parse_pairs(flag: str, text: str) -> dict[str, str]:
    """Return the labels or annotations in the value of a flag: `KEY=VALUE,...`; ConfigError: a part is none."""
    pairs = {}
    for part in filter(None, text.split(",")):
        key, equals, value = part.partition("=")
        if not equals or not key:
            raise ConfigError(f'{flag}: "{part}" is not allowed: expected KEY=VALUE')
        pairs[key.strip()] = value.strip()
    return pairs


def check_pairs(labels: Mapping[str, str], annotations: Mapping[str, str]) -> None:
    """Check the labels and annotations that a user gives to transfers; ConfigError: one is reserved, or invalid."""
    for flag, given, valid in (("--labels", labels, wire.LABEL), ("--annotations", annotations, wire.ANNOTATION)):
        for key, value in given.items():
            if is_reserved(key):
                raise ConfigError(f"{flag}: {key} is reserved")
            if not valid.fullmatch(f"{key}={value}"):
                raise ConfigError(f'{flag}: "{key}={value}" is not allowed: expected what Kubernetes allows')


def transfer_name(backup: str, namespace: str, claim: str) -> str:
    """Return the name of the transfer of a PVC and of its VolumeSnapshot: always the same, at most 63 characters."""
    digits = hashlib.sha256(f"{backup}/{namespace}/{claim}".encode()).hexdigest()[:_HASH_DIGITS]
    return f"{backup[:_NAME_CHARACTERS].rstrip('.-')}-{digits}"


def snapshot_label(namespace: str, schedule: str) -> dict[str, str]:
    """Return the label of a schedule's VolumeSnapshots: agents of another namespace may have one of the same name."""
    return {wire.SCHEDULE_LABEL: wire.label_value(f"{namespace}.{schedule}")}


def build_snapshot(metadata: Manifest, snapshot_class: str, claim: str) -> Manifest:
    """Return a VolumeSnapshot of a PVC."""
    spec = {"volumeSnapshotClassName": snapshot_class, "source": {"persistentVolumeClaimName": claim}}
    return kube.VOLUME_SNAPSHOTS.build(metadata, spec=spec)


def build_upload_spec(snapshot: str, way: SnapshotWay, claim: SavedClaim, location: str) -> Manifest:
    """Return the spec of the DataUpload of a VolumeSnapshot."""
    return {
        "snapshotType": "CSI",
        "csiSnapshot": {
            "volumeSnapshot": snapshot,
            "storageClass": claim.storage_class or "",
            "snapshotClass": way.snapshot_class,
            "driver": way.driver,
        },
        "sourceNamespace": claim.namespace,
        "sourcePVC": claim.name,
        "backupStorageLocation": location,
        "operationTimeout": OPERATION_TIMEOUT,
    }


@dataclass(frozen=True)
class PlannedVolume:
    """One volume of a backup: its PVC, and how it is backed up. `volumes` is how many the backup has.

    A `data_mover` of None: the agents' configuration decides.
    """

    request: BackupRequest
    claim: SavedClaim
    way: ChosenMethod
    volumes: int
    data_mover: DataMover | None = None

    @property
    def name(self) -> str:
        """The name of its transfer, and of its VolumeSnapshot."""
        return transfer_name(self.request.name, self.claim.namespace, self.claim.name)

    @property
    def method(self) -> Method:
        """How it is backed up."""
        return Method.CSI_SNAPSHOT if isinstance(self.way, SnapshotWay) else Method.FS_BACKUP

    @property
    def resource(self) -> kube.Resource:
        """The kind of its transfer."""
        return kube.DATA_UPLOADS if isinstance(self.way, SnapshotWay) else kube.POD_VOLUME_BACKUPS

    def build_snapshot(self) -> Manifest | None:
        """Return the VolumeSnapshot; None: there is none."""
        if not isinstance(self.way, SnapshotWay):
            return None
        request, labels = self.request, self._label
        if request.schedule:
            labels = labels | snapshot_label(request.namespace, request.schedule)
        meta = {"name": self.name, "namespace": self.claim.namespace, "labels": labels}
        return build_snapshot(meta, self.way.snapshot_class, self.claim.name)

    def build_transfer(self) -> Manifest:
        """Return the DataUpload or the PodVolumeBackup."""
        request = self.request
        annotations = {
            **request.annotations,
            wire.BACKUP_ANNOTATION: request.name,
            wire.BACKUP_VOLUMES_ANNOTATION: str(self.volumes),
            wire.CLAIM_ANNOTATION: self.claim.text,
        }
        if request.keep is not None:
            annotations[wire.BACKUP_KEEP_ANNOTATION] = format_keep(request.keep, request.ttl)
        elif request.ttl is not None:
            annotations[wire.BACKUP_TTL_ANNOTATION] = format_duration(request.ttl)
        if isinstance(self.way, MountingPod):
            annotations[wire.PVC_NAME_ANNOTATION] = self.claim.name
        schedule = {wire.SCHEDULE_LABEL: wire.label_value(request.schedule)} if request.schedule else {}
        meta: Manifest = {
            "name": self.name,
            "namespace": request.namespace,
            "labels": {**request.labels, **self._label, **schedule},
            "annotations": annotations,
        }
        return self.resource.build(meta, spec=self._spec())

    @property
    def _label(self) -> dict[str, str]:
        return {wire.BACKUP_LABEL: wire.label_value(self.request.name)}

    def _spec(self) -> Manifest:
        claim, location = self.claim, self.request.location
        settings = {READ_ALL_FILES: "true"} if self.request.read_all_files else {}
        match self.way:
            case SnapshotWay():
                return {
                    **build_upload_spec(self.name, self.way, claim, location),
                    **({"datamover": _DATA_MOVERS[self.data_mover]} if self.data_mover else {}),
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

"""How a PVC can be backed up: which snapshot class its driver has, which running pod mounts it. Pure.

Source: Velero v1.18, GetVolumeSnapshotClassForStorageClass in pkg/util/csi/volume_snapshot.go; Kubernetes v1.34,
pkg/controller/volume/persistentvolume (annotation of the provisioner); external-snapshotter v8 (default class).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from core.contract import VolumeMode
from core.errors import AgentError
from core.kube.types import PersistentVolumeClaim, Pod, VolumeSnapshotClass
from exposer.manifests import claim_volume_mode

__all__ = [
    "BackupError",
    "ChosenMethod",
    "ClusterClasses",
    "Method",
    "MountingPod",
    "SnapshotWay",
    "choose_method",
    "needs_pods",
]

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

    `unread` is why some of them could not be read; empty: all were.
    """

    provisioners: Mapping[str, str]
    snapshot_classes: Sequence[VolumeSnapshotClass]
    unread: str = ""


def needs_pods(claim: PersistentVolumeClaim, method: Method, classes: ClusterClasses) -> bool:
    """Return whether it depends on pods how the PVC is backed up."""
    by_snapshot = method is not Method.FS_BACKUP and isinstance(_find_snapshot_way(claim, classes), SnapshotWay)
    return method is not Method.CSI_SNAPSHOT and not by_snapshot


def choose_method(
    claim: PersistentVolumeClaim, method: Method, classes: ClusterClasses, pods: Sequence[Pod]
) -> ChosenMethod:
    """Return how the PVC, a v1 PersistentVolumeClaim as JSON dict, is backed up.

    Args:
        claim: the PVC.
        method: what the user chose.
        classes: the classes of the cluster.
        pods: the pods of the PVC's namespace, as JSON dicts.

    Raises:
        BackupError: it cannot be; the message names the PVC and each cause.
    """
    name = f"PVC {claim['metadata']['namespace']}/{claim['metadata']['name']}"
    if cause := _unusable(claim):
        raise BackupError(f"{name}: {cause}")
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


def _unusable(claim: PersistentVolumeClaim) -> str:
    """Return why no method can back it up; empty: one may."""
    if claim["metadata"].get("deletionTimestamp"):
        return "it is being deleted"
    phase = (claim.get("status") or {}).get("phase", "")
    return "" if phase == "Bound" else f"it has no volume yet: it is {phase or 'not bound'}"


def _find_snapshot_way(claim: PersistentVolumeClaim, classes: ClusterClasses) -> SnapshotWay | str:
    """Return the snapshot class, or why there is none."""
    # The data mover's PVC is of that class.
    if not (claim.get("spec") or {}).get("storageClassName"):
        return "no CSI snapshot: it names no storage class"
    driver = _driver(claim, classes)
    if classes.unread:
        return f"no CSI snapshot: {classes.unread}"
    if not driver:
        return "no CSI snapshot: its storage class does not say which driver its volume has"
    fitting = [one for one in classes.snapshot_classes if one.get("driver") == driver]
    if not fitting:
        return f"no CSI snapshot: no VolumeSnapshotClass has its driver {driver}"
    marked = [one for one in fitting if _VELERO_CLASS_LABEL in (one["metadata"].get("labels") or {})]
    default = [one for one in fitting if (one["metadata"].get("annotations") or {}).get(_DEFAULT_CLASS) == "true"]
    for chosen in (marked, default, fitting):
        if len(chosen) == 1:
            return SnapshotWay(chosen[0]["metadata"]["name"], driver)
    names = ", ".join(sorted(one["metadata"]["name"] for one in fitting))
    return f"no CSI snapshot: label one VolumeSnapshotClass of driver {driver} {_VELERO_CLASS_LABEL}=true: {names}"


def _driver(claim: PersistentVolumeClaim, classes: ClusterClasses) -> str:
    annotations = claim["metadata"].get("annotations") or {}
    for key in _PROVISIONER_ANNOTATIONS:
        if found := annotations.get(key):
            return str(found)
    return classes.provisioners.get((claim.get("spec") or {}).get("storageClassName") or "", "")


def _find_pod(claim: PersistentVolumeClaim, pods: Sequence[Pod]) -> MountingPod | str:
    """Return the first Running pod that mounts the PVC, by name, or why there is none."""
    if claim_volume_mode(claim) is VolumeMode.BLOCK:
        return "no backup of files: its volume is a block device"
    for pod in sorted(pods, key=lambda one: str(one["metadata"]["name"])):
        if found := _mounting(pod, claim["metadata"]["name"]):
            return found
    return "no backup of files: no Running pod mounts it"


def _mounting(pod: Pod, claim_name: str) -> MountingPod | None:
    meta, spec = pod["metadata"], pod.get("spec") or {}
    if (pod.get("status") or {}).get("phase") != "Running" or meta.get("deletionTimestamp"):
        return None
    mounted = {mount["name"] for one in spec.get("containers") or [] for mount in one.get("volumeMounts") or []}
    for volume in spec.get("volumes") or []:
        source = volume.get("persistentVolumeClaim")
        if source and source["claimName"] == claim_name and volume["name"] in mounted:
            return MountingPod(meta["name"], meta["uid"], spec.get("nodeName", ""), volume["name"])
    return None

"""What coverage reads of PVCs, volumes, pods and namespaces: small frozen models, since there are thousands of each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, TypeVar

import msgspec

from core.errors import ContractError
from core.kube.errors import parse_json
from core.models import names
from core.models.base import Time, WireModel, explain_invalid
from core.models.transfers import KIND_NAMES
from core.models.units import parse_quantity

VolumeKey = tuple[str, str]
"""Namespace, and the name of a PVC or, for a volume without one, `pod:volume`."""

_Model = TypeVar("_Model", bound=WireModel)


def decode_object(model: type[_Model], text: msgspec.Raw) -> _Model:
    """Return the model of an object in JSON, in which null counts as absent; ContractError: it has another form."""
    try:
        return msgspec.json.decode(text, type=model)
    except (ValueError, RecursionError):
        pass
    try:
        return msgspec.json.decode(msgspec.json.encode(parse_json(bytes(text))), type=model)
    except (ValueError, RecursionError) as e:
        raise ContractError(explain_invalid(e)) from e


class _Annotations(WireModel, gc=False):
    """What PVCs, pods and namespaces ask for."""

    interval: str = msgspec.field(default="", name=names.BACKUP_INTERVAL_ANNOTATION)
    left_out: str = msgspec.field(default="", name=names.EXCLUDE_ANNOTATION)
    opted_in: str = msgspec.field(default="", name="backup.velero.io/backup-volumes")
    opted_out: str = msgspec.field(default="", name="backup.velero.io/backup-volumes-excludes")
    hook: str = msgspec.field(default="", name="hook.backup.velero.io/command")
    pre_hook: str = msgspec.field(default="", name="pre.hook.backup.velero.io/command")
    post_hook: str = msgspec.field(default="", name="post.hook.backup.velero.io/command")


class _OwnerReference(WireModel, gc=False):
    api_version: str
    kind: str


class _Meta(WireModel, gc=False):
    name: str
    namespace: str = ""
    uid: str = ""
    creation_timestamp: Time | None = None
    deletion_timestamp: Time | None = None
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    annotations: _Annotations = msgspec.field(default_factory=_Annotations)
    owner_references: tuple[_OwnerReference, ...] = ()

    @property
    def left_out(self) -> bool:
        """Whether it has Velero's label against backups. Source: Velero v1.18, ExcludeFromBackupLabel."""
        return self.labels.get(names.EXCLUDE_LABEL) == "true"


class ClusterObject(WireModel, gc=False):
    """An object of the cluster."""

    metadata: _Meta

    @property
    def matters(self) -> bool:
        """Whether coverage depends on it."""
        return True


class _ClaimSpec(WireModel, gc=False):
    volume_name: str = ""
    storage_class_name: str | None = None
    volume_mode: str = ""
    access_modes: tuple[str, ...] = ()


class _PhaseStatus(WireModel, gc=False):
    phase: str = ""


class VolumeClaim(ClusterObject, gc=False):
    """A PVC."""

    spec: _ClaimSpec = msgspec.field(default_factory=_ClaimSpec)
    status: _PhaseStatus = msgspec.field(default_factory=_PhaseStatus)

    @property
    def key(self) -> VolumeKey:
        """Its namespace and name."""
        return (self.metadata.namespace, self.metadata.name)

    @property
    def matters(self) -> bool:
        """Whether it is a workload's, not what a transfer, ours or Velero's, reads or writes for a while."""
        owners = self.metadata.owner_references
        moved = any(one.kind in KIND_NAMES and one.api_version.startswith("velero.io/") for one in owners)
        return not moved and names.OWNER_UID_LABEL not in self.metadata.labels

    @property
    def bound(self) -> bool:
        """Whether it has a volume."""
        return self.status.phase == "Bound" and bool(self.spec.volume_name)


class NfsSource(WireModel, gc=False):
    """A directory of an NFS server."""

    server: str = ""
    path: str = ""


class CsiSource(WireModel, gc=False):
    """A volume of a CSI driver."""

    driver: str = ""
    volume_attributes: dict[str, str] = msgspec.field(default_factory=dict)


_TYPES: Final = (
    *("csi", "nfs", "awsElasticBlockStore", "azureDisk", "azureFile", "cephfs", "cinder", "fc", "flocker"),
    *("flexVolume", "gcePersistentDisk", "glusterfs", "hostPath", "iscsi", "local", "photonPersistentDisk"),
    *("portworxVolume", "quobyte", "rbd", "scaleIO", "storageos", "vsphereVolume"),
)
"""The types of a PersistentVolume as its spec names them, and as volume policies do.

Source: Velero v1.18, getVolumeTypeFromPV in internal/resourcepolicies/volume_types_conditions.go.
"""


class StoredVolume(ClusterObject, gc=False):
    """A volume; `spec` is kept as text: little of it is read."""

    spec: dict[str, msgspec.Raw] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        """Reject invalid fields; msgspec converts the ValueError to a validation error."""
        parse_quantity(self.capacity)
        _ = (self.storage_class, self.nfs, self.csi)

    @property
    def type(self) -> str:
        """Its type as volume policies name it; "" stands for all that they do not know."""
        found = next((name for name in _TYPES if name in self.spec), "")
        return "storageOS" if found == "storageos" else found

    @property
    def capacity(self) -> str:
        """Its size as a quantity."""
        sizes = msgspec.json.decode(self.spec["capacity"], type=dict[str, str]) if "capacity" in self.spec else {}
        return sizes.get("storage", "0")

    @property
    def storage_class(self) -> str:
        """The name of its storage class, which may be ""."""
        text = self.spec.get("storageClassName")
        return msgspec.json.decode(text, type=str) if text is not None else ""

    @property
    def nfs(self) -> NfsSource | None:
        """Its NFS server; None: it is not of one."""
        return msgspec.json.decode(self.spec["nfs"], type=NfsSource) if "nfs" in self.spec else None

    @property
    def csi(self) -> CsiSource | None:
        """Its CSI driver; None: it is not of one."""
        return msgspec.json.decode(self.spec["csi"], type=CsiSource) if "csi" in self.spec else None


class _Present(WireModel, gc=False):
    """An object that nothing is read of."""


class _ClaimSource(WireModel, gc=False):
    claim_name: str = ""


class PodVolume(WireModel, gc=False):
    """A volume of a pod; what fs-backup never backs up is only told apart from the rest."""

    name: str
    persistent_volume_claim: _ClaimSource | None = None
    nfs: NfsSource | None = None
    csi: CsiSource | None = None
    empty_dir: _Present | None = None
    ephemeral: _Present | None = None
    host_path: _Present | None = None
    secret: _Present | None = None
    config_map: _Present | None = None
    projected: _Present | None = None
    downward_api: _Present | None = msgspec.field(default=None, name="downwardAPI")

    @property
    def claim(self) -> str | None:
        """The name of its PVC; None: it has none."""
        return self.persistent_volume_claim.claim_name or None if self.persistent_volume_claim is not None else None

    @property
    def type(self) -> str:
        """Its type as volume policies name it; "" stands for all others."""
        types = {"nfs": self.nfs, "csi": self.csi, "emptyDir": self.empty_dir, "ephemeral": self.ephemeral}
        return next((name for name, source in types.items() if source is not None), "")

    @property
    def has_data(self) -> bool:
        """Whether fs-backup may back it up at all.

        Source: Velero v1.18, shouldIncludeVolumeInBackup in internal/volumehelper/volume_policy_helper.go.
        """
        without = (self.host_path, self.secret, self.config_map, self.projected, self.downward_api)
        return all(source is None for source in without) and not self.name.startswith("default-token")


class _Mount(WireModel, gc=False):
    name: str = ""


class _Container(WireModel, gc=False):
    volume_mounts: tuple[_Mount, ...] = ()
    volume_devices: tuple[_Mount, ...] = ()


class _PodSpec(WireModel, gc=False):
    volumes: tuple[PodVolume, ...] = ()
    containers: tuple[_Container, ...] = ()


class WorkloadPod(ClusterObject, gc=False):
    """A pod with volumes."""

    spec: _PodSpec = msgspec.field(default_factory=_PodSpec)
    status: _PhaseStatus = msgspec.field(default_factory=_PhaseStatus)

    @property
    def running(self) -> bool:
        """Whether fs-backup backs its volumes up. Source: Velero v1.18, BackupPodVolumes in pkg/podvolume."""
        return self.status.phase == "Running"

    @property
    def matters(self) -> bool:
        """Whether it may decide how a volume is backed up: it names a PVC, or has not ended and has data of its own."""
        ended = self.status.phase in {"Succeeded", "Failed"}
        return any(volume.claim or (volume.has_data and not ended) for volume in self.spec.volumes)

    @property
    def has_hooks(self) -> bool:
        """Whether its annotations have a command that a backup runs."""
        annotations = self.metadata.annotations
        return bool(annotations.hook or annotations.pre_hook or annotations.post_hook)

    def key_of(self, volume: PodVolume) -> VolumeKey:
        """Return the namespace and name of one of its volumes."""
        return (self.metadata.namespace, volume.claim or f"{self.metadata.name}:{volume.name}")

    def is_mounted(self, volume: PodVolume) -> bool:
        """Return whether a container mounts the volume as a file system, without which fs-backup finds no files."""
        mounts = {one.name for each in self.spec.containers for one in each.volume_mounts}
        devices = {one.name for each in self.spec.containers for one in each.volume_devices}
        return volume.name in mounts - devices


class Namespace(ClusterObject, gc=False):
    """A namespace."""


@dataclass(frozen=True)
class ClusterVolumes:
    """What was read of the cluster; `volumes` are PersistentVolumes by name, None: they may not be read."""

    claims: Mapping[VolumeKey, VolumeClaim]
    pods: tuple[WorkloadPod, ...] = ()
    volumes: Mapping[str, StoredVolume] | None = field(default_factory=dict)
    namespaces: Mapping[str, Namespace] = field(default_factory=dict)

    @cached_property
    def pods_by_claim(self) -> Mapping[VolumeKey, tuple[WorkloadPod, ...]]:
        """The pods that name each PVC."""
        found: dict[VolumeKey, list[WorkloadPod]] = {}
        for pod in self.pods:
            for claim in {volume.claim for volume in pod.spec.volumes if volume.claim}:
                found.setdefault((pod.metadata.namespace, claim), []).append(pod)
        return {key: tuple(pods) for key, pods in found.items()}

    @cached_property
    def by_namespace(self) -> Mapping[str, Sequence[VolumeClaim | WorkloadPod]]:
        """The PVCs and pods of each namespace."""
        found: dict[str, list[VolumeClaim | WorkloadPod]] = {}
        objects: tuple[VolumeClaim | WorkloadPod, ...] = (*self.claims.values(), *self.pods)
        for one in objects:
            found.setdefault(one.metadata.namespace, []).append(one)
        return found

    def volume_of(self, claim: VolumeClaim) -> StoredVolume | None:
        """Return the volume of a PVC; None: it is not known."""
        return (self.volumes or {}).get(claim.spec.volume_name)

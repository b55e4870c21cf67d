"""The objects of a restore: for each volume a new PVC, unless it is in place, and the transfer. Pure builders.

The transfer is a DataDownload; or, for a PVC that a pod waits for, a PodVolumeRestore.
"""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from client.backups.manifests import OPERATION_TIMEOUT, is_reserved, transfer_name
from client.backups.plan import ClaimName
from client.collections.collection import WaitingPod
from client.restores.sources import RestoreError, SavedVolume
from client.text import format_bytes
from core.contract import VolumeMode
from core.kube.resources import DATA_DOWNLOADS, PERSISTENT_VOLUME_CLAIMS, POD_VOLUME_RESTORES, PODS, Resource
from core.kube.types import Manifest, OwnerRef, UncheckedObject
from core.models import names as wire
from core.models.transfer_settings import DELETE_EXTRA_FILES, InPlace
from core.models.transfers import PLAIN_RESTORE, RESTORE_TYPE
from core.models.units import parse_quantity

_DEFAULT_MODES: Final = ("ReadWriteOnce",)
_VOLUME: Final = "data"


@dataclass(frozen=True)
class RequestedRestore:
    """A restore as the user asked for it; `namespace` has the transfers.

    `size` and `storage_class` are for PVCs that the backup knows by name only, `storage_class` also for those whose
    class was empty; None: the cluster's default one. `wait_image` is the agents' image, whose `restore-wait` a pod runs
    in each PVC; None: none does. `in_place` is how data goes into the volumes that the PVCs have; None: into
    new ones. `owners` are the owner references of all objects.
    """

    name: str
    namespace: str
    namespaces: Mapping[str, str] = field(default_factory=dict)
    classes: Mapping[str, str] = field(default_factory=dict)
    size: str | None = None
    storage_class: str | None = None
    wait_image: str | None = None
    in_place: InPlace | None = None
    owners: Sequence[OwnerRef] = ()


@dataclass(frozen=True)
class PlannedRestore:
    """One volume of a restore. `volumes` is how many the restore has; `existing` is the PersistentVolume of an old PVC.

    "": a new PVC is created.
    """

    request: RequestedRestore
    volume: SavedVolume
    volumes: int
    existing: str = ""

    @property
    def target(self) -> ClaimName:
        """The new PVC."""
        claim = self.volume.claim
        return ClaimName(self.request.namespaces.get(claim.namespace, claim.namespace), claim.name)

    @property
    def name(self) -> str:
        """The name of the transfer, and of the pod that waits for it."""
        return transfer_name(self.request.name, self.target.namespace, self.target.name)

    @property
    def saved_class(self) -> str | None:
        """The class before it is mapped: the old PVC's or, if it had none to be used again, the given one."""
        claim, given = self.volume.claim, self.request.storage_class
        if not claim.size:
            return given
        # With "", no provisioner makes a volume of it.
        return claim.storage_class if claim.storage_class != "" else given or claim.storage_class

    @property
    def storage_class(self) -> str | None:
        """The class of the new PVC; None: the cluster's default one."""
        return self.request.classes.get(self.saved_class or "", self.saved_class)

    @property
    def size(self) -> str | None:
        """The size of the new PVC: the requested one, or the old volume's if it was larger; None: not known."""
        claim = self.volume.claim
        return max(filter(None, (claim.size, claim.capacity)), key=parse_quantity) if claim.size else self.request.size

    @property
    def by_pod(self) -> bool:
        """Whether a pod mounts the PVC, and waits for its data."""
        return bool(self.request.wait_image)

    @property
    def pod(self) -> WaitingPod:
        """The pod that waits for its data, if one does."""
        return WaitingPod(self.target.namespace, self.name)

    @property
    def resource(self) -> Resource[UncheckedObject]:
        """The kind of its transfer."""
        return POD_VOLUME_RESTORES if self.by_pod else DATA_DOWNLOADS

    def build_claim(self) -> Manifest:
        """Return the PVC. No provisioner fills it, unless a pod waits in it: it selects the volume that is restored.

        Raises:
            RestoreError: its size is not known or too small, its class makes no volume, or its volume has no files.
        """
        claim = self.volume.claim
        if self.by_pod and (self.volume.by_block or claim.volume_mode == VolumeMode.BLOCK):
            what = "its backup has" if self.volume.by_block else "its volume is"
            raise RestoreError(f"PVC {self.volume.name}: {what} a block device: leave out --method restore-wait")
        if not self.by_pod and self.storage_class == "":
            raise RestoreError(
                f'PVC {self.volume.name}: its storage class was "", which no provisioner serves: set --storage-class'
            )
        if not self.size:
            raise RestoreError(
                f"PVC {self.volume.name}: its backup does not say its size: set --size, and --storage-class"
            )
        if not claim.size and self.volume.size_bytes > parse_quantity(self.size):
            data = format_bytes(self.volume.size_bytes)
            raise RestoreError(f"PVC {self.volume.name}: its backup has {data}: set a larger --size than {self.size}")
        labels = {key: value for key, value in claim.labels.items() if not is_reserved(key)}
        spec: Manifest = {
            "accessModes": list(claim.access_modes or _DEFAULT_MODES),
            "resources": {"requests": {"storage": self.size}},
            "volumeMode": claim.volume_mode,
        }
        if not self.by_pod:
            spec["selector"] = {"matchLabels": {wire.RESTORE_SELECTOR_LABEL: self.name}}
        if self.storage_class is not None:
            spec["storageClassName"] = self.storage_class
        meta = self._meta({}) | {"name": self.target.name, "namespace": self.target.namespace}
        meta["labels"] = labels | meta["labels"]
        return PERSISTENT_VOLUME_CLAIMS.build(meta, spec=spec)

    def build_pod(self) -> Manifest | None:
        """Return the pod that waits for the data in its PVC, and then ends; None: none is needed."""
        if not self.by_pod:
            return None
        helper = {
            **self._container("restore-wait", ["/velero-restore-helper", self._restore_uid]),
            "volumeMounts": [{"name": _VOLUME, "mountPath": f"/restores/{_VOLUME}"}],
        }
        spec = {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 1,
            "automountServiceAccountToken": False,
            "securityContext": {"runAsUser": 0, "seccompProfile": {"type": "RuntimeDefault"}},
            "nodeSelector": {"kubernetes.io/os": "linux"},
            "initContainers": [helper],
            "containers": [self._container("restored", ["true"])],
            "volumes": [{"name": _VOLUME, "persistentVolumeClaim": {"claimName": self.target.name}}],
        }
        meta = {**self._meta({}), "namespace": self.target.namespace}
        return PODS.build(meta, spec=spec)

    def _container(self, name: str, command: list[str]) -> Manifest:
        """Return a container that may remove the done file of any owner, and nothing else."""
        capabilities = {"drop": ["ALL"], "add": ["DAC_OVERRIDE"]}
        return {
            "name": name,
            "image": self.request.wait_image,
            "imagePullPolicy": "IfNotPresent",
            "command": command,
            "resources": {"requests": {"cpu": "1m", "memory": "16Mi"}, "limits": {"memory": "32Mi"}},
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": capabilities,
            },
        }

    @property
    def _restore_uid(self) -> str:
        """The UID that the done file is named by: the same each time, so that a repetition waits for the same."""
        return str(uuid.uuid5(uuid.NAMESPACE_URL, f"{self.name}/{self.volume.snapshot_id}"))

    def build_transfer(self, pod_uid: str | None = None) -> Manifest:
        """Return the transfer; that into a pod needs the UID of its pod."""
        volume = self.volume
        meta = self._meta({wire.RESTORE_VOLUMES_ANNOTATION: str(self.volumes)})
        spec: Manifest = {
            "snapshotID": volume.snapshot_id,
            "sourceNamespace": volume.repository,
            "backupStorageLocation": volume.location,
            **PLAIN_RESTORE,
        }
        if self.by_pod:
            meta["labels"][wire.RESTORE_UID_LABEL] = self._restore_uid
            meta["annotations"][wire.PVC_NAME_ANNOTATION] = self.target.name
            place = {"kind": "Pod", "namespace": self.target.namespace, "name": self.name, "uid": pod_uid or ""}
            spec |= {"pod": place, "volume": _VOLUME, "repoIdentifier": "", "uploaderType": "kopia"}
        else:
            target = {"namespace": self.target.namespace, "pvc": self.target.name, "pv": self.existing}
            spec |= {"targetVolume": target, "operationTimeout": OPERATION_TIMEOUT, "nodeOS": "linux"}
            if volume.by_block:
                spec["datamover"] = wire.BLOCK_DATA_MOVER
            if in_place := self.request.in_place:
                spec[RESTORE_TYPE] = in_place.restore_type
                spec["dataMoverConfig"] = {DELETE_EXTRA_FILES: "true"} if in_place.delete_extra_files else {}
        return self.resource.build(meta, spec=spec)

    def _meta(self, annotations: Manifest) -> Manifest:
        return {
            "name": self.name,
            "namespace": self.request.namespace,
            "labels": {wire.RESTORE_LABEL: wire.label_value(self.request.name)},
            "annotations": {wire.RESTORE_ANNOTATION: self.request.name, **annotations},
            **({"ownerReferences": list(self.request.owners)} if self.request.owners else {}),
        }

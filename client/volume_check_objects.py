"""The objects of `nodeagent preflight`: a claim, a pod that fills it and one that reads it, and both transfers."""

from dataclasses import dataclass
from typing import Final

from core.kube import resources as kube
from core.kube.resources import Resource
from core.kube.types import Manifest
from core.models.names import RESTORE_SELECTOR_LABEL
from core.models.transfers import PLAIN_RESTORE

__all__ = ["DEFAULT_SPACE", "PREFLIGHT_LABELS", "CheckPlan"]

PREFLIGHT_LABELS: Final = {"nodeagent.io/preflight": "true"}
"""On everything that a check creates, so that a later one finds what an earlier one left."""

DEFAULT_SPACE: Final = "nodeagent-preflight"
"""The namespace of the test's volumes, which is created and deleted with them."""

_USER: Final = 65532
"""That of the image."""

_DATA_BYTES: Final = 1 << 20

_REPORT: Final = "open('/dev/termination-log', 'w').write(hashlib.sha256(data).hexdigest())"
_WRITE: Final = f"""\
import hashlib, os
data = os.urandom({_DATA_BYTES})
with open('/data/preflight', 'wb') as file:
    file.write(data)
    file.flush()
    os.fsync(file.fileno())
{_REPORT}
"""
_READ: Final = f"""\
import hashlib
data = open('/data/preflight', 'rb').read()
{_REPORT}
"""


@dataclass(frozen=True)
class CheckPlan:
    """One check: `space` is the namespace of its volumes, `namespace` that of agents and transfers.

    `image` has Python and is the agents'; `size` is a quantity. `retaining` are the classes, as text, by whose policy
    volumes or snapshots stay in the storage.
    """

    id: str
    namespace: str
    space: str
    image: str
    size: str
    storage_class: str
    snapshot_class: str
    driver: str
    location: str
    retaining: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The name of source claim, snapshot and transfers."""
        return f"nodeagent-preflight-{self.id}"

    @property
    def restored(self) -> str:
        """The name of the target claim."""
        return f"{self.name}-restored"

    def build_namespace(self) -> Manifest:
        """Return the namespace of the volumes."""
        return self._object(kube.NAMESPACES, self.space, "")

    def build_claim(self) -> Manifest:
        """Return the source claim."""
        return self._claim(self.name, {})

    def build_target(self) -> Manifest:
        """Return the target claim: no provisioner fills it."""
        return self._claim(self.restored, {"selector": {"matchLabels": {RESTORE_SELECTOR_LABEL: self.restored}}})

    def build_writer(self) -> Manifest:
        """Return the pod that writes random data into the source claim, and ends with its checksum."""
        return self._pod(self.name, self.name, _WRITE)

    def build_reader(self) -> Manifest:
        """Return the pod that reads the target claim, and ends with the checksum of what is in it."""
        return self._pod(self.restored, self.restored, _READ)

    def build_snapshot(self) -> Manifest:
        """Return the VolumeSnapshot of the source claim."""
        spec = {
            "volumeSnapshotClassName": self.snapshot_class,
            "source": {"persistentVolumeClaimName": self.name},
        }
        return {**self._object(kube.VOLUME_SNAPSHOTS, self.name, self.space), "spec": spec}

    def build_upload(self) -> Manifest:
        """Return the DataUpload of the snapshot."""
        spec = {
            "snapshotType": "CSI",
            "csiSnapshot": {
                "volumeSnapshot": self.name,
                "storageClass": self.storage_class,
                "snapshotClass": self.snapshot_class,
                "driver": self.driver,
            },
            "sourceNamespace": self.space,
            "sourcePVC": self.name,
            "backupStorageLocation": self.location,
            "operationTimeout": "10m0s",
        }
        return {**self._object(kube.DATA_UPLOADS, self.name, self.namespace), "spec": spec}

    def build_download(self, snapshot_id: str) -> Manifest:
        """Return the DataDownload of that kopia snapshot into the target claim."""
        spec = {
            "targetVolume": {"namespace": self.space, "pvc": self.restored, "pv": ""},
            "snapshotID": snapshot_id,
            "sourceNamespace": self.space,
            "backupStorageLocation": self.location,
            "operationTimeout": "10m0s",
            "nodeOS": "linux",
            **PLAIN_RESTORE,
        }
        return {**self._object(kube.DATA_DOWNLOADS, self.name, self.namespace), "spec": spec}

    def _object(self, resource: Resource, name: str, namespace: str) -> Manifest:
        meta: Manifest = {"name": name, "labels": dict(PREFLIGHT_LABELS)}
        if namespace:
            meta["namespace"] = namespace
        return {"apiVersion": resource.api_version, "kind": resource.kind, "metadata": meta}

    def _claim(self, name: str, more: Manifest) -> Manifest:
        spec = {
            "accessModes": ["ReadWriteOnce"],
            "storageClassName": self.storage_class,
            "resources": {"requests": {"storage": self.size}},
            **more,
        }
        return {**self._object(kube.PERSISTENT_VOLUME_CLAIMS, name, self.space), "spec": spec}

    def _pod(self, name: str, claim: str, script: str) -> Manifest:
        """Return a pod that every Pod Security Standard allows."""
        container = {
            "name": "preflight",
            "image": self.image,
            "imagePullPolicy": "IfNotPresent",
            "command": ["python", "-c", script],
            "terminationMessagePolicy": "FallbackToLogsOnError",
            "resources": {"requests": {"cpu": "10m", "memory": "32Mi"}, "limits": {"memory": "128Mi"}},
            "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
            "volumeMounts": [{"name": "data", "mountPath": "/data"}],
        }
        spec = {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 1,
            "automountServiceAccountToken": False,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": _USER,
                "runAsGroup": _USER,
                "fsGroup": _USER,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "nodeSelector": {"kubernetes.io/os": "linux"},
            "containers": [container],
            "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": claim}}],
        }
        return {**self._object(kube.PODS, name, self.space), "spec": spec}

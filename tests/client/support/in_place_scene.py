"""A cluster with a PVC whose volume can be restored into, as `nodeagent restore create --in-place` finds it."""

from typing import Any

from core.kube.resources import PERSISTENT_VOLUMES, VOLUME_SNAPSHOTS
from tests.client.support.restore_scene import RestoreScene
from tests.support.objects import JsonDict

OWNER = {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "db", "uid": "u-db"}
NODE = "volume.kubernetes.io/selected-node"
BOUND = {"pv.kubernetes.io/bind-completed": "yes", "pv.kubernetes.io/bound-by-controller": "yes"}
SPEC = {
    "accessModes": ["ReadWriteOnce"],
    "resources": {"requests": {"storage": "2Gi"}},
    "storageClassName": "fast",
    "volumeMode": "Filesystem",
    "volumeName": "pv-1",
}


class InPlaceScene(RestoreScene):
    """The PVC app/data with a volume, an agent that can restore in place, and a snapshot class."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._put("VolumeSnapshotClass", "snap", "snapshot.storage.k8s.io/v1", driver="p", deletionPolicy="Delete")
        meta = {
            "name": "data",
            "namespace": "app",
            "uid": "uid-old",
            "labels": {"tier": "db"},
            "annotations": {NODE: "node-a", "team": "x", **BOUND},
            "ownerReferences": [OWNER],
        }
        self.kube.put(
            {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": meta, "spec": SPEC}
            | {"status": {"phase": "Bound"}}
        )
        reference = {"namespace": "app", "name": "data", "uid": "uid-old"}
        self.put_volume("pv-1", claimRef=reference, capacity={"storage": "2Gi"})
        self.put_agent("restore-in-place")

    def put_volume(self, name: str, **spec: Any) -> None:
        csi = {"driver": "p", "volumeHandle": "h-1"}
        wanted = {"csi": csi, "persistentVolumeReclaimPolicy": "Delete", "volumeMode": "Filesystem"}
        self._put("PersistentVolume", name, "v1", spec=wanted | spec, status={"phase": "Bound"})

    def put_agent(self, features: str) -> None:
        meta = {"name": "agent", "namespace": "velero", "labels": {"role": "node-agent"}}
        meta["annotations"] = {"nodeagent.io/features": features}
        self.kube.put({"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": {"nodeName": "node-a"}})

    def put_pod(self, claim: str = "data", namespace: str = "app", phase: str = "Running") -> None:
        owners = [{"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "db", "uid": "u", "controller": True}]
        meta = {"name": "db-0", "namespace": namespace, "ownerReferences": owners}
        spec = {"volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": claim}}]}
        self.kube.put({"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec, "status": {"phase": phase}})

    @property
    def volume(self) -> JsonDict:
        found: JsonDict = next(v for v in self.kube.objects(PERSISTENT_VOLUMES) if v["metadata"]["name"] == "pv-1")
        return found

    @property
    def snapshots(self) -> list[JsonDict]:
        return self.kube.objects(VOLUME_SNAPSHOTS)

"""Builds what agents and transfers find in a cluster: nodes, agents' pods, volumes, the transfers themselves.

It is the least that an API server accepts and an agent needs; transfers are as large as recorded ones.
"""

import json
from dataclasses import dataclass, field
from typing import Final

from core.kube.types import VolumeSnapshot
from core.models.names import AGENT_LABELS
from tests.nodeagent.support.transfers import data_download, data_upload, pod_volume_backup, pod_volume_restore
from tests.nodeagent.support.volume_scene import an_object
from tests.support.objects import JsonDict

KINDS: Final = ("DataUpload", "DataDownload", "PodVolumeBackup", "PodVolumeRestore")
CONFIG_MAP: Final = "node-agent-config"
APPS: Final = 10
"""Namespaces with volumes, which alternate in the admission queue."""

_SNAPSHOTS: Final = "snapshot.storage.k8s.io/v1"


def app_namespace(namespace: str, number: int) -> str:
    """Return the namespace of the volume with that number, for the agents of `namespace`."""
    return f"{namespace}-app-{number % APPS}"


def node_name(number: int) -> str:
    """Return the name of the node with that number."""
    return f"node-{number:03}"


def build_config(namespace: str, *, queue_length: int | None, slots: int) -> JsonDict:
    """Return the agents' ConfigMap."""
    concurrency: JsonDict = {"globalConfig": slots}
    if queue_length is not None:
        concurrency["prepareQueueLength"] = queue_length
    data = {"config.json": json.dumps({"loadConcurrency": concurrency})}
    return an_object("ConfigMap", CONFIG_MAP, namespace, data=data)


def build_location(namespace: str) -> JsonDict:
    """Return a storage location that counts as available."""
    spec = {"provider": "aws", "objectStorage": {"bucket": "bucket"}, "config": {"region": "region"}}
    return an_object("BackupStorageLocation", "default", namespace, "velero.io/v1", spec=spec)


def build_node(name: str) -> JsonDict:
    """Return a node."""
    return an_object("Node", name, labels={"kubernetes.io/os": "linux", "kubernetes.io/hostname": name})


def build_agent_pod(namespace: str, node: str) -> tuple[JsonDict, JsonDict]:
    """Return the pod of the agent on `node`, and its status: Ready."""
    pod = _pod(namespace, f"node-agent-{node}", node, labels=dict(AGENT_LABELS))
    return pod, {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}


def build_workload(namespace: str, name: str, node: str, *, waits: bool) -> tuple[JsonDict, JsonDict]:
    """Return a pod with a volume `fs`, and its status: running, or waiting for the data of its volume."""
    pod = _pod(namespace, name, node)
    mounts = [{"name": "fs", "mountPath": "/data"}]
    pod["spec"]["containers"][0]["volumeMounts"] = mounts
    pod["spec"]["volumes"] = [{"name": "fs", "emptyDir": {}}]
    if not waits:
        return pod, {"phase": "Running"}
    pod["spec"]["initContainers"] = [{"name": "restore-wait", "image": "none", "volumeMounts": mounts}]
    running = {"running": {"startedAt": "2026-11-21T11:00:00Z"}}
    shown = {
        "name": "restore-wait",
        "ready": False,
        "restartCount": 0,
        "image": "none",
        "imageID": "",
        "state": running,
    }
    return pod, {"phase": "Pending", "initContainerStatuses": [shown]}


def build_claim(namespace: str, name: str, *, volume: str = "") -> JsonDict:
    """Return a claim, bound to `volume` if one is named."""
    resources = {"requests": {"storage": "1Gi"}}
    spec: JsonDict = {"accessModes": ["ReadWriteOnce"], "resources": resources, "storageClassName": ""}
    spec |= {"volumeName": volume} if volume else {}
    return an_object("PersistentVolumeClaim", name, namespace, spec=spec)


def build_snapshot(namespace: str, name: str) -> tuple[JsonDict, JsonDict]:
    """Return a VolumeSnapshot of the claim `data`, and its status: ready."""
    spec = {"source": {"persistentVolumeClaimName": "data"}}
    snapshot = an_object("VolumeSnapshot", name, namespace, _SNAPSHOTS, spec=spec)
    content = _content_name(namespace, name)
    return snapshot, {"readyToUse": True, "restoreSize": "1Gi", "boundVolumeSnapshotContentName": content}


def build_content(snapshot: VolumeSnapshot) -> JsonDict:
    """Return the VolumeSnapshotContent of the snapshot, as stored."""
    meta = snapshot["metadata"]
    namespace, name, uid = (meta["namespace"], meta["name"], meta["uid"])
    spec = {
        "deletionPolicy": "Delete",
        "driver": "hostpath.csi.k8s.io",
        "source": {"snapshotHandle": f"handle-{namespace}-{name}"},
        "volumeSnapshotRef": {"name": name, "namespace": namespace, "uid": uid},
    }
    return an_object("VolumeSnapshotContent", _content_name(namespace, name), version=_SNAPSHOTS, spec=spec)


@dataclass(frozen=True)
class Volume:
    """What one transfer is about.

    `app` is the namespace of its volume. `workload` is the pod, as stored, whose volume a
    PodVolumeBackup or PodVolumeRestore is about. `source` is the snapshot of a DataUpload and
    the target claim of a DataDownload; they have the transfer's name where it is empty.
    """

    kind: str
    name: str
    app: str
    workload: JsonDict = field(default_factory=dict)
    source: str = ""


def build_transfer(volume: Volume, namespace: str) -> JsonDict:
    """Return a New transfer on `volume`, for the agents of `namespace`."""
    name, app, source = volume.name, volume.app, volume.source or volume.name
    match volume.kind:
        case "DataUpload":
            transfer = data_upload(name)
            transfer["spec"] |= {"sourceNamespace": app, "sourcePVC": "data"}
            transfer["spec"]["csiSnapshot"]["volumeSnapshot"] = source
        case "DataDownload":
            transfer = data_download(name)
            transfer["spec"]["targetVolume"] |= {"namespace": app, "pvc": source}
        case "PodVolumeBackup":
            transfer = pod_volume_backup(name)
            transfer["spec"]["node"] = volume.workload["spec"]["nodeName"]
        case _:
            transfer = pod_volume_restore(name)
    if "pod" in transfer["spec"]:
        meta = volume.workload["metadata"]
        transfer["spec"]["pod"] |= {"namespace": app, "name": meta["name"], "uid": meta["uid"]}
    labels = transfer["metadata"]["labels"]
    transfer["metadata"] = {"name": name, "namespace": namespace, "labels": labels}
    del transfer["status"]
    return transfer


def _content_name(namespace: str, name: str) -> str:
    return f"snapcontent-{namespace}-{name}"


def _pod(namespace: str, name: str, node: str, labels: JsonDict | None = None) -> JsonDict:
    spec = {"nodeName": node, "containers": [{"name": "main", "image": "none"}]}
    return an_object("Pod", name, namespace, spec=spec, labels=labels or {})

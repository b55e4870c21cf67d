"""Transfers and mover pods as JSON dicts, for the tests of the life cycle."""

import json
from functools import partial
from pathlib import Path

from core.kube.resources import PODS
from core.models.names import (
    DATA_DOWNLOAD_LABEL,
    DATA_UPLOAD_LABEL,
    NODE_LABEL,
    OWNER_UID_LABEL,
    POD_VOLUME_BACKUP_LABEL,
    POD_VOLUME_RESTORE_LABEL,
)
from tests.support.objects import JsonDict, build_object

MOVER_LABELS = {
    "DataUpload": DATA_UPLOAD_LABEL,
    "DataDownload": DATA_DOWNLOAD_LABEL,
    "PodVolumeBackup": POD_VOLUME_BACKUP_LABEL,
    "PodVolumeRestore": POD_VOLUME_RESTORE_LABEL,
}
NAMESPACE = "velero"
NODE = "node-a"
_RECORDINGS = Path(__file__).parents[2] / "recordings" / "velero-1.18.2"


def _first_recorded(kind: str) -> JsonDict:
    recorded = json.loads((_RECORDINGS / f"{kind}.json").read_text())
    transfer: JsonDict = recorded[0]["object"]
    return transfer


def _build(
    recording: str, default: str, name: str = "", /, *, node: str = "", status: JsonDict | None = None, **meta: object
) -> JsonDict:
    """Return a transfer, New and unowned unless `node` and `status` differ; a PodVolumeBackup's pod is on `NODE`."""
    transfer, name = _first_recorded(recording), name or default
    metadata = {"name": name, "namespace": NAMESPACE, "uid": f"uid-of-{name}", "resourceVersion": "1"}
    metadata["creationTimestamp"] = "2026-11-21T11:58:00Z"
    labels = transfer["metadata"]["labels"] | ({NODE_LABEL: node} if node else {})
    transfer["metadata"] = metadata | {"labels": labels} | meta
    transfer["status"] = status or {}
    return transfer


data_upload = partial(_build, "dataupload", "du-1")
data_download = partial(_build, "datadownload", "dd-1")
pod_volume_backup = partial(_build, "podvolumebackup", "pvb-1")
pod_volume_restore = partial(_build, "podvolumerestore", "pvr-1")


def workload_pod(transfer: JsonDict, *, node: str = NODE, status: JsonDict | None = None, **meta: object) -> JsonDict:
    """Return the workload pod of a PodVolumeBackup or PodVolumeRestore; it runs, or is in `restore-wait`."""
    ref, volume = transfer["spec"]["pod"], transfer["spec"]["volume"]
    waits = transfer["kind"] == "PodVolumeRestore"
    waiting = {"name": "restore-wait", "state": {"running": {"startedAt": "2026-11-21T11:00:00Z"}}}
    mounts = [{"name": volume, "mountPath": "/data"}]
    spec = {
        "nodeName": node,
        "initContainers": [{"name": "restore-wait", "volumeMounts": mounts}] if waits else [],
        "containers": [{"name": "app", "volumeMounts": mounts}],
        "volumes": [{"name": volume, "emptyDir": {}}],
    }
    status = status or ({"phase": "Pending", "initContainerStatuses": [waiting]} if waits else {"phase": "Running"})
    return build_object(
        PODS, ref["name"], ref["namespace"], metadata={"uid": ref["uid"]} | meta, spec=spec, status=status
    )


def mover_pod(transfer: JsonDict, *, node: str = NODE, **status: object) -> JsonDict:
    """Return the mover pod of `transfer` on `node`; `status` is the pod's."""
    meta = transfer["metadata"]
    reference = {key: transfer[key] for key in ("apiVersion", "kind")} | {key: meta[key] for key in ("name", "uid")}
    own: JsonDict = {
        "uid": f"pod-of-{meta['uid']}",
        "labels": {OWNER_UID_LABEL: meta["uid"], MOVER_LABELS[transfer["kind"]]: meta["name"]},
        "ownerReferences": [reference | {"controller": True}],
    }
    spec = {"nodeName": node, "containers": [{"name": "mover"}]}
    return build_object(
        PODS, meta["name"], meta["namespace"], metadata=own, spec=spec, status=status or {"phase": "Pending"}
    )


def ended(exit_code: int, message: str = "", why: str = "Error", /, **status: object) -> JsonDict:
    """Return the status of a mover pod whose container ended, with `why` as its reason."""
    state = {"terminated": {"exitCode": exit_code, "message": message, "reason": why}}
    phase = "Failed" if exit_code else "Succeeded"
    return {"phase": phase, "containerStatuses": [{"name": "mover", "state": state}]} | status


def disrupted(reason: str, message: str = "a cause") -> JsonDict:
    """Return the part of a pod's status that says that the cluster ends it."""
    return {"conditions": [{"type": "DisruptionTarget", "status": "True", "reason": reason, "message": message}]}


TRANSFERS = {
    "DataUpload": data_upload,
    "DataDownload": data_download,
    "PodVolumeBackup": pod_volume_backup,
    "PodVolumeRestore": pod_volume_restore,
}
"""The factory of each kind."""

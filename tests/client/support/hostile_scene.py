"""A cluster whose tenants write what could be taken for HTML, in every field that the pages show."""

import json

from core.models.names import (
    OUTCOME_ANNOTATION,
    OWNER_UID_LABEL,
    PENDING_REASON_ANNOTATION,
    VELERO_BACKUP_LABEL,
    VELERO_SCHEDULE_LABEL,
)
from tests.client.support.status_scene import StatusScene, transfer
from tests.nodeagent.support.maintenance_scene import repository_object
from tests.support.objects import JsonDict

HOSTILE = "\"'><img src=x onerror='window.hacked=1'><script>window.hacked=2</script>{{ 7*7 }}</title>"
"""Ends an attribute and a title, runs scripts where it is no text, and is a template."""

HOSTILE_PATHS = (
    "/",
    "/transfers",
    "/transfers/du/moving",
    "/transfers/du/broken",
    "/nodes/a",
    "/queue",
    "/repositories",
    "/repositories/app-default-kopia",
)

_ENDED = "2026-11-21T11:30:00Z"


def _event(kind: str, uid: str) -> JsonDict:
    """Return an Event about the object; its source is hostile as well."""
    about = {"kind": kind, "uid": uid, "namespace": "velero", "name": "any"}
    event = {"type": "Warning", "reason": HOSTILE, "message": HOSTILE, "lastTimestamp": _ENDED}
    return {"involvedObject": about, **event}


def hostile_scene() -> StatusScene:
    """Return the scene."""
    scene = StatusScene()
    for name, phase in (("moving", "InProgress"), ("broken", "Failed"), ("waits", "New"), ("held", "Prepared")):
        times = {"completionTimestamp": _ENDED} if phase == "Failed" else {}
        raw = transfer("DataUpload", name, phase, message=HOSTILE, node="a" if phase != "New" else "", **times)
        raw["spec"] |= {"sourcePVC": HOSTILE, "sourceNamespace": HOSTILE, "backupStorageLocation": HOSTILE}
        raw["metadata"]["labels"] |= {VELERO_BACKUP_LABEL: HOSTILE}
        raw["metadata"]["annotations"] |= {OUTCOME_ANNOTATION: HOSTILE}
        if phase != "Failed":
            raw["metadata"]["annotations"] |= {PENDING_REASON_ANNOTATION: HOSTILE}
        stored = scene.kube.put(raw)
        uid = stored["metadata"]["uid"]
        scene.put("Event", f"of-{name}", "v1", **_event("DataUpload", uid))
        state = {"waiting": {"reason": HOSTILE}}
        status = {"phase": HOSTILE, "containerStatuses": [{"name": "m", "state": state}]}
        meta = {"labels": {OWNER_UID_LABEL: uid}}
        scene.put("Pod", f"pod-of-{name}", "v1", metadata=meta, spec={"nodeName": HOSTILE}, status=status)
    scene.put("Backup", HOSTILE, metadata={"labels": {VELERO_SCHEDULE_LABEL: HOSTILE}})
    failed = {"result": "Failed", "startTimestamp": _ENDED, "completeTimestamp": _ENDED, "message": HOSTILE}
    repository = repository_object(phase="NotReady", message=HOSTILE, recentMaintenance=[failed])
    repository["spec"]["volumeNamespace"] = HOSTILE
    stored = scene.kube.put(repository)
    scene.put("Event", "of-repository", "v1", **_event("BackupRepository", stored["metadata"]["uid"]))
    storage = {"provider": "aws", "objectStorage": {"bucket": "b"}}
    scene.put("BackupStorageLocation", "default", spec=storage, status={"phase": HOSTILE, "message": HOSTILE})
    scene.put_config(json.dumps({HOSTILE: 1, "loadConcurrency": {HOSTILE: 2}}))
    return scene

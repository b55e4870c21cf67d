"""A cluster in which there is something to see on each page: weeks of backups, a failure, transfers in all phases."""

import json

from core.models.names import VELERO_BACKUP_LABEL, VERIFICATION_ANNOTATION
from tests.client.support.status_scene import StatusScene, transfer
from tests.client.support.volumes_scene import a_cron_job
from tests.nodeagent.support.volume_scene import a_claim
from tests.support.objects import JsonDict

_GIB = 2**30


def _backup(day: int) -> JsonDict:
    size, new = 40 * _GIB + day * _GIB // 8, _GIB // 4 + day % 5 * _GIB // 16
    raw = transfer(
        "DataUpload",
        f"nightly-{day:02}",
        "Completed",
        completionTimestamp=f"2026-11-{day:02}T02:30:00Z",
        progress={"totalBytes": size, "bytesDone": size},
        incrementalBytes=40 * _GIB if day == 1 else new,
    )
    raw["spec"] |= {"sourceNamespace": "app", "sourcePVC": "data", "backupStorageLocation": "default"}
    verified = {"at": "2026-11-20T00:00:00Z", "outcome": "passed", "percent": 100}
    raw["metadata"]["creationTimestamp"] = f"2026-11-{day:02}T02:00:00Z"
    raw["metadata"]["annotations"] = {VERIFICATION_ANNOTATION: json.dumps(verified)}
    raw["metadata"]["labels"] |= {VELERO_BACKUP_LABEL: f"nightly-202611{day:02}"}
    return raw


def busy_scene() -> StatusScene:
    """Return the scene: besides the transfers of `put_transfers`, 20 nights of one volume, and one that failed.

    Of three PVCs, a schedule backs two up.
    """
    scene = StatusScene()
    scene.put_transfers()
    ended = {"node": "b", "completionTimestamp": "2026-11-21T02:31:00Z"}
    failed = transfer("DataUpload", "broken", "Failed", message="no space left on the repository's disk", **ended)
    failed["spec"]["sourcePVC"] = "unlucky"
    failed["metadata"]["creationTimestamp"] = "2026-11-21T02:00:00Z"
    scene.kube.put(failed)
    for day in range(1, 21):
        scene.kube.put(_backup(day))
    for claim in ("data", "new", "unlucky"):
        scene.kube.put(a_claim(claim))
    scene.kube.put(a_cron_job("nightly", "--pvc=app/data", "--pvc=app/unlucky"))
    return scene

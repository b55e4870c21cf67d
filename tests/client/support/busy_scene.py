"""A cluster in which there is something to see on each page: weeks of backups, a failure, transfers in all phases."""

import base64
import json
from datetime import UTC, datetime

from core.kube.resources import CONFIG_MAPS
from core.models.names import VELERO_BACKUP_LABEL, VERIFICATION_ANNOTATION
from nodeagent.coverage.history import EndedBackup, block_of, merge_history, name_of_block
from tests.client.support.status_scene import StatusScene, transfer
from tests.client.support.volumes_scene import a_cron_job
from tests.nodeagent.support.volume_scene import a_claim
from tests.support.objects import JsonDict

_GIB = 2**30


def _backup(day: int) -> JsonDict:
    size, new = 40 * _GIB + day * _GIB // 8, _GIB // 4 + day % 5 * _GIB // 16
    status: JsonDict = {
        "progress": {"totalBytes": size, "bytesDone": size},
        "incrementalBytes": 40 * _GIB if day == 1 else new,
    }
    ended = f"2026-11-{day:02}T02:30:00Z"
    raw = transfer("DataUpload", f"nightly-{day:02}", "Completed", completionTimestamp=ended, **status)
    raw["spec"] |= {"sourceNamespace": "app", "sourcePVC": "data", "backupStorageLocation": "default"}
    verified = {"at": "2026-11-20T00:00:00Z", "outcome": "passed", "percent": 100}
    raw["metadata"]["creationTimestamp"] = f"2026-11-{day:02}T02:00:00Z"
    raw["metadata"]["annotations"] = {VERIFICATION_ANNOTATION: json.dumps(verified)}
    raw["metadata"]["labels"] |= {VELERO_BACKUP_LABEL: f"nightly-202611{day:02}"}
    return raw


def put_history(scene: StatusScene) -> None:
    """Store what the leader has kept: 75 nights of app/data and app/logs, with two gaps."""
    today = datetime(2026, 11, 21, tzinfo=UTC).toordinal()
    blocks: dict[int, list[EndedBackup]] = {}
    for n in (*range(74, 50, -1), *range(44, 20, -1), 10, *range(6, 0, -1)):
        ended = datetime.fromordinal(today - n).replace(hour=2, tzinfo=UTC)
        for claim, size in (("data", 40 * _GIB), ("logs", 4 * _GIB)):
            new = size if n == 74 else _GIB // 4 + n % 5 * _GIB // 16
            one = EndedBackup(f"{claim}-{n}", "app", claim, ended, size + (75 - n) * _GIB // 8, new, 300 + n % 7 * 60.0)
            blocks.setdefault(block_of(today - n), []).append(one)
    for block, members in blocks.items():
        data = merge_history(None, block, members, today) or b""
        content = {"days": base64.b64encode(data).decode()}
        scene.put(CONFIG_MAPS.kind, name_of_block(block), CONFIG_MAPS.api_version, binaryData=content)


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
    put_history(scene)
    return scene

"""A cluster as a new user finds it: 40 PVCs, three schedules and one of Velero; some volumes are not protected."""

from datetime import datetime, timedelta
from typing import Any

from core.models.base import format_time
from core.models.names import PVC_UID_LABEL, SCHEDULE_COMMAND, SCHEDULE_LABEL
from tests.client.support.status_scene import StatusScene
from tests.nodeagent.support.hand_clock import NOON
from tests.nodeagent.support.transfers import data_upload
from tests.nodeagent.support.volume_scene import a_claim, a_pod, a_schedule, a_volume, an_object
from tests.support.fakekube import FakeKube
from tests.support.objects import JsonDict

_DAY = timedelta(days=1)
_LEFT_OUT = {"velero.io/exclude-from-backup": "true"}


def a_backup(
    namespace: str,
    claim: str,
    created: datetime,
    phase: str = "Completed",
    annotations: JsonDict | None = None,
    **status: Any,
) -> JsonDict:
    """Return a DataUpload of a PVC that has ended."""
    name = f"{namespace}-{claim}-{created:%d%H}"
    ended = {"phase": phase, "completionTimestamp": format_time(created), "progress": {"totalBytes": 3 * 2**30}}
    raw = data_upload(
        name, status=ended | status, annotations=annotations or {}, creationTimestamp=format_time(created)
    )
    raw["spec"] |= {"sourceNamespace": namespace, "sourcePVC": claim}
    for key in ("uid", "resourceVersion"):
        del raw["metadata"][key]
    # It is of the recorded PVC.
    del raw["metadata"]["labels"][PVC_UID_LABEL]
    return raw


def a_cron_job(name: str, *words: str, schedule: str = "0 2 * * *", **more: object) -> JsonDict:
    """Return a schedule of `nodeagent schedule`."""
    pod = {"containers": [{"name": "x", "image": "agent:1", "args": [SCHEDULE_COMMAND, name, *words]}]}
    spec = {"schedule": schedule, "jobTemplate": {"spec": {"template": {"spec": pod}}}} | more
    return an_object("CronJob", name, "velero", "batch/v1", labels={SCHEDULE_LABEL: name}, spec=spec)


def put_volumes(kube: FakeKube) -> None:
    """Store 40 PVCs, of which three need attention and two are left out, and what is to back them up."""
    server = {"template": {"spec": {"containers": [{"name": "velero", "args": ["server", "--features=EnableCSI"]}]}}}
    kube.put(an_object("Deployment", "velero", "velero", "apps/v1", spec=server))
    for namespace in ("app", "db", "shop"):
        kube.put(an_object("Namespace", namespace))
    ran = {"lastScheduleTime": format_time(NOON - timedelta(hours=10))}
    kube.put(a_cron_job("app-night", "--namespace=app", "--selector=") | {"status": ran})
    kube.put(a_cron_job("db-hourly", "--namespace=db", "--selector=", schedule="@hourly"))
    kube.put(a_cron_job("old", "--namespace=shop", "--selector=", suspend=True))
    kube.put(a_schedule("shop-night", "0 3 * * *", includedNamespaces=["sh*"], snapshotMoveData=True))
    for namespace, count in (("app", 20), ("db", 8), ("shop", 12)):
        for number in range(count):
            _put_volume(kube, namespace, f"data-{number:02}")


def _put_volume(kube: FakeKube, namespace: str, name: str) -> None:
    labels = _LEFT_OUT if (namespace, name) in {("app", "data-18"), ("app", "data-19")} else {}
    kube.put(a_claim(name, namespace, labels=labels))
    kube.put(a_volume(name, namespace))
    match namespace, name:
        case "app", "data-03":
            kube.put(a_backup(namespace, name, NOON - 3 * _DAY))
        case "db", "data-05":
            failed = {"message": "data path failed: no space left on device"}
            kube.put(a_backup(namespace, name, NOON - timedelta(minutes=70)))
            kube.put(a_backup(namespace, name, NOON - timedelta(minutes=10), "Failed", **failed))
        case "shop", "data-07":
            marks = {"backup.velero.io/backup-volumes": name}
            kube.put(a_pod("report-x", namespace, claims=[name], annotations=marks, phase="Succeeded"))
        case _, _ if not labels:
            age = timedelta(minutes=30) if namespace == "db" else timedelta(hours=10)
            kube.put(a_backup(namespace, name, NOON - age))


def volumes_scene() -> StatusScene:
    """Return the cluster."""
    scene = StatusScene()
    put_volumes(scene.kube)
    return scene

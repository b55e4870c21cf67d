"""`nodeagent preflight`: its steps against a fake cluster, the causes of failures, and what is left: nothing."""

import asyncio
import hashlib
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import pytest

from client.session import Session
from client.volume_check import CheckReport, CheckStep, check_volume
from client.volume_check_plan import CheckChoice, CheckPlan, plan_check
from core.errors import AgentError, ConfigError
from core.kube import resources as kube
from core.kube.client import KubeClient
from core.kube.resources import Resource
from core.kube.transport import Retry
from tests.nodeagent.support.hand_clock import HandClock
from tests.support.fakekube import FakeKube
from tests.support.objects import JsonDict
from tests.support.tasks import interrupt, until

_SPACE = "nodeagent-preflight"
_MARKED: JsonDict = {"labels": {"nodeagent.io/preflight": "true"}}
_SUM = hashlib.sha256(b"data").hexdigest()
_CLASSES: dict[str, Any] = {"storage_class": "fast", "snapshot_class": "snap", "driver": "csi.example.com"}
_PLAN = CheckPlan("x", "velero", _SPACE, "node-agent:1", "64Mi", location="default", **_CLASSES)
_TESTED = (
    kube.NAMESPACES,
    kube.PODS,
    kube.PERSISTENT_VOLUME_CLAIMS,
    kube.VOLUME_SNAPSHOTS,
    kube.DATA_UPLOADS,
    kube.DATA_DOWNLOADS,
)


def _ended(code: int = 0, message: str = _SUM) -> JsonDict:
    state = {"terminated": {"exitCode": code, "message": message}}
    return {"phase": "Failed" if code else "Succeeded", "containerStatuses": [{"name": "preflight", "state": state}]}


@dataclass
class _World(HandClock):
    """A cluster whose kubelets, drivers and agents do their work during a sleep; `answers` replace results."""

    answers: dict[str, JsonDict] = field(default_factory=dict)
    steps: list[CheckStep] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.kube = FakeKube(self)
        self.client = KubeClient(self.kube, Retry(self, attempts=1))

    async def sleep(self, seconds: float) -> None:
        self.seconds += seconds
        await asyncio.sleep(0)
        for resource, name, status in (
            (kube.PODS, _PLAN.name, _ended()),
            (kube.VOLUME_SNAPSHOTS, _PLAN.name, {"readyToUse": True}),
            (kube.DATA_UPLOADS, _PLAN.name, {"phase": "Completed", "snapshotID": "k1"}),
            (kube.DATA_DOWNLOADS, _PLAN.name, {"phase": "Completed"}),
            (kube.PODS, _PLAN.restored, _ended()),
        ):
            for stored in self.kube.objects(resource):
                if stored["metadata"]["name"] == name:
                    answer = self.answers.get(f"{resource.kind} {name}", status)
                    self.kube.put(stored | {"status": answer})
        for space in self.kube.objects(kube.NAMESPACES):
            self.put("ServiceAccount", "v1", "default", namespace=space["metadata"]["name"])

    def put(self, kind: str, version: str, name: str, *, namespace: str = "", **more: Any) -> JsonDict:
        meta = {"name": name, **more.pop("metadata", {})} | ({"namespace": namespace} if namespace else {})
        return self.kube.put({"apiVersion": version, "kind": kind, "metadata": meta, **more})

    async def check(self, timeout: timedelta = timedelta(minutes=1), plan: CheckPlan = _PLAN) -> CheckReport:
        tools = Session(self.client, self, "velero", self.notes.append)
        return await check_volume(tools, plan, timeout, self.steps.append)

    @property
    def left(self) -> list[str]:
        return [f"{one.kind} {obj['metadata']['name']}" for one in _TESTED for obj in self.kube.objects(one)]


@pytest.fixture
def world() -> _World:
    return _World()


async def test_a_volume_goes_through_all_steps_and_nothing_is_left(world: _World) -> None:
    # An API server that restarts ends no step.
    world.kube.fail_next("GET", f"/datauploads/{_PLAN.name}", "lost", times=9)
    report = await world.check()
    names = ["prepare", "volume", "snapshot", "backup", "restore", "compare", "clean up"]
    assert [step.name for step in report.steps] == names
    assert (report.error, report.snapshot_id) == (None, "k1")
    assert world.steps == report.steps
    assert world.left == []


@pytest.mark.parametrize(
    ("what", "status", "step", "cause"),
    [
        (f"Pod {_PLAN.name}", _ended(1, "PermissionError:\n /data"), "volume", "failed: .*PermissionError: /data"),
        (f"Pod {_PLAN.name}", {"phase": "Running"}, "volume", r"not within 1m0s \(--timeout\): Pod .* is running"),
        (f"VolumeSnapshot {_PLAN.name}", {"error": {"message": "no class"}}, "snapshot", "is not ready: no class"),
        (f"VolumeSnapshot {_PLAN.name}", {}, "snapshot", "no snapshot controller or driver has reported yet"),
        (f"DataUpload {_PLAN.name}", {"phase": "Failed", "message": "no"}, "backup", "^DataUpload .* is Failed: no$"),
        (f"DataUpload {_PLAN.name}", {}, "backup", "is New: no message"),
        (f"DataDownload {_PLAN.name}", {"phase": "Canceled", "message": "by"}, "restore", "is Canceled: by"),
        (f"Pod {_PLAN.restored}", _ended(0, "other"), "compare", f"differs: SHA-256 other instead of {_SUM}"),
        (f"Pod {_PLAN.restored}", _ended(0, ""), "compare", f"differs: SHA-256 unknown instead of {_SUM}"),
    ],
    ids=["writer", "no end", "snapshot error", "no driver", "upload", "no agent", "download", "other data", "no data"],
)
async def test_a_step_that_fails_has_its_cause_and_nothing_is_left(
    what: str, status: JsonDict, step: str, cause: str
) -> None:
    world = _World(answers={what: status})
    report = await world.check()
    assert [one.name for one in report.steps if one.error] == [step]
    assert report.steps[-1].name == "clean up"
    with pytest.raises(AgentError, match=cause):
        raise AgentError(report.error)
    assert world.left == []


async def test_volumes_that_a_policy_keeps_are_announced_and_named(world: _World) -> None:
    world.put("Namespace", "v1", _SPACE, metadata=_MARKED)
    for name, policy in (("kept", "Retain"), ("deleted", "Delete")):
        claim = {"volumeName": f"pv-{name}"}
        world.put("PersistentVolumeClaim", "v1", name, namespace=_SPACE, metadata=_MARKED, spec=claim)
        world.put("PersistentVolume", "v1", f"pv-{name}", spec={"persistentVolumeReclaimPolicy": policy})
    version, content = "snapshot.storage.k8s.io/v1", {"boundVolumeSnapshotContentName": "content"}
    world.put("VolumeSnapshot", version, "s", namespace=_SPACE, metadata=_MARKED, spec={}, status=content)
    world.put("VolumeSnapshotContent", version, "content", spec={"deletionPolicy": "Retain"})
    announced = "StorageClass fast has reclaimPolicy Retain"
    report = await world.check(plan=replace(_PLAN, retaining=(announced,)))
    assert report.error is None
    assert world.notes[0] == f"{announced}: what the test creates with it stays in the storage"
    command = "kubectl delete pv/pv-kept volumesnapshotcontent/content"
    assert world.notes[-1] == f"kept by the policy Retain, to delete by: {command}"


async def test_volumes_that_nobody_may_look_at_are_named(world: _World) -> None:
    world.put("Namespace", "v1", _SPACE, metadata=_MARKED)
    world.put("PersistentVolumeClaim", "v1", "c", namespace=_SPACE, metadata=_MARKED, spec={"volumeName": "hidden"})
    world.kube.fail_next("GET", "/persistentvolumes/hidden", 403)
    report = await world.check(plan=replace(_PLAN, retaining=("StorageClass fast has reclaimPolicy Retain",)))
    assert report.error is None
    assert world.notes[-1] == "kept by the policy Retain, to delete by: kubectl delete pv/hidden"


@pytest.mark.usefixtures("_allowed")
async def test_classes_are_found_and_those_that_retain_are_in_the_plan() -> None:
    world = _ready_cluster()
    plan = await plan_check(world.client, "velero", CheckChoice())
    assert (plan.image, plan.storage_class, plan.snapshot_class, plan.space) == ("node-agent:1", "fast", "snap", _SPACE)
    for resource, policy in ((kube.STORAGE_CLASSES, "reclaimPolicy"), (kube.VOLUME_SNAPSHOT_CLASSES, "deletionPolicy")):
        world.kube.put(world.kube.objects(resource)[0] | {policy: "Retain"})
    plan = await plan_check(world.client, "velero", CheckChoice(storage_class="fast"))
    classes = ("StorageClass fast has reclaimPolicy Retain", "VolumeSnapshotClass snap has deletionPolicy Retain")
    assert plan.retaining == classes


@pytest.mark.usefixtures("_allowed")
async def test_the_class_of_the_snapshot_is_the_one_that_backups_take() -> None:
    world = _ready_cluster()
    default = {"annotations": {"snapshot.storage.kubernetes.io/is-default-class": "true"}}
    for name, meta in (("default", default), ("taken", {"labels": {"velero.io/csi-volumesnapshot-class": "true"}})):
        world.put("VolumeSnapshotClass", "snapshot.storage.k8s.io/v1", name, driver="csi.example.com", metadata=meta)
    assert (await plan_check(world.client, "velero", CheckChoice())).snapshot_class == "taken"


async def test_an_interrupted_check_deletes_everything() -> None:
    world = _World(answers={f"DataUpload {_PLAN.name}": {"phase": "InProgress"}})
    created = until(lambda: bool(world.kube.objects(kube.DATA_UPLOADS)), every=0)
    await interrupt(world.check(timedelta(days=1)), created)
    assert world.left == []


async def test_what_an_earlier_check_left_is_deleted_first(world: _World) -> None:
    for resource, namespace in ((kube.PERSISTENT_VOLUME_CLAIMS, _SPACE), (kube.DATA_UPLOADS, "velero")):
        world.put(resource.kind, resource.api_version, "old", namespace=namespace, metadata=_MARKED, spec={})
    world.put("Namespace", "v1", _SPACE, metadata=_MARKED)
    report = await world.check()
    assert report.error is None
    assert world.notes == ["deleted what an earlier preflight had left"]
    assert world.left == []


async def test_a_namespace_of_the_user_stays(world: _World) -> None:
    world.put("Namespace", "v1", _SPACE)
    assert (await world.check()).error is None
    assert world.left == [f"Namespace {_SPACE}"]


async def test_what_cannot_be_deleted_is_named(world: _World) -> None:
    meta = _MARKED | {"finalizers": ["example.com/hold"]}
    world.put("DataUpload", "velero.io/v2alpha1", "held", namespace="velero", metadata=meta, spec={})
    report = await world.check()
    assert [step.name for step in report.steps] == ["prepare", "clean up"]
    assert report.error is not None
    assert report.error.startswith("not deleted yet: DataUpload velero/held; the next preflight deletes")


def _ready_cluster() -> _World:
    world = _World()
    container = {"name": "node-agent", "image": "node-agent:1"}
    spec = {"selector": {}, "template": {"spec": {"containers": [container]}}}
    world.put("DaemonSet", "apps/v1", "node-agent", namespace="velero", spec=spec, status={"numberReady": 1})
    storage = {"provider": "aws", "objectStorage": {"bucket": "b"}}
    world.put("BackupStorageLocation", "velero.io/v1", "default", namespace="velero", spec=storage)
    default = {"annotations": {"storageclass.kubernetes.io/is-default-class": "true"}}
    world.put("StorageClass", "storage.k8s.io/v1", "fast", provisioner="csi.example.com", metadata=default)
    world.put("StorageClass", "storage.k8s.io/v1", "slow", provisioner="other.example.com")
    version = "snapshot.storage.k8s.io/v1"
    world.put("VolumeSnapshotClass", version, "snap", driver="csi.example.com", deletionPolicy="Delete")
    return world


@pytest.fixture
def _allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing(*_: object) -> dict[object, str]:
        return {}

    monkeypatch.setattr("client.volume_check_plan.missing_permissions", nothing)


_OTHER_DRIVER = "--volume-snapshot-class: snap is of driver csi.example.com, and the storage class of other.example.com"


@pytest.mark.usefixtures("_allowed")
@pytest.mark.parametrize(
    ("choice", "gone", "message"),
    [
        (CheckChoice(), kube.DAEMON_SETS, "DaemonSet velero/node-agent does not exist: run nodeagent install"),
        (CheckChoice(), kube.BACKUP_STORAGE_LOCATIONS, "BackupStorageLocation velero/default does not exist"),
        (CheckChoice(), kube.STORAGE_CLASSES, "no default StorageClass: --storage-class names one of slow"),
        (CheckChoice(), kube.VOLUME_SNAPSHOT_CLASSES, "no single VolumeSnapshotClass of driver csi.example.com"),
        (CheckChoice(storage_class="none"), None, "--storage-class: StorageClass none does not exist"),
        (CheckChoice(storage_class="slow"), None, "no single VolumeSnapshotClass of driver other.example.com"),
        (CheckChoice(snapshot_class="none"), None, "--volume-snapshot-class: VolumeSnapshotClass none does not exist"),
        (CheckChoice(storage_class="slow", snapshot_class="snap"), None, _OTHER_DRIVER),
        (CheckChoice(space="team-a"), None, "--namespace-for-test: Namespace team-a does not exist"),
    ],
)
async def test_what_is_missing_is_named_with_its_flag(choice: CheckChoice, gone: Resource | None, message: str) -> None:
    world = _ready_cluster()
    if gone is not None:
        first = world.kube.objects(gone)[0]["metadata"]
        await world.client.delete(gone, first.get("namespace", ""), first["name"])
    with pytest.raises(ConfigError) as raised:
        await plan_check(world.client, "velero", choice)
    assert message in str(raised.value)


@pytest.mark.usefixtures("_allowed")
@pytest.mark.parametrize(
    ("spec", "status", "message"),
    [
        ({}, {"phase": "Unavailable", "message": "no bucket"}, "default is Unavailable: no bucket"),
        ({"accessMode": "ReadOnly"}, {}, "default is read-only: --storage-location names another"),
    ],
    ids=["unavailable", "read-only"],
)
async def test_a_location_that_cannot_be_used_is_an_error(spec: JsonDict, status: JsonDict, message: str) -> None:
    world = _ready_cluster()
    (location,) = world.kube.objects(kube.BACKUP_STORAGE_LOCATIONS)
    world.kube.put(location | {"spec": location["spec"] | spec, "status": status})
    with pytest.raises(ConfigError, match=message):
        await plan_check(world.client, "velero", CheckChoice())

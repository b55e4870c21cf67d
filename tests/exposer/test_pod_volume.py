"""Expose of pod volumes: location, rejection with a reason, cleanup."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from core.errors import ExposeError
from core.kube.resources import PERSISTENT_VOLUME_CLAIMS, PERSISTENT_VOLUMES, PODS
from core.kube.transport import Transport
from core.models.base import JsonDict
from exposer.model import LocatedVolume, NotOwnerError, Pending, PodVolumeRequest
from exposer.pod_volume import PodVolumeExposer
from exposer.template import AgentTemplate
from tests.exposer.support.inputs import pod_volume_request
from tests.exposer.support.steps import GuardAt, clean_up, ensure, expose
from tests.exposer.support.world import World

RUNNING: JsonDict = {"phase": "Running"}
WAITING_STATE: JsonDict = {"running": {"startedAt": "2026-11-21T11:15:23Z"}}
RESTORE = "e6098896-cfbd-477a-bfa8-dfa5963fb42e"
"""The UID of the Velero restore whose data the workload pod waits for."""
DONE_STATE: JsonDict = {"terminated": {"exitCode": 0}}


def init_status(state: JsonDict, phase: str = "Pending") -> JsonDict:
    return {"phase": phase, "initContainerStatuses": [{"name": "restore-wait", "state": state}]}


class Scene:
    """A workload pod on node-a with a PVC `fsdata`, and a request for its volume `fs`."""

    def __init__(self, kind: str = "podvolumebackup", *, agent_node: str = "", **request: Any) -> None:
        self.world = World()
        self.request: PodVolumeRequest = pod_volume_request(kind, **request)
        self._node = agent_node
        self.spec: JsonDict = {
            "nodeName": "node-a",
            "tolerations": [
                {"key": "a", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300},
                {"key": "b", "operator": "Exists"},
                {"key": "c", "operator": "Exists", "effect": "NoSchedule"},
            ],
            "initContainers": [
                {
                    "name": "restore-wait",
                    "args": [RESTORE],
                    "volumeMounts": [{"name": "fs", "mountPath": "/restores/fs"}],
                }
            ],
            "containers": [{"name": "c", "volumeMounts": [{"name": "fs", "mountPath": "/fs"}]}],
            "volumes": [{"name": "fs", "persistentVolumeClaim": {"claimName": "fsdata"}}, {"name": "unused"}],
        }
        self.put_volume({"local": {"path": "/x"}})
        self.put_pod(RUNNING if kind == "podvolumebackup" else init_status(WAITING_STATE))

    def put_pod(self, status: JsonDict, **meta: Any) -> None:
        ref = self.request.workload
        uid = meta.pop("uid", ref.uid)
        obj = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": ref.name, "namespace": ref.namespace, "uid": uid} | meta,
            "spec": self.spec,
            "status": status,
        }
        self.world.kube.put(obj)

    def put_volume(self, source: JsonDict, **spec: Any) -> None:
        space = self.request.workload.namespace
        bound = {"volumeName": "pv-1", "storageClassName": "hostpath"}
        self.world.put(PERSISTENT_VOLUME_CLAIMS, "fsdata", namespace=space, spec=bound, status={"phase": "Bound"})
        self.world.put(PERSISTENT_VOLUMES, "pv-1", spec=source | spec)

    def exposer(self, transport: Transport | None = None) -> PodVolumeExposer:
        client = self.world.client_over(transport or self.world.kube)
        return PodVolumeExposer(client, self.world.causes_over(client), node=self._node)

    @property
    def directory(self) -> str:
        """Where the kubelet has the volumes of the workload pod."""
        return f"/var/lib/kubelet/pods/{self.request.workload.uid}/volumes"

    def name_only(self) -> None:
        """Let the request name the workload pod without its UID."""
        self.request = replace(self.request, workload=structs.replace(self.request.workload, uid=None))

    async def remove_pod(self) -> None:
        await self.world.delete(PODS, str(self.request.workload))

    async def locate(self) -> LocatedVolume | Pending:
        return await self.exposer().locate(self.request, self.world.client)

    async def rejection(self) -> str:
        with pytest.raises(ExposeError) as rejected:
            await self.locate()
        return str(rejected.value)


async def test_a_volume_is_located_with_its_node_and_tolerations_and_the_class_of_its_persistent_volume() -> None:
    scene = Scene()
    scene.put_volume({"local": {"path": "/x"}}, storageClassName="fast")
    assert await scene.locate() == LocatedVolume(
        "node-a",
        f"{scene.directory}/kubernetes.io~local-volume/pv-1",
        (
            {"operator": "Exists", "effect": "NoSchedule"},
            {"key": "a", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300},
            {"key": "b", "operator": "Exists", "effect": "NoExecute"},
        ),
        storage_class="fast",
        claim="fsdata",
    )


async def test_a_volume_without_a_pvc_is_located_below_the_kubelets_root() -> None:
    scene = Scene(template=AgentTemplate("image", kubelet_root="/data/kubelet", host_pods="/host_pods"))
    scene.spec["volumes"] = [{"name": "fs", "emptyDir": {}}]
    scene.put_pod(RUNNING)
    located = await scene.locate()
    assert isinstance(located, LocatedVolume)
    directory = f"/data/kubelet/pods/{scene.request.workload.uid}/volumes/kubernetes.io~empty-dir/fs"
    assert (located.directory, located.claim, located.storage_class) == (directory, None, None)


async def test_pod_volumes_are_rejected_where_host_pods_is_not_mounted() -> None:
    assert await Scene(template=AgentTemplate("image", host_pods=None)).rejection() == (
        "pod volumes are not accessible: the node agent's DaemonSet does not mount the volume host-pods"
    )


GOING: JsonDict = {"deletionTimestamp": "2026-11-21T11:00:00Z", "finalizers": ["x/y"]}


@pytest.mark.parametrize(
    ("status", "meta", "text"),
    [
        ({"phase": "Pending"}, {}, "is not running: phase Pending"),
        ({"phase": "Succeeded"}, {}, "is not available: phase Succeeded, its volumes are unmounted"),
        ({"phase": "Failed"}, {}, "is not available: phase Failed, its volumes are unmounted"),
        (RUNNING, GOING, "is not available: it is being deleted"),
        (RUNNING, {"uid": "another"}, "is not available: the pod of that name has the UID another, not UID"),
        (None, {}, "is not available: it does not exist"),
    ],
    ids=["not yet", "ended", "failed", "terminating", "another", "deleted"],
)
async def test_a_pod_that_is_not_running_is_not_backed_up(
    status: JsonDict | None, meta: dict[str, Any], text: str
) -> None:
    scene = Scene()
    await scene.remove_pod()
    if status is not None:
        scene.put_pod(status, **meta)
    expected = f"workload pod app/writer {text}".replace("not UID", f"not {scene.request.workload.uid}")
    assert await scene.rejection() == expected


@pytest.mark.parametrize("state", ["state", "lastState"])
async def test_a_backup_is_pending_while_the_kubelet_starts_its_pod_again(state: str) -> None:
    scene = Scene()
    scene.put_pod({"phase": "Pending", "containerStatuses": [{"name": "c", state: {"terminated": {"exitCode": 255}}}]})
    text = "workload pod app/writer is not running: phase Pending, starting again"
    assert await scene.locate() == Pending("WorkloadNotStarting", text, blocked=True)


@pytest.mark.parametrize("lacks", ["namespace", "name"])
async def test_a_request_without_a_pod_is_rejected(lacks: str) -> None:
    """No definition asks for either, and a restore would wait for that pod without end."""
    scene = Scene("podvolumerestore")
    scene.request = replace(scene.request, workload=structs.replace(scene.request.workload, **{lacks: "", "uid": ""}))
    assert await scene.rejection() == "spec.pod: namespace and name are required"


@pytest.mark.parametrize("field", ["initContainers", "containers", "ephemeralContainers"])
async def test_a_volume_that_one_container_mounts_is_located(field: str) -> None:
    scene = Scene()
    mounting = scene.spec.pop("containers")
    scene.spec |= {"initContainers": [], "containers": [{"name": "app"}]} | {field: mounting}
    scene.put_pod(RUNNING)
    assert isinstance(await scene.locate(), LocatedVolume)


async def test_an_unsupported_volume_is_rejected_with_its_reason() -> None:
    said = {name: await Scene(volume=name).rejection() for name in ("nothing", "unused")}
    scene = Scene()
    scene.put_volume({"local": {}}, volumeMode="Block")
    said["block"] = await scene.rejection()
    scene.put_volume({"hostPath": {"path": "/x"}})
    said["hostPath"] = await scene.rejection()
    scene.spec["containers"][0]["volumeDevices"] = [{"name": "fs", "devicePath": "/d"}]
    scene.put_pod(RUNNING)
    said["device"] = await scene.rejection()
    block = "volume fs of workload pod app/writer is a block volume: pod volumes must be file systems"
    assert said == {
        "nothing": "workload pod app/writer has no volume nothing",
        "unused": "no container of workload pod app/writer mounts volume unused: it is not mounted on the node",
        "block": block,
        "device": block,
        "hostPath": "volume fs has source hostPath: its data is not in a directory of the pod",
    }


async def test_a_missing_pvc_or_volume_is_named() -> None:
    scene, place = Scene(), "PersistentVolumeClaim app/fsdata of volume fs"
    await scene.world.delete(PERSISTENT_VOLUMES, "pv-1")
    assert await scene.rejection() == f"{place} has no PersistentVolume"
    await scene.world.delete(PERSISTENT_VOLUME_CLAIMS, "app/fsdata")
    assert await scene.rejection() == f"{place} does not exist"


@pytest.mark.parametrize(
    "status",
    [{"phase": "Pending"}, init_status({"waiting": {"reason": "PodInitializing"}})],
    ids=["not placed", "not started"],
)
async def test_a_restore_is_pending_until_its_init_container_runs(status: JsonDict) -> None:
    scene = Scene("podvolumerestore")
    scene.put_pod(status)
    text = "init container restore-wait of workload pod app3/writer is not running"
    assert await scene.locate() == Pending("WorkloadNotWaiting", text)


@pytest.mark.parametrize(
    ("kind", "status", "ok"),
    [
        ("podvolumebackup", RUNNING, True),
        ("podvolumebackup", {"phase": "Succeeded"}, False),
        ("podvolumerestore", init_status(WAITING_STATE), True),
        ("podvolumerestore", init_status(DONE_STATE, "Succeeded"), True),
        ("podvolumerestore", init_status({"terminated": {"exitCode": 1}}, "Failed"), False),
    ],
    ids=["running", "ended", "waiting", "went on and ended", "never went on"],
)
async def test_a_volume_is_confirmed_while_its_pod_has_it_or_found_its_data(
    kind: str, status: JsonDict, ok: bool
) -> None:
    scene = Scene(kind)
    scene.put_pod(status)
    if ok:
        await scene.exposer().confirm(scene.request)
    else:
        with pytest.raises(ExposeError, match=r"workload pod .* is not available"):
            await scene.exposer().confirm(scene.request)


@pytest.mark.parametrize("kind", ["podvolumebackup", "podvolumerestore"])
async def test_a_volume_is_exposed_once_and_cleanup_deletes_everything(kind: str) -> None:
    scene = Scene(kind)
    before = scene.world.names()
    first, again = await expose(scene), await ensure(scene)
    assert again.pod["metadata"]["uid"] == first.pod["metadata"]["uid"]
    assert await scene.exposer().read_node(scene.request) == "node-a"
    await clean_up(scene)
    assert scene.world.names() == before


async def test_a_mover_that_a_previous_agent_left_to_the_scheduler_is_continued() -> None:
    scene = Scene()
    unschedulable = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no node"}
    await ensure(scene)
    name = scene.request.owner.name
    pod = scene.world.find(PODS, name)
    del pod["spec"]["nodeName"]
    scene.world.kube.put(pod | {"status": {"phase": "Pending", "conditions": [unschedulable]}})
    text = f"Pod velero/{name} cannot be scheduled: no node"
    assert await ensure(scene) == Pending("Unschedulable", text, blocked=True)
    assert scene.world.find(PODS, name)["metadata"]["uid"] == pod["metadata"]["uid"]


def found_by(agent_node: str, host_pods: Path, kind: str) -> Scene:
    """Return a scene whose agent has that directory of pods, in which the volume is another plugin's."""
    scene = Scene(kind, agent_node=agent_node, template=AgentTemplate("image", host_pods=str(host_pods)))
    (host_pods / str(scene.request.workload.uid) / "volumes" / "example.com~disk" / "pv-1").mkdir(parents=True)
    return scene


async def mounted(scene: Scene) -> str:
    """Return the directory that the mover mounts."""
    volumes = (await expose(scene)).pod["spec"]["volumes"]
    (path,) = (one.get("hostPath", {}).get("path") for one in volumes if one["name"] == scene.request.owner.uid)
    return str(path)


@pytest.mark.parametrize("kind", ["podvolumebackup", "podvolumerestore"])
@pytest.mark.parametrize(
    ("agent_node", "plugin"), [("node-a", "example.com~disk"), ("node-b", "kubernetes.io~local-volume")]
)
async def test_the_directory_is_looked_up_by_the_agent_of_its_node(
    tmp_path: Path, kind: str, agent_node: str, plugin: str
) -> None:
    scene = found_by(agent_node, tmp_path, kind)
    assert await mounted(scene) == f"{scene.directory}/{plugin}/pv-1"


async def test_nothing_is_created_for_a_volume_without_a_directory(tmp_path: Path) -> None:
    scene = found_by("node-a", tmp_path, "podvolumerestore")
    (tmp_path / str(scene.request.workload.uid) / "volumes" / "example.com~disk" / "pv-1").rmdir()
    before = scene.world.names()
    with pytest.raises(ExposeError, match=r"volume fs of workload pod app3/writer is not in .*, found nothing$"):
        await ensure(scene)
    assert scene.world.names() == before


async def test_an_expose_fails_when_the_workload_is_deleted_while_its_mover_is_pending() -> None:
    scene = Scene()
    await ensure(scene)
    await scene.remove_pod()
    assert await scene.exposer().read_node(scene.request) is None
    with pytest.raises(ExposeError, match="is not available"):
        await ensure(scene)


@pytest.mark.parametrize("ended", [True, False])
async def test_objects_of_a_finished_owner_are_deleted(ended: bool) -> None:
    scene = Scene()
    with pytest.raises(NotOwnerError):
        await expose(scene, guard=GuardAt(2, ended=ended))
    assert (f"Pod velero/{scene.request.owner.name}" in scene.world.names()) is not ended


@pytest.mark.parametrize("kind", ["podvolumebackup", "podvolumerestore"])
async def test_a_reference_without_uid_is_the_pod_whose_directory_the_mover_mounts(kind: str) -> None:
    scene = Scene(kind)
    uid, directory = scene.request.workload.uid, scene.directory
    scene.name_only()
    assert (await mounted(scene)).startswith(f"{directory}/")
    assert await scene.exposer().read_node(scene.request) == "node-a"
    await scene.exposer().confirm(scene.request)
    await scene.remove_pod()
    scene.put_pod(RUNNING if kind == "podvolumebackup" else init_status(DONE_STATE), uid="another")
    with pytest.raises(ExposeError, match=f"has the UID another, not {uid}"):
        await scene.exposer().confirm(scene.request)


async def test_a_reference_without_uid_is_not_confirmed_without_a_mover_of_its_directory() -> None:
    scene = Scene()
    scene.name_only()
    with pytest.raises(ExposeError, match="cannot determine the UID of workload pod"):
        await scene.exposer().confirm(scene.request)
    owner = scene.request.owner
    volume = {"name": owner.uid, "hostPath": {"path": "/var/lib/kubelet"}}
    scene.world.put(PODS, owner.name, namespace="velero", labels=owner.labels, spec={"volumes": [volume]})
    with pytest.raises(ExposeError, match="mounts no directory of workload pod"):
        await scene.exposer().confirm(scene.request)


async def test_a_restore_is_pending_for_a_reference_without_uid() -> None:
    scene = Scene("podvolumerestore")
    await scene.remove_pod()
    assert "it does not exist" in await scene.rejection()
    scene.name_only()
    assert await scene.locate() == Pending("WorkloadAbsent", "workload pod app3/writer does not exist yet")

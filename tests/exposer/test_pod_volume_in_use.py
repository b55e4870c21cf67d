"""Restores in place into a volume of a pod: no other pod may use it."""

import re
from typing import Any

import pytest

from core.errors import ExposeError
from core.kube.resources import PERSISTENT_VOLUMES, POD_VOLUME_RESTORES, PODS
from core.models.base import JsonDict
from core.models.transfer_settings import InPlace
from exposer.model import Pending
from tests.exposer.support.steps import ensure, expose
from tests.exposer.test_pod_volume import RESTORE, WAITING_STATE, Scene, init_status
from tests.support.golden import recorded

RESTORED = {"velero.io/restore-name": "r2"}


def _held(*args: str) -> JsonDict:
    return {"initContainers": [{"name": "restore-wait", "args": list(args)}]}


OF_THIS_RESTORE = _held(RESTORE)


def _other_pod(scene: Scene, claim: str = "fsdata", *, namespace: str = "app3", **fields: Any) -> None:
    """Store the pod web-0, which names this PVC; `fields` are of its metadata, its status, else of its spec."""
    owner = {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "web", "uid": "u", "controller": True}
    rest = {key: fields.pop(key) for key in ("labels", "status") if key in fields}
    volumes = [{"name": "v", "persistentVolumeClaim": {"claimName": claim}}]
    spec = {"nodeName": "node-b", "volumes": volumes} | fields
    whole = {"status": {"phase": "Running"}} | rest
    scene.world.put(PODS, "web-0", namespace=namespace, ownerReferences=[owner], spec=spec, **whole)


def _has_mover(scene: Scene) -> bool:
    return f"Pod velero/{scene.request.owner.name}" in scene.world.names()


@pytest.mark.cause("volume-in-use")
async def test_a_restore_in_place_waits_while_another_pod_uses_the_claim_and_fails_once_it_has_a_mover() -> None:
    scene = Scene("podvolumerestore", in_place=InPlace(incremental=True))
    _other_pod(scene)
    text = (
        "PersistentVolumeClaim app3/fsdata is in use by pod app3/web-0 of StatefulSet web: "
        "a restore in place needs it alone"
    )
    assert await ensure(scene) == Pending("VolumeInUse", text, blocked=True)
    assert not _has_mover(scene)
    await scene.world.delete(PODS, "app3/web-0")
    await expose(scene)
    await scene.exposer().confirm_alone(scene.request)
    _other_pod(scene)
    with pytest.raises(ExposeError, match=f"^{re.escape(text)}$"):
        await scene.exposer().confirm_alone(scene.request)


@pytest.mark.parametrize(
    "other",
    [
        {"claim": "other"},
        {"status": {"phase": "Succeeded"}},
        {"status": {"phase": "Failed"}},
        OF_THIS_RESTORE,
        OF_THIS_RESTORE | {"status": init_status(WAITING_STATE)},
        OF_THIS_RESTORE | {"status": init_status({"terminated": {"exitCode": 137}})},
    ],
    ids=["another claim", "succeeded", "failed", "not started", "waiting for its data", "starts to wait again"],
)
async def test_a_pod_that_does_not_have_the_volume_delays_no_restore_in_place(other: dict[str, Any]) -> None:
    scene = Scene("podvolumerestore", in_place=InPlace())
    _other_pod(scene, **other)
    await ensure(scene)
    assert _has_mover(scene)
    await scene.exposer().confirm_alone(scene.request)


@pytest.mark.parametrize(
    "other",
    [
        OF_THIS_RESTORE | {"status": init_status({"terminated": {"exitCode": 0}})},
        _held("another") | {"status": init_status(WAITING_STATE)},
        _held() | {"status": init_status(WAITING_STATE)},
        {"labels": RESTORED},
        {"status": {"phase": "Pending"}, "nodeName": ""},
    ],
    ids=["has its data", "of another restore", "of none", "made by the restore without waiting", "unscheduled"],
)
async def test_a_pod_that_may_write_delays_a_restore_in_place(other: dict[str, Any]) -> None:
    scene = Scene("podvolumerestore", in_place=InPlace())
    scene.put_pod(init_status(WAITING_STATE), labels=RESTORED)
    _other_pod(scene, **other)
    assert isinstance(await ensure(scene), Pending)


async def test_no_pod_is_held_where_the_workload_does_not_name_its_restore() -> None:
    scene = Scene("podvolumerestore", in_place=InPlace())
    del scene.spec["initContainers"][0]["args"]
    scene.put_pod(init_status(WAITING_STATE))
    _other_pod(scene, **_held())
    assert isinstance(await ensure(scene), Pending)


async def test_a_restore_in_place_waits_while_the_storage_is_used_through_another_volume() -> None:
    scene = Scene("podvolumerestore", in_place=InPlace())
    share = {"nfs": {"server": "s", "path": "/p"}}
    scene.put_volume(share)
    scene.world.put(PERSISTENT_VOLUMES, "pv-2", spec=share | {"claimRef": {"namespace": "app9", "name": "twin"}})
    _other_pod(scene, "twin", namespace="app9")
    text = (
        "PersistentVolumeClaim app3/fsdata is in use: pod app9/web-0 of StatefulSet web has PersistentVolume pv-2 "
        "of the same storage: a restore in place needs it alone"
    )
    assert await ensure(scene) == Pending("VolumeInUse", text, blocked=True)
    with pytest.raises(ExposeError, match=f"^{re.escape(text)}$"):
        await scene.exposer().confirm_alone(scene.request)


async def test_a_plain_restore_asks_for_no_other_pods() -> None:
    scene = Scene("podvolumerestore")
    _other_pod(scene)
    await expose(scene)
    await scene.exposer().confirm_alone(scene.request)


EARLIER, LATER = "2026-11-21T11:15:01Z", "2026-11-21T11:15:03Z"
FINALIZER = "velero.io/pod-volume-finalizer"


@pytest.mark.parametrize(
    ("other", "found"),
    [
        ({"created": EARLIER}, "pending"),
        ({"created": EARLIER, "phase": "InProgress"}, "pending"),
        ({"created": EARLIER, "phase": "Failed", "finalizers": [FINALIZER]}, "pending"),
        ({"created": EARLIER, "phase": "Completed", "finalizers": ["example.com/x"]}, "last"),
        ({"created": "2026-11-21T11:15:02Z", "name": "r2-aaaaa"}, "pending"),
        ({"created": "2026-11-21T11:15:02Z"}, "followed"),
        ({"created": LATER, "phase": "InProgress"}, "followed"),
        ({"created": LATER, "phase": "Failed", "finalizers": [FINALIZER]}, "last"),
        ({"created": LATER, "volume": "own"}, "last"),
        ({"created": EARLIER, "labels": {"velero.io/pod-uid": "another"}}, "last"),
    ],
)
async def test_restores_of_one_claim_into_one_pod_follow_each_other_and_the_last_one_lets_the_pod_start(
    other: dict[str, Any], found: str
) -> None:
    """Velero makes one for each volume of the pod, and the pod waits for one done file of them."""
    scene = Scene("podvolumerestore")
    again = {"name": "again", "persistentVolumeClaim": {"claimName": "fsdata"}}
    scene.spec["volumes"] += [again, {"name": "own", "persistentVolumeClaim": {"claimName": "other"}}]
    scene.put_pod(init_status(WAITING_STATE))
    restore = recorded("podvolumerestore")
    scene.world.kube.put(restore)
    scene.world.put(
        POD_VOLUME_RESTORES,
        other.get("name", "r2-zzzzz"),
        namespace="velero",
        uid="another",
        labels=other.get("labels", restore["metadata"]["labels"]),
        finalizers=other.get("finalizers", []),
        creationTimestamp=other["created"],
        spec=restore["spec"] | {"volume": other.get("volume", "again")},
        status={"phase": other.get("phase", "New")},
    )
    if found == "pending":
        by = f"PodVolumeRestore {other.get('name', 'r2-zzzzz')}"
        text = f"PersistentVolumeClaim app3/fsdata is being restored by {by}, for another volume of the pod"
        assert await scene.locate() == Pending("VolumeInUse", text)
    else:
        (container,) = (await expose(scene)).pod["spec"]["containers"]
        assert ("--followed" in container["args"]) is (found == "followed")

"""Restores in place into a volume of a pod: no other pod may use it."""

import re

import pytest

from core.errors import ExposeError
from core.kube.resources import PODS
from core.models.in_place import InPlace
from exposer.model import Pending
from tests.exposer.support.world import no_guard
from tests.exposer.test_pod_volume import Scene


def _other_pod(scene: Scene, name: str, claim: str = "fsdata", *, phase: str = "Running") -> None:
    owner = {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "web", "uid": "u", "controller": True}
    obj = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": scene.request.workload.namespace, "ownerReferences": [owner]},
        "spec": {"volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": claim}}]},
        "status": {"phase": phase},
    }
    scene.world.kube.put(obj)


@pytest.mark.cause("volume-in-use")
async def test_a_restore_in_place_waits_while_another_pod_uses_the_claim_and_fails_once_it_has_a_mover() -> None:
    scene = Scene("podvolumerestore", in_place=InPlace(incremental=True))
    _other_pod(scene, "web-0")

    pending = await scene.exposer.ensure(scene.request, no_guard)

    text = (
        "PersistentVolumeClaim app3/fsdata is in use by pod app3/web-0 of StatefulSet web: "
        "a restore in place needs it alone"
    )
    assert pending == Pending("VolumeInUse", text, blocked=True)
    assert await scene.world.client.read(PODS, "velero", scene.request.owner.name) is None

    await scene.world.client.delete(PODS, "app3", "web-0")
    await scene.world.until_exposed(lambda: scene.exposer.ensure(scene.request, no_guard))
    await scene.exposer.confirm_alone(scene.request)
    _other_pod(scene, "web-0")
    with pytest.raises(ExposeError, match=f"^{re.escape(text)}$"):
        await scene.exposer.confirm_alone(scene.request)


@pytest.mark.parametrize(
    "other",
    [{"claim": "other"}, {"phase": "Succeeded"}, {"phase": "Failed"}],
    ids=["another claim", "succeeded", "failed"],
)
async def test_a_pod_that_does_not_have_the_volume_delays_no_restore_in_place(other: dict[str, str]) -> None:
    scene = Scene("podvolumerestore", in_place=InPlace())
    _other_pod(scene, "web-0", **other)
    await scene.exposer.ensure(scene.request, no_guard)
    assert await scene.world.client.read(PODS, "velero", scene.request.owner.name) is not None
    await scene.exposer.confirm_alone(scene.request)


async def test_a_plain_restore_asks_for_no_other_pods() -> None:
    scene = Scene("podvolumerestore")
    _other_pod(scene, "web-0")
    await scene.world.until_exposed(lambda: scene.exposer.ensure(scene.request, no_guard))
    await scene.exposer.confirm_alone(scene.request)

"""Loads that wait for a pod are looked at when the pod changes, and not asked about meanwhile."""

import asyncio

import pytest

from core.kube.resources import PODS
from core.kube.transport import Request
from core.models.base import JsonDict
from core.models.transfers import PodVolumeRestore
from nodeagent.transfers.kinds.base import Admission, AdmissionState
from tests.nodeagent.support.dispatching import Scene, ScriptedKind, open_scene
from tests.nodeagent.support.transfers import workload_pod

__all__: list[str] = []

pytestmark = pytest.mark.looptime


def waits_for(load: JsonDict) -> Admission:
    ref = load["spec"]["pod"]
    place = (ref["namespace"], ref["name"])
    return Admission(
        AdmissionState.PENDING, "WorkloadNotWaiting", "the pod is not there yet", indefinite=True, pod=place
    )


def restore(scene: Scene, name: str, namespace: str) -> JsonDict:
    """Add a PodVolumeRestore that waits for its pod, which is Pending."""
    load = scene.add_kind(PodVolumeRestore, name, queue=namespace)
    load["spec"]["pod"] |= {"name": f"pod-of-{name}"}
    load = scene.kube.put(load)
    scene.kube.put(workload_pod(load, status={"phase": "Pending"}))
    scene.kind.answers[name] = waits_for(load)
    return load


def restores() -> Scene:
    scene = open_scene("node-a")
    scene.kind = ScriptedKind(PodVolumeRestore)
    return scene


def pod_requests(scene: Scene) -> list[Request]:
    path = PODS.path("shop")
    return [request for request in scene.kube.requests if request.path.startswith(path)]


async def test_a_restore_is_admitted_once_its_pod_waits_and_is_not_polled_for() -> None:
    scene = restores()
    load = restore(scene, "pvr", "shop")
    async with scene.dispatching():
        await scene.until(lambda: scene.message("pvr") != "")
        await asyncio.sleep(15)
        looks = len(scene.kind.checked)
        await asyncio.sleep(50)
        # One look a minute in case the watch is silent.
        assert len(scene.kind.checked) - looks <= 1
        scene.kube.put(workload_pod(load, annotations={"something": "else"}, status={"phase": "Pending"}))
        await asyncio.sleep(2)
        assert len(scene.kind.checked) - looks <= 1
        del scene.kind.answers["pvr"]
        scene.kube.put(workload_pod(load))
        await scene.until(lambda: scene.phase("pvr") == "Accepted", seconds=1)
        assert [request.query.get("watch") for request in pod_requests(scene)] == [None, "true"]
        await asyncio.sleep(1)
        # Nobody waits there any more: the agents' own pods are all that is watched.
        assert sum(stream.request.path == PODS.path("shop") for stream in scene.kube.watches._streams) == 0


async def test_a_pod_that_goes_away_or_ends_wakes_its_restore() -> None:
    scene = restores()
    for number, change in enumerate(("end", "delete")):
        name = f"pvr-{number}"
        load = restore(scene, name, f"shop-{number}")
        async with scene.dispatching():
            await scene.until(lambda name=name: scene.message(name) != "")  # type: ignore[misc] # this round's
            await asyncio.sleep(15)
            gone = Admission(AdmissionState.FAILED, "VolumeRefused", "the pod is gone")
            scene.kind.answers[name] = gone
            if change == "end":
                scene.kube.put(workload_pod(load, status={"phase": "Failed"}))
            else:
                client = scene.dispatcher()._tools.client
                await client.delete(PODS, f"shop-{number}", f"pod-of-{name}")
            await scene.until(lambda name=name: scene.phase(name) == "Failed", seconds=1)  # type: ignore[misc] # as above


async def test_namespaces_that_may_not_be_watched_are_asked_about_every_few_seconds() -> None:
    scene = restores()
    load = restore(scene, "pvr", "shop")
    scene.kube.fail_next("GET", "namespaces/shop/pods", 403, times=1000)
    async with scene.dispatching():
        await scene.until(lambda: scene.message("pvr") != "")
        await asyncio.sleep(30)
        del scene.kind.answers["pvr"]
        scene.kube.put(workload_pod(load))
        await scene.until(lambda: scene.phase("pvr") == "Accepted", seconds=7)


async def test_many_restores_into_one_namespace_share_one_watch() -> None:
    scene = restores()
    scene.limit = None
    loads = [restore(scene, f"pvr-{number:02}", "shop") for number in range(30)]
    async with scene.dispatching():
        await scene.until(lambda: all(scene.message(load["metadata"]["name"]) for load in loads))
        assert len(pod_requests(scene)) == 2
        scene.kind.answers.clear()
        for load in loads:
            scene.kube.put(workload_pod(load))
        await scene.until(lambda: set(scene.phases().values()) == {"Accepted"}, seconds=3)
        assert len(pod_requests(scene)) == 2

"""Transfers that depend on a workload pod are checked when it changes, and not polled."""

import asyncio

import pytest

from core.kube.resources import PODS
from core.kube.transport import Request
from core.models.reasons import FailureReason
from core.models.transfers import PodVolumeRestore
from nodeagent.transfers.kinds.base import Admission, AdmissionState
from tests.nodeagent.support.dispatching import Scene, ScriptedKind, open_scene
from tests.nodeagent.support.transfers import workload_pod
from tests.support.objects import JsonDict

pytestmark = pytest.mark.looptime


def pending_for(cr: JsonDict) -> Admission:
    ref = cr["spec"]["pod"]
    key = (ref["namespace"], ref["name"])
    return Admission(
        AdmissionState.PENDING, "WorkloadNotWaiting", "the pod does not exist yet", indefinite=True, pod=key
    )


def restore(scene: Scene, name: str, namespace: str) -> JsonDict:
    """Add a PodVolumeRestore whose workload pod is Pending."""
    cr = scene.add_kind(PodVolumeRestore, name, queue=namespace)
    cr["spec"]["pod"] |= {"name": f"pod-of-{name}"}
    cr = scene.kube.put(cr)
    scene.kube.put(workload_pod(cr, status={"phase": "Pending"}))
    scene.kind.answers[name] = pending_for(cr)
    return cr


def restores() -> Scene:
    scene = open_scene("node-a")
    scene.kind = ScriptedKind(PodVolumeRestore)
    return scene


def pod_requests(scene: Scene) -> list[Request]:
    path = PODS.path("shop")
    return [request for request in scene.kube.requests if request.path.startswith(path)]


async def test_a_restore_is_admitted_once_its_pod_is_ready_for_it_and_is_not_polled() -> None:
    scene = restores()
    cr = restore(scene, "pvr", "shop")
    async with scene.dispatching():
        await scene.until(lambda: scene.message("pvr") != "")
        await asyncio.sleep(15)
        checks = len(scene.kind.checked)
        await asyncio.sleep(50)
        # One check a minute in case the watch fails silently.
        assert len(scene.kind.checked) - checks <= 1
        scene.kube.put(workload_pod(cr, annotations={"something": "else"}, status={"phase": "Pending"}))
        await asyncio.sleep(2)
        assert len(scene.kind.checked) - checks <= 1
        del scene.kind.answers["pvr"]
        scene.kube.put(workload_pod(cr))
        await scene.until(lambda: scene.phase("pvr") == "Accepted", seconds=1)
        assert [request.query.get("watch") for request in pod_requests(scene)] == [None, "true"]
        await asyncio.sleep(1)
        # No transfer depends on pods there any more: only the agents' own pods are watched.
        assert sum(stream.request.path == PODS.path("shop") for stream in scene.kube.watches._streams) == 0


async def test_a_pod_that_is_deleted_ends_or_no_longer_waits_wakes_its_restore() -> None:
    scene = restores()
    for number, change in enumerate(("end", "delete", "over")):
        name = f"pvr-{number}"
        cr = restore(scene, name, f"shop-{number}")
        async with scene.dispatching():
            await scene.until(lambda name=name: scene.message(name) != "")  # type: ignore[misc] # this round's
            await asyncio.sleep(15)
            gone = Admission(AdmissionState.FAILED, FailureReason.VOLUME_REJECTED, "the pod does not exist")
            scene.kind.answers[name] = gone
            if change == "end":
                scene.kube.put(workload_pod(cr, status={"phase": "Failed"}))
            elif change == "over":
                over = {"name": "restore-wait", "state": {"terminated": {"exitCode": 0}}}
                scene.kube.put(workload_pod(cr, status={"phase": "Pending", "initContainerStatuses": [over]}))
            else:
                await scene.client.delete(PODS, f"shop-{number}", f"pod-of-{name}")
            await scene.until(lambda name=name: scene.phase(name) == "Failed", seconds=1)  # type: ignore[misc] # as above


async def test_pods_of_a_namespace_that_cannot_be_watched_are_polled(caplog: pytest.LogCaptureFixture) -> None:
    scene = restores()
    cr = restore(scene, "pvr", "shop")
    scene.kube.fail_next("GET", "namespaces/shop/pods", 403, times=1000)
    async with scene.dispatching():
        await scene.until(lambda: scene.message("pvr") != "")
        await asyncio.sleep(330)
        assert caplog.text.count("the pods of namespace shop cannot be watched") == 1
        del scene.kind.answers["pvr"]
        scene.kube.put(workload_pod(cr))
        await scene.until(lambda: scene.phase("pvr") == "Accepted", seconds=7)


async def test_many_restores_into_one_namespace_share_one_watch() -> None:
    scene = restores()
    scene.limit = None
    transfers = [restore(scene, f"pvr-{number:02}", "shop") for number in range(30)]
    async with scene.dispatching():
        await scene.until(lambda: all(scene.message(cr["metadata"]["name"]) for cr in transfers))
        assert len(pod_requests(scene)) == 2
        scene.kind.answers.clear()
        for cr in transfers:
            scene.kube.put(workload_pod(cr))
        await scene.until(lambda: set(scene.phases().values()) == {"Accepted"}, seconds=3)
        assert len(pod_requests(scene)) == 2

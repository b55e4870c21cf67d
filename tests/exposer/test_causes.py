"""Queries for the causes of pending pods: when, which objects, and how often."""

import asyncio
from typing import Any

import pytest

from core.kube.client import KubeClient
from core.kube.errors import UnreachableError
from core.kube.resources import EVENTS, PERSISTENT_VOLUME_CLAIMS
from core.kube.transport import Retry
from exposer.causes import CauseFinder
from exposer.model import Exposed, NoDeviceError, Pending
from exposer.ownership import is_being_provisioned, is_refused
from tests.nodeagent.support.dispatching import Gate
from tests.nodeagent.support.hand_clock import HandClock
from tests.support.clock import LoopClock
from tests.support.fakekube import FakeKube
from tests.support.objects import JsonDict

pytestmark = pytest.mark.looptime

UNBOUND_TEXT = "0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims. not found"
UNBOUND: JsonDict = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": UNBOUND_TEXT}
TAINT: JsonDict = UNBOUND | {"message": "0/1 nodes are available: 1 node(s) had untolerated taint {a: b}."}


class Scene:
    """A pending pod with a PVC, and a finder whose clock the test sets."""

    def __init__(self) -> None:
        self.kube = FakeKube()
        self.clock = HandClock()
        self.finder = CauseFinder(KubeClient(self.kube, Retry(LoopClock(), attempts=1)), self.clock)

    def pod(self, *, node: str = "", uid: str = "p", **status: Any) -> JsonDict:
        """Return the pod, with the PVCs that were put, and at least its own."""
        claims = [claim["metadata"]["name"] for claim in self.kube.objects(PERSISTENT_VOLUME_CLAIMS)] or ["b1"]
        volumes: list[JsonDict] = [{"name": name, "persistentVolumeClaim": {"claimName": name}} for name in claims]
        volumes.append({"name": "e", "emptyDir": {}})
        spec: JsonDict = {"volumes": volumes} | ({"nodeName": node} if node else {})
        meta = {"namespace": "velero", "name": "b1", "uid": uid}
        return {"metadata": meta, "spec": spec, "status": {"phase": "Pending"} | status}

    def put_claim(self, volume: str = "", *, name: str = "b1", uid: str = "c") -> None:
        meta = {"namespace": "velero", "name": name, "uid": uid}
        spec = {"volumeName": volume} if volume else {}
        self.kube.put(PERSISTENT_VOLUME_CLAIMS.build(meta, spec=spec))

    def put_event(self, uid: str, reason: str, message: str, *, warning: bool = True, last: str = "12:00:00") -> None:
        """Record an Event that was first recorded at 12:00:00."""
        first = "2026-11-21T12:00:00Z"
        meta = {"namespace": "velero", "name": f"{uid}.{reason}", "creationTimestamp": first}
        fields = {"reason": reason, "message": message, "firstTimestamp": first}
        fields |= {"type": "Warning" if warning else "Normal", "lastTimestamp": f"2026-11-21T{last}Z"}
        self.kube.put(EVENTS.build(meta, involvedObject={"uid": uid}, **fields))

    async def explain_at(self, *seconds: float, **pod: Any) -> list[Pending | None]:
        """Explain the pod at each of these times."""
        found = []
        for self.clock.seconds in seconds:
            found.append(await self.finder.explain(self.pod(**pod)))
        return found

    async def inspect(self, at: float = 0.0, *, by_block: bool) -> Exposed | Pending:
        """Inspect the pod, which the scheduler has not placed."""
        self.clock.seconds, pod = at, self.pod(conditions=[UNBOUND])
        return await self.finder.inspect(pod, by_block=by_block)

    @property
    def queries(self) -> list[str]:
        """The last path segment of each request."""
        return [request.path.rsplit("/", 1)[1] for request in self.kube.requests]


async def test_no_query_for_a_pod_whose_status_has_the_cause_nor_for_a_healthy_start() -> None:
    scene = Scene()
    found = await scene.explain_at(0.0, 10.0, conditions=[TAINT])
    assert [pending and pending.reason for pending in found] == ["Unschedulable"] * 2
    await scene.explain_at(20.0, 22.9, node="a")
    assert await scene.explain_at(23.0, node="a", phase="Running") == [None]
    assert scene.queries == []


async def test_a_warning_is_queried_at_intervals() -> None:
    scene = Scene()
    scene.put_claim("pv")
    scene.put_event("p", "FailedMount", "no such secret")
    found = await scene.explain_at(0.0, 3.0, 4.0, 6.9, 7.0, node="a")
    assert {pending and pending.reason for pending in found[1:]} == {"FailedMount"}
    assert scene.queries == ["b1", EVENTS.plural] * 2


NOT_BOUND = "PersistentVolumeClaim velero/b1 of Pod velero/b1 is not bound"
FULL = Pending("ProvisioningFailed", f"{NOT_BOUND}: ProvisioningFailed: the pool is full", blocked=True)
MISSING = Pending("ClaimMissing", "PersistentVolumeClaim velero/b1 of Pod velero/b1 does not exist", blocked=True)
POOL_IS_FULL = ("c", "ProvisioningFailed", "the pool is full")
NO_MOUNT = ("p", "FailedMount", "timed out")


@pytest.mark.parametrize(
    ("volume", "events", "pod", "found"),
    [
        pytest.param(
            "pv",
            [NO_MOUNT, ("other", "FailedMount", "of another pod")],
            {"node": "a"},
            Pending("FailedMount", "Pod velero/b1 cannot start on node a yet: FailedMount: timed out", blocked=True),
            id="the kubelet warns",
        ),
        pytest.param(
            "pv",
            [("p", "Pulling", 'Pulling image "x"')],
            {"node": "a"},
            Pending("ContainerCreating", 'Pod velero/b1 is starting on node a: Pulling: Pulling image "x"'),
            id="a long image pull is not blocked",
        ),
        pytest.param("", [POOL_IS_FULL], {"conditions": [UNBOUND]}, FULL, id="the provisioner warns"),
        pytest.param("", [POOL_IS_FULL], {}, FULL, id="the scheduler reports nothing"),
        # A mover of a pod volume is bound to its node when it is created; its cache may not be provisioned.
        pytest.param("", [POOL_IS_FULL, NO_MOUNT], {"node": "a"}, FULL, id="the pod was never scheduled"),
        pytest.param("", [], {}, Pending("ClaimUnbound", NOT_BOUND), id="an unbound PVC without Events"),
        pytest.param(None, [], {}, MISSING, id="a missing PVC", marks=pytest.mark.cause("claim-missing")),
        pytest.param("pv", [], {}, Pending("Scheduling", "Pod velero/b1 is not scheduled yet"), id="all are bound"),
    ],
)
async def test_the_cause_is_found_in_pvcs_and_events(
    volume: str | None, events: list[tuple[str, str, str]], pod: dict[str, Any], found: Pending
) -> None:
    scene = Scene()
    if volume is not None:
        scene.put_claim(volume)
    for uid, reason, message in events:
        scene.put_event(uid, reason, message, warning=reason != "Pulling")
    assert (await scene.explain_at(0.0, 3.0, **pod))[1] == found
    assert scene.kube.requests[0].path == PERSISTENT_VOLUME_CLAIMS.path("velero", "b1")
    assert len(scene.queries) <= 2


NFS_TEXT = (
    'failed to provision volume with StorageClass "nfs": rpc error: code = InvalidArgument desc = '
    "block volume capability not supported"
)


@pytest.mark.cause("data-mover-unsupported")
@pytest.mark.parametrize(
    "text",
    [
        pytest.param(NFS_TEXT, id="NFS"),
        pytest.param("rpc error: code = Unimplemented desc = block volume not supported", id="CephFS"),
        pytest.param("rpc error: code = InvalidArgument desc = Volume capabilities not supported", id="EFS"),
        pytest.param("local-path does not support block volume provisioning", id="no CSI driver"),
    ],
)
async def test_a_class_without_devices_is_named_within_ten_seconds(text: str) -> None:
    scene = Scene()
    scene.put_claim()
    scene.put_event("c", "ProvisioningFailed", text)
    assert isinstance(await scene.inspect(by_block=True), Pending)
    with pytest.raises(NoDeviceError, match=f"needs a volume of volumeMode Block, which is refused: .*{text}"):
        await scene.inspect(5.0, by_block=True)
    assert is_refused(scene.kube.objects(PERSISTENT_VOLUME_CLAIMS)[0])


@pytest.mark.parametrize(
    ("text", "by_block"),
    [
        ("rpc error: code = ResourceExhausted desc = no block is free", True),
        ("rpc error: code = InvalidArgument desc = class ceph-block has no clusterID", True),
        (NFS_TEXT, False),
    ],
)
async def test_another_refusal_of_a_provisioner_is_waited_for(text: str, *, by_block: bool) -> None:
    scene = Scene()
    scene.put_claim()
    scene.put_event("c", "ProvisioningFailed", text)
    await scene.inspect(by_block=by_block)
    found = await scene.inspect(5.0, by_block=by_block)
    assert isinstance(found, Pending)
    assert found.reason == "ProvisioningFailed"


async def test_a_refused_cache_is_not_taken_for_the_device() -> None:
    scene = Scene()
    scene.put_claim("pv")
    scene.put_claim(name="b1-cache", uid="cache")
    scene.put_event("cache", "ProvisioningFailed", "code = InvalidArgument desc = Volume capabilities not supported")
    await scene.inspect(by_block=True)
    found = await scene.inspect(5.0, by_block=True)
    assert isinstance(found, Pending)
    assert found.message.startswith("PersistentVolumeClaim velero/b1-cache of Pod velero/b1 is not bound")


async def test_a_previous_cause_does_not_apply_after_progress() -> None:
    scene = Scene()
    scene.put_claim()
    scene.put_event("c", "ProvisioningFailed", "the pool is full")
    await scene.explain_at(0.0, 3.0)
    scene.put_claim("pv")
    found = await scene.explain_at(4.0, 7.0, node="a")
    assert [pending and pending.reason for pending in found] == ["ContainerCreating"] * 2
    assert scene.queries == ["b1", EVENTS.plural, "b1", EVENTS.plural]


BACK_OFF = 'Back-off pulling image "x": ErrImagePull: dial tcp 10.97.0.1:5000: connect: connection refused'
NO_IMAGE = [{"name": "c", "state": {"waiting": {"reason": "ImagePullBackOff", "message": BACK_OFF}}}]


async def test_an_image_that_is_being_pulled_again_does_not_time_out() -> None:
    """While the kubelet pulls it, the pod's status has the error of the attempt before."""
    scene = Scene()
    scene.put_event("p", "Failed", "connection refused")
    failing = await scene.explain_at(0.0, 3.0, node="a", containerStatuses=NO_IMAGE)
    scene.put_event("p", "Pulling", 'Pulling image "x"', warning=False, last="12:00:30")
    pulling = await scene.explain_at(7.0, 8.0, node="a", containerStatuses=NO_IMAGE)
    scene.put_event("p", "Failed", "connection refused", last="12:00:40")
    failed = await scene.explain_at(12.0, node="a", containerStatuses=NO_IMAGE)
    operations = [[found.operation for found in each if found] for each in (failing, pulling, failed)]
    assert operations == [["image of Pod p"] * 2, [None, None], ["image of Pod p"]]
    assert {found and found.message for found in (*failing, *pulling, *failed)} == {
        f"image of Pod velero/b1 is not available on node a: ImagePullBackOff: {BACK_OFF}"
    }
    assert scene.queries == [EVENTS.plural] * 3


async def test_a_pod_pending_for_long_is_queried_as_soon_as_it_is_scheduled() -> None:
    scene = Scene()
    scene.put_claim("pv")
    scene.put_event("p", "FailedMount", "no such secret")
    await scene.explain_at(0.0, 2.9)
    found = await scene.explain_at(5.0, node="a")
    assert [pending and pending.reason for pending in found] == ["FailedMount"]


async def test_a_failed_query_has_no_cause() -> None:
    scene = Scene()
    scene.put_claim("pv")
    scene.kube.fail_next("GET", EVENTS.plural, 403, times=2)
    found = await scene.explain_at(0.0, 3.0, node="a")
    assert found[1] == Pending("ContainerCreating", "Pod velero/b1 is starting on node a")
    (found_image,) = await scene.explain_at(8.0, node="a", containerStatuses=NO_IMAGE)
    assert found_image is not None
    # It may time out.
    assert found_image.operation == "image of Pod p"


async def test_a_query_that_is_not_answered_delays_little() -> None:
    scene = Scene()
    scene.put_claim("pv")
    gate = Gate(scene.kube, lambda request: EVENTS.plural in request.path)
    scene.finder = CauseFinder(KubeClient(gate, Retry(LoopClock())), scene.clock)
    async with asyncio.timeout(6):
        found = await scene.explain_at(0.0, 3.0, node="a")
    assert found[1] == Pending("ContainerCreating", "Pod velero/b1 is starting on node a")


async def test_a_cleanup_is_held_up_little_by_events_that_are_not_answered() -> None:
    kube = FakeKube()
    meta = {"name": "b1", "namespace": "velero", "uid": "c"}
    marked = meta | {"annotations": {"volume.kubernetes.io/storage-provisioner": "driver"}}
    claim: Any = {"metadata": marked, "spec": {"storageClassName": "retaining"}}
    storage_class = {"apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "metadata": {"name": "retaining"}}
    kube.put(storage_class | {"provisioner": "driver", "reclaimPolicy": "Retain"})
    client = KubeClient(Gate(kube, lambda request: EVENTS.plural in request.path), Retry(LoopClock()))
    async with asyncio.timeout(6):
        with pytest.raises(UnreachableError, match="no answer about Events within 5 s"):
            await is_being_provisioned(client, claim)


async def test_many_pods_are_each_queried_less_often() -> None:
    scene = Scene()
    scene.put_claim("pv")
    pods = [scene.pod(node="a", uid=f"p{number}") for number in range(100)]
    for scene.clock.seconds in (0.0, 5.0, 10.0, 15.0, 20.0, 24.9):
        for pod in pods:
            await scene.finder.explain(pod)
    # 5 per second in total: every 20 s for each pod.
    assert scene.queries.count(EVENTS.plural) == 100
    scene.clock.seconds = 25.0
    await scene.finder.explain(pods[0])
    assert scene.queries.count(EVENTS.plural) == 101


async def test_pods_that_are_no_longer_checked_are_dropped() -> None:
    scene = Scene()
    scene.put_claim("pv")
    for number in range(100):
        await scene.finder.explain(scene.pod(node="a", uid=f"p{number}"))
    found = await scene.explain_at(400.0, 403.0, 407.0, node="a")
    assert len(found) == 3
    assert scene.queries == ["b1", EVENTS.plural] * 2

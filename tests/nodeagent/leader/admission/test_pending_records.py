"""What the leader remembers about New transfers, and when each is checked next: also when its workload pod changes."""

import asyncio
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise, product

import pytest

from core.kube.resources import PODS
from core.models.names import PENDING_REASON_ANNOTATION
from core.models.reasons import FailureReason
from core.models.transfers import DataUpload, PodVolumeRestore
from exposer.model import Pending
from nodeagent.leader.admission.examiner import Checked
from nodeagent.leader.admission.pending_records import PendingTransfer, PendingTransfers, PodWatch
from nodeagent.transfers.kinds.base import Admission, AdmissionState
from tests.nodeagent.support.dispatching import Scene, ScriptedKind, entry, open_scene
from tests.nodeagent.support.hand_clock import HandClock
from tests.nodeagent.support.transfers import data_upload, workload_pod
from tests.support.objects import JsonDict
from tests.support.scripted import answer, scripted_client

pytestmark = pytest.mark.looptime

SHORT = Admission(AdmissionState.PENDING, "TargetClaimMissing", "m", limit=timedelta(minutes=2))
INDEFINITE = Admission(AdmissionState.PENDING, "SnapshotNotReady", "m", indefinite=True)
LOCATION = Admission(AdmissionState.PENDING, "LocationUnavailable", "m", blocked=True)
BUSY = Admission(AdmissionState.PENDING, "NodeBusy", "m", node="node-a", indefinite=True)
POD = Admission(AdmissionState.PENDING, "WorkloadAbsent", "m", indefinite=True, pod=("app", "pod"))
LIMIT = timedelta(minutes=30)
DAY = timedelta(hours=24)


class Bench:
    """Records on a clock that the test sets; transfers are created an hour before it starts."""

    def __init__(self, skew: timedelta = timedelta()) -> None:
        self.clock = HandClock(3600.0, skew)
        self.pods = PodWatch(scripted_client(lambda _: answer({})), self.clock, on_change=lambda: None)
        self.pending = PendingTransfers(self.clock, self.pods)

    def checked(self, admission: Admission, uid: str = "uid-of-du-1", reason: str = "") -> Checked:
        annotations = {PENDING_REASON_ANNOTATION: reason} if reason else {}
        raw = data_upload(
            uid.removeprefix("uid-of-"), annotations=annotations, creationTimestamp="2026-11-21T12:00:00Z"
        )
        kind = ScriptedKind()
        return Checked(entry(uid), kind, DataUpload.parse(raw), admission)

    def observe(self, admission: Admission, uid: str = "uid-of-du-1", reason: str = "") -> Checked:
        """Do what follows a check with a pending result."""
        checked = self.checked(admission, uid, reason)
        self.pending.observe(checked)
        pending = Pending(admission.reason, admission.message, blocked=admission.blocked)
        if self.pending.decide_report(uid, pending).message:
            self.pending.reports.mark_reported(uid, pending)
        self.pending.schedule(uid, admission)
        return checked

    def is_overdue(self, admission: Admission) -> bool:
        return self.pending.find_exceeded(UID, admission, LIMIT) is not None


UID = "uid-of-du-1"


def test_a_transfer_is_due_until_it_is_postponed_and_again_when_it_is_woken() -> None:
    bench = Bench()
    assert bench.pending.is_due(UID)
    bench.observe(LOCATION)
    assert not bench.pending.is_due(UID)
    assert bench.pending.seconds_to_next() == 5.0
    bench.pending.wake([UID])
    assert bench.pending.is_due(UID)
    assert bench.pending.seconds_to_next() == float("inf")


def test_many_pending_transfers_are_checked_less_often() -> None:
    bench = Bench()
    for number in range(1000):
        bench.observe(LOCATION, f"uid-of-{number}")
    assert bench.pending.seconds_to_next() == 5.0
    bench.observe(LOCATION)
    bench.clock.seconds += 15.0
    assert not bench.pending.is_due(UID)


def test_nothing_is_remembered_of_a_transfer_that_is_gone_or_ready() -> None:
    for ready in (False, True):
        bench = Bench()
        bench.observe(POD)
        if ready:
            bench.pending.ready(UID)
        else:
            bench.pending.retain({"another"})
        assert bench.pending.get(UID) == PendingTransfer()
        assert not bench.pods._followers
        assert bench.pending.is_due(UID)


def test_what_is_woken_by_a_change_is_checked_rarely_once_it_is_reported() -> None:
    bench = Bench()
    bench.observe(BUSY)
    assert bench.pending.seconds_to_next() == 60.0
    assert bench.pending.held() == {UID: "node-a"}
    bench.pending.wake([UID])
    assert bench.pending.held() == {}


def test_what_is_woken_by_a_change_is_checked_when_its_limit_is_reached() -> None:
    bench = Bench()
    limited = replace(BUSY, indefinite=False, limit=timedelta(seconds=90))
    pauses = []
    for _ in range(3):
        bench.observe(limited)
        pauses.append(bench.pending.seconds_to_next())
        bench.clock.seconds += pauses[-1]
    assert pauses == [60.0, 30.0, 1.0]
    assert bench.is_overdue(limited)


@pytest.mark.parametrize(
    ("admission", "reason", "minutes"),
    [
        pytest.param(SHORT, "", [2], id="a limit of its own, by observed time"),
        pytest.param(LOCATION, "", [30], id="by observed time, however old it is"),
        pytest.param(LOCATION, "Queued", [30], id="queued before"),
        pytest.param(INDEFINITE, "", [], id="indefinitely"),
    ],
)
@pytest.mark.parametrize("skew", [timedelta(), DAY, -DAY], ids=["right", "a day ahead", "a day behind"])
def test_a_transfer_is_overdue_by_the_time_that_counts(
    admission: Admission, reason: str, minutes: list[int], skew: timedelta
) -> None:
    bench = Bench(skew)
    bench.observe(admission, reason=reason)
    overdue = []
    for minute in range(40):
        if bench.is_overdue(admission):
            overdue.append(minute)
            break
        bench.clock.seconds += 60
    assert overdue == minutes


def test_a_limit_counts_while_its_reason_lasts_and_no_time_does_while_that_is_indefinite() -> None:
    """Every course of 40 minutes, in steps of 10, until the transfer is overdue."""
    for course in product((SHORT, LOCATION, INDEFINITE), repeat=4):
        bench, definite = Bench(), 0
        for before, admission in pairwise((INDEFINITE, *course)):
            overdue = admission is not INDEFINITE and (definite >= 3 or before is admission is SHORT)
            bench.pending.observe(bench.checked(admission))
            assert bench.is_overdue(admission) is overdue, course
            if overdue:
                break
            bench.observe(admission)
            definite = 0 if admission is INDEFINITE else definite + 1
            bench.clock.seconds += 600


@pytest.mark.parametrize(
    ("reason", "seconds", "needed"),
    [("", 0, True), ("Queued", 0, False), ("NodeBusy", 0, False), ("NodeBusy", 9, False), ("NodeBusy", 10, True)],
)
def test_a_queued_transfer_is_reported_once_and_if_it_lasts(reason: str, seconds: int, needed: bool) -> None:
    bench, queued = Bench(), entry("du", reason=reason)
    bench.pending.needs_queue_report(queued)
    bench.clock.seconds += seconds
    assert bench.pending.needs_queue_report(queued) is needed
    bench.pending.mark_queued(queued.uid)
    assert not bench.pending.needs_queue_report(queued)


def test_a_pod_is_followed_once_for_each_transfer_that_depends_on_it() -> None:
    bench = Bench()
    bench.observe(POD)
    bench.observe(POD)
    bench.observe(POD, "uid-of-du-2")
    assert bench.pods._followers[("app", "pod")] == 2
    bench.pending.retain({UID})
    assert bench.pods._followers[("app", "pod")] == 1
    bench.pods._changed.add(("app", "pod"))
    bench.pending.wake_changed()
    assert bench.pending.is_due(UID)


def restore(scene: Scene, name: str, namespace: str) -> JsonDict:
    """Add a PodVolumeRestore whose workload pod is Pending."""
    scene.kind = scene.kind if scene.kind.model is PodVolumeRestore else ScriptedKind(PodVolumeRestore)
    cr = scene.add_kind(PodVolumeRestore, name, queue=namespace)
    cr["spec"]["pod"] |= {"name": f"pod-of-{name}"}
    cr = scene.kube.put(cr)
    scene.kube.put(workload_pod(cr, status={"phase": "Pending"}))
    scene.kind.answers[name] = replace(POD, pod=(namespace, f"pod-of-{name}"))
    return cr


async def test_a_restore_is_admitted_once_its_pod_is_ready_for_it_and_is_not_polled() -> None:
    scene = open_scene("node-a", limit=None)
    cr = restore(scene, "pvr", "shop")
    others = [restore(scene, f"pvr-{number:02}", "shop") for number in range(30)]
    async with scene.dispatching():
        await scene.until(lambda: "" not in map(scene.message, scene.phases()))
        await asyncio.sleep(15)
        checks = scene.kind.checked.count("pvr")
        await asyncio.sleep(50)
        # One check a minute in case the watch fails silently.
        assert scene.kind.checked.count("pvr") - checks <= 1
        scene.kube.put(workload_pod(cr, annotations={"something": "else"}, status={"phase": "Pending"}))
        await asyncio.sleep(2)
        assert scene.kind.checked.count("pvr") - checks <= 1
        del scene.kind.answers["pvr"]
        scene.kube.put(workload_pod(cr))
        await scene.until(lambda: scene.phase("pvr") == "Accepted", seconds=1)
        scene.kind.answers.clear()
        for other in others:
            scene.kube.put(workload_pod(other))
        await scene.until(lambda: set(scene.phases().values()) == {"Accepted"}, seconds=3)
        # They share one watch.
        requests = [request for request in scene.kube.requests if request.path.startswith(PODS.path("shop"))]
        assert [request.query.get("watch") for request in requests] == [None, "true"]
        await asyncio.sleep(1)
        # No transfer depends on pods there any more: only the agents' own pods are watched.
        assert sum(stream.request.path == PODS.path("shop") for stream in scene.kube.watches._streams) == 0


async def test_a_pod_that_is_deleted_ends_or_no_longer_waits_wakes_its_restore() -> None:
    scene = open_scene("node-a")
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
    scene = open_scene("node-a")
    cr = restore(scene, "pvr", "shop")
    scene.kube.fail_next("GET", "namespaces/shop/pods", 403, times=1000)
    async with scene.dispatching():
        await scene.until(lambda: scene.message("pvr") != "")
        await asyncio.sleep(330)
        assert caplog.text.count("the pods of namespace shop cannot be watched") == 1
        del scene.kind.answers["pvr"]
        scene.kube.put(workload_pod(cr))
        await scene.until(lambda: scene.phase("pvr") == "Accepted", seconds=7)

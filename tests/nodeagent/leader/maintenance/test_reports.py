"""What the leader reports of maintenance: metrics, Events, and what it remembers of a failure."""

import asyncio
import json
import re
from datetime import timedelta

import pytest

from core.kube.client import KubeClient
from core.kube.resources import EVENTS, JOBS
from core.kube.transport import Retry
from core.models.base import JsonDict, parse_time
from core.models.names import MAINTENANCE_ANNOTATION
from nodeagent.config.repositories import MaintenanceSettings
from nodeagent.metrics import Metrics
from nodeagent.runtime.settings import MaintenanceSwitch
from tests.nodeagent.support.maintenance_scene import MINUTE, MaintenanceScene, repository_object, result
from tests.nodeagent.support.repository_scene import SERVER
from tests.support.clock import LoopClock

pytestmark = pytest.mark.looptime

_HOUR = 60 * MINUTE
_ERROR = "Repo maintenance error: "


def _values(scene: MaintenanceScene, name: str) -> dict[str, float]:
    """Return the series of a metric, by their labels beside the node."""
    found = re.findall(rf"^{name}{{(.*)}} (.*)$", scene.metrics.render().decode(), re.MULTILINE)
    return {re.sub(r'node="node-a",', "", labels): float(value) for labels, value in found}


async def test_a_skip_is_counted_once_for_each_slot() -> None:
    scene = MaintenanceScene(switch=MaintenanceSwitch.ON)
    scene.kube.put(SERVER)
    async with scene.running():
        await asyncio.sleep(10 * _HOUR + 30 * MINUTE)
        assert _values(scene, "nodeagent_maintenance_skipped_total") in (
            {'reason="server"': 11.0},
            {'reason="server"': 12.0},
        )


async def test_what_is_waited_for_is_no_skip() -> None:
    scene = MaintenanceScene(switch=MaintenanceSwitch.ON)
    scene.kube.put(repository_object(lastMaintenanceTime="2026-11-21T10:00:00Z"))
    async with scene.running():
        await scene.run_once(result(nextQuick="2026-12-01T00:00:00Z", nextFull="2026-11-22T00:00:00Z"))
        await asyncio.sleep(5 * _HOUR)
        assert _values(scene, "nodeagent_maintenance_skipped_total") == {}


@pytest.mark.parametrize("deleted", [False, True], ids=["job", "pod"])
async def test_a_job_whose_pod_never_ends_makes_the_next_maintenance_overdue(*, deleted: bool) -> None:
    """As on a lost node, where the pod stays Terminating."""
    scene = MaintenanceScene(switch=MaintenanceSwitch.ON)
    stored = repository_object(lastMaintenanceTime="2026-11-17T10:00:00Z")
    stored["metadata"]["annotations"] = {MAINTENANCE_ANNOTATION: json.dumps({"fullIntervalSeconds": 600})}
    scene.kube.put(stored)
    async with scene.running() as controller:
        job = await scene.until_job(seconds=MINUTE)
        scene.start_pod(job)
        await scene.until_labeled(job)
        if deleted:
            await KubeClient(scene.kube, Retry(LoopClock())).delete(JOBS, "velero", job["metadata"]["name"])
        due = scene.clock.now() + timedelta(hours=1)
        await asyncio.sleep(85 * MINUTE)
        decision = controller.report()["app-default-kopia"]
        assert (decision["hold"], decision["overdue"]) == ("job-unfinished", False)
        assert timedelta() <= due - parse_time(decision["due"]) < timedelta(minutes=1)
        assert scene.reasons() == []
        assert _values(scene, "nodeagent_maintenance_overdue") == {'repository_name="app-default-kopia"': 0.0}
        await asyncio.sleep(10 * MINUTE)
        assert controller.report()["app-default-kopia"]["overdue"]
        assert _values(scene, "nodeagent_maintenance_overdue") == {'repository_name="app-default-kopia"': 1.0}
        (event,) = scene.kube.objects(EVENTS)
        assert event["reason"] == "MaintenanceOverdue"
        ending = f"job-unfinished: Job velero/{job['metadata']['name']} or its pod has not ended"
        assert event["message"].endswith(ending)


async def test_an_attempt_that_gets_no_more_memory_says_so() -> None:
    scene = MaintenanceScene(settings=MaintenanceSettings(memory_limit_max_bytes=768 * 2**20))
    async with scene.running():
        for attempt in range(3):
            job = await scene.until_job(seconds=2 * _HOUR, but=len(scene.jobs))
            await asyncio.sleep(1)
            assert scene.reasons().count("MaintenanceMemory") == attempt
            scene.start_pod(job)
            await scene.until_labeled(job)
            scene.end(job, 137, "", reason="OOMKilled")
            await asyncio.sleep(10)


@pytest.mark.parametrize("message", [f"{_ERROR}blob not found: p1", ""], ids=["failed", "killed"])
async def test_a_full_maintenance_that_failed_is_incomplete_until_one_succeeds(message: str) -> None:
    scene = MaintenanceScene()
    series = 'repository_name="app-default-kopia"'
    soon = "2026-11-21T12:30:00Z"
    async with scene.running():
        await scene.run_once(result("full", nextFull=soon, nextQuick=soon))
        assert _values(scene, "nodeagent_maintenance_incomplete_full") == {series: 0.0}
        await scene.run_once(message, exit_code=1)
        assert _values(scene, "nodeagent_maintenance_incomplete_full") == {series: 1.0}
        await scene.run_once(result("full", nextFull="2026-12-01T00:00:00Z"))
        assert _values(scene, "nodeagent_maintenance_incomplete_full") == {series: 0.0}


async def test_what_could_not_be_measured_is_not_shown_as_zero() -> None:
    scene = MaintenanceScene()
    async with scene.running():
        await scene.run_once('{"mode":"quick","seconds":3.0}')
        (event,) = scene.kube.objects(EVENTS)
        assert event["message"] == "quick maintenance took 3 s"
        assert _values(scene, "nodeagent_repository_index_blobs") == {}


async def test_a_new_leader_shows_what_is_stored_and_none_beside_a_server() -> None:
    scene = MaintenanceScene()
    async with scene.running():
        await scene.run_once(result("full", nextFull="2026-12-01T00:00:00Z"))
    scene.metrics = Metrics("node-a")
    shown: JsonDict = {'repository_name="app-default-kopia"': 7.0}
    async with scene.running():
        await asyncio.sleep(1)
        assert _values(scene, "nodeagent_repository_index_blobs") == shown
        (at,) = _values(scene, "nodeagent_maintenance_last_success_seconds").values()
        scene.kube.put(SERVER)
        await asyncio.sleep(2 * MINUTE)
        assert _values(scene, "nodeagent_repository_index_blobs") == {}
    assert at == pytest.approx(_completed(scene), abs=60)


def _completed(scene: MaintenanceScene) -> float:
    return parse_time(scene.repository()["status"]["lastMaintenanceTime"]).timestamp()


@pytest.mark.parametrize("corrected", [False, True])
async def test_a_wrong_password_that_was_corrected_while_the_job_ran_holds_nothing(*, corrected: bool) -> None:
    scene = MaintenanceScene()
    async with scene.running() as controller:
        job = await scene.until_job(seconds=2 * _HOUR)
        scene.start_pod(job)
        await scene.until_labeled(job)
        if corrected:
            scene.inputs = "corrected"
        scene.end(job, 1, f"{_ERROR}wrong password: it does not open the repository")
        await asyncio.sleep(2 * MINUTE)
        assert controller.report()["app-default-kopia"]["hold"] == ("back-off" if corrected else "blocked")


_UNREFERENCED: JsonDict = {"unreferenced": {"count": 2, "bytes": 700}, "bucketRead": True}
_SERIES = 'repository_name="app-default-kopia"'


def _asks_for_report(job: JsonDict) -> bool:
    return "--report-snapshots" in job["spec"]["template"]["spec"]["containers"][0]["args"]


async def test_snapshots_are_reported_once_a_week_and_shown_by_each_leader() -> None:
    scene = MaintenanceScene()
    async with scene.running():
        first = await scene.run_once(result("full", nextFull="2026-11-21T14:00:00Z", report=_UNREFERENCED))
        assert _asks_for_report(first)
        found = [event["message"] for event in scene.kube.objects(EVENTS) if event["reason"] == "SnapshotsUnreferenced"]
        name = first["metadata"]["name"]
        assert found == [f"2 snapshots with 700 bytes of files belong to no backup: the log of Job {name} lists them"]
        second = await scene.run_once(result("full", nextFull="2026-11-21T16:00:00Z"))
        assert not _asks_for_report(second)
    scene.metrics = Metrics("node-a")
    stored = scene.repository()
    week_ago = json.dumps(scene.record | {"reportedAt": "2026-11-14T12:00:00Z"})
    scene.kube.put(stored | {"metadata": stored["metadata"] | {"annotations": {MAINTENANCE_ANNOTATION: week_ago}}})
    async with scene.running():
        await asyncio.sleep(1)
        assert _values(scene, "nodeagent_repository_orphan_snapshots") == {_SERIES: 2.0}
        assert _values(scene, "nodeagent_repository_orphan_snapshot_bytes") == {_SERIES: 700.0}
        assert _asks_for_report(await scene.run_once(result("full"), seconds=4 * _HOUR))


@pytest.mark.parametrize(
    ("fields", "again"),
    [({"report": {"unread": "denied"}}, False), ({"reportError": "denied"}, True), ({}, True)],
    ids=["unread", "failed", "an older data mover"],
)
async def test_a_report_without_a_number_fails_nothing_and_shows_none(fields: JsonDict, *, again: bool) -> None:
    scene = MaintenanceScene()
    async with scene.running():
        job = await scene.run_once(result("full", nextFull="2026-11-21T16:00:00Z", **fields))
        assert [entry["result"] for entry in scene.history] == ["Succeeded"]
        assert _values(scene, "nodeagent_repository_orphan_snapshots") == {}
        doubts = [e["message"] for e in scene.kube.objects(EVENTS) if e["reason"] == "SnapshotReportIncomplete"]
        assert doubts == ([f"Job {job['metadata']['name']}: denied"] if fields else [])
        assert _asks_for_report(await scene.run_once(result("full"), seconds=48 * _HOUR)) is again

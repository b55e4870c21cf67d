"""What the leader reports of maintenance: metrics, Events, and what it remembers of a failure."""

import asyncio
import json
import re
from datetime import timedelta

import pytest

from core.kube.resources import BACKUP_REPOSITORIES, JOBS
from core.models.base import JsonDict, format_time, parse_time
from core.models.names import MAINTENANCE_ANNOTATION
from nodeagent.metrics import Metrics
from nodeagent.runtime.settings import MaintenanceSwitch
from tests.nodeagent.support.maintenance_scene import MINUTE, MaintenanceScene, repository_object, result, words_of
from tests.nodeagent.support.repository_scene import SERVER

pytestmark = pytest.mark.looptime

_HOUR = 60 * MINUTE
_ERROR = "Repo maintenance error: "
_SERIES = 'repository_name="app-default-kopia"'


def _values(scene: MaintenanceScene, name: str) -> dict[str, float]:
    """Return the series of a metric, by their labels beside the node."""
    found = re.findall(rf"^{name}{{(.*)}} (.*)$", scene.metrics.render().decode(), re.MULTILINE)
    return {re.sub(r'node="node-a",', "", labels): float(value) for labels, value in found}


@pytest.mark.parametrize("server", [True, False])
async def test_on_beside_a_server_says_so_once_and_each_slot_is_a_skip_but_none_that_is_waited_for(
    server: bool,
) -> None:
    scene = MaintenanceScene(switch=MaintenanceSwitch.ON)
    if server:
        scene.kube.put(SERVER)
    async with scene.running():
        if not server:
            await scene.run_once(result(nextQuick="2026-12-01T00:00:00Z", nextFull="2026-11-22T00:00:00Z"))
        await asyncio.sleep(10 * _HOUR + 30 * MINUTE)
        skips = _values(scene, "nodeagent_maintenance_skipped_total")
    assert skips in (({'reason="server"': 11.0}, {'reason="server"': 12.0}) if server else ({},))
    assert (len(scene.jobs), scene.reasons()) == ((0, ["MaintenanceHeld"]) if server else (1, ["Maintained"]))


@pytest.mark.parametrize("job_is", ["unfinished", "deleted", "failed"])
async def test_a_job_whose_pod_never_ends_makes_the_next_maintenance_overdue(job_is: str) -> None:
    """As on a lost node, where the pod stays Terminating, and may still write; its Job counts it as failed."""
    scene = MaintenanceScene(switch=MaintenanceSwitch.ON)
    stored = repository_object(lastMaintenanceTime="2026-11-17T10:00:00Z")
    stored["metadata"]["annotations"] = {MAINTENANCE_ANNOTATION: json.dumps({"fullIntervalSeconds": 600})}
    scene.kube.put(stored)
    async with scene.running():
        job = await scene.start_job(seconds=MINUTE)
        if job_is == "deleted":
            await scene.client.delete(JOBS, "velero", job["metadata"]["name"])
        if job_is == "failed":
            scene.kube.put(scene.current(job) | {"status": {"failed": 1}})
        due = scene.clock.now() + timedelta(hours=1)
        await asyncio.sleep(85 * MINUTE)
        decision = scene.report()["app-default-kopia"]
        assert (decision["hold"], decision["overdue"]) == ("job-unfinished", False)
        assert timedelta() <= due - parse_time(decision["due"]) < timedelta(minutes=1)
        assert scene.reasons() == []
        assert _values(scene, "nodeagent_maintenance_overdue") == {_SERIES: 0.0}
        await asyncio.sleep(10 * MINUTE)
        assert scene.report()["app-default-kopia"]["overdue"]
        assert _values(scene, "nodeagent_maintenance_overdue") == {_SERIES: 1.0}
        ((reason, message),) = scene.events()
        ending = f"job-unfinished: Job velero/{job['metadata']['name']} or its pod has not ended"
        assert (reason, message.endswith(ending)) == ("MaintenanceOverdue", True)


@pytest.mark.parametrize("message", [f"{_ERROR}blob not found: p1", ""], ids=["failed", "killed"])
async def test_a_full_maintenance_that_failed_is_incomplete_until_one_succeeds(message: str) -> None:
    scene = MaintenanceScene()
    soon = "2026-11-21T12:30:00Z"
    async with scene.running():
        await scene.run_once(result("full", nextFull=soon, nextQuick=soon))
        assert _values(scene, "nodeagent_maintenance_incomplete_full") == {_SERIES: 0.0}
        await scene.run_once(message, exit_code=1)
        assert _values(scene, "nodeagent_maintenance_incomplete_full") == {_SERIES: 1.0}
        await scene.run_once(result("full", nextFull="2026-12-01T00:00:00Z"))
        assert _values(scene, "nodeagent_maintenance_incomplete_full") == {_SERIES: 0.0}


async def test_a_new_leader_shows_what_is_stored_and_none_beside_a_server_or_of_what_was_not_measured() -> None:
    async with MaintenanceScene().running() as scene:
        await scene.run_once('{"mode":"quick","seconds":3.0}')
        assert scene.events() == [("Maintained", "quick maintenance took 3 s")]
        assert _values(scene, "nodeagent_repository_index_blobs") == {}
        await scene.run_once(result("full", nextFull="2026-12-01T00:00:00Z"))
    scene.metrics = Metrics("node-a")
    async with scene.running():
        await asyncio.sleep(1)
        assert _values(scene, "nodeagent_repository_index_blobs") == {_SERIES: 7.0}
        at = _values(scene, "nodeagent_maintenance_last_success_seconds")[f'mode="full",{_SERIES}']
        scene.kube.put(SERVER)
        await asyncio.sleep(2 * MINUTE)
        assert _values(scene, "nodeagent_repository_index_blobs") == {}
    completed = parse_time(scene.repository()["status"]["lastMaintenanceTime"]).timestamp()
    assert at == pytest.approx(completed, abs=60)


@pytest.mark.parametrize("corrected", [False, True])
async def test_a_wrong_password_that_was_corrected_while_the_job_ran_holds_nothing(*, corrected: bool) -> None:
    async with MaintenanceScene().running() as scene:
        job = await scene.start_job()
        if corrected:
            scene.inputs = "corrected"
        scene.end(job, 1, f"{_ERROR}wrong password: it does not open the repository")
        await asyncio.sleep(2 * MINUTE)
        assert scene.report()["app-default-kopia"]["hold"] == ("back-off" if corrected else "blocked")


_UNREFERENCED: JsonDict = {"unreferenced": {"count": 2, "bytes": 700}, "bucketRead": True}
_REPORT = "--report-snapshots"


async def test_snapshots_are_reported_once_a_week_and_shown_by_each_leader() -> None:
    async with MaintenanceScene().running() as scene:
        first = await scene.run_once(result("full", nextFull="2026-11-21T14:00:00Z", report=_UNREFERENCED))
        assert _REPORT in words_of(first)
        text = "2 snapshots with 700 bytes of files belong to no backup: the log of Job {} lists them"
        assert ("SnapshotsUnreferenced", text.format(first["metadata"]["name"])) in scene.events()
        second = await scene.run_once(result("full", nextFull="2026-11-21T16:00:00Z"))
        assert _REPORT not in words_of(second)
        assert scene.reasons().count("SnapshotsUnreferenced") == 1
    scene.metrics = Metrics("node-a")
    stored = scene.repository()
    week_ago = json.dumps(scene.record | {"reportedAt": "2026-11-14T12:00:00Z"})
    scene.kube.put(stored | {"metadata": stored["metadata"] | {"annotations": {MAINTENANCE_ANNOTATION: week_ago}}})
    async with scene.running():
        await asyncio.sleep(1)
        assert _values(scene, "nodeagent_repository_orphan_snapshots") == {_SERIES: 2.0}
        assert _values(scene, "nodeagent_repository_orphan_snapshot_bytes") == {_SERIES: 700.0}
        assert _REPORT in words_of(await scene.run_once(result("full"), seconds=4 * _HOUR))


@pytest.mark.parametrize(
    ("fields", "again"),
    [({"report": {"unread": "denied"}}, False), ({"reportError": "denied"}, True), ({}, True)],
    ids=["unread", "failed", "an older data mover"],
)
async def test_a_report_without_a_number_fails_nothing_and_shows_none(fields: JsonDict, *, again: bool) -> None:
    async with MaintenanceScene().running() as scene:
        job = await scene.run_once(result("full", nextFull="2026-11-21T16:00:00Z", **fields))
        assert [entry["result"] for entry in scene.history] == ["Succeeded"]
        assert _values(scene, "nodeagent_repository_orphan_snapshots") == {}
        doubts = [message for reason, message in scene.events() if reason == "SnapshotReportIncomplete"]
        assert doubts == ([f"Job {job['metadata']['name']}: denied"] if fields else [])
        assert (_REPORT in words_of(await scene.run_once(result("full"), seconds=48 * _HOUR))) is again


async def test_a_repository_of_the_same_name_shows_no_results_of_the_one_before() -> None:
    """It is deleted and created before an event is handled: by a command, or while the watch is interrupted."""
    scene = MaintenanceScene()

    def shown() -> set[str]:
        return set(re.findall(rf"(?m)^nodeagent_.*{_SERIES}.*", scene.metrics.render().decode()))

    async with scene.running():
        await asyncio.sleep(1)
        new = shown()
        job = await scene.run_once(result("full", nextFull="2026-12-01T00:00:00Z"))
        assert shown() > new
        await scene.client.delete(JOBS, "velero", job["metadata"]["name"])
        await scene.client.delete(BACKUP_REPOSITORIES, "velero", "app-default-kopia")
        scene.kube.put(repository_object(lastMaintenanceTime=format_time(scene.clock.now())))
        await asyncio.sleep(1)
        assert shown() == new

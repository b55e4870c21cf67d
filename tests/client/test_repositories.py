"""What a user sees of backup repositories, with and without the leader, and with few permissions."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
from msgspec.structs import replace

from client.mover_jobs import JobError
from client.repositories import SnapshotList, report_snapshots
from client.repository_view import RepositorySummary
from client.session import Session
from core.errors import AgentError, ConfigError, ContractError, ExposeError
from core.kube.client import KubeClient
from core.kube.errors import ForbiddenError, NotFoundError
from core.kube.resources import JOBS
from core.kube.transport import Retry
from core.snapshot_contract import REPORTED_LINE, ReportedSnapshot, SnapshotReport, SnapshotVerdict
from tests.client.support.job_pods import ended
from tests.client.support.user_scene import NAME, RECORD, UserScene
from tests.nodeagent.support.maintenance_scene import result
from tests.support.clock import LoopClock
from tests.support.fakekube import FakeKube
from tests.support.job_output import seal
from tests.support.objects import JsonDict
from tests.support.tasks import interrupt, until


@pytest.fixture
def scene() -> UserScene:
    return UserScene()


async def _only(scene: UserScene) -> RepositorySummary:
    found = await scene.reader.summarize()
    assert [one.name for one in found.repositories] == [NAME]
    return found.repositories[0]


def _put_job(scene: UserScene, name: str = "job-1", **status: object) -> JsonDict:
    labels = {"velero.io/repo-name": NAME, "nodeagent.io/owner-uid": "other"}
    return scene.put("Job", name, "batch/v1", labels=labels, spec={}, status=status)


def _put_location(scene: UserScene, phase: str = "Available", **spec: object) -> None:
    full = {"provider": "aws", "objectStorage": {"bucket": "b"}, **spec}
    scene.put("BackupStorageLocation", "default", spec=full, status={"phase": phase})


def _configure(scene: UserScene) -> None:
    scene.put_daemonset("serve", "--repo-maintenance-job-configmap=m")
    window = {"windows": [{"schedule": "0 22 * * *", "duration": "1h"}]}
    scene.put("ConfigMap", "m", "v1", data={"global": json.dumps(window)})
    scene.put_repository(RECORD | {"nextQuick": "2026-11-21T11:00:00Z"})


def _verify_another(scene: UserScene) -> None:
    scene.put_repository(RECORD | {"nextQuick": "2026-11-21T11:00:00Z"})
    scene.put("Job", "job-1", "batch/v1", labels={"nodeagent.io/verified-repository": "other"}, spec={}, status={})


_ELEVEN = "2026-11-21T11:00:00Z"
_FAILED = {"result": "Failed", "startTimestamp": "2026-11-21T11:58:00Z"}
_HOLDS: dict[str, Any] = {
    "off": lambda scene: scene.put_daemonset("serve", "--repo-maintenance=off"),
    "server": lambda scene: scene.put("Deployment", "velero", "apps/v1", spec={}),
    "job-unfinished": _put_job,
    "location-read-only": lambda scene: _put_location(scene, accessMode="ReadOnly"),
    "location-unavailable": lambda scene: _put_location(scene, "Unavailable"),
    "foreign": lambda scene: scene.put_repository(RECORD | {"foreignAt": "2026-11-21T11:00:00Z"}),
    "blocked": lambda scene: scene.put_repository(RECORD | {"blockedInputs": "i", "lastFailure": _ELEVEN}),
    "back-off": lambda scene: scene.put_repository(RECORD | {"nextQuick": _ELEVEN}, recentMaintenance=[_FAILED]),
    "window": _configure,
    "concurrency": _verify_another,
    "": lambda scene: scene.put_repository(RECORD | {"nextQuick": "2026-11-21T11:00:00Z"}),
}


@pytest.mark.parametrize("hold", _HOLDS, ids=lambda hold: hold or "due")
async def test_without_the_leader_its_rules_decide(scene: UserScene, hold: str) -> None:
    _HOLDS[hold](scene)
    scene.hush(500)
    following = (await _only(scene)).next
    assert (following.hold, following.from_leader) == (hold, False)
    assert bool(following.reason) is bool(hold)


async def test_a_time_out_of_range_is_no_error(scene: UserScene) -> None:
    scene.put_repository(RECORD | {"fullIntervalSeconds": 1e15})
    scene.hush()
    assert (await _only(scene)).next.hold == "invalid"


async def test_an_invalid_repository_is_noted_and_the_others_are_shown(scene: UserScene) -> None:
    raw = scene.put_repository(name="db-default-kopia")
    raw["status"]["phase"] = "Odd"
    scene.kube.put(raw)
    found = await scene.reader.summarize()
    assert [one.name for one in found.repositories] == [NAME]
    assert found.notes[0].startswith("invalid BackupRepository velero/db-default-kopia: ")
    with pytest.raises(ContractError, match="db-default-kopia"):
        await scene.reader.describe("db-default-kopia")


async def test_chosen_repositories_come_once_and_in_order(scene: UserScene) -> None:
    scene.put_repository(name="db-default-kopia")
    found = await scene.reader.summarize(["db-default-kopia", NAME, NAME])
    assert [one.name for one in found.repositories] == [NAME, "db-default-kopia"]


async def test_a_full_maintenance_that_did_not_finish_is_named(scene: UserScene) -> None:
    assert not (await scene.reader.describe(NAME)).incomplete_full
    scene.put_repository(RECORD | {"incompleteFull": True})
    assert (await scene.reader.describe(NAME)).incomplete_full


async def test_a_running_job_is_shown_with_the_reason_why_its_pod_is_pending(scene: UserScene) -> None:
    _put_job(scene)
    unschedulable = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}
    status = {"phase": "Pending", "conditions": [unschedulable]}
    scene.put("Pod", "job-1-x", "v1", labels={"job-name": "job-1"}, status=status)
    labels = {"velero.io/repo-name": NAME}
    scene.put("Job", "job-2", "batch/v1", labels=labels, spec={"suspend": True}, status={})
    job, suspended = (await scene.reader.describe(NAME)).running
    assert suspended.pending == "the Job is suspended (spec.suspend)"
    assert (job.job, job.pod, job.phase) == ("job-1", "job-1-x", "Pending")
    assert job.pending == "Pod velero/job-1-x cannot be scheduled: 0/3 nodes"


async def test_the_result_of_the_last_job_is_read_from_its_pod(scene: UserScene) -> None:
    _put_job(scene, succeeded=1, completionTime="2026-11-21T10:00:00Z")
    state = {"terminated": {"exitCode": 0, "message": result("full", freedBytes=5)}}
    status = {"phase": "Succeeded", "containerStatuses": [{"name": "c", "state": state}]}
    scene.put("Pod", "job-1-x", "v1", labels={"job-name": "job-1"}, status=status)
    last = (await scene.reader.describe(NAME)).last_result
    assert last is not None
    assert (last.mode, last.freed_bytes) == ("full", 5)


async def test_events_of_the_repository_come_newest_first(scene: UserScene) -> None:
    uid = scene.put_repository()["metadata"]["uid"]
    for name, about, seen in (("1", uid, "10:00"), ("2", uid, "11:00"), ("3", "other", "12:00")):
        moment = f"2026-11-21T{seen}:00Z"
        scene.put("Event", name, "v1", involvedObject={"uid": about}, message=name, lastTimestamp=moment)
    assert [event.message for event in (await scene.reader.describe(NAME)).events] == ["2", "1"]


@pytest.mark.parametrize("part", ["/daemonsets", "/leases", "/jobs", "/deployments", "locations", "/events"])
async def test_what_may_not_be_read_is_left_out_with_a_note(scene: UserScene, part: str) -> None:
    scene.kube.fail_next("GET", part, 403)
    one = await scene.reader.describe(NAME)
    assert one.name == NAME
    assert len(one.notes) == 1
    assert "403" in one.notes[0]


_TIMEOUT = timedelta(minutes=5)


def _snapshot(snapshot_id: str, verdict: SnapshotVerdict, **more: object) -> ReportedSnapshot:
    return ReportedSnapshot.from_wire({"id": snapshot_id, "verdict": verdict, "reason": "r", **more})


_OLD = _snapshot("s1", SnapshotVerdict.UNREFERENCED, start="2026-01-01T00:00:00Z", command="kopia snapshot delete s1")
_ODD = _snapshot("s2", SnapshotVerdict.UNKNOWN)


@dataclass
class _Report:
    """A cluster, and what a user's command has shown."""

    scene: UserScene = field(default_factory=lambda: UserScene(kube=FakeKube(LoopClock())))
    shown: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    async def run(self, name: str = NAME) -> SnapshotList:
        clock = LoopClock()
        client = KubeClient(self.scene.kube, Retry(clock, attempts=1))
        tools = Session(client, clock, "velero", self.notes.append, self.shown.append)
        return await report_snapshots(tools, name, timeout=_TIMEOUT)

    @property
    def jobs(self) -> list[JsonDict]:
        return self.scene.kube.objects(JOBS)

    @asynccontextmanager
    async def running(self) -> AsyncIterator["asyncio.Task[SnapshotList]"]:
        """Start the command, and yield once its Job exists."""
        task = asyncio.create_task(self.run(), name="command")
        try:
            await until(lambda: bool(self.jobs), seconds=30)
            yield task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def put_pod(self, spec: JsonDict | None = None, **status: object) -> None:
        job = self.jobs[0]["metadata"]["name"]
        self.scene.put("Pod", f"{job}-x", "v1", labels={"job-name": job}, spec=spec or {}, status=status)

    def end(self, message: str, *lines: str) -> None:
        """Let the pod of the Job end well."""
        job = self.jobs[0]["metadata"]["name"]
        self.put_pod(**ended(0, message))
        self.scene.kube.logs["velero", f"{job}-x"] = "".join(f"{line}\n" for line in lines)


@pytest.fixture
async def report() -> _Report:
    return _Report()


def _totals(**counts: int) -> SnapshotReport:
    return SnapshotReport.from_wire({name: {"count": count} for name, count in counts.items()})


@pytest.mark.looptime
async def test_the_report_is_read_and_its_job_deleted(report: _Report) -> None:
    async with report.running() as task:
        lines = ("time=1 level=info msg=begin", REPORTED_LINE.format(_ODD), REPORTED_LINE.format(_OLD))
        totals = replace(_totals(unreferenced=1, unknown=1, referenced=9), unread="403 Forbidden")
        report.end(seal(totals, *lines), *lines)
        found = await task
    assert (found.repository, found.snapshots) == (NAME, [_OLD, _ODD])
    assert found.notes == ["what refers to snapshots could not be read: 403 Forbidden"]
    assert found.totals.referenced.count == 9
    assert report.jobs == []
    assert report.notes == []


@pytest.mark.looptime
async def test_the_job_is_that_of_the_installed_agent(report: _Report) -> None:
    report.scene.put_daemonset("serve", "--mover-service-account=movers", "--log-level=debug")
    async with report.running():
        job = report.jobs[0]
    spec = job["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert (spec["serviceAccountName"], container["image"]) == ("movers", "mover:1")
    assert "report-snapshots" in container["args"]
    assert "--log-level=debug" in container["args"]
    assert job["metadata"]["labels"] == {"nodeagent.io/snapshot-report": NAME}
    assert container["resources"] == {"requests": {"memory": "256Mi"}, "limits": {"memory": "512Mi"}}
    assert len(job["metadata"]["name"]) <= 63


@pytest.mark.looptime
async def test_a_pod_that_does_not_start_is_reported_until_the_timeout_ends_the_command(report: _Report) -> None:
    async with report.running() as task:
        waiting = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}
        report.put_pod(phase="Pending", conditions=[waiting])
        with pytest.raises(JobError, match=r"did not end within 5m0s: Pod velero/.* cannot be scheduled: 0/3 nodes"):
            await task
    assert "cannot be scheduled: 0/3 nodes" in report.shown[-1]
    assert report.jobs == []


@pytest.mark.looptime
async def test_a_pod_that_can_never_start_ends_the_command_at_once(report: _Report) -> None:
    async with report.running() as task:
        waiting = {"waiting": {"reason": "InvalidImageName", "message": "bad"}}
        report.put_pod({"nodeName": "a"}, phase="Pending", containerStatuses=[{"name": "c", "state": waiting}])
        with pytest.raises(ExposeError, match="InvalidImageName"):
            await task
        assert asyncio.get_running_loop().time() < 60


@pytest.mark.looptime
async def test_a_pod_that_is_rejected_is_explained_by_the_events_of_the_job(report: _Report) -> None:
    async with report.running() as task:
        about = {"uid": report.jobs[0]["metadata"]["uid"]}
        report.scene.put("Event", "e", "v1", involvedObject=about, type="Warning", message="exceeded quota")
        with pytest.raises(JobError, match="has no pod yet: exceeded quota"):
            await task


_LATE = {"type": "FailureTarget", "status": "True", "reason": "DeadlineExceeded", "message": "active longer than"}


@pytest.mark.parametrize(
    ("status", "error"),
    [
        ({"failed": 1}, "failed: its pod was deleted before"),
        ({"failed": 1, "conditions": [_LATE | {"reason": "BackoffLimitExceeded"}]}, "failed: its pod was deleted"),
        ({"failed": 1, "conditions": [_LATE]}, "failed: active longer than"),
        (None, "was deleted before it ended"),
    ],
    ids=["failed", "drained", "deadline", "deleted"],
)
@pytest.mark.looptime
async def test_a_job_that_ends_before_its_pod_is_an_error(report: _Report, status: JsonDict | None, error: str) -> None:
    async with report.running() as task:
        job = report.jobs[0]
        report.put_pod(phase="Running")
        if status is None:
            await report.scene.client.delete(JOBS, "velero", job["metadata"]["name"])
        else:
            report.scene.kube.put(job | {"status": status})
        with pytest.raises(JobError, match=error):
            await task


@pytest.mark.looptime
async def test_a_command_that_is_interrupted_while_the_job_is_created_deletes_it(report: _Report) -> None:
    creates = until(lambda: any(request.method == "POST" for request in report.scene.kube.requests), every=0)
    await interrupt(report.run(), creates)
    assert report.jobs == []


@pytest.mark.looptime
async def test_a_job_that_cannot_be_deleted_is_named_with_the_command_that_does(report: _Report) -> None:
    async with report.running() as task:
        name = report.jobs[0]["metadata"]["name"]
        report.end(seal(_totals()))
        report.scene.kube.fail_next("DELETE", "/jobs", 403)
        await task
    (note,) = report.notes
    assert f"kubectl -n velero delete job {name}" in note


@pytest.mark.parametrize(
    ("part", "status", "error"),
    [
        ("/backuprepositories", 404, NotFoundError),
        ("/backupstoragelocations", 404, NotFoundError),
        ("/daemonsets", 404, ConfigError),
        ("/backuprepositories", 403, ForbiddenError),
    ],
    ids=["no repository", "no location", "no agent", "forbidden"],
)
@pytest.mark.looptime
async def test_what_a_job_needs_is_read_first(report: _Report, part: str, status: int, error: type[AgentError]) -> None:
    report.scene.kube.fail_next("GET", part, status)
    with pytest.raises(error):
        await report.run()
    assert not any(request.method == "POST" for request in report.scene.kube.requests)

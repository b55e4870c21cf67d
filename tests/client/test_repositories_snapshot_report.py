"""The snapshot report by command: its Job, what the user sees meanwhile, its result, and its deletion."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import pytest

from client.mover_jobs import JobError
from client.repositories import SnapshotList, report_snapshots
from client.session import Session
from core.errors import AgentError, ConfigError, ExposeError
from core.kube.client import KubeClient
from core.kube.errors import ForbiddenError, NotFoundError
from core.kube.resources import JOBS
from core.kube.transport import Retry
from core.models.base import JsonDict
from core.snapshot_contract import REPORTED_LINE, ReportedSnapshot, SnapshotReport, SnapshotTotal, SnapshotVerdict
from tests.client.support.user_scene import NAME, UserScene
from tests.support.clock import LoopClock
from tests.support.fakekube import FakeKube
from tests.support.job_output import seal

pytestmark = pytest.mark.looptime

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
            async with asyncio.timeout(30):
                while not self.jobs:
                    await asyncio.sleep(0.1)
            yield task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def put_pod(self, **status: object) -> None:
        job = self.jobs[0]["metadata"]["name"]
        self.scene.put("Pod", f"{job}-x", "v1", labels={"job-name": job}, status=status)

    def end(self, exit_code: int, message: str, *lines: str) -> None:
        """Let the pod of the Job end."""
        job = self.jobs[0]["metadata"]["name"]
        terminated = {"exitCode": exit_code, "message": message, "reason": "Error" if exit_code else "Completed"}
        state = [{"name": "velero-repo-maintenance-container", "state": {"terminated": terminated}}]
        self.put_pod(phase="Failed" if exit_code else "Succeeded", containerStatuses=state)
        self.scene.kube.logs["velero", f"{job}-x"] = "".join(f"{line}\n" for line in lines)


@pytest.fixture
async def report() -> _Report:
    return _Report()


def _totals(**counts: int) -> SnapshotReport:
    return SnapshotReport.from_wire({name: {"count": count} for name, count in counts.items()})


async def test_the_report_is_read_and_its_job_deleted(report: _Report) -> None:
    async with report.running() as task:
        lines = ("time=1 level=info msg=begin", REPORTED_LINE.format(_ODD), REPORTED_LINE.format(_OLD))
        report.end(0, seal(_totals(unreferenced=1, unknown=1, referenced=9), *lines), *lines)
        found = await task
    assert (found.repository, found.snapshots, found.notes) == (NAME, [_OLD, _ODD], [])
    assert found.totals.referenced.count == 9
    assert report.jobs == []
    assert report.notes == []


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


async def test_what_was_not_read_is_noted(report: _Report) -> None:
    async with report.running() as task:
        line = REPORTED_LINE.format(_ODD)
        totals = SnapshotReport(unknown=SnapshotTotal(count=1), unread="403 Forbidden")
        report.end(0, seal(totals, line), line)
        found = await task
    assert found.notes == ["what refers to snapshots could not be read: 403 Forbidden"]


async def test_a_log_that_lacks_snapshots_is_an_error(report: _Report) -> None:
    async with report.running() as task:
        report.end(0, seal(_totals(unknown=1), REPORTED_LINE.format(_ODD)), "time=1 level=info msg=end")
        with pytest.raises(
            JobError, match=r"^Pod velero/\S+ of the report: its log was rotated or cut off: it has 0 of 1 results$"
        ):
            await task


async def test_a_pod_that_does_not_start_is_reported_until_the_timeout_ends_the_command(report: _Report) -> None:
    async with report.running() as task:
        waiting = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}
        report.put_pod(phase="Pending", conditions=[waiting])
        with pytest.raises(JobError, match=r"did not end within 5m0s: Pod velero/.* cannot be scheduled: 0/3 nodes"):
            await task
    assert "cannot be scheduled: 0/3 nodes" in report.shown[-1]
    assert report.jobs == []


async def test_a_pod_that_can_never_start_ends_the_command_at_once(report: _Report) -> None:
    async with report.running() as task:
        waiting = {"waiting": {"reason": "InvalidImageName", "message": "bad"}}
        job = report.jobs[0]["metadata"]["name"]
        status = {"phase": "Pending", "containerStatuses": [{"name": "c", "state": waiting}]}
        spec = {"nodeName": "a"}
        report.scene.put("Pod", f"{job}-x", "v1", labels={"job-name": job}, spec=spec, status=status)
        with pytest.raises(ExposeError, match="InvalidImageName"):
            await task
        assert asyncio.get_running_loop().time() < 60


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


async def test_a_command_that_is_interrupted_while_the_job_is_created_deletes_it(report: _Report) -> None:
    task = asyncio.create_task(report.run(), name="command")
    kube = report.scene.kube
    while not any(request.method == "POST" for request in kube.requests):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert report.jobs == []


async def test_a_job_that_cannot_be_deleted_is_named_with_the_command_that_does(report: _Report) -> None:
    async with report.running() as task:
        name = report.jobs[0]["metadata"]["name"]
        report.end(0, seal(_totals()))
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
async def test_what_a_job_needs_is_read_before_it_is_created(
    report: _Report, part: str, status: int, error: type[AgentError]
) -> None:
    report.scene.kube.fail_next("GET", part, status)
    with pytest.raises(error):
        await report.run()
    assert not any(request.method == "POST" for request in report.scene.kube.requests)

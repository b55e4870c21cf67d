"""The list of a location by command: its Job, its answer, and its deletion."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta

import pytest

from client.mover_jobs import JobError, JobTools
from client.restores.sources import StoredList, list_stored
from core.kube.errors import NotFoundError
from core.kube.resources import JOBS
from core.models.base import JsonDict
from core.snapshot_contract import STORED_LINE, SnapshotListing, UnreadRepository
from tests.client.support.restore_scene import DATA, FILES, RestoreScene, stored
from tests.support.job_output import seal

pytestmark = pytest.mark.looptime


class _Listing:
    """A cluster, and a command that lists a location in it."""

    def __init__(self) -> None:
        self.scene = RestoreScene()

    async def run(self, location: str = "default", *namespaces: str) -> StoredList:
        scene = self.scene
        tools = JobTools(scene.client, scene.clock, "velero", lambda _: None, scene.notes.append)
        return await list_stored(tools, location, volume_namespaces=namespaces, timeout=timedelta(minutes=5))

    @property
    def jobs(self) -> list[JsonDict]:
        return self.scene.kube.objects(JOBS)

    @asynccontextmanager
    async def running(self, *namespaces: str) -> AsyncIterator["asyncio.Task[StoredList]"]:
        """Start the command, and yield once its Job exists."""
        task = asyncio.create_task(self.run("default", *namespaces), name="command")
        try:
            async with asyncio.timeout(30):
                while not self.jobs:
                    await asyncio.sleep(0.1)
            yield task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def end(self, exit_code: int, message: str, *lines: str) -> None:
        """Let the pod of the Job end."""
        job = self.jobs[0]["metadata"]["name"]
        terminated = {"exitCode": exit_code, "message": message, "reason": "Error" if exit_code else "Completed"}
        state = [{"name": "velero-repo-maintenance-container", "state": {"terminated": terminated}}]
        status = {"phase": "Failed" if exit_code else "Succeeded", "containerStatuses": state}
        self.scene.user.put("Pod", f"{job}-x", "v1", labels={"job-name": job}, status=status)
        self.scene.kube.logs["velero", f"{job}-x"] = "".join(f"{line}\n" for line in lines)


async def test_the_snapshots_are_read_in_order_and_the_job_is_deleted() -> None:
    listing = _Listing()
    older, newer = stored(DATA, "s0", start="2026-11-20T10:00:00Z"), stored(DATA, "s1")
    other = stored(FILES, "s2", cluster="uid-0")
    async with listing.running() as task:
        lines = ("time=1 level=info msg=begin", *map(STORED_LINE.format, (older, newer, other)))
        listing.end(0, seal(SnapshotListing(repositories=2, snapshots=3), *lines), *lines)
        found = await task
    assert found == StoredList(location="default", snapshots=[other, newer, older])
    assert listing.jobs == []


async def test_the_job_is_about_the_location_and_the_namespaces() -> None:
    listing = _Listing()
    async with listing.running("app", "db"):
        job = listing.jobs[0]
    spec = job["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert container["args"][:2] == ["list-snapshots", "--backup-storage-location=default"]
    assert container["args"][-2:] == ["--volume-namespace=app", "--volume-namespace=db"]
    assert job["metadata"]["labels"] == {"nodeagent.io/snapshot-list": "default"}
    assert container["resources"]["limits"] == {"memory": "512Mi"}


async def test_what_could_not_be_listed_is_noted() -> None:
    listing = _Listing()
    unread = [UnreadRepository(volume_namespace="db", message="wrong password")]
    async with listing.running() as task:
        line = STORED_LINE.format(stored(DATA))
        totals = SnapshotListing(repositories=1, snapshots=1, unread=unread, unread_count=4)
        listing.end(0, seal(totals, line), line)
        found = await task
    assert found.notes == [
        "the repository of namespace db: wrong password",
        "3 more repositories could not be listed",
    ]


async def test_a_log_that_lacks_snapshots_is_an_error_with_a_remedy() -> None:
    listing = _Listing()
    async with listing.running() as task:
        lines = (STORED_LINE.format(stored(DATA)), STORED_LINE.format(stored(FILES)))
        listing.end(0, seal(SnapshotListing(repositories=2, snapshots=2), *lines), lines[1])
        cut = r"its log was rotated or cut off: it has 1 of 2 results"
        with pytest.raises(
            JobError, match=rf"^Pod velero/\S+ of the list: {cut}: list one namespace at a time \(-n\)$"
        ):
            await task


async def test_a_pod_that_fails_is_an_error_with_its_cause() -> None:
    listing = _Listing()
    async with listing.running() as task:
        listing.end(12, "none of 2 repositories can be listed: wrong password")
        with pytest.raises(JobError, match=r"of the list failed: Error \(exit code 12\): none of 2 repositories"):
            await task
    assert listing.jobs == []


async def test_an_unknown_location_is_an_error_with_the_one_that_may_be_meant() -> None:
    with pytest.raises(NotFoundError, match=r"velero/defalt does not exist \(did you mean default\?\)"):
        await _Listing().run("defalt")

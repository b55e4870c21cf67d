"""The list of a location by command: its Job, its answer, and its deletion."""

import json
from datetime import timedelta

import pytest

from client.mover_jobs import JobError
from client.restores.sources import StoredList, list_location
from client.session import Session
from core.kube.errors import NotFoundError
from core.kube.resources import JOBS, PODS
from core.kube.transport import Request, Response
from core.snapshot_contract import STORED_LINE, SnapshotListing, StoredSnapshot, UnreadRepository
from tests.client.support.files_scene import FilesKube
from tests.client.support.restore_scene import DATA, FILES, RestoreScene, stored
from tests.support.job_output import seal

pytestmark = pytest.mark.looptime


class _Listing:
    """A cluster whose Jobs have ended at once, and a command that lists a location in it."""

    def __init__(self) -> None:
        self.kube = FilesKube()
        self.scene = RestoreScene(make_kube=lambda _: self.kube)

    def end(self, totals: SnapshotListing, *found: StoredSnapshot, lost: int = 0) -> None:
        """Let the Job find these; the log lacks the first ones, which are lost."""
        begin, *lines = "time=1 level=info msg=begin", *map(STORED_LINE.format, found)
        self.kube.end(0, seal(totals, *lines), begin, *lines[lost:])

    async def run(self, location: str = "default", *namespaces: str) -> StoredList:
        scene = self.scene
        tools = Session(scene.client, scene.clock, "velero", scene.notes.append)
        return await list_location(tools, location, volume_namespaces=namespaces, timeout=timedelta(minutes=5))


async def test_the_snapshots_are_read_in_order_and_the_job_is_deleted() -> None:
    listing = _Listing()
    older, newer = stored(DATA, "s0", start="2026-11-20T10:00:00Z"), stored(DATA, "s1")
    other = stored(FILES, "s2", cluster="uid-0")
    listing.end(SnapshotListing(repositories=2, snapshots=3), older, newer, other)
    assert await listing.run() == StoredList(location="default", snapshots=[other, newer, older])
    assert listing.kube.objects(JOBS) == []


async def test_the_job_is_about_the_location_and_the_namespaces() -> None:
    listing = _Listing()
    listing.end(SnapshotListing(repositories=2, snapshots=0))
    await listing.run("default", "app", "db")
    (created,) = (one for one in listing.kube.requests if one.method == "POST")
    job = json.loads(created.body or b"")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["args"][:2] == ["list-snapshots", "--backup-storage-location=default"]
    assert container["args"][-2:] == ["--volume-namespace=app", "--volume-namespace=db"]
    assert job["metadata"]["labels"] == {"nodeagent.io/snapshot-list": "default"}
    assert container["resources"]["limits"] == {"memory": "512Mi"}


async def test_what_could_not_be_listed_is_noted() -> None:
    listing = _Listing()
    unread = [UnreadRepository(volume_namespace="db", message="wrong password")]
    listing.end(SnapshotListing(repositories=1, snapshots=1, unread=unread, unread_count=4), stored(DATA))
    assert (await listing.run()).notes == [
        "the repository of namespace db: wrong password",
        "3 more repositories could not be listed",
    ]


async def test_a_log_that_lacks_snapshots_is_an_error_with_a_remedy() -> None:
    listing = _Listing()
    listing.end(SnapshotListing(repositories=2, snapshots=2), stored(DATA), stored(FILES), lost=1)
    cut = r"its log was rotated or cut off: it has 1 of 2 results"
    with pytest.raises(JobError, match=rf"^Pod velero/\S+ of the list: {cut}: list one namespace at a time \(-n\)$"):
        await listing.run()


async def test_an_unknown_location_is_an_error_with_the_one_that_may_be_meant() -> None:
    with pytest.raises(NotFoundError, match=r"velero/defalt does not exist \(did you mean default\?\)"):
        await _Listing().run("defalt")


async def test_a_job_may_end_while_it_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pod was seen while it ran, and the Job once it had ended."""
    listing = _Listing()
    kube, send = listing.kube, listing.kube.request

    async def request(one: Request) -> Response:
        response = await send(one)
        if one.method == "GET" and one.path.endswith("/pods") and kube.pod["phase"] == "Running":
            listing.end(SnapshotListing(repositories=1, snapshots=1), stored(DATA, "s1"))
            (job,), pods = kube.objects(JOBS), kube.objects(PODS)
            (pod,) = (each for each in pods if each["metadata"]["name"].startswith(job["metadata"]["name"]))
            kube.put(pod | {"status": kube.pod})
            kube.logs["velero", pod["metadata"]["name"]] = kube.log
            kube.put(job | {"status": {"conditions": [{"type": "Complete", "status": "True"}]}})
        return response

    monkeypatch.setattr(kube, "request", request)
    assert [one.id for one in (await listing.run()).snapshots] == ["s1"]

"""Which volumes a restore has: of a backup in the cluster, and of a bucket."""

import json
from datetime import timedelta

import pytest

from client.backups.plan import ClaimName
from client.collections.collection import Backups
from client.collections.models import Backup
from client.mover_jobs import JobError
from client.restores.sources import RestoreError, Source, StoredList, choose_from_backups, choose_stored, list_location
from client.session import Session
from core.kube.errors import NotFoundError
from core.kube.resources import JOBS, PODS
from core.kube.transport import Request, Response
from core.models.backups import SavedClaim
from core.snapshot_contract import STORED_LINE, SnapshotListing, StoredSnapshot, UnreadRepository
from tests.client.support.files_scene import FilesKube
from tests.client.support.restore_scene import DATA, FILES, RestoreScene, saved, stored
from tests.nodeagent.support.hand_clock import HandClock
from tests.support.job_output import seal

_NIGHT = Source("night")


async def _backups(scene: RestoreScene) -> list[Backup]:
    return (await Backups(scene.client, "velero").list_all()).groups


def _scene() -> RestoreScene:
    return RestoreScene(HandClock())


@pytest.mark.parametrize(
    "source",
    [Source("night", claims=(ClaimName("db", "files"),)), Source("night", namespace="db"), Source(snapshot="s2")],
    ids=["claim", "namespace", "snapshot"],
)
async def test_one_volume_of_a_backup_or_all(source: Source) -> None:
    backups = await _backups(_scene())
    assert choose_from_backups(backups, source) == [saved(FILES, "s2")]
    assert choose_from_backups(backups, _NIGHT) == [saved(DATA, "s1"), saved(FILES, "s2")]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (Source("nihgt"), r"there is no backup nihgt in the cluster \(did you mean night\?\)"),
        (Source("zzz"), "there is no backup zzz in the cluster: --from-storage-location"),
        (Source(snapshot="s9"), "no backup in the cluster names snapshot s9"),
        (Source("night", claims=(ClaimName("app", "dta"),)), r"has no PVC app/dta"),
        (Source("night", namespace="zzz"), "backup night has no volume of namespace zzz"),
        (Source(snapshot="s2", claims=(ClaimName("app", "data"),)), "snapshot s2 has no PVC app/data"),
        (Source(snapshot="s2", namespace="app"), "snapshot s2 has no volume of namespace app"),
    ],
)
async def test_what_is_not_there_is_named(source: Source, message: str) -> None:
    with pytest.raises(RestoreError, match=message):
        choose_from_backups(await _backups(_scene()), source)


async def test_a_volume_that_is_not_in_the_backup_is_an_error_unless_others_are_named() -> None:
    scene = _scene()
    scene.put_upload(FILES, "", "Failed", message="no space")
    backups = await _backups(scene)
    with pytest.raises(RestoreError, match="DataUpload night-files of PVC db/files is Failed: no space: name the"):
        choose_from_backups(backups, _NIGHT)
    assert choose_from_backups(backups, Source("night", namespace="app")) == [saved(DATA, "s1")]
    scene.put_upload(FILES, "s2")
    scene.put_upload(DATA, "s1", volumes="3")
    with pytest.raises(RestoreError, match="backup night: 1 of its volumes have no transfer: name the others by --pvc"):
        choose_from_backups(await _backups(scene), _NIGHT)


def _list(*snapshots: object) -> StoredList:
    return StoredList.from_wire({"location": "default", "snapshots": [one.to_wire() for one in snapshots]})  # type: ignore[attr-defined]


def test_the_newest_snapshot_of_each_claim_in_a_bucket() -> None:
    older = stored(DATA, "s0", start="2026-11-21T09:00:00Z")
    others = (stored(FILES, "s2"), stored(DATA, "x", backup="day"))
    found = choose_stored(_list(older, stored(DATA, "s1"), *others), _NIGHT)
    assert [(one.snapshot_id, one.claim) for one in found] == [("s1", DATA), ("s2", FILES)]
    assert {one.location for one in found} == {"default"}
    attempts = [stored(DATA, "s0", transfer_uid="t", **_EARLIER), stored(DATA, "s1", transfer_uid="t")]
    assert [one.snapshot_id for one in choose_stored(_list(*attempts), _NIGHT)] == ["s1"]


def test_a_backup_of_which_a_volume_is_not_in_the_bucket_is_an_error_unless_some_are_chosen() -> None:
    found = _list(stored(DATA, "s1", backup_volumes=2))
    with pytest.raises(RestoreError, match="backup night: 1 of its volumes are not in BackupStorageLocation default"):
        choose_stored(found, _NIGHT)
    for source in (Source("night", namespace="app"), Source(snapshot="s1")):
        assert [one.snapshot_id for one in choose_stored(found, source)] == ["s1"]


_EARLIER = {"start": "2026-11-20T10:00:00Z"}


@pytest.mark.parametrize(
    ("snapshots", "cause"),
    [
        (
            [stored(DATA, "s0", transfer_uid="t0", **_EARLIER), stored(DATA, "s1", transfer_uid="t1")],
            "different transfers made the snapshots s0 of 2026-11-20T10:00:00Z and s1 of 2026-11-21T10:00:00Z of PVC",
        ),
        (
            [stored(DATA, "s0", backup_volumes=1, **_EARLIER), stored(FILES, "s1", backup_volumes=2)],
            "there are s0 of 2026-11-20T10:00:00Z of 1 volumes and s1 of 2026-11-21T10:00:00Z of 2 volumes",
        ),
        (
            [stored(DATA, "s0", backup_volumes=1, **_EARLIER), stored(FILES, "s1", backup_volumes=1)],
            "2 PVCs instead of 1 have one, from s0 of 2026-11-20T10:00:00Z to s1 of 2026-11-21T10:00:00Z",
        ),
    ],
    ids=["two transfers of one claim", "two numbers of volumes", "more claims than volumes"],
)
def test_a_name_that_several_backups_had_is_refused(snapshots: list[StoredSnapshot], cause: str) -> None:
    with pytest.raises(
        RestoreError, match=f"several backups of that name: {cause}.*: choose each volume by --from-snap"
    ):
        choose_stored(_list(*snapshots), _NIGHT)
    (found,) = choose_stored(_list(*snapshots), Source(snapshot="s0"))
    assert (found.snapshot_id, found.claim) == ("s0", DATA)


def test_a_claim_of_another_namespace_than_the_repository_s_is_refused() -> None:
    strange = stored(DATA, "s9", volume_namespace="tenant-b", start="2026-11-22T10:00:00Z")
    for source in (_NIGHT, Source(snapshot="s9")):
        with pytest.raises(RestoreError, match=r"snapshot s9 in .* names no PVC of tenant-b, the namespace"):
            choose_stored(_list(stored(DATA, "s1"), strange), source)
    named = Source("night", claims=(ClaimName("app", "data"),))
    assert [one.snapshot_id for one in choose_stored(_list(stored(DATA, "s1"), strange), named)] == ["s1"]
    with pytest.raises(RestoreError, match="backup night has no PVC app/data"):
        choose_stored(_list(strange), named)
    with pytest.raises(RestoreError, match=r"snapshot s5 in .* default names no PVC of app, .*: its source is"):
        choose_stored(_list(stored(None, "s5")), Source(snapshot="s5"))


def test_a_backup_of_velero_is_named_by_its_uid() -> None:
    names = SavedClaim(namespace="app", name="web")
    velero = stored(names, "s7", backup=None, backup_uid="6bc33b7d", cluster=None)
    (found,) = choose_stored(_list(velero, stored(DATA)), Source("6bc33b7d"))
    assert (found.snapshot_id, found.claim) == ("s7", names)


def test_backups_of_several_clusters_with_one_name_are_told_apart() -> None:
    both = _list(stored(DATA, "s1"), stored(DATA, "s2", cluster="uid-2"))
    with pytest.raises(RestoreError, match="of several clusters: choose one by --cluster: uid-1, uid-2"):
        choose_stored(both, _NIGHT)
    (found,) = choose_stored(both, Source("night", cluster="uid-2"))
    assert found.snapshot_id == "s2"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (Source("nihgt"), r"there is no backup nihgt in BackupStorageLocation default \(did you mean night\?\)"),
        (Source(snapshot="s9"), "there is no snapshot s9 in BackupStorageLocation default"),
        (Source("night", cluster="uid-9"), "there is no backup night"),
        (Source("night", claims=(ClaimName("app", "dat"),)), r"has no PVC app/dat \(did you mean app/data\?\)"),
    ],
)
def test_what_is_not_in_the_bucket_is_named(source: Source, message: str) -> None:
    with pytest.raises(RestoreError, match=message):
        choose_stored(_list(stored(DATA, "s1")), source)


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


@pytest.mark.looptime
async def test_the_snapshots_are_read_in_order_and_the_job_is_deleted() -> None:
    listing = _Listing()
    older, newer = stored(DATA, "s0", start="2026-11-20T10:00:00Z"), stored(DATA, "s1")
    other = stored(FILES, "s2", cluster="uid-0")
    listing.end(SnapshotListing(), older, newer, other)
    found = StoredList(location="default", snapshots=[other, newer, older])
    assert await listing.run("default", "app", "db") == found
    assert listing.kube.objects(JOBS) == []
    (created,) = (one for one in listing.kube.requests if one.method == "POST")
    job = json.loads(created.body or b"")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["args"][:2] == ["list-snapshots", "--backup-storage-location=default"]
    assert container["args"][-2:] == ["--volume-namespace=app", "--volume-namespace=db"]
    assert job["metadata"]["labels"] == {"nodeagent.io/snapshot-list": "default"}
    assert container["resources"]["limits"] == {"memory": "512Mi"}
    with pytest.raises(NotFoundError, match=r"velero/defalt does not exist \(did you mean default\?\)"):
        await listing.run("defalt")


@pytest.mark.looptime
async def test_what_could_not_be_listed_is_noted() -> None:
    listing = _Listing()
    unread = [UnreadRepository(volume_namespace="db", message="wrong password")]
    listing.end(SnapshotListing(unread=unread, unread_count=4), stored(DATA))
    assert (await listing.run()).notes == [
        "the repository of namespace db: wrong password",
        "3 more repositories could not be listed",
    ]


@pytest.mark.looptime
async def test_a_log_that_lacks_snapshots_is_an_error_with_a_remedy() -> None:
    listing = _Listing()
    listing.end(SnapshotListing(), stored(DATA), stored(FILES), lost=1)
    cut = r"its log was rotated or cut off: it has 1 of 2 results"
    with pytest.raises(JobError, match=rf"^Pod velero/\S+ of the list: {cut}: list one namespace at a time \(-n\)$"):
        await listing.run()


@pytest.mark.looptime
async def test_a_job_may_end_while_it_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pod was seen while it ran, and the Job once it had ended."""
    listing = _Listing()
    kube, send = listing.kube, listing.kube.request

    async def request(one: Request) -> Response:
        response = await send(one)
        if one.method == "GET" and one.path.endswith("/pods") and kube.pod["phase"] == "Running":
            listing.end(SnapshotListing(), stored(DATA, "s1"))
            (job,), pods = kube.objects(JOBS), kube.objects(PODS)
            (pod,) = (each for each in pods if each["metadata"]["name"].startswith(job["metadata"]["name"]))
            kube.put(pod | {"status": kube.pod})
            kube.logs["velero", pod["metadata"]["name"]] = kube.log
            kube.put(job | {"status": {"conditions": [{"type": "Complete", "status": "True"}]}})
        return response

    monkeypatch.setattr(kube, "request", request)
    assert [one.id for one in (await listing.run()).snapshots] == ["s1"]

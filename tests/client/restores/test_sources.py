"""Which volumes a restore has: of a backup in the cluster, and of a bucket."""

import pytest

from client.backups.plan import ClaimName
from client.collections.collection import Backups
from client.collections.models import Backup
from client.restores.sources import RestoreError, Source, StoredList, choose_from_backups, choose_stored
from core.models.backups import SavedClaim
from core.snapshot_contract import StoredSnapshot
from tests.client.support.restore_scene import DATA, FILES, RestoreScene, saved, stored
from tests.nodeagent.support.hand_clock import HandClock

_NIGHT = Source("night")


async def _backups(scene: RestoreScene) -> list[Backup]:
    return (await Backups(scene.client, "velero").list_all()).groups


def _scene() -> RestoreScene:
    return RestoreScene(HandClock())


async def test_all_volumes_of_a_backup() -> None:
    found = choose_from_backups(await _backups(_scene()), _NIGHT)
    assert found == [saved(DATA, "s1"), saved(FILES, "s2")]


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(Source("night", claims=(ClaimName("db", "files"),)), id="claim"),
        pytest.param(Source("night", namespace="db"), id="namespace"),
        pytest.param(Source(snapshot="s2"), id="snapshot"),
    ],
)
async def test_one_volume_of_a_backup(source: Source) -> None:
    assert choose_from_backups(await _backups(_scene()), source) == [saved(FILES, "s2")]


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


async def test_a_backup_without_all_its_transfers_is_an_error() -> None:
    scene = _scene()
    scene.put_upload(DATA, "s1", volumes="3")
    with pytest.raises(RestoreError, match="backup night: 1 of its volumes have no transfer: name the others by --pvc"):
        choose_from_backups(await _backups(scene), _NIGHT)


def _list(*snapshots: object) -> StoredList:
    return StoredList.from_wire({"location": "default", "snapshots": [one.to_wire() for one in snapshots]})  # type: ignore[attr-defined]


def test_the_newest_snapshot_of_each_claim_in_a_bucket() -> None:
    older = stored(DATA, "s0", start="2026-11-21T09:00:00Z")
    found = choose_stored(
        _list(older, stored(DATA, "s1"), stored(FILES, "s2"), stored(DATA, "x", backup="day")), _NIGHT
    )
    assert [(one.snapshot_id, one.claim) for one in found] == [("s1", DATA), ("s2", FILES)]
    assert {one.location for one in found} == {"default"}


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
        pytest.param(
            [stored(DATA, "s0", transfer_uid="t0", **_EARLIER), stored(DATA, "s1", transfer_uid="t1")],
            "different transfers made the snapshots s0 of 2026-11-20T10:00:00Z and s1 of 2026-11-21T10:00:00Z of "
            "PVC app/data",
            id="two transfers of one claim",
        ),
        pytest.param(
            [stored(DATA, "s0", backup_volumes=1, **_EARLIER), stored(FILES, "s1", backup_volumes=2)],
            "there are s0 of 2026-11-20T10:00:00Z of 1 volumes and s1 of 2026-11-21T10:00:00Z of 2 volumes",
            id="two numbers of volumes",
        ),
        pytest.param(
            [stored(DATA, "s0", backup_volumes=1, **_EARLIER), stored(FILES, "s1", backup_volumes=1)],
            "2 PVCs instead of 1 have one, from s0 of 2026-11-20T10:00:00Z to s1 of 2026-11-21T10:00:00Z",
            id="more claims than volumes",
        ),
    ],
)
def test_a_name_that_several_backups_had_is_refused(snapshots: list[StoredSnapshot], cause: str) -> None:
    with pytest.raises(RestoreError, match=f"several backups of that name: {cause}: choose each volume by --from-snap"):
        choose_stored(_list(*snapshots), _NIGHT)
    (found,) = choose_stored(_list(*snapshots), Source(snapshot="s0"))
    assert (found.snapshot_id, found.claim) == ("s0", DATA)


def test_the_newest_attempt_of_a_transfer_counts() -> None:
    attempts = [stored(DATA, "s0", transfer_uid="t", **_EARLIER), stored(DATA, "s1", transfer_uid="t")]
    assert [one.snapshot_id for one in choose_stored(_list(*attempts), _NIGHT)] == ["s1"]


def test_a_claim_of_another_namespace_than_the_repository_s_is_refused() -> None:
    strange = stored(DATA, "s9", volume_namespace="tenant-b", start="2026-11-22T10:00:00Z")
    for source in (_NIGHT, Source(snapshot="s9")):
        with pytest.raises(RestoreError, match=r"snapshot s9 in .* names no PVC of tenant-b, the namespace"):
            choose_stored(_list(stored(DATA, "s1"), strange), source)
    named = Source("night", claims=(ClaimName("app", "data"),))
    assert [one.snapshot_id for one in choose_stored(_list(stored(DATA, "s1"), strange), named)] == ["s1"]
    with pytest.raises(RestoreError, match="backup night has no PVC app/data"):
        choose_stored(_list(strange), named)


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


def test_a_snapshot_of_something_else_is_not_restored() -> None:
    with pytest.raises(RestoreError, match=r"snapshot s5 in .* default names no PVC of app, .*: its source is"):
        choose_stored(_list(stored(None, "s5")), Source(snapshot="s5"))

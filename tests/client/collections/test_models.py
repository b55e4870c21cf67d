"""Backups and restores as the transfers of one name show them."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from client.backups.files import find_place
from client.backups.plan import ClaimName
from client.collections.collection import Backups, Found
from client.collections.models import Backup, BackupOrigin, BackupPhase, build_restore, explain_end
from client.restores.sources import RestoreError, Source, choose_from_backups
from client.verifications.report import choose_volumes
from core.kube.resources import DATA_UPLOADS, POD_VOLUME_BACKUPS, Resource
from core.kube.types import UncheckedObject
from core.models.backups import SavedClaim
from core.models.transfers import DataDownload
from tests.client.support.backup_scene import BackupScene
from tests.support.objects import JsonDict

_CREATED = "2026-11-21T10:00:00Z"


def _upload(
    claim: str, phase: str = "", *, volumes: str = "2", ttl: str = "", **more: Any
) -> tuple[Resource[UncheckedObject], JsonDict]:
    marks = {"nodeagent.io/backup": "night", "nodeagent.io/backup-volumes": volumes}
    marks |= {"nodeagent.io/backup-ttl": ttl} if ttl else {}
    marks["nodeagent.io/claim"] = SavedClaim(namespace="app", name=claim, size="1Gi").text
    meta = {"name": f"night-{claim}", "namespace": "velero", "creationTimestamp": _CREATED, "annotations": marks}
    meta["labels"] = {"nodeagent.io/backup": "night"}
    spec = {"snapshotType": "CSI", "sourceNamespace": "app", "sourcePVC": claim, "backupStorageLocation": "default"}
    spec |= more.pop("spec", {})
    status = {"progress": {"totalBytes": 100, "bytesDone": 40}, **more} | ({"phase": phase} if phase else {})
    raw = {"apiVersion": "velero.io/v2alpha1", "kind": "DataUpload", "metadata": meta, "spec": spec, "status": status}
    return DATA_UPLOADS, raw


def _of_velero(volume: str, **annotations: str) -> tuple[Resource[UncheckedObject], JsonDict]:
    meta = {"name": "v-1", "namespace": "velero", "labels": {"velero.io/backup-name": "night"}}
    pod = {"kind": "Pod", "namespace": "app", "name": "writer", "uid": "u"}
    spec = {"node": "node-a", "pod": pod, "volume": volume, "backupStorageLocation": "default", "uploaderType": "kopia"}
    raw = {"apiVersion": "velero.io/v1", "kind": "PodVolumeBackup", "spec": spec, "status": {"phase": "Completed"}}
    return POD_VOLUME_BACKUPS, raw | {"metadata": meta | {"annotations": annotations}}


def _unreadable(listed: tuple[Resource[UncheckedObject], JsonDict], name: str) -> tuple[Any, JsonDict]:
    resource, raw = listed
    return resource, raw | {"metadata": raw["metadata"] | {"name": name}, "status": {"startTimestamp": "yesterday"}}


def _gather(*listed: tuple[Resource[UncheckedObject], JsonDict]) -> Found[Backup]:
    return Backups(BackupScene().client, "velero").gather(listed)


def _one(*listed: tuple[Resource[UncheckedObject], JsonDict]) -> Backup:
    (backup,) = _gather(*listed).groups
    return backup


@pytest.mark.parametrize(
    ("phases", "phase"),
    [
        pytest.param(["", ""], BackupPhase.NEW, id="new"),
        pytest.param(["Prepared", "Accepted"], BackupPhase.NEW, id="exposed"),
        pytest.param(["InProgress", ""], BackupPhase.IN_PROGRESS, id="one moves"),
        pytest.param(["Completed", ""], BackupPhase.IN_PROGRESS, id="one waits"),
        pytest.param(["Completed", "Completed"], BackupPhase.COMPLETED, id="completed"),
        pytest.param(["Completed", "Failed"], BackupPhase.PARTIALLY_FAILED, id="one failed"),
        pytest.param(["Completed", "Canceled"], BackupPhase.PARTIALLY_FAILED, id="one canceled"),
        pytest.param(["Failed", "Failed"], BackupPhase.FAILED, id="failed"),
        pytest.param(["Failed", "Canceled"], BackupPhase.FAILED, id="failed and canceled"),
        pytest.param(["Canceled", "Canceled"], BackupPhase.CANCELED, id="canceled"),
        pytest.param(["Completed"], BackupPhase.INCOMPLETE, id="a transfer is missing"),
        pytest.param(["InProgress"], BackupPhase.IN_PROGRESS, id="missing, and one moves"),
    ],
)
def test_the_phase_follows_from_those_of_the_transfers(phases: list[str], phase: BackupPhase) -> None:
    backup = _one(*(_upload(f"c{index}", each) for index, each in enumerate(phases)))
    assert backup.phase is phase
    assert backup.missing == 2 - len(phases)
    assert backup.counted == f"{phases.count('Completed')}/2"


def test_a_cancel_request_shows_until_all_have_ended() -> None:
    canceled: dict[str, Any] = {"spec": {"cancel": True}}
    assert _one(_upload("a", "InProgress", **canceled), _upload("b", "Completed")).phase is BackupPhase.CANCELING
    ended = _one(_upload("a", "Canceled", **canceled), _upload("b", "Canceled", **canceled))
    assert ended.phase is BackupPhase.CANCELED


def test_sizes_and_times_are_those_of_all_volumes() -> None:
    ends = {"completionTimestamp": "2026-11-21T11:00:00Z"}, {"completionTimestamp": "2026-11-21T12:00:00Z"}
    backup = _one(_upload("a", "Completed", ttl="24h0m0s", **ends[1]), _upload("b", "Completed", **ends[0]))
    created = datetime(2026, 11, 21, 10, tzinfo=UTC)
    assert (backup.bytes_done, backup.total_bytes) == (80, 200)
    assert (backup.created, backup.completed) == (created, created + timedelta(hours=2))
    assert backup.expires == created + timedelta(hours=24)


@pytest.mark.parametrize(("volumes", "ttl"), [("", ""), ("many", "long"), ("-1", "2562047h47m0s")])
def test_a_count_or_a_time_to_live_that_is_none_is_not_known(volumes: str, ttl: str) -> None:
    backup = _one(_upload("a", "Completed", volumes=volumes, ttl=ttl))
    assert backup.expires is None or backup.expires.year > 2300
    assert (backup.expected, backup.missing, backup.phase) == (None, 0, BackupPhase.COMPLETED)


@pytest.mark.parametrize(
    ("annotations", "claim"), [({"velero.io/pvc-name": "data"}, "data"), ({}, "writer:vol")], ids=["PVC", "no PVC"]
)
def test_backups_of_velero_are_shown_by_its_label(annotations: dict[str, str], claim: str) -> None:
    backup = _one(_of_velero("vol", **annotations))
    assert (backup.origin, backup.name, backup.expected, backup.counted) == (BackupOrigin.VELERO, "night", None, "1/1")
    assert (backup.volumes[0].namespace, backup.volumes[0].claim) == ("app", claim)


def test_a_transfer_of_no_backup_is_left_out_and_an_unreadable_one_is_noted() -> None:
    resource, stray = _upload("a")
    stray["metadata"]["annotations"].pop("nodeagent.io/backup")
    _, broken = _upload("b")
    broken["status"] = {"startTimestamp": "yesterday"}
    found = _gather((resource, stray), (resource, broken))
    assert found.groups == []
    assert [note.partition(":")[0] for note in found.notes] == ["invalid DataUpload velero/night-b"]


@pytest.mark.parametrize("listed", [_upload("a", "Completed"), _of_velero("vol")], ids=["of nodeagent", "of Velero"])
def test_a_backup_with_an_unreadable_transfer_is_incomplete(listed: tuple[Any, JsonDict]) -> None:
    found = _gather(listed, _unreadable(listed, "odd"))
    (backup,) = found.groups
    assert (backup.phase, backup.counted, backup.missing) == (BackupPhase.INCOMPLETE, "1/2", 0)
    assert explain_end(backup) == "1 transfers cannot be read"
    assert len(found.notes) == 1
    with pytest.raises(RestoreError, match="night: 1 of its transfers cannot be read: name the others by --pvc"):
        choose_from_backups(found.groups, Source("night"))


def test_of_several_transfers_of_a_pvc_the_newest_counts() -> None:
    """Names do not say which one that is."""
    older, newer = _upload("a", "Completed", snapshotID="s1"), _upload("a", "Completed", snapshotID="s2")
    older[1]["metadata"]["name"] = "night-z"
    newer[1]["metadata"]["creationTimestamp"] = "2026-11-21T11:00:00Z"
    backup = _one(newer, older)
    assert [one.snapshot_id for one in choose_from_backups([backup], Source("night"))] == ["s2"]
    assert find_place(backup, "a/x").volume.snapshot_id == "s2"
    for claims in ([ClaimName("app", "a")], []):
        assert [one.snapshot_id for one in choose_volumes(backup, claims)[0]] == ["s2"]


def test_a_restore_is_the_sum_of_its_transfers() -> None:
    def download(claim: str, phase: str, total: int, done: int) -> DataDownload:
        spec = {"targetVolume": {"pvc": claim, "namespace": "app"}, "snapshotID": "s", "sourceNamespace": "app"}
        spec |= {"backupStorageLocation": "default", "operationTimeout": "10m0s"}
        status = {"phase": phase, "progress": {"totalBytes": total, "bytesDone": done}}
        meta = {"name": f"back-{claim}", "namespace": "velero", "annotations": {"nodeagent.io/restore-volumes": "3"}}
        raw = {"apiVersion": "velero.io/v2alpha1", "kind": "DataDownload", "metadata": meta, "spec": spec}
        return DataDownload.parse(raw | {"status": status})

    moving = build_restore("back", [download("files", "InProgress", 3, 1), download("data", "Completed", 7, 7)])
    assert (moving.phase, moving.counted, moving.missing) == (BackupPhase.IN_PROGRESS, "1/3", 1)
    assert (moving.bytes_done, moving.total_bytes) == (8, 10)
    assert [f"{one.namespace}/{one.claim}" for one in moving.volumes] == ["app/data", "app/files"]
    ended = build_restore("back", [download("files", "Completed", 3, 3), download("data", "Completed", 7, 7)])
    assert (ended.phase, ended.counted) == (BackupPhase.INCOMPLETE, "2/3")
    assert explain_end(ended) == "1 of 3 volumes have no transfer: it was deleted"

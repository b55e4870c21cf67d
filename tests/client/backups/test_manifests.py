"""The objects of a backup: what a DataUpload and a PodVolumeBackup of ours have."""

from dataclasses import replace
from datetime import timedelta

import pytest

from client.backups.manifests import (
    BackupRequest,
    DataMover,
    Method,
    MountingPod,
    PlannedVolume,
    SnapshotWay,
    transfer_name,
)
from core.contract import MoverVerb
from core.models.backups import SavedClaim
from core.models.names import SNAPSHOT_REQUESTERS
from core.models.transfers import DataUpload, PodVolumeBackup
from datamover.kinds import BackupPlan, parse_settings, plan_of
from tests.support.golden import assert_golden

_CLAIM = SavedClaim(namespace="app", name="data", size="1Gi", storage_class="fast", labels={"a": "b"})
_REQUEST = BackupRequest(
    "night", "velero", "default", ttl=timedelta(hours=720), labels={"team": "a"}, annotations={"why": "upgrade"}
)
_BY_SNAPSHOT = PlannedVolume(_REQUEST, _CLAIM, SnapshotWay("snap", "csi.example.com"), volumes=2)
_BY_POD = PlannedVolume(_REQUEST, _CLAIM, MountingPod("writer", "uid-1", "node-a", "vol"), volumes=2)


@pytest.mark.parametrize(
    ("volume", "method"),
    [(_BY_SNAPSHOT, Method.CSI_SNAPSHOT), (_BY_POD, Method.FS_BACKUP)],
    ids=lambda one: str(one)[:9],
)
def test_a_transfer_is_its_golden_manifest(volume: PlannedVolume, method: Method) -> None:
    assert volume.method is method
    assert_golden(f"backup-transfer-{method}", volume.build_transfer())


@pytest.mark.parametrize(
    ("data_mover", "named"), [(DataMover.BLOCK, "velero-block"), (DataMover.FS, "velero-fs"), (None, None)]
)
def test_the_data_mover_is_left_to_the_agents_unless_it_is_named(
    data_mover: DataMover | None, named: str | None
) -> None:
    assert replace(_BY_SNAPSHOT, data_mover=data_mover).build_transfer()["spec"].get("datamover") == named


def test_a_snapshot_of_the_claim_has_the_name_of_the_transfer() -> None:
    assert _BY_SNAPSHOT.build_snapshot() == {
        "apiVersion": "snapshot.storage.k8s.io/v1",
        "kind": "VolumeSnapshot",
        "metadata": {"name": _BY_SNAPSHOT.name, "namespace": "app", "labels": {"nodeagent.io/backup": "night"}},
        "spec": {"volumeSnapshotClassName": "snap", "source": {"persistentVolumeClaimName": "data"}},
    }
    assert _BY_POD.build_snapshot() is None


def test_a_backup_without_ttl_says_nothing_about_its_end() -> None:
    volume = PlannedVolume(BackupRequest("night", "velero", "default"), _CLAIM, _BY_POD.way, volumes=1)
    assert "nodeagent.io/backup-ttl" not in volume.build_transfer()["metadata"]["annotations"]


@pytest.mark.parametrize(
    ("volume", "model"), [(_BY_SNAPSHOT, DataUpload), (_BY_POD, PodVolumeBackup)], ids=["du", "pvb"]
)
def test_the_data_mover_reads_what_is_written(
    volume: PlannedVolume, model: type[DataUpload] | type[PodVolumeBackup]
) -> None:
    transfer = model.parse(volume.build_transfer())
    plan = plan_of(transfer)
    assert isinstance(plan, BackupPlan)
    assert not parse_settings(transfer.settings, MoverVerb.BACKUP).read_all_files
    assert plan.source.split("/")[0] in SNAPSHOT_REQUESTERS
    assert plan.source.endswith("/data")
    assert plan.tags["nodeagent.io/backup"] == "night"
    assert SavedClaim.from_json(plan.tags["nodeagent.io/claim"]) == _CLAIM
    request = replace(_REQUEST, read_all_files=True)
    transfer = model.parse(replace(volume, request=request).build_transfer())
    assert parse_settings(transfer.settings, MoverVerb.BACKUP).read_all_files


def test_names_of_transfers_are_valid_distinct_and_the_same_each_time() -> None:
    long = "x" * 53 + ".y"
    names = [
        transfer_name(*words)
        for words in [("a", "b", "c"), ("a", "b", "d"), ("a", "bc", "c"), (long, "b", "c"), (long + "z", "b", "c")]
    ]
    assert names[0] == transfer_name("a", "b", "c") == "a-d76a7b72"
    assert len(set(names)) == len(names)
    assert [len(name) for name in names[3:]] == [62, 62]
    assert ".-" not in "".join(names)

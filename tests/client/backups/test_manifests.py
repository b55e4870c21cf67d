"""The objects of a backup, and how a PVC is backed up, over every kind of cluster."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from client.backups.manifests import (
    BackupError,
    BackupRequest,
    ClusterClasses,
    DataMover,
    Method,
    MountingPod,
    PlannedVolume,
    SnapshotWay,
    choose_method,
    needs_pods,
    transfer_name,
)
from core.contract import MoverVerb
from core.models.backups import SavedClaim
from core.models.names import SNAPSHOT_REQUESTERS
from core.models.transfers import DataUpload, PodVolumeBackup
from datamover.kinds import BackupPlan, parse_settings, plan_of
from tests.support.golden import assert_golden
from tests.support.objects import JsonDict

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
    kept = replace(volume, request=BackupRequest("night", "velero", "default"))
    assert "nodeagent.io/backup-ttl" not in kept.build_transfer()["metadata"]["annotations"]


def test_the_data_mover_is_left_to_the_agents_unless_it_is_named() -> None:
    for data_mover, named in ((DataMover.BLOCK, "velero-block"), (DataMover.FS, "velero-fs"), (None, None)):
        assert replace(_BY_SNAPSHOT, data_mover=data_mover).build_transfer()["spec"].get("datamover") == named


def test_a_snapshot_of_the_claim_has_the_name_of_the_transfer() -> None:
    assert _BY_SNAPSHOT.build_snapshot() == {
        "apiVersion": "snapshot.storage.k8s.io/v1",
        "kind": "VolumeSnapshot",
        "metadata": {"name": _BY_SNAPSHOT.name, "namespace": "app", "labels": {"nodeagent.io/backup": "night"}},
        "spec": {"volumeSnapshotClassName": "snap", "source": {"persistentVolumeClaimName": "data"}},
    }
    assert _BY_POD.build_snapshot() is None


@pytest.mark.parametrize(
    ("volume", "model"), [(_BY_SNAPSHOT, DataUpload), (_BY_POD, PodVolumeBackup)], ids=["du", "pvb"]
)
def test_the_data_mover_reads_it(volume: PlannedVolume, model: type[DataUpload] | type[PodVolumeBackup]) -> None:
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
    given = [("a", "b", "c"), ("a", "b", "d"), ("a", "bc", "c"), (long, "b", "c"), (long + "z", "b", "c")]
    names = [transfer_name(*words) for words in given]
    assert names[0] == transfer_name("a", "b", "c") == "a-d76a7b72"
    assert len(set(names)) == len(names)
    assert [len(name) for name in names[3:]] == [62, 62]
    assert ".-" not in "".join(names)


_DRIVER = "csi.example.com"
_LABEL: dict[str, Any] = {"labels": {"velero.io/csi-volumesnapshot-class": "true"}}
_DEFAULT: dict[str, Any] = {"annotations": {"snapshot.storage.kubernetes.io/is-default-class": "true"}}


def _claim(phase: str = "Bound", storage_class: str = "fast", mode: str = "Filesystem", **meta: Any) -> JsonDict:
    spec = {"storageClassName": storage_class, "volumeMode": mode}
    return {"metadata": {"namespace": "app", "name": "data", **meta}, "spec": spec, "status": {"phase": phase}}


def _snapshot_class(name: str, driver: str = _DRIVER, **meta: Any) -> JsonDict:
    return {"metadata": {"name": name, **meta}, "driver": driver}


def _classes(*found: JsonDict, unread: str | None = None) -> ClusterClasses:
    return ClusterClasses({"fast": _DRIVER, "plain": "none"}, found, unread)


def _pod(
    name: str = "writer", phase: str = "Running", *, mounted: str = "containers", own: bool = False, **meta: Any
) -> JsonDict:
    """Return a pod that mounts the volume, which is its `own`, in the containers of that list of its spec."""
    source: JsonDict = (
        {"ephemeral": {"volumeClaimTemplate": {}}} if own else {"persistentVolumeClaim": {"claimName": "data"}}
    )
    spec = {"nodeName": "node-a", "containers": [{"name": "c"}]}
    spec |= {mounted: [{"name": "d", "volumeMounts": [{"name": "vol", "mountPath": "/data"}]}]}
    spec["volumes"] = [{"name": "vol", **source}, {"name": "x", "emptyDir": {}}]
    return {"metadata": {"name": name, "uid": f"uid-{name}", **meta}, "spec": spec, "status": {"phase": phase}}


_DEBUGGER = "ephemeralContainers"
_SNAPSHOT = SnapshotWay("a", _DRIVER)
_POD = MountingPod("writer", "uid-writer", "node-a", "vol")
_WITH, _WITHOUT = _classes(_snapshot_class("a")), _classes()
_PROVISIONED: dict[str, Any] = {"annotations": {"volume.kubernetes.io/storage-provisioner": _DRIVER}}
"""As a plugin that was migrated to CSI says its driver."""


@pytest.mark.parametrize(
    ("found", "chosen"),
    [
        pytest.param([_snapshot_class("a")], "a", id="the only one"),
        pytest.param([_snapshot_class("b", "other"), _snapshot_class("a")], "a", id="the one of the driver"),
        pytest.param([_snapshot_class("a", **_DEFAULT), _snapshot_class("b")], "a", id="the default one"),
        pytest.param([_snapshot_class("a", **_DEFAULT), _snapshot_class("b", **_LABEL)], "b", id="Velero's label"),
    ],
)
def test_the_snapshot_class_is_that_of_the_driver(found: list[JsonDict], chosen: str) -> None:
    assert choose_method(_claim(), Method.CSI_SNAPSHOT, _classes(*found), ()) == SnapshotWay(chosen, _DRIVER)


@pytest.mark.parametrize(
    ("claim", "method", "classes", "pods", "way"),
    [
        pytest.param(_claim(), Method.AUTO, _WITH, [_pod()], _SNAPSHOT, id="auto prefers a snapshot"),
        pytest.param(_claim(), Method.AUTO, _WITHOUT, [_pod()], _POD, id="auto without a class"),
        pytest.param(_claim(), Method.FS_BACKUP, _WITH, [_pod()], _POD, id="fs-backup"),
        pytest.param(_claim(), Method.FS_BACKUP, _WITHOUT, [_pod("zero"), _pod()], _POD, id="the first pod by name"),
        pytest.param(_claim(), Method.FS_BACKUP, _WITHOUT, [_pod(mounted="initContainers")], _POD, id="a sidecar's"),
        pytest.param(_claim(), Method.FS_BACKUP, _WITHOUT, [_pod(mounted=_DEBUGGER)], _POD, id="a debugger's"),
        pytest.param(_claim(storage_class="plain", **_PROVISIONED), Method.AUTO, _WITH, [], _SNAPSHOT, id="migrated"),
        pytest.param(_claim(storage_class="", **_PROVISIONED), Method.AUTO, _WITH, [_pod()], _POD, id="of no class"),
        pytest.param(_claim(name="writer-vol"), Method.AUTO, _WITHOUT, [_pod(own=True)], _POD, id="ephemeral"),
    ],
)
def test_the_method_follows_from_the_cluster(
    claim: JsonDict, method: Method, classes: ClusterClasses, pods: list[JsonDict], way: SnapshotWay | MountingPod
) -> None:
    assert choose_method(claim, method, classes, pods) == way
    assert needs_pods(claim, method, classes) is isinstance(way, MountingPod)


_SEVERAL = _classes(_snapshot_class("b"), _snapshot_class("a"))
_MARK_ONE = "label one VolumeSnapshotClass of driver csi.example.com velero.io/csi-volumesnapshot-class=true: a, b"
_NO_DRIVER = "its storage class does not say which driver its volume has"
_NO_CLASS = "no CSI snapshot: no VolumeSnapshotClass has its driver csi.example.com"
_DEVICE = "no backup of files: its volume is a block device"
_NO_POD = "no backup of files: no Running pod mounts it"


@pytest.mark.parametrize(
    ("claim", "method", "classes", "pods", "cause"),
    [
        (_claim("Pending"), Method.AUTO, _WITHOUT, [], "it has no volume yet: it is Pending"),
        (_claim(deletionTimestamp="x"), Method.AUTO, _WITHOUT, [], "it is being deleted"),
        (_claim(), Method.AUTO, _WITHOUT, [], f"{_NO_CLASS}; {_NO_POD}"),
        (_claim(), Method.CSI_SNAPSHOT, _WITHOUT, [_pod()], _NO_CLASS),
        (_claim(), Method.FS_BACKUP, _WITHOUT, [_pod(phase="Pending")], _NO_POD),
        (_claim(), Method.FS_BACKUP, _WITHOUT, [_pod(mounted="none")], _NO_POD),
        (_claim(), Method.FS_BACKUP, _WITHOUT, [_pod(deletionTimestamp="x")], _NO_POD),
        (_claim(mode="Block"), Method.FS_BACKUP, _WITHOUT, [_pod()], _DEVICE),
        (_claim(storage_class="other"), Method.CSI_SNAPSHOT, _WITHOUT, [], f"no CSI snapshot: {_NO_DRIVER}"),
        (_claim(storage_class=""), Method.CSI_SNAPSHOT, _WITH, [], "no CSI snapshot: it names no storage class"),
        (_claim(), Method.CSI_SNAPSHOT, _classes(unread="no right"), [], "no CSI snapshot: no right"),
        (_claim(), Method.CSI_SNAPSHOT, _SEVERAL, [], f"no CSI snapshot: {_MARK_ONE}"),
    ],
)
def test_a_claim_that_cannot_be_backed_up_is_named_with_each_cause(
    claim: JsonDict, method: Method, classes: ClusterClasses, pods: list[JsonDict], cause: str
) -> None:
    with pytest.raises(BackupError) as e:
        choose_method(claim, method, classes, pods)
    assert str(e.value) == f"PVC app/data: {cause}"

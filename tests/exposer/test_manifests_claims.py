"""PVCs and snapshot objects: golden manifests, and cases that the recordings do not have."""

import pytest

from core.contract import VolumeMode
from core.errors import ContractError, ExposeError
from core.models.names import OWNER_KIND_ANNOTATION
from exposer.manifests import (
    build_backup_claim,
    build_backup_content,
    build_cache_claim,
    build_restore_claim,
    diagnose_snapshot,
    parse_snapshot_source,
    parse_source_annotation,
)
from exposer.model import Pending
from exposer.settings import DEFAULT_EXCLUDED, BackupPVCSettings, CacheVolume
from tests.exposer.support.inputs import restore_request, snapshot_request
from tests.exposer.test_pods_velero import source_objects
from tests.support.golden import assert_golden, recorded
from tests.support.objects import JsonDict, only

OWNER = snapshot_request().owner


def content() -> JsonDict:
    snapshot, source, claim = source_objects()
    source["metadata"] |= {
        "labels": {"snapshot.storage.kubernetes.io/managed-by": "node-a", "other": "x"},
        "annotations": {
            "snapshot.storage.kubernetes.io/deletion-secret-name": "secret",
            "snapshot.storage.kubernetes.io/deletion-secret-namespace": "csi",
            "snapshot.storage.kubernetes.io/volumesnapshot-being-created": "yes",
        },
    }
    return build_backup_content(OWNER, source, parse_snapshot_source(snapshot, source, claim))


def test_objects_are_their_golden_manifests() -> None:
    shallow = BackupPVCSettings(read_only=True, storage_class="shallow")
    backup = snapshot_request(backup_pvcs={"hostpath": shallow})
    claim = build_backup_claim(backup, size="2Gi", mode=VolumeMode.FILESYSTEM)
    assert_golden("claim-backup-read-only-other-class", claim)
    target, owner = recorded("block-target-pvc"), restore_request().owner
    claim = build_restore_claim(owner, target, node="node-b", excluded=DEFAULT_EXCLUDED)
    assert_golden("claim-restore-block-on-node", claim)
    assert_golden("claim-cache-on-node", build_cache_claim(OWNER, CacheVolume("fast", 5500), node="node-b"))
    anywhere: JsonDict = build_cache_claim(OWNER, CacheVolume("fast", 5500), node="")
    assert set(anywhere["metadata"]["annotations"]) == {OWNER_KIND_ANNOTATION}
    assert_golden("content-backup", content())


def test_a_backup_pvc_without_a_class_does_not_get_the_clusters_default() -> None:
    claim = build_backup_claim(snapshot_request(storage_class=""), size="2Gi", mode=VolumeMode.BLOCK)
    assert (claim["spec"]["storageClassName"], claim["spec"]["volumeMode"]) == ("", "Block")


def test_the_restore_pvc_has_nothing_of_the_targets_binding() -> None:
    """The last recorded version of the target has all annotations of the controllers."""
    bound: JsonDict = recorded("target-pvc-of-datadownload", -1)
    bound["metadata"]["annotations"]["volume.kubernetes.io/selected-node"] = "node-a"
    bound["spec"] |= {"dataSource": {"kind": "Other"}, "volumeAttributesClassName": "gold"}
    claim = build_restore_claim(restore_request().owner, bound, node="", excluded=())
    kept = {"backup.velero.io/must-include-additional-items", "kubectl.kubernetes.io/last-applied-configuration"}
    assert set(claim["metadata"]["annotations"]) == kept | {OWNER_KIND_ANNOTATION}
    expected = {"accessModes", "resources", "storageClassName", "volumeMode", "volumeAttributesClassName"}
    assert set(claim["spec"]) == expected


@pytest.mark.parametrize(
    ("restore_bytes", "size"),
    [(2 << 30, "2Gi"), (3 << 20, "3Mi"), (1_000_001, "1000001"), (None, "1Gi"), (0, "1Gi")],
    ids=["reported", "suffix", "bytes", "not reported", "zero"],
)
def test_the_size_is_what_the_driver_reports_or_else_the_source_pvcs(restore_bytes: int | None, size: str) -> None:
    """A tenant may be able to write the status of the VolumeSnapshot."""
    snapshot, source, claim = source_objects()
    snapshot["status"]["restoreSize"] = "9Pi"
    source["status"]["restoreSize"] = restore_bytes
    assert parse_snapshot_source(snapshot, source, claim).size == size


def test_a_content_records_its_source_and_needs_its_handle() -> None:
    snapshot, source, claim = source_objects(VolumeMode.BLOCK)
    parsed = parse_snapshot_source(snapshot, source, claim)
    recorded: JsonDict = build_backup_content(OWNER, source, parsed)
    assert parse_source_annotation(recorded) == parsed
    del recorded["metadata"]["annotations"]
    with pytest.raises(ContractError, match="annotation nodeagent"):
        parse_source_annotation(recorded)
    del source["status"]["snapshotHandle"]
    with pytest.raises(ExposeError, match="has no snapshot handle"):
        build_backup_content(OWNER, source, parsed)


def failed(message: str, *, at: str = "12:00:01", taken: str | None = "12:00:00") -> JsonDict:
    """Return the status of a snapshot with an error of that time, which the storage has `taken`."""
    error = {"message": message, "time": f"2026-11-21T{at}Z"}
    return {"error": error} | ({"readyToUse": False, "creationTime": f"2026-11-21T{taken}Z"} if taken else {})


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        pytest.param({}, "SnapshotNotReady", id="new"),
        pytest.param({"readyToUse": False}, "SnapshotNotReady", id="not ready"),
        pytest.param({"readyToUse": True}, "SnapshotNotReady", id="not bound"),
        pytest.param(failed("quota", taken=None), "SnapshotError", id="error"),
        pytest.param(failed("code = Internal", at="11:59:59"), "SnapshotNotReady", id="taken after the error"),
        pytest.param(failed("code = Internal"), "SnapshotError", id="taken before the error"),
        pytest.param(failed("code = ResourceExhausted desc"), "SnapshotNotReady", id="taken, then throttled"),
        pytest.param(failed("code = Aborted"), "SnapshotNotReady", id="taken, the driver goes on"),
        pytest.param(failed("cannot be fulfilled: the object has been modified"), "SnapshotNotReady", id="conflict"),
        pytest.param(
            {"readyToUse": True, "boundVolumeSnapshotContentName": "c", "error": {"message": "old"}},
            None,
            id="ready after an error",
        ),
    ],
)
def test_a_snapshot_has_a_pending_reason(status: JsonDict, reason: str | None) -> None:
    """An error stays in the status until the snapshot is ready, also if the driver goes on."""
    found = diagnose_snapshot(only(metadata={"namespace": "app", "name": "s"}, status=status))
    assert (found.reason if isinstance(found, Pending) else None) == reason
    if "error" in status and found is not None:
        blocked, error = reason == "SnapshotError", status["error"]["message"]
        text = f"is not ready: {error}" if blocked else f"is not ready yet; last error: {error}"
        assert found == Pending(str(reason), f"VolumeSnapshot app/s {text}", blocked=blocked)

"""The objects of a restore: the new PVC is made as the old one was, and the DataDownload names its snapshot."""

from dataclasses import replace

import pytest

from client.restores.manifests import PlannedRestore, RequestedRestore
from client.restores.sources import RestoreError
from core.models.backups import SavedClaim
from tests.client.support.restore_scene import DATA, FILES, saved
from tests.support.golden import assert_golden

_REQUEST = RequestedRestore("back", "velero")


def test_the_claim_and_its_transfer() -> None:
    one = PlannedRestore(_REQUEST, saved(DATA), 2)
    assert_golden("restore-claim", one.build_claim())
    assert_golden("restore-transfer", one.build_transfer())


def test_the_pod_that_waits_and_its_transfer() -> None:
    one = PlannedRestore(RequestedRestore("back", "velero", wait_image="agents:1"), saved(DATA), 1)
    pod, transfer = one.build_pod(), one.build_transfer("uid-of-pod")
    assert pod is not None
    assert_golden("restore-pod", pod)
    assert_golden("restore-pod-volume", transfer)
    (helper,) = pod["spec"]["initContainers"]
    assert helper["command"][1] == transfer["metadata"]["labels"]["velero.io/restore-uid"]
    assert PlannedRestore(_REQUEST, saved(DATA), 1).build_pod() is None


def test_a_block_device_is_not_restored_into_a_pod() -> None:
    one = PlannedRestore(RequestedRestore("back", "velero", wait_image="agents:1"), saved(FILES), 1)
    with pytest.raises(RestoreError, match="PVC db/files: its volume is a block device: leave out --method"):
        one.build_claim()


def test_a_backup_by_block_is_restored_by_block_into_a_pvc_as_it_was() -> None:
    volume = replace(saved(DATA), by_block=True)
    one = PlannedRestore(_REQUEST, volume, 1)
    assert one.build_claim()["spec"]["volumeMode"] == "Filesystem"
    assert one.build_transfer()["spec"]["datamover"] == "velero-block"
    into_pod = PlannedRestore(RequestedRestore("back", "velero", wait_image="agents:1"), volume, 1)
    with pytest.raises(RestoreError, match="PVC app/data: its backup has a block device: leave out --method"):
        into_pod.build_claim()


def test_namespace_and_class_are_mapped_and_the_repository_stays() -> None:
    request = RequestedRestore("back", "velero", namespaces={"app": "trial"}, classes={"fast": "slow"})
    one = PlannedRestore(request, saved(DATA), 1)
    claim, spec = one.build_claim(), one.build_transfer()["spec"]
    assert (claim["metadata"]["namespace"], claim["spec"]["storageClassName"]) == ("trial", "slow")
    assert spec["targetVolume"]["namespace"] == "trial"
    assert spec["sourceNamespace"] == "app"


@pytest.mark.parametrize(
    ("size", "capacity", "wanted"), [("1Gi", "5Gi", "5Gi"), ("2Gi", "", "2Gi"), ("2G", "1Gi", "2G")]
)
def test_the_new_claim_is_as_large_as_the_old_volume(size: str, capacity: str, wanted: str) -> None:
    claim = SavedClaim(namespace="a", name="b", size=size, capacity=capacity)
    spec = PlannedRestore(_REQUEST, saved(claim), 1).build_claim()["spec"]
    assert spec["resources"] == {"requests": {"storage": wanted}}


def test_a_claim_of_the_empty_class_stays_one_or_gets_the_given_one() -> None:
    volume = saved(SavedClaim(namespace="a", name="b", size="1Gi", storage_class=""))
    with pytest.raises(RestoreError, match=r'PVC a/b: its storage class was "", .* set --storage-class'):
        PlannedRestore(_REQUEST, volume, 1).build_claim()
    given = RequestedRestore("back", "velero", storage_class="fast")
    assert PlannedRestore(given, volume, 1).build_claim()["spec"]["storageClassName"] == "fast"
    by_pod = RequestedRestore("back", "velero", wait_image="agents:1")
    assert PlannedRestore(by_pod, volume, 1).build_claim()["spec"]["storageClassName"] == ""


def test_reserved_labels_of_the_old_claim_are_left_out() -> None:
    labels = {"nodeagent.io/restore": "x", "a.velero.io/b": "y", "app": "z"}
    claim = SavedClaim(namespace="a", name="b", size="1Gi", labels=labels)
    labels = PlannedRestore(_REQUEST, saved(claim), 1).build_claim()["metadata"]["labels"]
    assert labels == {"app": "z", "nodeagent.io/restore": "back"}


def test_size_and_class_are_given_where_the_backup_has_the_names_only() -> None:
    claim = SavedClaim(namespace="app", name="old")
    with pytest.raises(RestoreError, match="PVC app/old: its backup does not say its size: set --size"):
        PlannedRestore(_REQUEST, saved(claim), 1).build_claim()
    request = RequestedRestore("back", "velero", size="3Gi", storage_class="slow")
    spec = PlannedRestore(request, saved(claim), 1).build_claim()["spec"]
    assert spec["resources"] == {"requests": {"storage": "3Gi"}}
    assert (spec["storageClassName"], spec["accessModes"]) == ("slow", ["ReadWriteOnce"])
    spec = PlannedRestore(request, saved(DATA), 1).build_claim()["spec"]
    assert (spec["storageClassName"], spec["resources"]["requests"]["storage"]) == ("fast", "2Gi"), "as it says itself"
    with pytest.raises(RestoreError, match=r"PVC app/old: its backup has 3\.0 GiB: set a larger --size than 3G$"):
        PlannedRestore(replace(request, size="3G"), replace(saved(claim), size_bytes=3 << 30), 1).build_claim()
    request = RequestedRestore("b", "v", size="1Gi")
    assert "storageClassName" not in PlannedRestore(request, saved(claim), 1).build_claim()["spec"]


def test_the_names_of_long_restores_are_valid() -> None:
    one = PlannedRestore(RequestedRestore("r" * 200, "velero"), saved(DATA), 1)
    assert len(one.name) <= 63
    assert len(one.build_claim()["metadata"]["labels"]["nodeagent.io/restore"]) == 63

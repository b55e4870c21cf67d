"""Directories of volumes on the node, for each kind of volume; the test bed has `local` ones only."""

import pytest

from core.errors import ExposeError
from exposer.workload import build_volume_directory, claim_of, join_directory, pod_of_directory, split_directory
from tests.support.golden import recorded
from tests.support.objects import JsonDict, only

ROOT = "/var/lib/kubelet"


def directory(source: JsonDict, *, pv: bool) -> str:
    """Return the directory below `volumes/` of a volume `v` with that source, its own or its PersistentVolume's."""
    volume = only(name="v") if pv else only(name="v", **source)
    behind = only(metadata={"name": "pvc-1"}, spec={"capacity": {}} | source) if pv else None
    found = build_volume_directory(ROOT, "u-1", volume, pv=behind)
    head = f"{ROOT}/pods/u-1/volumes/"
    assert found.startswith(head)
    return found.removeprefix(head)


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("csi", "kubernetes.io~csi/pvc-1/mount"),
        ("local", "kubernetes.io~local-volume/pvc-1"),
        ("nfs", "kubernetes.io~nfs/pvc-1"),
        ("iscsi", "kubernetes.io~iscsi/pvc-1"),
        ("fc", "kubernetes.io~fc/pvc-1"),
        ("cephfs", "kubernetes.io~cephfs/pvc-1"),
        ("rbd", "kubernetes.io~rbd/pvc-1"),
        ("awsElasticBlockStore", "kubernetes.io~csi/pvc-1/mount"),
        ("azureDisk", "kubernetes.io~csi/pvc-1/mount"),
        ("azureFile", "kubernetes.io~csi/pvc-1/mount"),
        ("cinder", "kubernetes.io~csi/pvc-1/mount"),
        ("gcePersistentDisk", "kubernetes.io~csi/pvc-1/mount"),
        ("portworxVolume", "kubernetes.io~csi/pvc-1/mount"),
        ("vsphereVolume", "kubernetes.io~csi/pvc-1/mount"),
    ],
)
def test_the_directory_of_a_pvc_is_named_after_its_persistent_volume(key: str, expected: str) -> None:
    assert directory({key: {"x": 1}}, pv=True) == expected


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("emptyDir", "kubernetes.io~empty-dir/v"),
        ("csi", "kubernetes.io~csi/v/mount"),
        ("nfs", "kubernetes.io~nfs/v"),
        ("configMap", "kubernetes.io~configmap/v"),
        ("secret", "kubernetes.io~secret/v"),
        ("downwardAPI", "kubernetes.io~downward-api/v"),
        ("projected", "kubernetes.io~projected/v"),
    ],
)
def test_the_directory_of_a_volume_without_a_pvc_has_the_volumes_name(key: str, expected: str) -> None:
    assert directory({key: {}}, pv=False) == expected


@pytest.mark.parametrize("pv", [False, True], ids=["own", "claim"])
def test_a_flex_volume_is_in_its_drivers_directory(pv: bool) -> None:
    assert directory({"flexVolume": {"driver": "example.com/disk"}}, pv=pv).startswith("example.com~disk/")


@pytest.mark.parametrize("key", ["hostPath", "image"])
@pytest.mark.parametrize("pv", [False, True], ids=["own", "claim"])
def test_a_volume_without_a_directory_of_the_pod_is_rejected(key: str, pv: bool) -> None:
    with pytest.raises(ExposeError, match=f"volume v has source {key}"):
        directory({key: {"path": "/x"}}, pv=pv)


def test_the_recorded_path_is_built() -> None:
    mover = recorded("pod-of-podvolumebackup", 1)
    pvb = recorded("podvolumebackup")
    pv: JsonDict = {"metadata": {"name": "pvc-3dcf745d-9e92-47e5-bb50-4baa1d7fd6bb"}, "spec": {"csi": {"driver": "d"}}}
    volume: JsonDict = {"name": "fs", "persistentVolumeClaim": {"claimName": "fsdata"}}
    found = build_volume_directory(ROOT, pvb["spec"]["pod"]["uid"], volume, pv=pv)
    assert found == mover["spec"]["volumes"][0]["hostPath"]["path"]


@pytest.mark.parametrize("plugin", ["kubernetes.io~csi", "kubernetes.io~nfs"])
@pytest.mark.parametrize("name", ["v", "volumes", "mount", "pods"])
def test_a_directory_is_split_into_what_it_was_joined_from(plugin: str, name: str) -> None:
    directory = join_directory("/pods/volumes/kubelet/pods/u-1", plugin, name)
    assert split_directory(directory) == ("/pods/volumes/kubelet/pods/u-1", plugin, name)
    assert pod_of_directory(directory) == "u-1"


def test_another_directory_is_of_no_pod() -> None:
    assert (split_directory("/var/lib/kubelet"), pod_of_directory("/var/lib/kubelet")) == (None, None)


@pytest.mark.parametrize(
    ("volume", "claim"),
    [({"persistentVolumeClaim": {"claimName": "c"}}, "c"), ({"ephemeral": {}}, "writer-v"), ({"emptyDir": {}}, None)],
    ids=["claim", "ephemeral", "none"],
)
def test_the_pvc_of_a_volume_is_found(volume: JsonDict, claim: str | None) -> None:
    assert claim_of(only(metadata={"name": "writer"}), {"name": "v"} | volume) == claim

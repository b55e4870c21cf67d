"""How a PVC is backed up, over every kind of cluster."""

from typing import Any

import pytest

from client.backups.manifests import (
    BackupError,
    ClusterClasses,
    Method,
    MountingPod,
    SnapshotWay,
    choose_method,
    needs_pods,
)
from tests.support.objects import JsonDict

_DRIVER = "csi.example.com"
_LABEL: dict[str, Any] = {"labels": {"velero.io/csi-volumesnapshot-class": "true"}}
_DEFAULT: dict[str, Any] = {"annotations": {"snapshot.storage.kubernetes.io/is-default-class": "true"}}


def _claim(phase: str = "Bound", storage_class: str = "fast", mode: str = "Filesystem", **meta: Any) -> JsonDict:
    return {
        "metadata": {"namespace": "app", "name": "data", **meta},
        "spec": {"storageClassName": storage_class, "volumeMode": mode},
        "status": {"phase": phase},
    }


def _snapshot_class(name: str, driver: str = _DRIVER, **meta: Any) -> JsonDict:
    return {"metadata": {"name": name, **meta}, "driver": driver}


def _classes(*found: JsonDict, unread: str | None = None) -> ClusterClasses:
    return ClusterClasses({"fast": _DRIVER, "plain": "none"}, found, unread)


def _pod(name: str = "writer", phase: str = "Running", *, mounted: str = "containers", **meta: Any) -> JsonDict:
    """Return a pod that mounts the volume in the containers of that list of its spec."""
    mounts = [{"name": "vol", "mountPath": "/data"}]
    return {
        "metadata": {"name": name, "uid": f"uid-{name}", **meta},
        "spec": {
            "nodeName": "node-a",
            "containers": [{"name": "c"}],
            mounted: [{"name": "d", "volumeMounts": mounts}],
            "volumes": [{"name": "vol", "persistentVolumeClaim": {"claimName": "data"}}, {"name": "x", "emptyDir": {}}],
        },
        "status": {"phase": phase},
    }


_SNAPSHOT = SnapshotWay("a", _DRIVER)
_POD = MountingPod("writer", "uid-writer", "node-a", "vol")


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


def test_the_driver_of_a_migrated_plugin_is_in_an_annotation() -> None:
    claim = _claim(storage_class="plain", annotations={"volume.kubernetes.io/storage-provisioner": _DRIVER})
    assert choose_method(claim, Method.AUTO, _classes(_snapshot_class("a")), ()) == _SNAPSHOT


def test_a_claim_without_a_class_is_backed_up_from_its_pod() -> None:
    claim = _claim(storage_class="", annotations={"volume.kubernetes.io/storage-provisioner": _DRIVER})
    classes = _classes(_snapshot_class("a"))
    assert needs_pods(claim, Method.AUTO, classes)
    assert choose_method(claim, Method.AUTO, classes, [_pod()]) == _POD


@pytest.mark.parametrize(
    ("method", "classes", "pods", "way"),
    [
        pytest.param(Method.AUTO, _classes(_snapshot_class("a")), [_pod()], _SNAPSHOT, id="auto prefers a snapshot"),
        pytest.param(Method.AUTO, _classes(), [_pod()], _POD, id="auto without a class"),
        pytest.param(Method.FS_BACKUP, _classes(_snapshot_class("a")), [_pod()], _POD, id="fs-backup"),
        pytest.param(Method.FS_BACKUP, _classes(), [_pod("zero"), _pod()], _POD, id="the first pod by name"),
        pytest.param(Method.FS_BACKUP, _classes(), [_pod(mounted="initContainers")], _POD, id="a sidecar's"),
        pytest.param(Method.FS_BACKUP, _classes(), [_pod(mounted="ephemeralContainers")], _POD, id="a debugger's"),
    ],
)
def test_the_method_follows_from_the_cluster(
    method: Method, classes: ClusterClasses, pods: list[JsonDict], way: SnapshotWay | MountingPod
) -> None:
    assert choose_method(_claim(), method, classes, pods) == way
    assert needs_pods(_claim(), method, classes) is isinstance(way, MountingPod)


def test_the_claim_of_an_ephemeral_volume_is_backed_up_from_its_pod() -> None:
    claim, pod = _claim(), _pod()
    claim["metadata"]["name"] = "writer-vol"
    pod["spec"]["volumes"] = [{"name": "vol", "ephemeral": {"volumeClaimTemplate": {}}}]
    assert choose_method(claim, Method.AUTO, _classes(), [pod]) == _POD


_NO_CLASS = "no CSI snapshot: no VolumeSnapshotClass has its driver csi.example.com"
_NO_POD = "no backup of files: no Running pod mounts it"


@pytest.mark.parametrize(
    ("claim", "method", "classes", "pods", "cause"),
    [
        pytest.param(
            _claim("Pending"), Method.AUTO, _classes(), [], "it has no volume yet: it is Pending", id="unbound"
        ),
        pytest.param(_claim(deletionTimestamp="x"), Method.AUTO, _classes(), [], "it is being deleted", id="deleted"),
        pytest.param(_claim(), Method.AUTO, _classes(), [], f"{_NO_CLASS}; {_NO_POD}", id="neither"),
        pytest.param(_claim(), Method.CSI_SNAPSHOT, _classes(), [_pod()], _NO_CLASS, id="csi-snapshot only"),
        pytest.param(_claim(), Method.FS_BACKUP, _classes(), [_pod(phase="Pending")], _NO_POD, id="pod not running"),
        pytest.param(_claim(), Method.FS_BACKUP, _classes(), [_pod(mounted="none")], _NO_POD, id="not mounted"),
        pytest.param(_claim(), Method.FS_BACKUP, _classes(), [_pod(deletionTimestamp="x")], _NO_POD, id="pod ends"),
        pytest.param(
            _claim(mode="Block"),
            Method.FS_BACKUP,
            _classes(),
            [_pod()],
            "no backup of files: its volume is a block device",
            id="block device",
        ),
        pytest.param(
            _claim(storage_class="other"),
            Method.CSI_SNAPSHOT,
            _classes(),
            [],
            "no CSI snapshot: its storage class does not say which driver its volume has",
            id="no driver",
        ),
        pytest.param(
            _claim(storage_class="", annotations={"volume.kubernetes.io/storage-provisioner": _DRIVER}),
            Method.CSI_SNAPSHOT,
            _classes(_snapshot_class("a")),
            [],
            "no CSI snapshot: it names no storage class",
            id="no class",
        ),
        pytest.param(
            _claim(), Method.CSI_SNAPSHOT, _classes(unread="no right"), [], "no CSI snapshot: no right", id="unread"
        ),
        pytest.param(
            _claim(),
            Method.CSI_SNAPSHOT,
            _classes(_snapshot_class("b"), _snapshot_class("a")),
            [],
            "no CSI snapshot: label one VolumeSnapshotClass of driver csi.example.com "
            "velero.io/csi-volumesnapshot-class=true: a, b",
            id="several classes",
        ),
    ],
)
def test_a_claim_that_cannot_be_backed_up_is_named_with_each_cause(
    claim: JsonDict, method: Method, classes: ClusterClasses, pods: list[JsonDict], cause: str
) -> None:
    with pytest.raises(BackupError) as e:
        choose_method(claim, method, classes, pods)
    assert str(e.value) == f"PVC app/data: {cause}"

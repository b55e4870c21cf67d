"""The test bed itself: pods, network, volumes, snapshots, devices, and the faults it is asked for."""

from pathlib import Path

import pytest

from core.kube.resources import PERSISTENT_VOLUME_CLAIMS, PERSISTENT_VOLUMES, VOLUME_SNAPSHOT_CONTENTS, VOLUME_SNAPSHOTS
from tests.cluster.bed import Bed
from tests.testbed.api import Json
from tests.testbed.demonstration.manifests import build_claim, build_pod, build_snapshot
from tests.testbed.processes import BedError
from tests.testbed.storage.objects import DRIVER, FAULT_ANNOTATION

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.lane(name="apart"),
    pytest.mark.timeout(1800),
    pytest.mark.thorough,
]

_REACH = """
import os, socket, ssl, urllib.error, urllib.request
account = "/var/run/secrets/kubernetes.io/serviceaccount/"
socket.create_connection(("10.97.0.1", 7070), timeout=5).close()
context = ssl.create_default_context(cafile=account + "ca.crt")
url = "https://" + os.environ["KUBERNETES_SERVICE_HOST"] + "/api/v1/namespaces"
token = {"Authorization": "Bearer " + open(account + "token").read()}
try:
    urllib.request.urlopen(urllib.request.Request(url, headers=token), context=context)
except urllib.error.HTTPError as error:
    assert error.code == 403, error
"""
_WRITE = "open('/data/file', 'w').write('kept')"
_READ = "assert open('/data/file').read() == 'kept'"
_WRITE_DEVICE = "file = open('/data', 'r+b'); file.seek(5_000_000); file.write(b'kept'); file.flush()"
_READ_DEVICE = "file = open('/data', 'rb'); file.seek(5_000_000); assert file.read(4) == b'kept'"


def _pod(space: str, name: str, claim: str, code: str) -> Json:
    pod = build_pod(space, name, claim=claim, script=["-c", code], folders={})
    # Tests that run at the same time taint nodes for a while.
    pod["spec"]["tolerations"] = [{"operator": "Exists"}]
    return pod


def _device_pod(space: str, name: str, claim: str, code: str) -> Json:
    pod = _pod(space, name, claim, code)
    container = pod["spec"]["containers"][0]
    del container["volumeMounts"]
    container["volumeDevices"] = [{"name": "data", "devicePath": "/data"}]
    return pod


def _claim(space: str, name: str, *, snapshot: str = "", block: bool = False, storage_class: str = "bed") -> Json:
    claim = build_claim(space, name, size="16Mi")
    claim["spec"]["storageClassName"] = storage_class
    claim["spec"]["volumeMode"] = "Block" if block else "Filesystem"
    if snapshot:
        source = {"apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot", "name": snapshot}
        claim["spec"]["dataSource"] = source
    return claim


def _take_snapshot(bed: Bed, space: str, name: str, claim: str) -> Json:
    """Take a snapshot; returns its content once it is ready."""
    bed.user.apply(build_snapshot(space, name, claim=claim))
    bed.user.wait(f"volumesnapshot/{name}", "jsonpath={.status.readyToUse}=true", namespace=space)
    snapshot = bed.api.get(VOLUME_SNAPSHOTS, space, name) or {}
    content = bed.api.get(VOLUME_SNAPSHOT_CONTENTS, "", snapshot["status"]["boundVolumeSnapshotContentName"])
    assert content is not None
    return content


def test_pod_reaches_api_server_and_s3(bed: Bed, space: str) -> None:
    bed.user.apply(_claim(space, "data"))
    bed.user.run_pod(_pod(space, "reach", "data", _REACH))


@pytest.mark.parametrize("block", [False, True], ids=["folder", "device"])
def test_volume_comes_back_from_snapshot(bed: Bed, space: str, block: bool) -> None:
    pod, write, read = (_device_pod, _WRITE_DEVICE, _READ_DEVICE) if block else (_pod, _WRITE, _READ)
    bed.user.apply(_claim(space, "data", block=block, storage_class="bed-wait"))
    bed.user.run_pod(pod(space, "write", "data", write))

    content = _take_snapshot(bed, space, "first", "data")
    bed.user.apply(_claim(space, "copy", snapshot="first", block=block))

    bed.user.run_pod(pod(space, "read", "copy", read))
    assert content["status"]["restoreSize"] == 16 << 20
    assert content["spec"]["sourceVolumeMode"] == ("Block" if block else "Filesystem")


def test_snapshot_moves_to_another_namespace_by_its_handle(bed: Bed, space: str) -> None:
    """What a node agent does with the snapshot of a DataUpload."""
    bed.user.apply(_claim(space, "data"))
    bed.user.run_pod(_pod(space, "write", "data", _WRITE))
    content = _take_snapshot(bed, space, "source", "data")
    name, handle = content["metadata"]["name"], content["status"]["snapshotHandle"]
    bed.api.patch(VOLUME_SNAPSHOT_CONTENTS, {"spec": {"deletionPolicy": "Retain"}}, name=name)
    bed.user.kubectl("delete", "volumesnapshot", "source", "-n", space, "--timeout=600s")
    bed.user.kubectl("delete", "volumesnapshotcontent", name, "--timeout=600s")

    bed.user.apply(*_static_snapshot(space, f"moved-{space}", handle), _claim(space, "copy", snapshot=f"moved-{space}"))

    bed.user.run_pod(_pod(space, "read", "copy", _READ))
    bed.user.kubectl("delete", "volumesnapshot", f"moved-{space}", "-n", space, "--timeout=600s")
    assert bed.api.get(VOLUME_SNAPSHOT_CONTENTS, "", f"moved-{space}") is None
    assert not (bed.folder / "snapshots" / handle).exists()


def _static_snapshot(space: str, name: str, handle: str) -> list[Json]:
    snapshot = build_snapshot(space, name, claim="")
    snapshot["spec"]["source"] = {"volumeSnapshotContentName": name}
    spec = {
        "deletionPolicy": "Delete",
        "driver": DRIVER,
        "source": {"snapshotHandle": handle},
        "volumeSnapshotRef": {"namespace": space, "name": name},
    }
    content = {"kind": "VolumeSnapshotContent", "metadata": {"name": name}, "spec": spec}
    return [snapshot, {"apiVersion": snapshot["apiVersion"], **content}]


@pytest.mark.parametrize(("storage_class", "kept"), [("bed", False), ("bed-retain", True)], ids=["delete", "retain"])
def test_volume_goes_with_its_claim_unless_retained(bed: Bed, space: str, storage_class: str, kept: bool) -> None:
    bed.user.apply(_claim(space, "data", storage_class=storage_class))
    bed.user.wait("pvc/data", "jsonpath={.status.phase}=Bound", namespace=space)
    name = (bed.api.get(PERSISTENT_VOLUME_CLAIMS, space, "data") or {})["spec"]["volumeName"]

    bed.user.kubectl("delete", "pvc", "data", "-n", space)

    condition = "jsonpath={.status.phase}=Released" if kept else "delete"
    bed.user.wait(f"pv/{name}", condition, namespace=space)
    assert (bed.folder / "volumes" / name).exists() is kept
    assert (bed.api.get(PERSISTENT_VOLUMES, "", name) is not None) is kept


@pytest.mark.parametrize("fault", ["fail:the disk is full", "never"], ids=["failing", "never ready"])
def test_snapshot_fails_as_asked(bed: Bed, space: str, fault: str) -> None:
    bed.user.apply(_claim(space, "data"))
    bed.user.wait("pvc/data", "jsonpath={.status.phase}=Bound", namespace=space)
    snapshot = build_snapshot(space, "broken", claim="data")
    snapshot["metadata"]["annotations"] = {FAULT_ANNOTATION: fault}

    bed.user.apply(snapshot)

    if fault == "never":
        with pytest.raises(BedError, match="timed out"):
            bed.user.wait("volumesnapshot/broken", "jsonpath={.status.readyToUse}=true", namespace=space, seconds=3)
    else:
        bed.user.wait("volumesnapshot/broken", "jsonpath={.status.error.message}", namespace=space)
        status = (bed.api.get(VOLUME_SNAPSHOTS, space, "broken") or {})["status"]
        assert "the disk is full" in status["error"]["message"]
        assert status["readyToUse"] is False


def test_claim_with_selector_is_left_alone(bed: Bed, space: str) -> None:
    """A target PVC must stay unbound until the node agent binds the restored volume to it."""
    bed.user.apply(build_claim(space, "target", size="16Mi", restored_into="x"), _claim(space, "other"))
    bed.user.wait("pvc/other", "jsonpath={.status.phase}=Bound", namespace=space)
    with pytest.raises(BedError, match="timed out"):
        bed.user.wait("pvc/target", "jsonpath={.status.phase}=Bound", namespace=space, seconds=3)


def test_failed_provisioning_is_reported_by_an_event(bed: Bed, space: str) -> None:
    claim = _claim(space, "data")
    claim["metadata"]["annotations"] = {FAULT_ANNOTATION: "fail:no space left"}
    bed.user.apply(claim)
    options = ["--field-selector=reason=ProvisioningFailed", "-n", space, "--for=create", "--timeout=600s"]
    bed.user.kubectl("wait", "events", *options)
    messages = bed.user.kubectl("get", "events", "-n", space, "-o", "jsonpath={.items[*].message}")
    assert "no space left" in messages


def test_audit_log_names_the_user(bed: Bed) -> None:
    assert '"username":"system:node:bed-1"' in Path(bed.folder / "logs" / "audit.log").read_text()

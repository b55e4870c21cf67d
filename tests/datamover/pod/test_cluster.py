"""Retries of requests before the data path starts, what a storage is asked, and volumes as the mounts show them."""

import asyncio
import base64
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from core.contract import SnapshotMetadata, TrackedSnapshot
from core.errors import DataPathError, RepositoryError, StorageOutageError
from core.kube.client import KubeClient
from core.kube.errors import ServerError
from core.kube.resources import BACKUP_STORAGE_LOCATIONS, SECRETS
from core.kube.transport import Retry
from core.models.storage import BackupStorageLocation
from core.redact import Redactor
from datamover.pod.cluster import PodContext, ask_directory, build_changes, check_mounted
from datamover.runtime.resources import ResourceLimits
from datamover.runtime.signals import StopSignal
from tests.support.clock import LoopClock
from tests.support.fakekube import FakeKube
from tests.support.objects import build_object


def _context(kube: FakeKube) -> PodContext:
    clock = LoopClock()
    return PodContext(
        client=KubeClient(kube, Retry(clock)),
        clock=clock,
        namespace="velero",
        node="node-a",
        environment={},
        limits=ResourceLimits(1),
        stop=StopSignal(),
        termination_file=Path("/dev/null"),
    )


@pytest.mark.looptime
async def test_an_api_server_that_is_unavailable_for_minutes_is_awaited_and_reported_then(looptime: float) -> None:
    kube = FakeKube()
    location = {"provider": "velero.io/aws", "objectStorage": {"bucket": "none"}}
    metadata = {"namespace": "velero", "name": "default"}
    kube.put({"apiVersion": "velero.io/v1", "kind": "BackupStorageLocation", "metadata": metadata, "spec": location})
    kube.fail_next("GET", "backupstoragelocations", "lost", times=40)
    assert (await _context(kube).reader.location("default")).name == "default"
    assert looptime > 120
    began = asyncio.get_running_loop().time()
    kube.fail_next("GET", "backupstoragelocations", 503, times=1000)
    with pytest.raises(ServerError):
        await _context(kube).reader.location("default")
    assert 200 < asyncio.get_running_loop().time() - began < 301


async def test_a_password_may_be_any_bytes_but_zero() -> None:
    """Velero takes it as it is."""
    kube, random = FakeKube(), b"\x1f\xff of the generator\xa1\x1c"

    def store(value: bytes) -> None:
        data = {"repository-password": base64.b64encode(value).decode()}
        kube.put(build_object(SECRETS, "velero-repo-credentials", "velero", data=data))

    store(b"\xc2\xa0" + random + b"\r\n")
    password = await _context(kube).reader.password()
    assert os.fsencode(password) == random
    assert Redactor([password]).redact(f"it is {base64.b64encode(random).decode()}") == "it is ***"
    store(b"zero\0byte")
    with pytest.raises(RepositoryError, match=r"^Secret velero/velero-repo-credentials: the password has a zero byte$"):
        await _context(kube).reader.password()


async def test_credentials_may_begin_with_the_mark_of_an_editor() -> None:
    kube = FakeKube()
    kube.put(
        build_object(SECRETS, "cloud", "velero", data={"key": base64.b64encode(b"\xef\xbb\xbf[default]").decode()})
    )
    spec = {"provider": "aws", "objectStorage": {"bucket": "b"}, "credential": {"name": "cloud", "key": "key"}}
    location = BackupStorageLocation.parse(build_object(BACKUP_STORAGE_LOCATIONS, "default", "velero", spec=spec))
    credential = (await _context(kube).reader.location_secrets(location)).credential
    assert credential is not None
    assert credential.text == "[default]"


@pytest.mark.looptime
async def test_a_storage_is_asked_with_the_token_that_the_pod_has_then(tmp_path: Path) -> None:
    context = replace(_context(FakeKube()), token=tmp_path / "token")
    service = SnapshotMetadata(address="csi:6443", ca_cert=base64.b64encode(b"PEM").decode())
    changes = build_changes(context, TrackedSnapshot("handle", "volume", "b1", service))
    assert changes is not None
    assert changes.query is not None
    assert changes.query()["token"] == ""
    context.token.write_text("of-this-pod\n")
    assert changes.query() == {
        "address": "csi:6443",
        "ca": "PEM",
        "token": "of-this-pod",
        "namespace": "velero",
        "snapshot": "b1",
        "timeout_seconds": 300,
    }
    assert context.redactor.redact("Bearer of-this-pod") == "Bearer ***"


POD = "/var/lib/kubelet/pods/0b1c8d2e/volumes"
VOLUME = Path("/scratch/volume")


def line(root: str, point: Path = VOLUME) -> str:
    return f"700 699 8:1 {root} {point} ro,relatime shared:5 master:1 - ext4 /dev/sda1 rw\n"


def check(tmp_path: Path, *lines: str) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text("".join(["22 1 8:1 / / rw - ext4 /dev/sda1 rw\n", *lines]))
    check_mounted(VOLUME, mounts)


@pytest.mark.parametrize(
    "root",
    [
        f"{POD}/kubernetes.io~csi/pvc-1/mount",
        f"{POD}/kubernetes.io~csi/pvc-1/mount//deleted",
        f"/@rootfs{POD}/kubernetes.io~nfs/share",
        "/pods/0b1c8d2e/volumes/kubernetes.io~local-volume/pv-1",
    ],
)
def test_a_directory_without_its_mount_is_rejected(tmp_path: Path, root: str) -> None:
    with pytest.raises(DataPathError, match=f"is not mounted on the node: {root} is a plain directory"):
        check(tmp_path, line(root))


@pytest.mark.parametrize(
    "root",
    [
        "/",
        "/csi-data-dir/77aa",
        f"{POD}/kubernetes.io~empty-dir/cache",
        f"{POD}/example~driver/data",
        f"{POD}/kubernetes.io~local-volume/pv-1/below",
    ],
    ids=["a device", "a bind mount", "emptyDir", "flexVolume", "a directory below a volume"],
)
def test_a_mounted_volume_or_one_that_is_never_mounted_is_accepted(tmp_path: Path, root: str) -> None:
    check(tmp_path, line(root))


def test_the_last_mount_on_the_volume_counts(tmp_path: Path) -> None:
    root = f"{POD}/kubernetes.io~csi/pvc-1/mount"
    check(tmp_path, line(root), line("/"))
    with pytest.raises(DataPathError):
        check(tmp_path, line("/"), line(root))
    # Mounts of other directories do not count.
    check(tmp_path, line(root, VOLUME / "below"))


async def test_a_directory_that_does_not_answer_is_not_awaited_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datamover.pod.cluster._ANSWER_SECONDS", 0)
    answers = threading.Event()
    with pytest.raises(StorageOutageError, match="the location's directory did not answer for 0 s"):
        await ask_directory(lambda: answers.wait(20))
    answers.set()

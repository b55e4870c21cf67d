"""Volumes whose data a test writes from outside, the transfers that move it, and the comparison of what came of it.

The test bed keeps volumes as folders and images, so nothing needs a pod to fill or to read them.
"""

import hashlib
import os
import secrets
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from core.kube.resources import PODS
from tests.cluster.bed import Bed
from tests.cluster.followed import Followed
from tests.cluster.handkopia import open_kopia
from tests.cluster.scenes import Place, Volume, build_pod_transfer
from tests.cluster.workloads import build_holder, is_waiting
from tests.testbed.api import Json
from tests.testbed.demonstration.compare import Survey, compare
from tests.testbed.demonstration.manifests import NAMESPACE, build_claim
from tests.testbed.demonstration.survey import describe
from tests.testbed.processes import wait_for
from tests.testbed.storage.objects import SHARED_CLASS

_FILES, _FILE_BYTES = 20, 3 << 19
DATA_BYTES = _FILES * _FILE_BYTES
"""What each volume holds, which cannot be compressed: 30 MiB."""

_DONE = ".velero"
"""What a PodVolumeRestore leaves in its volume."""


def _fill(folder: Path) -> None:
    """Write random files, and one of each kind of entry that a restore could get wrong."""
    for number in range(_FILES):
        parent = folder / f"folder-{number % 4}"
        parent.mkdir(exist_ok=True)
        (parent / f"file-{number}").write_bytes(os.urandom(_FILE_BYTES))
    own = folder / "own"
    own.mkdir()
    for number, mode in enumerate((0o400, 0o640, 0o4755)):
        file = own / f"file-{number}"
        file.write_text(secrets.token_hex(2000))
        os.chown(file, 1000 + number, 2000)
        file.chmod(mode)
        os.utime(file, ns=(10**18 + number, 10**18 + 123_456_789 * number))
    (own / "link").symlink_to("../folder-0/file-0")
    (own / "broken").symlink_to("/nowhere")
    os.chown(own / "broken", 1001, 1001, follow_symlinks=False)
    (own / "empty").mkdir(mode=0o750)
    with (own / "holes").open("wb") as sparse:
        sparse.seek(5 << 20)
        sparse.write(b"after a hole")


def _fill_device(path: Path) -> None:
    with path.open("r+b") as device:
        device.write(os.urandom(DATA_BYTES))
        device.seek(60 << 20)
        device.write(b"after a hole")
        device.flush()
        os.fsync(device.fileno())


@dataclass
class Site:
    """What a test moves: a volume `data`, a device `disk`, and the volume of a pod `writer`.

    Attributes:
        url: Where the storage of its transfers is.
        node: The node of its pods; empty: any.
        shared: All nodes reach its volumes; else they are where the test bed creates volumes.
    """

    bed: Bed
    space: str
    url: str
    node: str = ""
    shared: bool = True
    devices: bool = False
    size: str = "64Mi"
    fill: Callable[[Path], None] = _fill
    fill_device: Callable[[Path], None] = _fill_device

    def prepare(self) -> None:
        """Make the volumes, with data in them, and the pod."""
        self.bed.user.apply(self.claim("data"), self.claim("writer"), self._pod("writer"))
        self.fill(self.path("data"))
        self.fill(self.path("writer"))
        if self.devices:
            self.bed.user.apply(self.claim("disk", block=True))
            self.fill_device(self.path("disk"))
        self._wait_pod("writer", lambda pod: pod["status"].get("phase") == "Running")

    def open_place(self, word: str) -> str:
        """Make a storage location with an empty repository; returns its name."""
        place = Place(self.bed, f"{self.space}-{word}")
        self.bed.user.apply(*place.build(url=self.url))
        return place.name

    def upload(self, name: str, *, location: str, block: bool = False) -> Followed:
        claim = "disk" if block else "data"
        # A snapshot is handed over to one transfer.
        Volume(self.bed, self.space, claim).take_snapshots([name])
        body = Volume(self.bed, self.space, claim).upload(self._full(name), snapshot=name, location=location)
        if self.shared:
            body["spec"]["csiSnapshot"]["storageClass"] = SHARED_CLASS
        return Followed(self.bed, body)

    def download(self, name: str, *, of: Followed) -> Followed:
        """A DataDownload of what an upload kept, into a new claim."""
        block = of.transfer["spec"]["sourcePVC"] == "disk"
        claim = self.claim(name, block=block)
        claim["spec"]["selector"] = Volume(self.bed, self.space).target(name)["spec"]["selector"]
        self.bed.user.apply(claim)
        status, location = of.last["status"], of.transfer["spec"]["backupStorageLocation"]
        body = Volume(self.bed, self.space).download(name, snapshot_id=status["snapshotID"], location=location)
        body["metadata"]["name"] = self._full(name)
        body["spec"]["snapshotSize"] = status["progress"]["totalBytes"]
        return Followed(self.bed, body)

    def backup(self, name: str, *, location: str) -> Followed:
        pod = self.bed.api.get(PODS, self.space, "writer") or {}
        return Followed(self.bed, build_pod_transfer("PodVolumeBackup", self._full(name), pod, location=location))

    def restore(self, name: str, *, of: Followed) -> Followed:
        """A PodVolumeRestore of what a backup kept, into the volume of a new pod that waits for it."""
        self.bed.user.apply(self.claim(name), self._pod(name, waits=True))
        pod = self._wait_pod(name, is_waiting)
        location, snapshot = of.transfer["spec"]["backupStorageLocation"], of.last["status"]["snapshotID"]
        body = build_pod_transfer("PodVolumeRestore", self._full(name), pod, location=location, snapshotID=snapshot)
        return Followed(self.bed, body)

    def differences(self, followed: Followed) -> list[str]:
        """What a transfer has kept or restored otherwise than it was; nothing where all is well."""
        spec = followed.transfer["spec"]
        match followed.transfer["kind"]:
            case "DataUpload":
                return self._kept_differences(followed, spec["sourcePVC"])
            case "PodVolumeBackup":
                return self._kept_differences(followed, "writer")
            case "PodVolumeRestore":
                return _compare(self.path("writer"), self.path(spec["pod"]["name"]))
        source, target = (self.path(name) for name in (self._source_of(followed), spec["targetVolume"]["pvc"]))
        return _compare(source, target) if source.is_dir() else _compare_files(source, target)

    def remove(self, followed: Iterable[Followed], *places: str) -> None:
        left = [f"{each.transfer['kind'].lower()}/{each.name}" for each in followed]
        for place in places:
            left += [f"backuprepository/{self.space}-{place}-kopia", f"backupstoragelocation.velero.io/{place}"]
            left += [f"secret/{place}-keys"]
        self.bed.user.kubectl("delete", *left, "-n", NAMESPACE, "--ignore-not-found", "--wait=false")

    def _source_of(self, download: Followed) -> str:
        return "disk" if self.path(download.transfer["spec"]["targetVolume"]["pvc"]).is_block_device() else "data"

    def _kept_differences(self, followed: Followed, claim: str) -> list[str]:
        """What of a kopia snapshot is not as in the volume; kopia restores it, and nothing of ours."""
        source = self.path(claim)
        place = followed.transfer["spec"]["backupStorageLocation"]
        with tempfile.TemporaryDirectory(prefix="kept-", dir=self.bed.folder) as folder:
            copy = Path(folder) / "copy"
            with open_kopia(self.bed, self.space, prefix=place) as kopia:
                kopia.run("restore", followed.last["status"]["snapshotID"], str(copy))
            if source.is_dir():
                return _compare(source, copy)
            (device,) = copy.iterdir()
            return _compare_files(source, device)

    def _full(self, name: str) -> str:
        return f"{self.space}-{name}"

    def claim(self, name: str, *, block: bool = False) -> Json:
        """A claim of its size; Kubernetes attaches one that is shared to several nodes at a time."""
        claim = build_claim(self.space, name, size=self.size)
        claim["spec"]["volumeMode"] = "Block" if block else "Filesystem"
        if self.shared:
            claim["spec"] |= {"accessModes": ["ReadWriteMany"], "storageClassName": SHARED_CLASS}
        return claim

    def path(self, claim: str) -> Path:
        return Volume(self.bed, self.space, claim).path()

    def _pod(self, name: str, *, waits: bool = False) -> Json:
        selector = {"kubernetes.io/hostname": self.node} if self.node else {}
        volume = {"persistentVolumeClaim": {"claimName": name}}
        return build_holder(self.space, name, volume, waits=waits, nodeSelector=selector)

    def _wait_pod(self, name: str, until: Callable[[Json], bool]) -> Json:
        def find() -> Json | None:
            pod = self.bed.api.get(PODS, self.space, name)
            return pod if pod is not None and until(pod) else None

        return wait_for(f"pod {self.space}/{name}", find)


def _survey(folder: Path) -> Survey:
    paths = [path for path in folder.rglob("*") if path.relative_to(folder).parts[0] != _DONE]
    return {str(path.relative_to(folder)): describe(path) for path in paths}


def _compare(source: Path, copy: Path) -> list[str]:
    return list(compare(_survey(source), _survey(copy)).differences)


def _compare_files(source: Path, copy: Path) -> list[str]:
    digests = []
    for path in (source, copy):
        with path.open("rb") as file:
            digests.append(hashlib.file_digest(file, "sha256").hexdigest())
    return [] if len(set(digests)) == 1 else [f"{copy} differs from {source}"]

"""A worker's own volumes, storage location and repository, and how it makes a transfer of each kind.

Data is put into volumes from outside, where the test bed keeps them: random each time, so that
nothing of it is in the repository yet and a shut gate holds it.
"""

import hashlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from core.kube.resources import (
    BACKUP_STORAGE_LOCATIONS,
    NAMESPACES,
    PERSISTENT_VOLUME_CLAIMS,
    PODS,
    SECRETS,
    VOLUME_SNAPSHOTS,
    Resource,
)
from tests.cluster.bed import Bed
from tests.cluster.gate import HELD_BYTES, Gate
from tests.cluster.handkopia import open_kopia
from tests.cluster.scenes import RESOURCES, Place, Volume, build_pod_transfer, is_final
from tests.cluster.workloads import build_holder, is_waiting
from tests.testbed.api import Json
from tests.testbed.demonstration.manifests import NAMESPACE, build_claim, build_namespace, build_snapshot
from tests.testbed.processes import BedError

_BY_KIND = {"Secret": SECRETS, "BackupStorageLocation": BACKUP_STORAGE_LOCATIONS}
_POD_VOLUMES = "/var/lib/kubelet/pods/{uid}/volumes/kubernetes.io~empty-dir/data"
_NODE = "bed-1"
_SECONDS = 300
_LOOK_SECONDS = 0.3


@dataclass
class Ground:
    """What one worker has for itself.

    Attributes:
        gate: Behind which its storage location is.
        name: Its namespace, its location and the beginning of its transfers' names.
        by_block: Its claim is a device, which is backed up by block.
        copies: Snapshot and digest of the last Completed backup, by its kind.
    """

    bed: Bed
    gate: Gate
    name: str
    by_block: bool = False
    copies: dict[str, tuple[str, str]] = field(default_factory=dict)
    _filled: dict[str, str] = field(default_factory=dict)

    def prepare(self) -> None:
        """Make it, and back a volume and a pod's volume up once."""
        api = self.bed.api
        api.create(NAMESPACES, build_namespace(self.name))
        for item in Place(self.bed, self.name).build(url=self.gate.url):
            api.create(_BY_KIND[item["kind"]], item)
        api.create(PERSISTENT_VOLUME_CLAIMS, self._claim(build_claim(self.name, "data", size="64Mi")))
        api.create(PODS, self._pod("writer"))
        for kind in ("DataUpload", "PodVolumeBackup"):
            transfer = self.make(kind, f"{self.name}-{kind.lower()}-seed")
            api.create(RESOURCES[kind], transfer)
            ended = self.wait(transfer, is_final)
            if ended["status"]["phase"] != "Completed":
                raise BedError(
                    f"{kind} {transfer['metadata']['name']} ended before anything was broken: {ended['status']}"
                )
            self.keep(ended)

    def keep(self, ended: Json) -> None:
        """Remember a Completed transfer, if it is a backup."""
        if digest := self._filled.get(ended["metadata"]["name"]):
            self.copies[ended["kind"]] = (ended["status"]["snapshotID"], digest)

    def lost(self) -> list[str]:
        """Restore the copies with kopia; returns those whose content is not as it was."""
        lost = []
        for kind, (snapshot, digest) in self.copies.items():
            try:
                with open_kopia(self.bed, self.name, prefix=self.name) as kopia, TemporaryDirectory() as folder:
                    kopia.run("restore", snapshot, folder)
                    device = self.by_block and kind == "DataUpload"
                    if digest_of(next(Path(folder).iterdir()) if device else Path(folder)) == digest:
                        continue
                error: object = "it has other content"
            except (BedError, OSError) as e:
                error = e
            lost.append(f"the last {kind} of {self.name}, snapshot {snapshot}: {error}")
        return lost

    def fill(self, size_bytes: int = HELD_BYTES) -> str:
        """Replace what is in the claim; returns the digest."""
        return _fill(Volume(self.bed, self.name).path(), size_bytes)

    def make(self, kind: str, name: str) -> Json:
        """Make what a transfer of a kind is about; returns the transfer, which is not made yet."""
        match kind:
            case "DataUpload":
                return self._upload(name)
            case "DataDownload":
                volume = Volume(self.bed, self.name)
                self.bed.api.create(PERSISTENT_VOLUME_CLAIMS, self._claim(volume.target(name)))
                return volume.download(name, snapshot_id=self.copies["DataUpload"][0], location=self.name)
            case "PodVolumeBackup":
                writer = self._wait_pod("writer", lambda pod: pod.get("status", {}).get("phase") == "Running")
                self._filled[name] = _fill(Path(_POD_VOLUMES.format(uid=writer["metadata"]["uid"])), HELD_BYTES)
                return build_pod_transfer(kind, name, writer, location=self.name)
        self.bed.api.create(PODS, self._pod(name, waits=True))
        reader = self._wait_pod(name, is_waiting)
        snapshot, _ = self.copies["PodVolumeBackup"]
        return build_pod_transfer(kind, name, reader, location=self.name, snapshotID=snapshot)

    def wait(self, transfer: Json, until: Callable[[Json], bool], *, seconds: float = _SECONDS) -> Json:
        """Wait until something is true of a transfer; returns it, empty once it is deleted."""
        where = (NAMESPACE, transfer["metadata"]["name"])
        return wait_for(
            self.bed, RESOURCES[transfer["kind"]], where, lambda found: not found or until(found), seconds=seconds
        )

    def mover(self, transfer: Json) -> Json:
        """The mover pod of a transfer, empty where there is none."""
        return self.bed.api.get(PODS, NAMESPACE, transfer["metadata"]["name"]) or {}

    def remove(self, transfer: Json) -> None:
        """Have a transfer deleted, and what it was about."""
        api, name = self.bed.api, transfer["metadata"]["name"]
        api.delete(RESOURCES[transfer["kind"]], NAMESPACE, name)
        self.wait(transfer, lambda _: False)
        for resource in (PODS, PERSISTENT_VOLUME_CLAIMS, VOLUME_SNAPSHOTS):
            api.delete(resource, self.name, name)

    def _upload(self, name: str) -> Json:
        self._filled[name] = self.fill()
        self.bed.api.create(VOLUME_SNAPSHOTS, build_snapshot(self.name, name, claim="data"))
        wait_for(
            self.bed, VOLUME_SNAPSHOTS, (self.name, name), lambda found: (found.get("status") or {}).get("readyToUse")
        )
        transfer = Volume(self.bed, self.name).upload(name, snapshot=name, location=self.name)
        transfer["spec"] |= {"datamover": "velero-block"} if self.by_block else {}
        return transfer

    def _claim(self, claim: Json) -> Json:
        claim["spec"]["volumeMode"] = "Block" if self.by_block else "Filesystem"
        return claim

    def _pod(self, name: str, *, waits: bool = False) -> Json:
        return build_holder(self.name, name, {"emptyDir": {}}, waits=waits, nodeName=_NODE)

    def _wait_pod(self, name: str, until: Callable[[Json], bool]) -> Json:
        return wait_for(self.bed, PODS, (self.name, name), until)


def wait_for(
    bed: Bed, resource: Resource, where: tuple[str, str], until: Callable[[Json], object], *, seconds: float = _SECONDS
) -> Json:
    """Wait until something is true of an object, which is empty where there is none; returns it."""
    deadline = time.monotonic() + seconds
    while not until(found := bed.api.get(resource, *where) or {}):
        if time.monotonic() > deadline:
            seen = found.get("status"), found.get("metadata", {}).get("annotations")
            raise BedError(f"{resource.plural} {'/'.join(where)} after {seconds:.0f} s: {seen}")
        time.sleep(_LOOK_SECONDS)
    return found


def _fill(volume: Path, size_bytes: int) -> str:
    if volume.is_dir():
        part = volume / "file.part"
        part.write_bytes(os.urandom(size_bytes))
        part.rename(volume / "file")
    else:
        with volume.open("r+b") as device:
            device.write(os.urandom(size_bytes))
            device.flush()
            os.fsync(device.fileno())
    return digest_of(volume)


def digest_of(volume: Path) -> str:
    """The digest of what was filled in, or of a whole device."""
    with (volume / "file" if volume.is_dir() else volume).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

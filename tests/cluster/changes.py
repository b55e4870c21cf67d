"""Backups by block of a driver that says what has changed: the released sidecar over the test bed's driver."""

import hashlib
import json
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple, Self

from core.kube.resources import EVENTS, VOLUME_SNAPSHOT_CONTENTS, VOLUME_SNAPSHOTS
from tests.cluster.bed import Bed
from tests.cluster.breakage import break_storage
from tests.cluster.scenes import Volume, open_place, wait_released
from tests.testbed.api import Json
from tests.testbed.demonstration.manifests import NAMESPACE
from tests.testbed.layout import Layout
from tests.testbed.settings import BUCKET, node_address
from tests.testbed.storage.changes import ChangesService, serving_changes
from tests.testbed.storage.csi import Storage

MIB: Final = 1 << 20

_BASE_LABEL = "nodeagent.io/base-claim"


class Content(NamedTuple):
    """All of a device: its size in bytes and its SHA-256."""

    size: int
    digest: str

    @classmethod
    def read(cls, path: Path) -> Self:
        with path.open("rb") as file:
            return cls(digest=hashlib.file_digest(file, "sha256").hexdigest(), size=file.tell())


@contextmanager
def announced_changes(bed: Bed, space: str) -> Iterator[ChangesService]:
    """Run and announce the sidecar; tests of other lanes leave the announcement out of their lists by `space`."""
    driver, folder = Storage(Layout(bed.folder)).socket(1), bed.folder / f"changes-{space}"
    with serving_changes(bed.api, driver, folder, host=node_address(1), label=space) as service:
        yield service


@dataclass
class Tracked:
    """A volume, its backups by block in a location of its own, and what they cost.

    Attributes:
        space: Its namespace, and the name of its location.
        block: It is a device; else it has a file system with one file.
        content: What each backup has to have, by name: all of the device.
    """

    bed: Bed
    space: str
    block: bool = True
    content: dict[str, Content] = field(default_factory=dict)
    _random: random.Random = field(default_factory=lambda: random.Random(1))

    @property
    def volume(self) -> Volume:
        return Volume(self.bed, self.space)

    def create(self, *, mib: int, filled_mib: int) -> None:
        """Create the claim, with random data at the start of the device or file."""
        self.volume.fill("" if self.block else "open('/data/file', 'x')", size=f"{mib}Mi", block=self.block)
        self.write(0, filled_mib * MIB)

    def write(self, at: int, count: int) -> None:
        """Write random bytes, or zeros for a negative count."""
        path = self.volume.path()
        with (path if self.block else path / "file").open("r+b") as file:
            file.seek(at)
            for start in range(0, abs(count), MIB):
                piece = min(MIB, abs(count) - start)
                file.write(self._random.randbytes(piece) if count > 0 else bytes(piece))
            file.flush()
            os.fsync(file.fileno())

    def back_up(self, name: str, *, fault: str = "") -> Json:
        """Back the volume up as it is, with a fault of the service or none; return the DataUpload as it ended."""
        full = f"{self.space}-{name}"
        self.volume.take_snapshots([full])
        self.content[name] = self._snapshot_content(full)
        body = self.volume.upload(full, snapshot=full, location=self.space)
        body["spec"]["datamover"] = "velero-block"
        faults = [("changes", f"{self.space}/{full}", fault)] if fault else []
        with break_storage(self.bed, self.space, faults):
            self.bed.user.apply(body)
            return wait_released(self.bed, body, "Completed")

    def _snapshot_content(self, name: str) -> Content:
        found = self.bed.api.get(VOLUME_SNAPSHOTS, self.space, name) or {}
        content = (
            self.bed.api.get(VOLUME_SNAPSHOT_CONTENTS, "", found["status"]["boundVolumeSnapshotContentName"]) or {}
        )
        handle: str = content["status"]["snapshotHandle"]
        return Content.read(self.bed.folder / "snapshots" / handle)

    def restore(self, upload: Json) -> Content:
        """Restore a backup into a new device, and return its content."""
        name = upload["metadata"]["name"]
        target, size = f"{name}-back", str(upload["status"]["progress"]["totalBytes"])
        claim = self.volume.target(target, size=size, block=True)
        last = self.volume.restore(claim, snapshot_id=upload["status"]["snapshotID"], location=self.space)
        assert last["status"]["phase"] == "Completed", last["status"]
        return Content.read(Volume(self.bed, self.space, target).path())

    def messages(self, upload: Json, reason: str) -> list[str]:
        uid = upload["metadata"]["uid"]
        events = self.bed.api.objects(EVENTS, NAMESPACE)
        return [one["message"] for one in events if (one["involvedObject"].get("uid"), one["reason"]) == (uid, reason)]

    def hashed_bytes(self, upload: Json) -> int:
        """How many bytes its data mover has read and hashed; it reads few blocks of zeros besides."""
        readings = [json.loads(message) for message in self.messages(upload, "Data-Path-Progress")]
        return max(int(one.get("hashedBytes", 0)) for one in readings)

    def stored_bytes(self) -> int:
        folder = Layout(self.bed.folder).s3 / BUCKET / self.space
        return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())

    def bases(self) -> list[str]:
        """The names of its base snapshots, each that of a DataUpload."""
        selector = f"{_BASE_LABEL}={self.space}.data"
        return [one["metadata"]["name"] for one in self.bed.api.objects(VOLUME_SNAPSHOT_CONTENTS, selector=selector)]


@contextmanager
def open_tracked(bed: Bed, space: str, *, block: bool = True) -> Iterator[Tracked]:
    """A location for the backups of a volume, which is not created yet; what they leave is deleted at the end."""
    tracked = Tracked(bed, space, block)
    with open_place(bed, space):
        yield tracked
    for base in tracked.bases():
        delete_base(bed, base)


def delete_base(bed: Bed, name: str) -> None:
    """Delete a base snapshot, also on the storage."""
    policy = json.dumps({"spec": {"deletionPolicy": "Delete"}})
    bed.user.kubectl("patch", "volumesnapshotcontent", name, "--type=merge", "-p", policy)
    bed.user.kubectl("delete", "volumesnapshotcontent", name, "--ignore-not-found")

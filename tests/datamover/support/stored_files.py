"""A pod that reads files of a snapshot, with a real kopia and a directory as location."""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.datamover.support.plainkopia import IDENTITY, PlainKopia
from tests.datamover.support.pods import MoverPod
from tests.support.fakekube import FakeKube


@dataclass
class SnapshotBed:
    """The pod, the volume that is backed up, and the ID of its snapshot, in the repository of namespace app."""

    pod: MoverPod
    volume: Path
    snapshot_id: str

    @classmethod
    def make(cls, kopia: PlainKopia, folder: Path, volume: Path) -> "SnapshotBed":
        root = folder / "location"
        place = root / "kopia" / "app"
        place.mkdir(parents=True)
        pod = MoverPod(FakeKube(), folder)
        pod.put_location({"fspath": str(root)}, provider="velero.io/fs", bucket="")
        kopia.run("repository", "create", "filesystem", f"--path={place}", *IDENTITY)
        return cls(pod, volume, json.loads(kopia.run("snapshot", "create", str(volume), "--json"))["id"])

    def copy(self, folder: Path) -> "SnapshotBed":
        """Return one with a pod and a repository of its own, and the same volume."""
        root = Path(shutil.copytree(self.pod.folder / "location", folder / "location"))
        pod = MoverPod(FakeKube(), folder)
        pod.put_location({"fspath": str(root)}, provider="velero.io/fs", bucket="")
        return SnapshotBed(pod, self.volume, self.snapshot_id)

    def place(self, path: str = "", **more: Any) -> dict[str, Any]:
        """Return the fields of a specification that name a path in the snapshot."""
        place = {"backup_storage_location": "default", "volume_namespace": "app", "snapshot": self.snapshot_id}
        return {**place, "path": path, **more}


def make_volume(volume: Path) -> Path:
    """Create a volume with odd names, links, an empty directory and a file with a hole."""
    (volume / "sub" / "deep").mkdir(parents=True)
    (volume / "empty").mkdir()
    (volume / "empty").chmod(0o2770)
    (volume / "a").write_bytes(b"one")
    (volume / "a").chmod(0o640)
    (volume / "new\nline\x1b[31m").write_bytes(b"two")
    Path(os.fsdecode(os.fsencode(volume) + b"/bad\xff")).write_bytes(b"three")
    (volume / "sub" / "deep" / "$(HOME) ü%41").write_bytes(b"four")
    (volume / "sub" / "link").symlink_to("../a")
    os.link(volume / "a", volume / "sub" / "hard")
    with (volume / "sparse").open("wb") as file:
        file.truncate(3_000_000)
        file.seek(1_000_000)
        file.write(b"middle")
    return volume

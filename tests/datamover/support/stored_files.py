"""A pod that reads files of a snapshot, with a real kopia and a directory as location, and what it sends."""

import asyncio
import io
import os
import sys
import tarfile
from asyncio.subprocess import PIPE
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.mover_specs import SendFiles
from core.snapshot_contract import ENTRY_LINE, SEND_COMMAND, FileEntry, SentFiles
from datamover.pod.file_stream import FileSender
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
        pod = MoverPod(FakeKube(), folder)
        pod.repository.mkdir(parents=True)
        kopia.run("repository", "create", "filesystem", f"--path={pod.repository}", *IDENTITY)
        return cls(pod, volume, kopia.snapshot(volume))

    def copy(self, folder: Path) -> "SnapshotBed":
        """Return one with a pod and a repository of its own, and the same volume."""
        return SnapshotBed(MoverPod.ready(self.pod.repository, folder), self.volume, self.snapshot_id)

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


class Received:
    """What the process that is executed in the pod passed on."""

    def __init__(self, code: int, output: bytes, errors: bytes) -> None:
        self.code = code
        line, _, self.tar = output.partition(b"\n")
        self.entry: FileEntry | None = ENTRY_LINE.parse(line.decode())
        self.result = SentFiles.from_json(errors.decode().strip())
        self.whole = self.result == SentFiles(bytes=len(output), note=self.result.note)

    def open(self) -> tarfile.TarFile:
        return tarfile.open(fileobj=io.BytesIO(self.tar))


async def relay_in_process() -> Received:
    command = [sys.executable, *SEND_COMMAND[1:]]
    child = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE, env=os.environ)
    output, errors = await child.communicate()
    return Received(child.returncode or 0, output, errors)


def build_sender(bed: SnapshotBed, path: str = "", *, device: bool = False, **limits: float) -> FileSender:
    """Return one that sends what is at a path."""
    spec = SendFiles(**bed.place(path, device=device))
    return FileSender(spec, bed.pod.context, linger_seconds=0, **limits)


async def receive(bed: SnapshotBed, path: str = "", *, device: bool = False) -> Received:
    """Return what a command gets of what is at a path."""
    async with asyncio.TaskGroup() as group:
        sending = group.create_task(build_sender(bed, path, device=device).run(), name="sending")
        receiving = group.create_task(relay_in_process(), name="receiving")
    assert SentFiles.from_json(sending.result().message) == receiving.result().result
    return receiving.result()

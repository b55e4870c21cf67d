"""Volumes and snapshots as folders and device images. Knows nothing of Kubernetes.

A file-system volume is a folder; a block volume is a sparse file behind a loop device.
A snapshot is a copy of either, found by its handle.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from tests.datamover.support.loopdevice import FIND_DEVICE

__all__ = ["Disk", "Snapshot"]

_MUCH_BYTES: Final = 256 << 20


@dataclass(frozen=True)
class Snapshot:
    """What is known of a snapshot besides its data."""

    handle: str
    size_bytes: int
    block: bool
    created_ns: int


@dataclass(frozen=True)
class Disk:
    """All volumes and snapshots of a test bed; methods that copy take as long as the data is large."""

    volumes: Path
    snapshots: Path

    def create(self, name: str, size_bytes: int, *, block: bool, source: str = "") -> str:
        """Make a volume, or continue what an earlier call began.

        Args:
            name: The volume's name.
            size_bytes: Its capacity; only a block volume is held to it.
            block: Whether it is a device.
            source: Handle of the snapshot whose data it starts with.

        Returns:
            The path to give to a `local` PersistentVolume.
        """
        part, data = self.volumes / f"{name}.part", self.volumes / name
        if not data.exists():
            _remove(part)
            self.volumes.mkdir(parents=True, exist_ok=True)
            if source:
                _copy(self.snapshots / source / "data", part)
            elif not block:
                part.mkdir()
            if block:
                with part.open("ab") as image:
                    image.truncate(size_bytes)
            else:
                part.chmod(0o777)
            part.rename(data)
        return self._device(data) or self._attach(data) if block else str(data)

    def delete(self, name: str) -> None:
        """Remove a volume and its device; one that no longer exists is no error."""
        data = self.volumes / name
        device = self._device(data)
        if device:
            subprocess.run(["losetup", "--detach", device], check=True)
        _remove(data)
        _remove(self.volumes / f"{name}.part")

    def take_snapshot(self, volume: str, size_bytes: int) -> Snapshot:
        """Copy a volume as it is now.

        Raises:
            FileNotFoundError: There is no such volume.
        """
        data = self.volumes / volume
        if not data.exists():
            raise FileNotFoundError(f"there is no volume {volume}")
        device = self._device(data)
        if device:
            _flush(device)
        snapshot = Snapshot(str(uuid.uuid4()), size_bytes, data.is_file(), time.time_ns())
        folder = self.snapshots / snapshot.handle
        folder.mkdir(parents=True)
        _copy(data, folder / "data")
        (folder / "snapshot.json").write_text(json.dumps(asdict(snapshot)))
        return snapshot

    def find_snapshot(self, handle: str) -> Snapshot | None:
        """The snapshot of this handle, if its copy is complete."""
        file = self.snapshots / handle / "snapshot.json"
        return Snapshot(**json.loads(file.read_text())) if handle and file.exists() else None

    def delete_snapshot(self, handle: str) -> None:
        """Remove a snapshot; one that no longer exists is no error."""
        _remove(self.snapshots / handle)

    def _device(self, data: Path) -> str:
        """The loop device over an image, or nothing."""
        if not data.is_file():
            return ""
        return _output("losetup", "--list", "--noheadings", "--output", "NAME", "-j", str(data))

    def _attach(self, data: Path) -> str:
        return _output(*FIND_DEVICE, str(data))


def _copy(source: Path, target: Path) -> None:
    """Copy data; much of it is then on the disk.

    As with a real driver, whose copies share blocks: else the kernel would write it while the copy is backed up.
    """
    options = ["--archive", "--reflink=auto", "--sparse=always", "--no-target-directory"]
    subprocess.run(["cp", *options, str(source), str(target)], check=True, capture_output=True)
    if int(_output("du", "--summarize", "--bytes", str(target))) >= _MUCH_BYTES:
        subprocess.run(["sync", "--file-system", str(target)], check=True, capture_output=True)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _flush(device: str) -> None:
    """Write what the device still has in memory into its image."""
    descriptor = os.open(device, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _output(*argv: str) -> str:
    lines = subprocess.run(argv, check=True, capture_output=True, text=True).stdout.split()
    return lines[0] if lines else ""

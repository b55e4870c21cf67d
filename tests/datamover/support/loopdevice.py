"""A real block device: a loop device over a file."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.datamover.support.mounts import need_root

__all__ = ["FIND_DEVICE", "attached"]

FIND_DEVICE = ("flock", "/dev/loop-control", "losetup", "--find", "--show")
"""Attaches the file that follows, and prints the device.

Two that run at the same time may choose the same device; the second one claims it for a moment before it tries
another, and who uses the device meanwhile fails. Source: Linux 6.12, drivers/block/loop.c, loop_configure.
"""


@contextmanager
def attached(file: Path, *flags: str) -> Iterator[Path]:
    """Attach a device to the file, and detach it at the end."""
    need_root("loop devices")
    attached = subprocess.run([*FIND_DEVICE, *flags, file], check=True, capture_output=True, text=True)
    device = attached.stdout.strip()
    try:
        yield Path(device)
    finally:
        subprocess.run(["losetup", "--detach", device], check=True)

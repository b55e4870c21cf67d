"""A real block device: a loop device over a file, and the file system on it."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.datamover.support.mounts import need_root

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


def make_ext4(image: Path, size_bytes: int, *flags: str) -> None:
    """Make a file of that size with an empty file system, instead of what is there."""
    image.unlink(missing_ok=True)
    image.touch()
    os.truncate(image, size_bytes)
    subprocess.run(["mkfs.ext4", "-q", "-F", "-b", "4096", *flags, image], check=True)


@contextmanager
def mounted_image(image: Path, folder: Path, options: str = "defaults") -> Iterator[Path]:
    """Mount the file system in a file, and unmount it at the end."""
    folder.mkdir(exist_ok=True)
    with attached(image) as device:
        subprocess.run(["mount", "-o", options, device, folder], check=True)
        try:
            yield folder
        finally:
            subprocess.run(["umount", folder], check=True)


def fill(file: Path) -> None:
    """Write random data into the file until its file system is full."""
    with suppress(OSError), file.open("wb", buffering=0) as opened:
        while True:
            opened.write(os.urandom(4096))

"""A real block device: a loop device over a file."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.datamover.support.mounts import need_root

__all__ = ["attached"]


@contextmanager
def attached(file: Path, *flags: str) -> Iterator[Path]:
    """Attach a device to the file, and detach it at the end."""
    need_root("loop devices")
    attached = subprocess.run(["losetup", "--find", "--show", *flags, file], check=True, capture_output=True, text=True)
    device = attached.stdout.strip()
    try:
        yield Path(device)
    finally:
        subprocess.run(["losetup", "--detach", device], check=True)

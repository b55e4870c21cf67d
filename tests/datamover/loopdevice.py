"""A real block device: a loop device over a file."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

__all__ = ["attached", "needs_devices"]


def needs_devices() -> None:
    """Skip the test where no device can be made; under CI that is a failure."""
    if os.geteuid() == 0 and Path("/dev/loop-control").exists():
        return
    reason = "loop devices need root"
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


@contextmanager
def attached(file: Path, *flags: str) -> Iterator[Path]:
    """Make a device of the file, and detach it at the end."""
    needs_devices()
    made = subprocess.run(["losetup", "--find", "--show", *flags, file], check=True, capture_output=True, text=True)
    device = made.stdout.strip()
    try:
        yield Path(device)
    finally:
        subprocess.run(["losetup", "--detach", device], check=True)

"""Mounted file systems: small ones, and read-only ones."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def need_root(what: str) -> None:
    """Skip the test without root; under CI that is a failure."""
    if os.geteuid() == 0:
        return
    reason = f"{what} need root"
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[Path]:
    """Mount a file system in memory, and unmount it at the end."""
    need_root("mounts")
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        # A loop device over a file in it may be detached a moment later.
        subprocess.run(["umount", "--lazy", folder], check=True)

"""Mounted file systems: small ones, read-only ones, and those that do not keep all names."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.tools import tool


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


@contextmanager
def mounted_folding(folder: Path, *rules: str) -> Iterator[Path]:
    """Mount a file system that takes some names for others or refuses them, and unmount it at the end.

    The rules are tools/foldfs's; the program also unmounts it if this process ends.
    """
    need_root("mounts")
    kept = folder.with_name(f"{folder.name}-kept")
    for one in (folder, kept):
        one.mkdir()
    argv: list[str | Path] = [tool("foldfs", "foldfs"), kept, folder, *rules]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"mounted\n"
        yield folder
    assert process.returncode == 0

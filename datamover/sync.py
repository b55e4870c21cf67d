"""Restored data reaches the disk before anybody says so.

Knows the program that asks the kernel for it. A child does it, because a thread that waits
for a slow disk could not be left when the load is canceled.
Source: GNU coreutils 9.1, sync(1).
"""

import os
from pathlib import Path
from typing import Final

from core.errors import DataPathError
from datamover.child import ChildCommand, run_child

__all__ = ["WRITING", "sync_device", "sync_file_system"]

WRITING: Final = "writing what was restored to the disk"
"""What takes so long, for whoever asks."""


async def sync_file_system(path: Path) -> None:
    """Write out everything on the file system that holds `path`.

    Raises:
        DataPathError: the disk did not take it.
    """
    await _sync("--file-system", path)


async def sync_device(path: Path) -> None:
    """Write out everything that was written to the device.

    Raises:
        DataPathError: the disk did not take it.
    """
    await _sync(str(path))


async def _sync(*arguments: str | Path) -> None:
    lines: list[str] = []
    end = await run_child(ChildCommand(["sync", *map(str, arguments)], os.environ), lines.append)
    if end.exit_code:
        raise DataPathError(f"what was restored to {arguments[-1]} did not reach the disk: {' '.join(lines)}")

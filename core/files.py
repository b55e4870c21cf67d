"""Files that another party may exchange while they are opened: only what is a regular file then is read."""

import os
from pathlib import Path

__all__ = ["read_start"]


def read_start(file: Path, most_bytes: int) -> bytes:
    """Return the start of a regular file; a link is not followed, and a pipe without a writer does not block.

    Raises:
        OSError: it is a link or a directory, or it cannot be read.
    """
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as opened:
        return opened.read(most_bytes)

"""Files that another party may exchange while they are opened: only what is a regular file then is read."""

import errno
import os
import stat
from pathlib import Path

__all__ = ["read_start"]


def read_start(file: Path | str, most_bytes: int) -> bytes:
    """Return the start of a regular file; a link is not followed, and a pipe does not block.

    Raises:
        OSError: it is anything else, or it cannot be read.
    """
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Not a regular file", str(file))
        return os.read(descriptor, most_bytes)
    finally:
        os.close(descriptor)

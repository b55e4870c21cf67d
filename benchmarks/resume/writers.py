"""Which processes write to a file system, as the kernel reports it: exactly, however short it was.

Does not know movers or attempts.
Source: fanotify_init(2), fanotify_mark(2), fanotify(7), linux/fanotify.h; only with CAP_SYS_ADMIN are PIDs reported.
"""

import ctypes
import os
import struct
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from benchmarks.processes import BenchmarkError

__all__ = ["Writers", "watch_writers"]

_FLAGS: Final = 0x0001 | 0x0002 | 0x0010 | 0x0200
"""FAN_CLOEXEC, FAN_NONBLOCK, FAN_UNLIMITED_QUEUE, and FAN_REPORT_FID: no open file comes with an event."""

_ADD_FILE_SYSTEM: Final = 0x0001 | 0x0100
_CHANGES: Final = 0x0002 | 0x0040 | 0x0080 | 0x0100 | 0x0200
"""FAN_MODIFY, FAN_MOVED_FROM, FAN_MOVED_TO, FAN_CREATE, FAN_DELETE."""

_AT_FDCWD: Final = -100
_EVENT: Final = struct.Struct("=IBBHQii")
_READ_BYTES: Final = 1 << 20


class Writers:
    """The changes that no one has asked for yet."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def take(self) -> Counter[int]:
        """Return how many changes each process (PID) has made since this was last asked; repeated ones may be one."""
        found: Counter[int] = Counter()
        with suppress(BlockingIOError):
            while events := os.read(self._descriptor, _READ_BYTES):
                begin = 0
                while begin < len(events):
                    size, _, _, _, _, _, pid = _EVENT.unpack_from(events, begin)
                    found[pid] += 1
                    begin += size
        return found


@contextmanager
def watch_writers(folder: Path) -> Iterator[Writers]:
    """Yield what knows which processes change the file system of a folder, until the end of the block.

    Raises:
        BenchmarkError: the kernel does not say it to this process.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.fanotify_init(_FLAGS, os.O_RDONLY)
    try:
        mask, path = ctypes.c_uint64(_CHANGES), os.fsencode(folder)
        if descriptor < 0 or libc.fanotify_mark(descriptor, _ADD_FILE_SYSTEM, mask, _AT_FDCWD, path) < 0:
            raise BenchmarkError(f"{folder} cannot be watched: {os.strerror(ctypes.get_errno())} (not as root?)")
        yield Writers(descriptor)
    finally:
        if descriptor >= 0:
            os.close(descriptor)

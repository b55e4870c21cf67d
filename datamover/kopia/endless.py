"""Files that kopia would read without an end: there is more in them than they say, or they grow as fast as it reads.

kopia reads a file until its end, however long that takes, and does not say how far it is. The kernel does.
Source: kopia 0.23.1, snapshot/upload/upload.go (copyWithProgress); Linux, proc_pid_fdinfo(5).
"""

import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from datamover.runtime.cancellation import ShouldStop
from datamover.runtime.child import running_children
from datamover.runtime.tree import escape_controls

__all__ = ["EndlessFile", "EndlessFiles", "Reading"]

_BEYOND_BYTES: Final = 1 << 30
"""How much of a file may be read beyond its size, which some file systems do not know."""

_GROWTH: Final = 4
_GROWN_BYTES: Final = 64 << 30
"""How far a file that grows may be read: so many times the size that it had at first, or so far."""


class Reading(NamedTuple):
    """A file that a process reads: the descriptor's link in `/proc`, and its path for that process."""

    link: Path
    path: str


class EndlessFile(NamedTuple):
    """A file that is read beyond its end; `certain`: beyond all limits."""

    path: str
    text: str
    certain: bool


class EndlessFiles:
    """Finds such files among those that the children of this process read."""

    def __init__(self, processes: Callable[[], Iterable[int]] = running_children) -> None:
        self._processes = processes
        self._read_bytes: dict[Reading, int] = {}
        self._size_bytes: dict[Reading, int] = {}
        self._first_bytes: dict[Reading, int] = {}
        self._first_beyond_bytes: dict[Reading, int] = {}

    def observe(self) -> list[Reading]:
        """Look how far each file is read, and return those to measure: more of them was read since the last call."""
        before, self._read_bytes = self._read_bytes, dict(self._readings())
        return [one for one, count in self._read_bytes.items() if count > before.get(one, 0)]

    def measure(self, files: Iterable[Reading], _: ShouldStop) -> None:
        """Read the sizes of files; may hang, as their file system may."""
        for one in files:
            # It may be closed by now.
            with suppress(OSError):
                found = one.link.stat()
                if stat.S_ISREG(found.st_mode):
                    self._size_bytes[one] = found.st_size

    def find(self) -> EndlessFile | None:
        """Return a file that is read beyond its end; None: there is none."""
        for known in (self._size_bytes, self._first_bytes, self._first_beyond_bytes):
            for one in known.keys() - self._read_bytes.keys():
                del known[one]
        for one, size_bytes in self._size_bytes.items():
            count, first_bytes = self._read_bytes[one], self._first_bytes.setdefault(one, size_bytes)
            grown_bytes = max(_GROWN_BYTES, _GROWTH * first_bytes)
            # The next read of one that was cut meanwhile is at its end.
            if count > min(size_bytes, grown_bytes) and count > self._first_beyond_bytes.setdefault(one, count):
                path = escape_controls(one.path)
                text = (
                    f"no end of {path}: {count} bytes of it were read, and its size is {size_bytes}: leave it out by "
                    "an ignore rule in kopia's policy"
                )
                return EndlessFile(path, text, certain=count > min(size_bytes + _BEYOND_BYTES, grown_bytes))
        return None

    def _readings(self) -> Iterator[tuple[Reading, int]]:
        for process in (Path(f"/proc/{pid}") for pid in self._processes()):
            # It may have exited.
            with suppress(OSError):
                root = str((process / "root").readlink()).rstrip("/")
                for info in (process / "fdinfo").iterdir():
                    with suppress(OSError):
                        if count := _position(info.read_text()):
                            link = process / "fd" / info.name
                            yield Reading(link, str(link.readlink()).removeprefix(root)), count


def _position(text: str) -> int:
    """Return the position that `fdinfo` has, if the descriptor can only read; otherwise 0."""
    found = dict(line.split(":\t", 1) for line in text.splitlines()[:2])
    return int(found["pos"]) if int(found["flags"], 8) & os.O_ACCMODE == os.O_RDONLY else 0

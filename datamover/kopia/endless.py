"""Files that kopia would read without an end: there is more in them than they say, or they grow as fast as it reads.

kopia reads a file until its end, however long that takes, and does not say how far it is. The kernel does.
Source: kopia 0.23.1, snapshot/upload/upload.go (copyWithProgress); Linux, proc_pid_fdinfo(5).
"""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from datamover.runtime.cancellation import ShouldStop
from datamover.runtime.child import running_children
from datamover.runtime.tree import escape_controls

__all__ = ["EndlessFiles"]

_BEYOND_BYTES: Final = 1 << 30
"""How much of a file may be read beyond its size, which some file systems do not know."""

_GROWTH: Final = 4
_GROWN_BYTES: Final = 64 << 30
"""How far a file that grows may be read: so many times the size that it had when its first GiB was read, or so far."""


class _Reading(NamedTuple):
    """A file that a process reads: the descriptor's link in `/proc`, and its path for that process."""

    link: Path
    path: str


class EndlessFiles:
    """Finds such files among those that the children of this process read."""

    def __init__(self, processes: Callable[[], Iterable[int]] = running_children) -> None:
        self._processes = processes
        self._read_bytes: dict[_Reading, int] = {}
        self._first_bytes: dict[tuple[int, int], int] = {}
        self._exceeding: set[_Reading] = set()

    def observe(self) -> dict[_Reading, int]:
        """Return how far each file is read, if that is beyond its first GiB, and further than at the last call."""
        before, self._read_bytes = self._read_bytes, dict(self._readings())
        return {one: count for one, count in self._read_bytes.items() if count > before.get(one, 0)}

    def judge(self, read_bytes: dict[_Reading, int], _: ShouldStop) -> str:
        """Return which of the files has no end, or an empty string; may hang, as their file system may."""
        before, self._exceeding = self._exceeding, set()
        for one, count in read_bytes.items():
            # It may be closed by now.
            with suppress(OSError):
                found = one.link.stat()
                first_bytes = self._first_bytes.setdefault((found.st_dev, found.st_ino), found.st_size)
                if count <= min(found.st_size + _BEYOND_BYTES, max(_GROWN_BYTES, _GROWTH * first_bytes)):
                    continue
                # The next read of one that was cut meanwhile is at its end.
                self._exceeding.add(one)
                if one in before:
                    return (
                        f"{escape_controls(one.path)} has no end, or grows as fast as it is read: {count} bytes were "
                        f"read, and its size is {found.st_size}: leave it out by an ignore rule in kopia's policy"
                    )
        return ""

    def _readings(self) -> Iterator[tuple[_Reading, int]]:
        for process in (Path(f"/proc/{pid}") for pid in self._processes()):
            # It may have exited.
            with suppress(OSError):
                root = str((process / "root").readlink()).rstrip("/")
                for info in (process / "fdinfo").iterdir():
                    with suppress(OSError):
                        if (count := _position(info.read_text())) > _BEYOND_BYTES:
                            link = process / "fd" / info.name
                            yield _Reading(link, str(link.readlink()).removeprefix(root)), count


def _position(text: str) -> int:
    """Return the position that `fdinfo` has, if the descriptor can only read; otherwise 0."""
    found = dict(line.split(":\t", 1) for line in text.splitlines()[:2])
    return int(found["pos"]) if int(found["flags"], 8) & os.O_ACCMODE == os.O_RDONLY else 0

"""Owner, mode and time of a restored entry: as in the snapshot, and what the target has instead.

kopia leaves out of an entry what is 0, and gives a directory the latest time of what is below it, the root aside.
Source: kopia 0.23.1, snapshot/manifest.go (DirEntry), snapshot/snapshotfs/repofs.go (loadLocked).
"""

import os
import stat
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Final, Self

from core.errors import ContractError
from core.models.base import JsonDict
from datamover.data_path.probe import TIME_TOLERANCE_NS
from datamover.kopia.snapshot_files import parse_mode, parse_time_ns
from datamover.kopia.snapshots import EntryType

__all__ = ["Attribute", "Attributes"]

_SECOND_NS: Final = 10**9
_NO_TIME: Final = "1970-01-01T00:00:00Z"


class Attribute(StrEnum):
    """What a restore sets of an entry, as messages name it."""

    OWNER = "owner"
    MODE = "mode"
    TIME = "time"


@dataclass(frozen=True, slots=True)
class Attributes:
    """Owner, mode and time of one entry of a snapshot; a link has no mode, and an entry may have no valid time."""

    owner: tuple[int, int]
    mode: int | None
    time_ns: int | None

    @classmethod
    def of(cls, entry: JsonDict, *, root: bool = False) -> Self:
        """Return the attributes that kopia sets for one of its entries; `root`: it is the snapshot's root."""
        time = "" if root else (entry.get("summ") or {}).get("maxTime", "")
        time_ns = None
        with suppress(ContractError):
            time_ns = parse_time_ns(str(time or entry.get("mtime", _NO_TIME)))
        mode = None if entry.get("type") == EntryType.LINK else parse_mode(str(entry.get("mode", "0"))) or 0
        return cls((int(entry.get("uid", 0)), int(entry.get("gid", 0))), mode, time_ns)

    @classmethod
    def of_status(cls, status: os.stat_result) -> Self:
        """Return the attributes of a directory or file."""
        return cls((status.st_uid, status.st_gid), stat.S_IMODE(status.st_mode), status.st_mtime_ns)

    def find_unset(self, status: os.stat_result, *, tolerance_ns: int = TIME_TOLERANCE_NS) -> dict[str, str]:
        """Return which of them a file does not have, and what it has instead.

        Times that differ by less than `tolerance_ns` are alike.
        """
        found: dict[str, str] = {}
        if (owner := (status.st_uid, status.st_gid)) != self.owner:
            found[Attribute.OWNER] = "owner {}:{} instead of {}:{}".format(*owner, *self.owner)
        if self.mode is not None and (mode := stat.S_IMODE(status.st_mode)) != self.mode:
            found[Attribute.MODE] = f"mode {mode:o} instead of {self.mode:o}"
        if self.time_ns is not None and abs(status.st_mtime_ns - self.time_ns) >= tolerance_ns:
            seconds = status.st_mtime_ns // _SECOND_NS, self.time_ns // _SECOND_NS
            found[Attribute.TIME] = "time {} instead of {}".format(*seconds)
        return found

    def changes(self, name: str, directory: int, unset: Collection[str]) -> Iterator[Callable[[], None]]:
        """Yield what sets these attributes of an entry of the open directory; no link is followed."""
        if Attribute.OWNER in unset:
            yield partial(os.chown, name, *self.owner, dir_fd=directory, follow_symlinks=False)
        if self.time_ns is not None and Attribute.TIME in unset:
            times = (self.time_ns, self.time_ns)
            yield partial(os.utime, name, ns=times, dir_fd=directory, follow_symlinks=False)
        # The last one: a new owner may change it, and it may close the directory.
        if self.mode is not None and (Attribute.MODE in unset or Attribute.OWNER in unset):
            yield partial(_set_mode, name, self.mode, directory)


def _set_mode(name: str, mode: int, directory: int) -> None:
    """Set the mode of what is opened: meanwhile, a link may be there."""
    fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    try:
        if not stat.S_ISLNK(os.fstat(fd).st_mode):
            os.chmod(f"/proc/self/fd/{fd}", mode)  # noqa: PTH101 - a descriptor
    finally:
        os.close(fd)

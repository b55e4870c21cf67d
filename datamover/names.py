"""Names that kopia cannot keep as they are.

Knows what kopia makes of names that are not UTF-8, and when two of one folder become the same:
a restore then writes one file over the other and says nothing. Does not know who is told.
Source: kopia 0.23.1, snapshot/snapshotfs/dir_writer.go (folders are kept as JSON); Go,
encoding/json (each byte that is not UTF-8 becomes U+FFFD).
"""

import os
import re
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from core.errors import DataPathError
from datamover.background import Stop

__all__ = ["NameReport", "examine_names", "mangle"]

_EXAMPLES: Final = 3
_REPLACEMENT: Final = "\ufffd"
_ESCAPED: Final = re.compile("[\udc80-\udcff]")
"""What Python makes of a byte that is not UTF-8, and nothing else."""


def mangle(name: bytes) -> str:
    """Return what kopia keeps of a name."""
    return _ESCAPED.sub(_REPLACEMENT, name.decode(errors="surrogateescape"))


def _show(folder: bytes, name: bytes) -> str:
    """Return the path for a message; a byte that is not UTF-8 is shown by its number."""
    return (folder + b"/" + name if folder else name).decode(errors="backslashreplace")


@dataclass
class NameReport:
    """What a walk found: paths are below the volume's root, at most three of a kind."""

    mangled: int = 0
    collisions: int = 0
    examples: list[str] = field(default_factory=list)
    colliding: list[str] = field(default_factory=list)

    @property
    def warning(self) -> str:
        """What there is to warn of; empty: nothing."""
        if not self.mangled:
            return ""
        return (
            f"{self.mangled} names are not UTF-8: a restore writes U+FFFD for each byte that is not, "
            f"such as in {', '.join(self.examples)}"
        )

    def check(self) -> None:
        """Return if no name is lost.

        Raises:
            DataPathError: two in one folder become one; names some.
        """
        if self.collisions:
            raise DataPathError(
                f"{self.collisions} names would be lost: kopia keeps them under a name that another one in their "
                f"folder has too, because they are not UTF-8. Rename them: {'; '.join(self.colliding)}"
            )

    def add(self, folder: bytes, names: list[bytes]) -> None:
        """Take the names of one folder that kopia may change."""
        kept: dict[str, bytes] = {}
        # A name that holds U+FFFD itself is kept, but may be what another one becomes.
        for name in sorted(names):
            new = mangle(name)
            if new.encode() != name:
                self.mangled += 1
                if len(self.examples) < _EXAMPLES:
                    self.examples.append(_show(folder, name))
            first = kept.setdefault(new, name)
            if first is not name:
                self.collisions += 1
                if len(self.colliding) < _EXAMPLES:
                    both = (_show(folder, one) for one in (first, name))
                    self.colliding.append(" and ".join(both))


def examine_names(root: Path, stop: Stop) -> NameReport:
    """Look at every name below `root`, and return what kopia makes of them; `stop` ends it early.

    What cannot be read is passed over: kopia tells of it.
    """
    report = NameReport()
    start = os.fsencode(root)
    folders = [start]
    while folders and not stop():
        folder = folders.pop()
        suspects: list[bytes] = []
        with suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                # Most names are ASCII, and this must cost nothing beside the transfer.
                if not entry.name.isascii() and _may_change(entry):
                    suspects.append(entry.name)
        if suspects:
            report.add(folder[len(start) :].lstrip(b"/"), suspects)
    return report


def _may_change(entry: "os.DirEntry[bytes]") -> bool:
    """Whether kopia keeps the entry, and its name is changed or could be what another one becomes."""
    if not (entry.is_file(follow_symlinks=False) or entry.is_dir(follow_symlinks=False) or entry.is_symlink()):
        return False
    return _REPLACEMENT in mangle(entry.name)

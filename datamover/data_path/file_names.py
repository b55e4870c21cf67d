"""Names that kopia cannot keep as they are.

Knows what kopia makes of names that are not UTF-8, when two of one folder become the same (a
restore then writes one file over the other without an error), and when one becomes too long to be
restored.
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
from datamover.runtime.cancellation import ShouldStop

__all__ = ["NameReport", "examine_names", "mangle"]

_EXAMPLES: Final = 3
_NAME_LIMIT_BYTES: Final = 255
"""What a file system holds: NAME_MAX."""

_PATH_LIMIT_BYTES: Final = 4095 - len("/00000000-0000-0000-0000-000000000000/")
"""What a path below the volume may have: PATH_MAX without its NUL, less `/<uid>/`, where movers have it."""

_SHOWN_CHARACTERS: Final = 1000
"""Of a path in a message: three of them must fit into a termination message."""

_REPLACEMENT: Final = "\ufffd"
_ESCAPED: Final = re.compile("[\udc80-\udcff]")
"""What Python makes of a byte that is not UTF-8, and nothing else."""


def mangle(name: bytes) -> str:
    """Return what kopia keeps of a name."""
    return _ESCAPED.sub(_REPLACEMENT, name.decode(errors="surrogateescape"))


def _show(folder: bytes, name: bytes) -> str:
    """Return the path for a message, a byte that is not UTF-8 by its number; a long path without its middle."""
    shown = (folder + b"/" + name if folder else name).decode(errors="backslashreplace")
    half = _SHOWN_CHARACTERS // 2
    return shown if len(shown) <= _SHOWN_CHARACTERS else f"{shown[:half]}…{shown[-half:]}"


@dataclass
class NameReport:
    """What a walk found: paths are below the volume's root, at most three of a kind."""

    mangled: int = 0
    collisions: int = 0
    too_long: int = 0
    examples: list[str] = field(default_factory=list)
    colliding: list[str] = field(default_factory=list)
    longest: list[str] = field(default_factory=list)

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
        """Return if every name can be restored.

        Raises:
            DataPathError: two in one folder become one, or one becomes too long; names some.
        """
        faults: list[str] = []
        if self.collisions:
            faults.append(
                f"{self.collisions} names would be lost: kopia keeps them under a name that another one in their "
                f"folder has too, because they are not UTF-8. Rename them: {'; '.join(self.colliding)}"
            )
        if self.too_long:
            faults.append(
                f"{self.too_long} names would be too long to restore: as kopia keeps them, with U+FFFD (3 bytes) for "
                f"each byte that is not UTF-8, they have more than {_NAME_LIMIT_BYTES} bytes, or their path below the "
                f"volume more than {_PATH_LIMIT_BYTES}. Rename them: {'; '.join(self.longest)}"
            )
        if faults:
            raise DataPathError(". ".join(faults))

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

    def add_long(self, folder: bytes, name: bytes) -> None:
        """Count a name that is too long as kopia keeps it, or makes its path so."""
        self.too_long += 1
        if len(self.longest) < _EXAMPLES:
            self.longest.append(_show(folder, name))


def examine_names(root: Path, stop: ShouldStop) -> NameReport:
    """Return what kopia makes of every name below `root`; `stop` ends the walk early.

    What cannot be read is passed over: kopia reports it.
    """
    report = NameReport()
    start = os.fsencode(root)
    # With each folder, how many bytes its path below the root has as kopia keeps it, and a slash.
    folders = [(start, 0)]
    while folders and not stop():
        folder, folder_bytes = folders.pop()
        suspects: list[bytes] = []
        with suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                name = entry.name
                # Most names are ASCII, and this must cost nothing beside the transfer.
                mangled = "" if name.isascii() else mangle(name)
                name_bytes = len(mangled.encode()) or len(name)
                if entry.is_dir(follow_symlinks=False):
                    folders.append((entry.path, folder_bytes + name_bytes + 1))
                if _REPLACEMENT in mangled and _is_kept(entry):
                    suspects.append(name)
                too_long = name_bytes > _NAME_LIMIT_BYTES or folder_bytes + name_bytes > _PATH_LIMIT_BYTES
                if too_long and _is_kept(entry):
                    report.add_long(_below(start, folder), name)
        if suspects:
            report.add(_below(start, folder), suspects)
    return report


def _below(start: bytes, folder: bytes) -> bytes:
    return folder[len(start) :].lstrip(b"/")


def _is_kept(entry: "os.DirEntry[bytes]") -> bool:
    """Whether kopia keeps the entry: it skips sockets, pipes and devices."""
    return entry.is_file(follow_symlinks=False) or entry.is_dir(follow_symlinks=False) or entry.is_symlink()

"""Symbolic links in the target of a restore that lead out of it, in the place of a directory or file.

kopia follows them: it writes through a link to a file, and into a link to a directory. Confinement keeps kopia from
opening what is outside of the target; here such links are replaced before a restore, and found after it.
Source: kopia 0.23.1, snapshot/restore/local_fs_output.go (createDirectory, copyFileContent).
"""

import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from core.errors import DataPathError
from datamover.data_path.file_names import mangle
from datamover.kopia.process import Kopia
from datamover.kopia.snapshots import Snapshot
from datamover.runtime.cancellation import ShouldStop
from datamover.runtime.tree import escape_controls, join, open_below, walk_tree

__all__ = ["SnapshotTypes", "find_links", "remove_links", "show_path"]

_LINK: Final = "s"
_DIRECTORY: Final = "d"


def find_links(target: Path, stop: ShouldStop, *, since_ns: int = 0) -> list[bytes]:
    """Return the paths, relative to the target, of links that lead out of it.

    Args:
        since_ns: leave out links with an older modification time; that of a restored one is the original's.

    Raises:
        DataPathError: the target cannot be read.
    """
    root = os.path.realpath(os.fsencode(target))
    found: list[bytes] = []
    try:
        for directory, entries in walk_tree(target, stop):
            for entry in entries:
                if entry.is_symlink() and entry.stat(follow_symlinks=False).st_mtime_ns >= since_ns:
                    path = join(directory, entry.name)
                    if os.path.commonpath([root, os.path.realpath(root + b"/" + path)]) != root:
                        found.append(path)
    except OSError as e:
        raise DataPathError(f"cannot read target {target}: {e.strerror}") from e
    return found


def remove_links(target: Path, links: Sequence[bytes]) -> None:
    """Remove the links, relative paths; what is no link any more stays.

    Raises:
        DataPathError: one of them cannot be removed.
    """
    root = os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for link in links:
            directory, name = os.path.split(link)
            with suppress(FileNotFoundError, NotADirectoryError), open_below(root, directory) as fd:
                if stat.S_ISLNK(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
                    os.unlink(name, dir_fd=fd)
    except OSError as e:
        raise DataPathError(f"cannot replace link {show_path(link)} in the target: {e.strerror}") from e
    finally:
        os.close(root)


def show_path(path: bytes) -> str:
    """Return a relative path for a message."""
    return escape_controls(path.decode(errors="backslashreplace"))


class SnapshotTypes:
    """Types of the entries of a snapshot; each of its directories is read at most once."""

    def __init__(self, kopia: Kopia, snapshot: Snapshot) -> None:
        self._kopia = kopia
        self._snapshot = snapshot
        self._known: dict[bytes, dict[str, tuple[str, str]]] = {}

    async def replaced(self, links: Sequence[bytes]) -> list[bytes]:
        """Return those paths at which the snapshot has a directory or a file.

        Raises:
            KopiaError: the snapshot cannot be read.
        """
        return [link for link in links if await self._type(link) not in {"", _LINK}]

    async def _type(self, path: bytes) -> str:
        directory, name = os.path.split(path)
        return (await self._entries(directory)).get(mangle(name), ("", ""))[0]

    async def _entries(self, directory: bytes) -> dict[str, tuple[str, str]]:
        """Return type and object ID of each entry; none if the snapshot has no such directory."""
        if directory in self._known:
            return self._known[directory]
        root = self._snapshot.root_object
        if directory:
            parent, name = os.path.split(directory)
            kind, root = (await self._entries(parent)).get(mangle(name), ("", ""))
            if kind != _DIRECTORY:
                return {}
        answer = await self._kopia.call(f"snapshot {self._snapshot.snapshot_id}", "show", root)
        entries = answer.check().document().get("entries") or []
        known = {one["name"]: (one["type"], one.get("obj", "")) for one in entries}
        self._known[directory] = known
        return known

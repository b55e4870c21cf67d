"""Access to a directory tree by descriptors: no symbolic link in it is followed, whatever changes meanwhile.

Each system call would resolve a path again, and a tenant who controls the tree could put a link into it in between.
"""

import os
import re
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final

__all__ = ["DIRECTORY", "escape_controls", "is_name", "join", "open_below", "open_root", "walk_tree"]

DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
"""Flags that open a directory, and fail for a link to one."""


_Skip = Callable[[bytes, "os.DirEntry[str]"], bool]
"""Gets the path of the directory that the entry is in."""

_KEPT_NAMES: Final = 1000
_REREAD_LEVELS: Final = 100
"""Below so many levels all names are kept: those that are read again are open, and files that are open are limited."""

_CONTROLS: Final = re.compile("[\x00-\x1f\x7f-\x9f]")


def escape_controls(text: str) -> str:
    """Return a text that may quote a tenant's names, with escapes for what could control a terminal."""
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def is_name(name: str) -> bool:
    """Return whether an entry of a directory can have this name."""
    return name not in {"", ".", ".."} and not set(name) & {"/", "\0"}


def join(directory: bytes, name: str) -> bytes:
    """Return the relative path of an entry of a directory."""
    return directory + b"/" + os.fsencode(name) if directory else os.fsencode(name)


@contextmanager
def open_root(root: Path) -> Iterator[int]:
    """Open the root of a tree, which may be a link to it.

    Raises:
        OSError: it cannot be opened, or is not a directory.
    """
    fd = os.open(root, DIRECTORY & ~os.O_NOFOLLOW)
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def open_below(root: int, directory: bytes) -> Iterator[int]:
    """Open a directory below the directory `root`; `directory` is a relative path, empty for the root itself.

    Raises:
        OSError: it does not exist, or it or a part of its path is not a directory.
    """
    fd = os.dup(root)
    try:
        for name in directory.split(b"/") if directory else ():
            parent, fd = fd, os.open(name, DIRECTORY, dir_fd=fd)
            os.close(parent)
        yield fd
    finally:
        os.close(fd)


def walk_tree(
    root: Path,
    stop: Callable[[], bool],
    *,
    skip: _Skip = lambda _, __: False,
    strict: bool = False,
) -> Iterator[tuple[bytes, Iterator["os.DirEntry[str]"]]]:
    """Yield each directory's path relative to `root`, and its entries, which are to be read before the next one.

    A directory is left out if `skip` returns True for it, or if it cannot be read, unless the walk is `strict`.
    `stop` ends the walk early. Of a directory with very many others in it their names are not kept, but read again.

    Raises:
        OSError: the root cannot be opened; in a strict walk, a directory cannot be read.
    """
    ignored = () if strict else (OSError,)
    fd = os.open(root, DIRECTORY & ~os.O_NOFOLLOW)
    # What is still to be read in each directory on the way to the one that is read.
    levels = [_join_all(b"", [""])]
    try:
        while levels and not stop():
            if (directory := next(levels[-1], None)) is None:
                levels.pop()
                continue
            below = _Below(partial(skip, directory), _KEPT_NAMES if len(levels) <= _REREAD_LEVELS else sys.maxsize)
            with suppress(*ignored), open_below(fd, directory) as opened, os.scandir(opened) as entries:
                yield directory, _entries(entries, below.add, ignored)
            reread = _read_again(fd, directory, skip, ignored)
            levels.append(reread if below.names is None else _join_all(directory, below.names))
    finally:
        for level in levels:
            level.close()
        os.close(fd)


class _Below:
    """The names of the directories in one, without what `skip` leaves out; None: there are more than `limit`."""

    def __init__(self, skip: Callable[["os.DirEntry[str]"], bool], limit: int) -> None:
        self.names: list[str] | None = []
        self._skip = skip
        self._limit = limit

    def add(self, entry: "os.DirEntry[str]") -> None:
        if self.names is None or not entry.is_dir(follow_symlinks=False) or self._skip(entry):
            return
        if len(self.names) < self._limit:
            self.names.append(entry.name)
        else:
            self.names = None


def _entries(
    entries: Iterator["os.DirEntry[str]"],
    add: Callable[["os.DirEntry[str]"], None],
    ignored: tuple[type[OSError], ...],
) -> Iterator["os.DirEntry[str]"]:
    with suppress(*ignored):
        for entry in entries:
            add(entry)
            yield entry


def _join_all(directory: bytes, names: list[str]) -> Generator[bytes]:
    for name in names:
        yield join(directory, name)


def _read_again(root: int, directory: bytes, skip: _Skip, ignored: tuple[type[OSError], ...]) -> Generator[bytes]:
    """Yield the path of each directory in one, which stays open meanwhile."""
    with suppress(*ignored), open_below(root, directory) as opened, os.scandir(opened) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False) and not skip(directory, entry):
                yield join(directory, entry.name)

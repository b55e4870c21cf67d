"""Access to a directory tree by descriptors: no symbolic link in it is followed, whatever changes meanwhile.

Each system call would resolve a path again, and a tenant who controls the tree could put a link into it in between.
"""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final

__all__ = ["DIRECTORY", "escape_controls", "join", "open_below", "walk_tree"]

DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
"""Flags that open a directory, and fail for a link to one."""


_CONTROLS: Final = re.compile("[\x00-\x1f\x7f-\x9f]")


def escape_controls(text: str) -> str:
    """Return a text that may quote a tenant's names, with escapes for what could control a terminal."""
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def join(directory: bytes, name: str) -> bytes:
    """Return the relative path of an entry of a directory."""
    return directory + b"/" + os.fsencode(name) if directory else os.fsencode(name)


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
    skip: Callable[["os.DirEntry[str]"], bool] = lambda _: False,
    strict: bool = False,
) -> Iterator[tuple[bytes, Iterator["os.DirEntry[str]"]]]:
    """Yield each directory's path relative to `root`, and its entries, which are to be read before the next one.

    A directory is left out if `skip` returns True for it, or if it cannot be read, unless the walk is `strict`.
    `stop` ends the walk early.

    Raises:
        OSError: the root cannot be opened; in a strict walk, a directory cannot be read.
    """
    ignored = () if strict else (OSError,)
    fd = os.open(root, DIRECTORY & ~os.O_NOFOLLOW)
    try:
        directories = [b""]
        while directories and not stop():
            directory = directories.pop()
            with suppress(*ignored), open_below(fd, directory) as opened, os.scandir(opened) as entries:
                yield directory, _entries(entries, partial(_add, directories, directory, skip), ignored)
    finally:
        os.close(fd)


def _entries(
    entries: Iterator["os.DirEntry[str]"],
    add: Callable[["os.DirEntry[str]"], None],
    ignored: tuple[type[OSError], ...],
) -> Iterator["os.DirEntry[str]"]:
    with suppress(*ignored):
        for entry in entries:
            add(entry)
            yield entry


def _add(
    directories: list[bytes], directory: bytes, skip: Callable[["os.DirEntry[str]"], bool], entry: "os.DirEntry[str]"
) -> None:
    if entry.is_dir(follow_symlinks=False) and not skip(entry):
        directories.append(join(directory, entry.name))

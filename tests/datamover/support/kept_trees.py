"""What a tree has, what a restore has of it, and what a report has to name: see docs/limits.md."""

import hashlib
import math
import os
import stat
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Final

from datamover.data_path.file_names import mangle

_TIMES_NS: Final = range(-(2**63), 2**63)
_PLACEHOLDER: Final = b".kopia-entry"
_NAME_BYTES, _PATH_BYTES = 255, 4057
_SYSTEM_PATH_BYTES: Final = 4095


@dataclass(frozen=True)
class Found:
    """One entry by lstat, with the digest of a file's content or the target of a link; `mtime_ns` None: any."""

    kind: int
    owner: tuple[int, int]
    mode: int
    mtime_ns: int | None
    size_bytes: int = 0
    content: bytes | None = None


Tree = Mapping[bytes, Found]
"""Entries by their paths, which begin with a slash for all but the root; outer ones first."""


def inspect(root: Path) -> Tree:
    """Return all of a tree, by descriptors: paths may be longer than the system takes at once."""
    found, top = {b"": _inspect(root.stat(), None)}, os.fsencode(root)
    for path, folders, files, fd in os.fwalk(top):
        for name in sorted([*folders, *files]):
            status = os.stat(name, dir_fd=fd, follow_symlinks=False)
            found[path[len(top) :] + b"/" + name] = _inspect(status, _read(fd, name, status.st_mode))
    return found


def _inspect(status: os.stat_result, content: bytes | None) -> Found:
    kind, mode = stat.S_IFMT(status.st_mode), stat.S_IMODE(status.st_mode)
    size_bytes = status.st_size if kind == stat.S_IFREG else 0
    return Found(kind, (status.st_uid, status.st_gid), mode, status.st_mtime_ns, size_bytes, content)


def _read(fd: int, name: bytes, mode: int) -> bytes | None:
    if stat.S_ISLNK(mode):
        return os.readlink(name, dir_fd=fd)
    if not stat.S_ISREG(mode):
        return None
    with os.fdopen(os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=fd), "rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


@dataclass
class Outcome:
    """What a restore of a tree has; `refused`: paths that no backup can have; the others are reported by a backup."""

    tree: dict[bytes, Found]
    refused: list[bytes]
    mangled: list[bytes]
    far: list[bytes]
    unkept: list[bytes]


def restorable(tree: Tree, root: Path) -> Outcome:
    """Return what a restore of a tree has that is backed up from `root`, from what kopia keeps."""
    kept = {path: found for path, found in tree.items() if _is_kept(path, found)}
    # A socket is of no use without its process.
    unkept = [path for path, found in tree.items() if path not in kept and found.kind != stat.S_IFSOCK]
    # If an entry's path is too long for the system, kopia cannot find out what it is.
    unread = [path for path in tree if len(os.fsencode(root) + path) > _SYSTEM_PATH_BYTES]
    counts = Counter(map(_name, kept))
    return Outcome(
        tree={_name(path): replace(found, mtime_ns=_time(path, kept)) for path, found in kept.items()},
        refused=[*unread, *(path for path in kept if counts[_name(path)] > 1 or _is_refused(path))],
        mangled=[path for path in kept if mangle(path.rpartition(b"/")[2]).encode() != path.rpartition(b"/")[2]],
        far=[path for path, found in kept.items() if path and _is_far(found)],
        unkept=unkept,
    )


def _is_kept(path: bytes, found: Found) -> bool:
    links = {stat.S_IFLNK} if not path.endswith(_PLACEHOLDER) else set()
    return found.kind in {stat.S_IFREG, stat.S_IFDIR, *links}


def _name(path: bytes) -> bytes:
    return mangle(path).encode()


def _is_refused(path: bytes) -> bool:
    new = _name(path)
    name = new.rpartition(b"/")[2]
    return path.endswith(_PLACEHOLDER) or len(name) > _NAME_BYTES or len(new) - 1 > _PATH_BYTES


def _is_far(found: Found) -> bool:
    """Return whether kopia cannot keep the time."""
    time_ns = found.mtime_ns or 0
    return time_ns not in _TIMES_NS or (found.kind == stat.S_IFLNK and time_ns + 999 not in _TIMES_NS)


def _round(time_ns: int) -> int:
    """Return the time that kopia gives a link: in microseconds, rounded up, and once more before 1970.

    Source: Go 1.26, syscall.NsecToTimeval, whose division rounds toward zero.
    """
    return math.trunc(Fraction(time_ns + 999, 1000)) * 1000


def _time(path: bytes, kept: Tree) -> int | None:
    """Return the time that a restore sets, None: any. A directory gets the latest one in it since 1970, if there is."""
    found, below = kept[path], [one for other, one in kept.items() if path and other.startswith(path + b"/")]
    if any(map(_is_far, below or [found])):
        return None
    if below:
        return max(0, *(one.mtime_ns or 0 for one in below))
    return _round(found.mtime_ns or 0) if found.kind == stat.S_IFLNK else found.mtime_ns


def differences(actual: Tree, wanted: Tree, *, tolerance_ns: int = 0) -> Iterator[tuple[bytes, str]]:
    """Yield what differs, with the word that reports have for it."""
    for path in actual.keys() | wanted.keys():
        here, there = actual.get(path), wanted.get(path)
        if here is None or there is None:
            yield path, "missing" if here is None else "besides"
            continue
        if (here.kind, here.size_bytes, here.content) != (there.kind, there.size_bytes, there.content):
            yield path, "content"
        if here.owner != there.owner:
            yield path, "owner"
        if here.mode != there.mode:
            yield path, "mode"
        if there.mtime_ns is not None and abs((here.mtime_ns or 0) - there.mtime_ns) > tolerance_ns:
            yield path, "time"

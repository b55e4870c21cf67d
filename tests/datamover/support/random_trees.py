"""Random trees of every kind of entry, name and attribute that a volume may have."""

import os
import socket
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

_ROOT: Final = os.geteuid() == 0
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW

Owner = tuple[int, int]


@dataclass(frozen=True)
class Kept:
    """The attributes of an entry; a link has no mode."""

    owner: Owner
    mtime_ns: int
    mode: int


@dataclass(frozen=True)
class File:
    kept: Kept
    content: bytes
    hole_bytes: int = 0
    attribute: tuple[str, bytes] | None = None


@dataclass(frozen=True)
class Link:
    kept: Kept
    target: bytes


@dataclass(frozen=True)
class Special:
    """A pipe, a socket or a device."""

    kept: Kept
    kind: int


@dataclass(frozen=True)
class Again:
    """Another name of the file that was created last."""


@dataclass(frozen=True)
class Folder:
    kept: Kept
    entries: "Mapping[bytes, Entry]"


Entry = File | Link | Special | Again | Folder


def _crowd(kept: Kept, count: int, entry: Entry) -> Folder:
    """Return a folder with many entries that are alike."""
    return Folder(kept, {b"%d" % number: entry for number in range(count)})


def _chain(kept: Kept, path_bytes: int, entry: Entry) -> Folder:
    """Return folders in each other: the path of the innermost one has so many bytes below the outermost one."""
    above = (path_bytes - 1) // 201
    inner = Folder(kept, {b"e" * (path_bytes - above * 201): entry})
    for _ in range(above):
        inner = Folder(kept, {b"d" * 200: inner})
    return inner


# -- attributes -------------------------------------------------------------------------------------------------------
_SECOND_NS: Final = 10**9
_FAR: Final = (2**63 - 1000, 2**63 - 1, 2**63, 10_000_000_000 * _SECOND_NS)
"""The last time that kopia keeps, some that it does not, of a link or at all, and one of the year 2286."""

_EARLY: Final = (-1, -_SECOND_NS, -2_000_000_000 * _SECOND_NS)
_TIMES: Final = st.integers(0, 4_000_000_000 * _SECOND_NS) | st.sampled_from((0, *_EARLY, *_FAR))


def _owners() -> SearchStrategy[Owner]:
    ids = st.integers(0, 2**32 - 2)
    return st.tuples(ids, ids) if _ROOT else st.just((os.getuid(), os.getgid()))


def _kept(always: int) -> SearchStrategy[Kept]:
    """Any mode, except that the owner can read it unless that is root."""
    modes = st.integers(0, 0o7777).map(lambda mode: mode if _ROOT else mode | always)
    return st.builds(Kept, _owners(), _TIMES, modes)


_ACCESS_LIST: Final = bytes.fromhex(
    "0200000001000600ffffffff020007003930000004000400ffffffff10000700ffffffff20000400ffffffff"
)
"""Source: linux/posix_acl_xattr.h: user 12345 has all permissions."""

_ATTRIBUTES: Final = [("user.note", b"x"), ("system.posix_acl_access", _ACCESS_LIST)]
_OF_ROOT: Final = [
    ("trusted.overlay.opaque", b"y"),
    ("security.capability", bytes.fromhex("0000000201000000" + "00" * 12)),
]

# -- names ------------------------------------------------------------------------------------------------------------
_RULES: Final = b".kopiaignore"
_SIMILAR: Final = "Logo.png logo.png caf\u00e9 cafe\u0301 stra\u00dfe strasse"
_ODD: Final = "end end. \ufffd -rf --help 12:13 \x1b[31m ... ..a \\ *? '$(x)\" @ %s"
_OURS: Final = ".nodeagent-probe-\u00e4 .nodeagent-probe-\u00e4-link .nodeagent-restore-1 .velero lost+found"
_KOPIAS: Final = "kopia.repository kopia.repository.f .shards CACHEDIR.TAG .gitignore a.tmp.0"
_WORDS: Final = f"{_SIMILAR} {_ODD} {_OURS} {_KOPIAS}"
_LONG: Final = (b"a" * 255, b"b" * 250, b"\xff" * 85, "\u00e4".encode() * 127)
_CHOSEN: Final = (_RULES, *_WORDS.encode().split(b" "), b"end ", b"new\nline", b"\x7f\r", b" ", *_LONG)

_UNKEPT: Final = (b"\xff", b"\xfe", b"\xff" * 86, b"x.kopia-entry", b".kopia-entry", b"x")
"""Not all of them can be restored: some become the same, too long, or stand for something else."""

_ALIKE: Final = (*_SIMILAR.encode().split(b" "), b"a", b"A", b"a:b")


def _is_name(name: bytes) -> bool:
    return name not in {b".", b".."} and not name.endswith(b".kopia-entry")


_TEXTS: Final = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=60)
_BYTES: Final = st.lists(st.integers(1, 255).filter(lambda one: one != ord("/")), min_size=1, max_size=85).map(bytes)


def _names(*more: bytes) -> SearchStrategy[bytes]:
    texts = _TEXTS.map(str.encode).filter(_is_name)
    return st.one_of(
        texts, st.sampled_from(_CHOSEN), _BYTES.filter(_is_name), *([st.sampled_from(more)] if more else [])
    )


# -- entries ----------------------------------------------------------------------------------------------------------
_CONTENTS: Final = st.sampled_from([b"*", b"*\n!a\n", b"[0-9a-z]*", b"{}"]) | st.binary(max_size=2000)
_TARGETS: Final = st.one_of(
    st.sampled_from([b"../a/b", b"/etc/passwd", b".", b"a", b"x" * 4000, b"\xff\xfe", b"loop"]), _TEXTS.map(str.encode)
)
_KINDS: Final = (stat.S_IFIFO, stat.S_IFSOCK, *((stat.S_IFCHR, stat.S_IFBLK) if _ROOT else ()))


def _leaves() -> SearchStrategy[Entry]:
    files: SearchStrategy[Entry] = st.builds(
        File,
        _kept(0o600),
        _CONTENTS,
        st.sampled_from([0, 0, 0, 4096, 100_000, 3_000_000]),
        st.none() | st.sampled_from([*_ATTRIBUTES, *(_OF_ROOT if _ROOT else ())]),
    )
    return st.one_of(
        files,
        files,
        st.builds(Link, _kept(0), _TARGETS),
        st.builds(Special, _kept(0), st.sampled_from(_KINDS)),
        st.builds(Again),
    )


def folders(*, unkept: bool = False, alike: bool = False) -> SearchStrategy[Folder]:
    """Return any trees; with `unkept`, kopia cannot keep each name, with `alike`, many are the same to some targets."""
    names, leaves, kept = _names(*(_UNKEPT if unkept else ())), _leaves(), _kept(0o700)
    if alike:
        names = st.one_of(*[st.sampled_from(_ALIKE)] * 3, names)
    crowds = st.builds(_crowd, kept, st.integers(40, 80), leaves)
    chains = st.builds(_chain, kept, st.integers(3800, 4090 if unkept else 4000), leaves)

    def inside(entries: SearchStrategy[Entry]) -> SearchStrategy[Entry]:
        return st.builds(Folder, kept, st.dictionaries(names, entries, max_size=6))

    entries = st.recursive(leaves, inside, max_leaves=15)
    rare: SearchStrategy[Entry] = entries if alike else st.one_of(*[entries] * 8, crowds, chains)
    return st.builds(Folder, kept, st.dictionaries(names, rare, min_size=3, max_size=8))


# -- creation ---------------------------------------------------------------------------------------------------------
def create(path: Path, tree: Folder) -> None:
    """Create the tree; its root must not exist."""
    path.mkdir()
    fd = os.open(path, _FOLDER)
    try:
        _Creator().fill(fd, tree)
    finally:
        os.close(fd)


class _Creator:
    """Creates entries by descriptors: paths may be longer than the system takes at once."""

    def __init__(self) -> None:
        self._last: tuple[int, bytes] | None = None

    def fill(self, fd: int, folder: Folder) -> None:
        for name, entry in folder.entries.items():
            self._create(fd, name, entry)
        # Another folder's descriptor is closed.
        self._last = None
        _keep(fd, b".", folder.kept)

    def _create(self, fd: int, name: bytes, entry: Entry) -> None:
        match entry:
            case File():
                self._last = (fd, name)
                _create_file(fd, name, entry)
            case Link(kept, target):
                os.symlink(target, name, dir_fd=fd)
                _keep(fd, name, kept)
            case Special(kept, kind):
                _create_special(fd, name, kind)
                _keep(fd, name, kept)
            case Again():
                if self._last and self._last[0] == fd:
                    os.link(self._last[1], name, src_dir_fd=fd, dst_dir_fd=fd)
            case Folder():
                os.mkdir(name, dir_fd=fd)
                below = os.open(name, _FOLDER, dir_fd=fd)
                try:
                    _Creator().fill(below, entry)
                finally:
                    os.close(below)


def _create_file(fd: int, name: bytes, entry: File) -> None:
    with os.fdopen(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=fd), "wb") as file:
        file.write(entry.content)
        file.truncate(len(entry.content) + entry.hole_bytes)
        _keep(fd, name, entry.kept)
        if entry.attribute:
            os.setxattr(file.fileno(), *entry.attribute)
            os.utime(file.fileno(), ns=(entry.kept.mtime_ns, entry.kept.mtime_ns))


def _create_special(fd: int, name: bytes, kind: int) -> None:
    if kind != stat.S_IFSOCK:
        os.mknod(name, kind | 0o600, os.makedev(1, 3) if kind in {stat.S_IFCHR, stat.S_IFBLK} else 0, dir_fd=fd)
        return
    with socket.socket(socket.AF_UNIX) as bound:
        # Its own address is limited to 108 bytes.
        bound.bind(f"/proc/self/fd/{fd}/.s")
    os.rename(".s", name, src_dir_fd=fd, dst_dir_fd=fd)


def _keep(fd: int, name: bytes, kept: Kept) -> None:
    os.chown(name, *kept.owner, dir_fd=fd, follow_symlinks=False)
    if not stat.S_ISLNK(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
        os.chmod(name, kept.mode, dir_fd=fd)
    os.utime(name, ns=(kept.mtime_ns, kept.mtime_ns), dir_fd=fd, follow_symlinks=False)

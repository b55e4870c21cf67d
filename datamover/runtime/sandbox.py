"""The kernel's means to confine a child process: a chroot jail, Landlock, and seccomp filters that answer its calls.

With CAP_SYS_ADMIN the jail is an empty directory into which a mount namespace of the child's own brings the trees. With
CAP_SYS_CHROOT alone it is the directory that holds the volume, if that holds nothing else. Landlock needs no
capability: it governs what is opened, created, linked, renamed and removed by path, and no stat, readlink, chmod,
chown, utimes and extended attributes; ABI 3 adds truncation by path.
Source: Linux, chroot(2), unshare(2), mount(2), Documentation/filesystems/sharedsubtree.rst,
Documentation/userspace-api/seccomp_filter.rst and landlock.rst; include/uapi/linux/seccomp.h, filter.h, audit.h,
landlock.h.
"""

import ctypes
import errno
import os
import platform
import shutil
import stat
import struct
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from enum import IntFlag
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from core.errors import DataPathError, Translated
from core.landlock import SYS_CREATE_RULESET
from datamover.runtime.work_dir import opened

_CLONE_NEWNS: Final = 0x00020000
_MS_RDONLY: Final = 0x1
_MS_NOSUID: Final = 0x2
_MS_NODEV: Final = 0x4
_MS_NOEXEC: Final = 0x8
_MS_REMOUNT: Final = 0x20
_MS_BIND: Final = 0x1000
_MS_REC: Final = 0x4000
_MS_SLAVE: Final = 0x80000

LIBC: Final = ctypes.PyDLL(None, use_errno=True)
"""PyDLL keeps the interpreter's lock, which could not be reacquired between fork and exec."""

Step = tuple[str, Callable[[], int]]
"""A system call between fork and exec: its name, and the call, which returns a negative number if it failed."""


@dataclass(frozen=True)
class Jail:
    """The root of a jail, and the trees that its mount namespace brings into it, some of them to be read only."""

    root: Path
    trees: tuple[Path, ...] = ()
    read_only: tuple[Path, ...] = ()

    def steps(self) -> list[Step]:
        """Return what the child does to enter it."""
        root = os.fsencode(self.root)
        steps = share_nothing() if self.trees else []
        # A tree may lie in another one.
        for tree in sorted(self.trees, key=lambda one: len(one.parts)):
            source, target = os.fsencode(tree), os.fsencode(below(self.root, tree))
            flags = ctypes.c_ulong(_MS_BIND | _MS_REC)
            steps.append((f"mount {tree}", partial(LIBC.mount, source, target, None, flags, None)))
            limits = ctypes.c_ulong(_MS_REMOUNT | _MS_BIND | self._limits(tree))
            steps.append((f"remount {tree}", partial(LIBC.mount, None, target, None, limits, None)))
        return [*steps, ("chroot", partial(LIBC.chroot, root)), ("chdir", partial(LIBC.chdir, b"/"))]

    def _limits(self, tree: Path) -> int:
        """Return the flags of a mount: a tenant's device nodes must not lead to the devices of the node."""
        # A remount would make a tree writable that is mounted read-only.
        read_only = tree in self.read_only or os.statvfs(tree).f_flag & os.ST_RDONLY
        return _MS_NOSUID | _MS_NODEV | _MS_NOEXEC | (_MS_RDONLY if read_only else 0)


def share_nothing() -> list[Step]:
    """Return the steps into a mount namespace of its own, which still takes over what the node unmounts."""
    flags = ctypes.c_ulong(_MS_SLAVE | _MS_REC)
    return [
        ("unshare", partial(LIBC.unshare, ctypes.c_int(_CLONE_NEWNS))),
        ("mount / as slave", partial(LIBC.mount, b"none", b"/", None, flags, None)),
    ]


def below(root: Path, path: Path) -> Path:
    """Return where the absolute path lies in the jail."""
    return root / path.relative_to("/")


def _make(made: ExitStack, path: Path) -> None:
    """Make a directory, and those above it, until `made` is closed."""
    if not path.is_dir():
        _make(made, path.parent)
        path.mkdir(mode=0o700)
        made.callback(_remove, path)


def _copy(made: ExitStack, source: Path, target: Path) -> None:
    if source.is_dir():
        for file in source.iterdir():
            _copy(made, file, target / file.name)
        return
    _make(made, target.parent)
    if source.is_file() and not target.exists():
        made.callback(_remove, target)
        shutil.copyfile(source, target)


def _remove(path: Path) -> None:
    """Remove what was made, but never content of others."""
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink()


@contextmanager
def _building() -> Iterator[None]:
    with Translated(OSError, DataPathError, "cannot confine kopia: cannot build its jail"):
        yield


@contextmanager
def build_jail(
    home: Path, trees: Sequence[Path], copies: Sequence[Path], *, read_only: Sequence[Path] = ()
) -> Iterator[Jail]:
    """Yield a jail with mounts of `trees`, some read-only, and with `copies` of files, in a new directory in `home`.

    Raises:
        DataPathError: it cannot be built.
    """
    with ExitStack() as made:
        with _building():
            root = Path(tempfile.mkdtemp(prefix="jail-", dir=home))
            made.callback(_remove, root)
            for tree in trees:
                _make(made, below(root, tree))
            for file in copies:
                _copy(made, file, below(root, file))
        yield Jail(root, tuple(trees), tuple(read_only))


@contextmanager
def use_as_jail(root: Path, trees: Sequence[Path], copies: Sequence[Path]) -> Iterator[Jail]:
    """Yield a jail without mounts: `root`, which holds the trees; a link in it makes absolute paths valid.

    Raises:
        DataPathError: it is not suitable: a tree is elsewhere, or it holds something else.
    """
    with ExitStack() as made:
        with _building():
            _check(root, trees)
            link = below(root, root)
            _make(made, link.parent)
            link.symlink_to("/")
            made.callback(_remove, link)
            for file in copies:
                _copy(made, file, below(root, file))
        yield Jail(root)


def _check(root: Path, trees: Sequence[Path]) -> None:
    if root == Path("/"):
        raise DataPathError("cannot confine kopia: the volume is not mounted in a directory of its own")
    expected = set()
    for tree in trees:
        if not tree.is_relative_to(root):
            raise DataPathError(f"cannot confine kopia: {tree} is not in {root}, which would be its jail")
        if tree == root:
            return
        expected.add(tree.relative_to(root).parts[0])
    if others := sorted({entry.name for entry in root.iterdir()} - expected):
        raise DataPathError(f'cannot confine kopia: {root} would be its jail, and also holds "{others[0]}"')


class _Numbers(NamedTuple):
    """What an architecture calls itself, and its numbers of system calls."""

    audit: int
    seccomp: int
    fsync: int
    fdatasync: int
    pread: int
    lseek: int


_ARCHITECTURES: Final = {
    "x86_64": _Numbers(0xC000003E, 317, 74, 75, 17, 8),
    "aarch64": _Numbers(0xC00000B7, 277, 82, 83, 67, 62),
}

_SET_MODE_FILTER: Final = 1
_NEW_LISTENER: Final = 1 << 3
_SPEC_ALLOW: Final = 1 << 2
"""Without it, older kernels slow the whole program down, against attacks on programs that run foreign code."""

_LOAD: Final = 0x20
_JUMP_IF_EQUAL: Final = 0x15
_RETURN: Final = 0x06
_ALLOW: Final = 0x7FFF0000
_SUCCEED: Final = 0x00050000
"""SECCOMP_RET_ERRNO with the error 0: the call returns at once, without an error."""

_FAIL: Final = _SUCCEED | errno.EIO
"""As before, with an error."""

_NOTIFY: Final = 0x7FC00000
"""SECCOMP_RET_USER_NOTIF: the call waits until the process with the listener answers it."""

_NUMBER_AT: Final = 0
_ARCHITECTURE_AT: Final = 4
"""Offsets in `struct seccomp_data`."""


class _Program(ctypes.Structure):
    """`struct sock_fprog`."""

    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def no_flushes() -> list[Step]:
    """Return the last step of a child before exec: from then on its flushes do nothing; none on other architectures.

    It requires `no_new_privs`, or a capability. Where the kernel refuses the filter, the child flushes as before.
    """
    if (numbers := _ARCHITECTURES.get(platform.machine())) is None:
        return []
    install = _install(numbers, (numbers.fsync, numbers.fdatasync), _SUCCEED, _SPEC_ALLOW)
    return [("seccomp", lambda: max(0, install()))]


def notify_reads(send: Callable[[int], object]) -> list[Step]:
    """Return the steps after which each pread of the child waits for an answer; none on other architectures.

    Its seeks fail: after a pread that failed, libext2fs would seek and read, and get zeros where nothing was fetched.
    It requires `no_new_privs`, or a capability. `send` is called in the child with the descriptor of the listener.
    """
    if (numbers := _ARCHITECTURES.get(platform.machine())) is None:
        return []
    deny = _install(numbers, (numbers.lseek,), _FAIL, _SPEC_ALLOW)
    install = _install(numbers, (numbers.pread,), _NOTIFY, _NEW_LISTENER)

    def observe() -> int:
        listener = install()
        if listener >= 0:
            send(listener)
        return listener

    return [("seccomp without seeks", deny), ("seccomp with a listener", observe)]


def _install(numbers: _Numbers, calls: Sequence[int], action: int, flags: int) -> Callable[[], int]:
    """Return the call that installs a filter with one action for these system calls."""
    program = _build(numbers.audit, calls, action)
    return partial(
        LIBC.syscall,
        ctypes.c_long(numbers.seccomp),
        ctypes.c_ulong(_SET_MODE_FILTER),
        ctypes.c_ulong(flags),
        ctypes.byref(program),
    )


def _build(architecture: int, calls: Sequence[int], action: int) -> _Program:
    """Return the filter; a jump names how many lines to skip if it is equal, and if not."""
    lines = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_JUMP_IF_EQUAL, 0, len(calls) + 1, architecture),
        (_LOAD, 0, 0, _NUMBER_AT),
        *((_JUMP_IF_EQUAL, len(calls) - at, 0, call) for at, call in enumerate(calls)),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, action),
    ]
    return _Program(len(lines), b"".join(struct.pack("HBBI", *line) for line in lines))


_SYS_ADD_RULE: Final = 445
SYS_RESTRICT_SELF: Final = 446
_PATH_BENEATH: Final = 1


class Rights(IntFlag):
    """LANDLOCK_ACCESS_FS_*."""

    EXECUTE = 1 << 0
    WRITE_FILE = 1 << 1
    READ_FILE = 1 << 2
    READ_DIR = 1 << 3
    REMOVE_DIR = 1 << 4
    REMOVE_FILE = 1 << 5
    MAKE_CHAR = 1 << 6
    MAKE_DIR = 1 << 7
    MAKE_REG = 1 << 8
    MAKE_SOCK = 1 << 9
    MAKE_FIFO = 1 << 10
    MAKE_BLOCK = 1 << 11
    MAKE_SYM = 1 << 12
    REFER = 1 << 13
    TRUNCATE = 1 << 14
    IOCTL_DEV = 1 << 15

    @classmethod
    def of_abi(cls, abi: int) -> "Rights":
        """Return the rights that the ABI governs."""
        newest = next((right for since, right in _ADDED if abi >= since), cls.MAKE_SYM)
        return cls(newest * 2 - 1)


TO_READ: Final = Rights.READ_FILE | Rights.READ_DIR
"""The rights to read a tree."""

_TO_MAKE: Final = Rights.MAKE_DIR | Rights.MAKE_REG | Rights.MAKE_SYM | Rights.REFER
TO_WRITE: Final = TO_READ | _TO_MAKE | Rights.REMOVE_DIR | Rights.REMOVE_FILE | Rights.WRITE_FILE | Rights.TRUNCATE
"""The rights to read and change a tree: files, directories and symbolic links."""

_ADDED: Final = ((5, Rights.IOCTL_DEV), (3, Rights.TRUNCATE), (2, Rights.REFER))
"""The newest right of each ABI that added one for files, newest first."""

_OF_FILES: Final = Rights.EXECUTE | Rights.WRITE_FILE | Rights.READ_FILE | Rights.TRUNCATE | Rights.IOCTL_DEV
"""The rights that a rule for a single file may have; the kernel rejects others."""


class _Attributes(ctypes.Structure):
    """`struct landlock_ruleset_attr`, as of ABI 1."""

    _fields_ = (("handled_access_fs", ctypes.c_uint64),)


class _PathBeneath(ctypes.Structure):
    """`struct landlock_path_beneath_attr`."""

    _pack_ = 1
    _fields_ = (("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


@contextmanager
def open_ruleset(abi: int, rules: Iterable[tuple[Path, Rights]]) -> Iterator[int]:
    """Yield a ruleset that allows `rules` alone, if their paths exist; raises DataPathError."""
    governed = Rights.of_abi(abi)
    attributes = _Attributes(governed)
    ruleset = _call(SYS_CREATE_RULESET, ctypes.addressof(attributes), ctypes.sizeof(attributes), 0)
    try:
        for path, rights in rules:
            _add(ruleset, path, rights & governed)
        yield ruleset
    finally:
        os.close(ruleset)


def _add(ruleset: int, path: Path, rights: Rights) -> None:
    try:
        with opened(path, os.O_PATH) as fd:
            if not stat.S_ISDIR(os.fstat(fd).st_mode):
                rights &= _OF_FILES
            rule = _PathBeneath(rights, fd)
            _call(_SYS_ADD_RULE, ruleset, _PATH_BENEATH, ctypes.addressof(rule), 0)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as e:
        raise DataPathError(f"cannot confine kopia: {path}: {e.strerror}") from e


def _call(*arguments: int) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    if (result := int(libc.syscall(*(ctypes.c_long(one) for one in arguments)))) < 0:
        raise DataPathError(f"cannot confine kopia: Landlock: {os.strerror(ctypes.get_errno())}")
    return result

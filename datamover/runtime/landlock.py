"""Landlock: rules that let a process open nothing but some trees and files.

Governs what is opened, created, linked, renamed and removed by path; ABI 3 adds truncation by path. No ABI governs
stat, readlink, chmod, chown, utimes and extended attributes. It needs no capability.
Source: Linux, Documentation/userspace-api/landlock.rst; include/uapi/linux/landlock.h.
"""

import ctypes
import errno
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import IntFlag
from pathlib import Path
from typing import Final

from core.errors import DataPathError
from core.landlock import SYS_CREATE_RULESET

__all__ = ["SYS_RESTRICT_SELF", "Rights", "open_ruleset"]

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

    @classmethod
    def to_read(cls) -> "Rights":
        """Return the rights to read a tree."""
        return cls.READ_FILE | cls.READ_DIR

    @classmethod
    def to_write(cls) -> "Rights":
        """Return the rights to read and change a tree: files, directories and symbolic links."""
        making = cls.MAKE_DIR | cls.MAKE_REG | cls.MAKE_SYM
        return cls.to_read() | making | cls.REMOVE_DIR | cls.REMOVE_FILE | cls.REFER | cls.WRITE_FILE | cls.TRUNCATE


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
    """Yield the descriptor of a ruleset that allows `rules` and nothing else; paths that do not exist are left out.

    Raises:
        DataPathError: the kernel rejected it.
    """
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
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError as e:
        if e.errno in {errno.ENOENT, errno.ENOTDIR}:
            return
        raise DataPathError(f"cannot confine kopia: {path}: {e.strerror}") from e
    try:
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            rights &= _OF_FILES
        rule = _PathBeneath(rights, fd)
        _call(_SYS_ADD_RULE, ruleset, _PATH_BENEATH, ctypes.addressof(rule), 0)
    finally:
        os.close(fd)


def _call(*arguments: int) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    result = int(libc.syscall(*(ctypes.c_long(one) for one in arguments)))
    if result < 0:
        raise DataPathError(f"cannot confine kopia: Landlock: {os.strerror(ctypes.get_errno())}")
    return result

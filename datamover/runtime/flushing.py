"""A child whose flushes (fsync) return at once: what it writes need not outlive the machine, or is flushed by others.

Knows the seccomp filter that answers them. Does not know for which child that is right.
Source: Linux, Documentation/userspace-api/seccomp_filter.rst; include/uapi/linux/seccomp.h, filter.h, audit.h.
"""

import ctypes
import platform
import struct
from functools import partial
from typing import Final, NamedTuple

from datamover.runtime.jail import Step

__all__ = ["no_flushes"]


class _Numbers(NamedTuple):
    """What an architecture calls itself, and its numbers of system calls."""

    audit: int
    seccomp: int
    fsync: int
    fdatasync: int


_ARCHITECTURES: Final = {
    "x86_64": _Numbers(0xC000003E, 317, 74, 75),
    "aarch64": _Numbers(0xC00000B7, 277, 82, 83),
}

_SET_MODE_FILTER: Final = 1
_SPEC_ALLOW: Final = 1 << 2
"""Without it, older kernels slow the whole program down, against attacks on programs that run foreign code."""

_LOAD: Final = 0x20
_JUMP_IF_EQUAL: Final = 0x15
_RETURN: Final = 0x06
_ALLOW: Final = 0x7FFF0000
_SUCCEED: Final = 0x00050000
"""SECCOMP_RET_ERRNO with the error 0: the call returns at once, without an error."""

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
    numbers = _ARCHITECTURES.get(platform.machine())
    if numbers is None:
        return []
    program = _build(numbers)
    libc = ctypes.PyDLL(None, use_errno=True)
    install = partial(
        libc.syscall,
        ctypes.c_long(numbers.seccomp),
        ctypes.c_ulong(_SET_MODE_FILTER),
        ctypes.c_ulong(_SPEC_ALLOW),
        ctypes.byref(program),
    )
    return [("seccomp", lambda: max(0, install()))]


def _build(numbers: _Numbers) -> _Program:
    """Return the filter; a jump names how many lines to skip if it is equal, and if not."""
    lines = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_JUMP_IF_EQUAL, 0, 3, numbers.audit),
        (_LOAD, 0, 0, _NUMBER_AT),
        (_JUMP_IF_EQUAL, 2, 0, numbers.fsync),
        (_JUMP_IF_EQUAL, 1, 0, numbers.fdatasync),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _SUCCEED),
    ]
    return _Program(len(lines), b"".join(struct.pack("HBBI", *line) for line in lines))

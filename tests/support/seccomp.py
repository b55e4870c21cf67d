"""A kernel without some system calls, simulated by a seccomp filter for a process and its children."""

import ctypes
import errno
import platform
import struct
from collections.abc import Callable
from functools import partial
from typing import Final

_X86: Final = platform.machine() == "x86_64"
LANDLOCK: Final = (444, 445, 446)
MOUNTS: Final = (272, 165) if _X86 else (97, 40)
CHROOT: Final = (161,) if _X86 else (51,)

_LOAD_NUMBER: Final = (0x20, 0, 0, 0)
_ALLOW: Final = (0x06, 0, 0, 0x7FFF0000)
_NO_NEW_PRIVS, _SECCOMP, _FILTER = 38, 22, 2


class _Program(ctypes.Structure):
    """`struct sock_fprog`."""

    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def deny(numbers: tuple[int, ...], error: int = errno.ENOSYS) -> Callable[[], None]:
    """Return what a process, such as a child before exec, runs so that these system calls fail with `error`."""
    rejected = (0x06, 0, 0, 0x00050000 | error)
    tests = [(0x15, len(numbers) - index, 0, number) for index, number in enumerate(numbers)]
    lines = [_LOAD_NUMBER, *tests, _ALLOW, rejected]
    code = b"".join(struct.pack("HBBI", *line) for line in lines)
    program = _Program(len(lines), code)
    libc = ctypes.CDLL(None, use_errno=True)

    def install() -> None:
        zero, one = ctypes.c_ulong(0), ctypes.c_ulong(1)
        apply = partial(libc.prctl, _SECCOMP, ctypes.c_ulong(_FILTER), ctypes.byref(program), zero, zero)
        # Only root may do without it; with it, a container runtime could not change security labels.
        if apply() and (libc.prctl(_NO_NEW_PRIVS, one, zero, zero, zero) or apply()):
            raise OSError(ctypes.get_errno(), "seccomp")

    return install

"""The version of Landlock that the kernel offers to this process.

Source: Linux, Documentation/userspace-api/landlock.rst; include/uapi/linux/landlock.h. The numbers of its
system calls are the same on every architecture.
"""

import ctypes
import os
from typing import Final

SYS_CREATE_RULESET: Final = 444
_VERSION: Final = 1


def landlock_abi() -> int:
    """Return the version of Landlock's interface, at least 1.

    Raises:
        OSError: there is none: the kernel is older than 5.13, was started without it, or a seccomp filter denies it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    zero = ctypes.c_long(0)
    abi = int(libc.syscall(ctypes.c_long(SYS_CREATE_RULESET), zero, zero, ctypes.c_long(_VERSION)))
    if abi < 1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return abi

import ctypes
import errno
import os
import re
from typing import Any

import pytest

from core.landlock import landlock_abi


def _kernel(answer: int, error: int = 0) -> Any:
    """Return what opens a C library whose system calls give this answer."""

    def syscall(*_: Any) -> int:
        ctypes.set_errno(error)
        return answer

    library = type("Library", (), {"syscall": staticmethod(syscall)})
    return lambda *_, **__: library


@pytest.mark.parametrize("error", [errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM], ids=errno.errorcode.get)
def test_a_kernel_without_landlock_is_an_error(monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    """Too old, switched off, or denied by a seccomp filter."""
    monkeypatch.setattr(ctypes, "CDLL", _kernel(4))
    assert landlock_abi() == 4
    monkeypatch.setattr(ctypes, "CDLL", _kernel(-1, error))
    with pytest.raises(OSError, match=re.escape(os.strerror(error))):
        landlock_abi()

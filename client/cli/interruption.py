"""The signals that end a command for users as Ctrl-C does, so that it removes what it has made for itself.

asyncio cancels a command on SIGINT alone; by default, others would end it before any cleanup.
"""

import os
import signal
import stat
from collections.abc import Generator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Final

__all__ = ["interrupted_by_signals"]

_ENDING: Final = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def interrupted_by_signals() -> Generator[None]:
    """Interrupt what runs within the block by SIGTERM, and by SIGHUP unless it is ignored, as below nohup.

    Raises:
        KeyboardInterrupt: a signal came.
    """
    before = {number: signal.getsignal(number) for number in _ENDING}
    for number, handler in before.items():
        if handler is signal.SIG_DFL:
            signal.signal(number, _interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int, _frame: FrameType | None) -> None:
    if number == signal.SIGHUP:
        _leave_terminal()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # So shells without job control start commands in the background. asyncio cancels its tasks after this too.
        raise KeyboardInterrupt
    signal.raise_signal(signal.SIGINT)


def _leave_terminal() -> None:
    """Write to nothing: a terminal that has hung up answers with an error, which would end the cleanup."""
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        with suppress(OSError):
            if stat.S_ISCHR(os.fstat(fd).st_mode):
                os.dup2(null, fd)
    os.close(null)

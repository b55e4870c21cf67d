"""The request to stop that the kernel delivers: SIGTERM from the kubelet, an interrupt at a terminal.

Imports next to nothing, so that its handler stands before anything heavy is loaded. Does not
know what stopping means.
"""

import signal
from collections.abc import Callable
from types import FrameType

__all__ = ["StopSignal"]


class StopSignal:
    """Remembers that this process was told to stop, and tells one listener."""

    def __init__(self) -> None:
        self.received = ""
        self._listener: Callable[[], None] | None = None

    def install(self) -> None:
        """Take SIGTERM and SIGINT from now on."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._take)

    def listen(self, listener: Callable[[], None]) -> None:
        """Call `listener` when a signal comes, at once if one came before.

        It runs between two instructions of the main thread: it may do no more than wake a loop.
        """
        self._listener = listener
        if self.received:
            listener()

    def _take(self, number: int, _frame: FrameType | None) -> None:
        self.received = signal.Signals(number).name
        if self._listener is not None:
            self._listener()

"""The handler of SIGTERM from the kubelet, and of an interrupt from a terminal; imports little, to be early."""

import signal
from collections.abc import Callable
from contextlib import suppress
from types import FrameType


class StopSignal:
    """Keeps the signal that stopped this process, and notifies one listener."""

    def __init__(self) -> None:
        self.received = ""
        self._listener: Callable[[], object] | None = None

    @property
    def reason(self) -> str:
        """Why the work ends, for messages."""
        return f"the data mover was stopped by {self.received}"

    def install(self) -> None:
        """Handle SIGTERM and SIGINT."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._take)

    def listen(self, listener: Callable[[], object]) -> None:
        """Call `listener` on a signal, immediately if one was received before.

        It runs between two instructions of the main thread: it may only wake an event loop.
        """
        self._listener = listener
        if self.received:
            listener()

    def _take(self, number: int, _frame: FrameType | None) -> None:
        self.received = signal.Signals(number).name
        if self._listener is not None:
            # The loop is closed once the work has ended: its result and exit code stay.
            with suppress(RuntimeError):
                self._listener()

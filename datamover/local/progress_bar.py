"""Progress in local mode: a bar on a terminal, otherwise a line every 10 seconds."""

from typing import Final, TextIO

from core.clock import Clock
from core.contract import ProgressMessage
from datamover.kopia.progress import Meter

__all__ = ["ProgressBar", "format_bytes"]

_BAR_WIDTH: Final = 30
_TERMINAL_SECONDS: Final = 0.5
_LINE_SECONDS: Final = 10.0
_UNITS: Final = ("B", "KB", "MB", "GB", "TB", "PB")
_STEP: Final = 1000


def format_bytes(count: float) -> str:
    """Return `count` in a readable unit, such as `1.2 GB`."""
    for unit in _UNITS:
        if count < _STEP or unit == _UNITS[-1]:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= _STEP
    return ""


class ProgressBar:
    """Writes the progress of one data path to `stream`."""

    def __init__(self, stream: TextIO, clock: Clock) -> None:
        self._stream = stream
        self._clock = clock
        self._terminal = stream.isatty()

    async def follow(self, meter: Meter) -> None:
        """Draw the progress, forever."""
        while True:
            await self._clock.sleep(_TERMINAL_SECONDS if self._terminal else _LINE_SECONDS)
            self.draw(await meter.read())

    def draw(self, reading: ProgressMessage, *, last: bool = False) -> None:
        """Draw one reading; the last one ends the line."""
        text = _format_text(reading)
        if self._terminal:
            end = "\n" if last else ""
            self._stream.write(f"\r\x1b[K{_format_bar(reading)} {text}{end}")
        else:
            self._stream.write(f"{text}\n")
        self._stream.flush()


def _format_bar(reading: ProgressMessage) -> str:
    if not reading.total_bytes:
        return "[" + " " * _BAR_WIDTH + "]"
    filled = _BAR_WIDTH * reading.done_bytes // reading.total_bytes
    return "[" + "#" * filled + "." * (_BAR_WIDTH - filled) + "]"


def _format_text(reading: ProgressMessage) -> str:
    parts = [format_bytes(reading.done_bytes)]
    if reading.total_bytes:
        parts = [f"{format_bytes(reading.done_bytes)} of {format_bytes(reading.total_bytes)}"]
        parts.append(f"{100 * reading.done_bytes // reading.total_bytes} %")
    if reading.bytes_per_second:
        parts.append(f"{format_bytes(reading.bytes_per_second)}/s")
        if reading.total_bytes > reading.done_bytes:
            left = (reading.total_bytes - reading.done_bytes) / reading.bytes_per_second
            parts.append(f"{left:.0f} s left")
    return ", ".join(parts)

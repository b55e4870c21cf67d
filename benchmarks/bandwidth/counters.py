"""What has passed through the sockets of a storage, by the kernel's own counters, and into a directory.

Does not know why it passed, or what it should have been.
Source: Linux, include/uapi/linux/tcp.h, struct tcp_info: `tcpi_bytes_acked` and `tcpi_bytes_received`.
"""

import asyncio
import os
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Final

from benchmarks.bandwidth.course import Course

__all__ = ["SocketCounters", "directory_bytes", "sampled"]

_SAMPLE_SECONDS: Final = 0.05
_COUNTERS: Final = struct.Struct("=QQ")
_COUNTERS_AT: Final = 120


class SocketCounters:
    """Counts what the sockets of a server have received, and what of theirs was acknowledged."""

    def __init__(self) -> None:
        self.received, self.sent = Course(), Course()
        self._ended = (0, 0)
        self._open: dict[asyncio.StreamWriter, tuple[int, int]] = {}

    @contextmanager
    def counting(self, writer: asyncio.StreamWriter) -> Iterator[None]:
        """Count a connection during the block."""
        self._open[writer] = (0, 0)
        try:
            yield
        finally:
            self._read(writer)
            received, sent = self._open.pop(writer)
            self._ended = (self._ended[0] + received, self._ended[1] + sent)

    def sample(self) -> None:
        """Add a sample to both courses."""
        for writer in self._open:
            self._read(writer)
        now = time.monotonic()
        self.received.add(now, self._ended[0] + sum(received for received, _ in self._open.values()))
        self.sent.add(now, self._ended[1] + sum(sent for _, sent in self._open.values()))

    def _read(self, writer: asyncio.StreamWriter) -> None:
        # A socket that its transport has closed keeps what was read before.
        with suppress(OSError):
            info = writer.get_extra_info("socket").getsockopt(
                socket.IPPROTO_TCP, socket.TCP_INFO, _COUNTERS_AT + _COUNTERS.size
            )
            acknowledged, received = _COUNTERS.unpack_from(info, _COUNTERS_AT)
            self._open[writer] = (received, acknowledged)


@asynccontextmanager
async def sampled(sample: Callable[[], None]) -> AsyncIterator[None]:
    """Call `sample` 20 times per second during the block."""

    async def repeat() -> None:
        while True:
            sample()
            await asyncio.sleep(_SAMPLE_SECONDS)

    task = asyncio.create_task(repeat(), name="samples")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


def directory_bytes(folder: Path) -> int:
    """Return the size of all files below a folder."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            # kopia renames each file when it is complete.
            with suppress(OSError):
                total += (Path(parent) / name).stat().st_size
    return total

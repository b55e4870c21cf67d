"""`python -m benchmarks.latency.line PORT TO_PORT SECONDS`: a line to a server, on which a round trip takes that long.

A process of its own, with one loop for all connections: what it costs is a tenth of a millisecond for each piece. The
bandwidth has no limit. A connection takes a round trip to open, and a half for each byte to arrive.
"""

import select
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from heapq import heappop, heappush
from itertools import count
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from tests.datamover.support.servers import run_server
from tests.support.sockets import free_port

__all__ = ["run_line"]

_ROOT: Final = Path(__file__).parents[2]
_HOST: Final = "127.0.0.1"
_PIECE_BYTES: Final = 1 << 18
_ON_THE_LINE_BYTES: Final = 32 << 20
"""Of one connection in one direction; more is not read before: what 3 GB/s have on their way in 10 ms."""

_EARLY_SECONDS: Final = 0.0005
"""A pause takes whole milliseconds."""

_READ: Final = select.EPOLLIN
_WRITE: Final = select.EPOLLOUT
_GONE: Final = select.EPOLLHUP | select.EPOLLERR


@contextmanager
def run_line(url: str, folder: Path, seconds: float) -> Iterator[str]:
    """Yield the URL by which the server at `url` is reached, `seconds` there and back; its log is beside `folder`."""
    port, address = free_port(), urlsplit(url)
    argv = [sys.executable, "-m", __spec__.name, str(port), str(address.port), str(seconds)]
    with run_server(argv, {"PYTHONPATH": str(_ROOT)}, folder, port):
        yield f"http://{_HOST}:{port}"


class _End:
    """One end of a connection, and what is on its way to the other end, and what that end has not taken yet."""

    __slots__ = ("closing", "events", "opened_at", "other", "size_bytes", "socket", "waiting")

    def __init__(self, connection: socket.socket, opened_at: float) -> None:
        self.socket = connection
        self.opened_at = opened_at
        self.other: _End = self
        self.events = _READ
        self.size_bytes = 0
        self.waiting = bytearray()
        self.closing = False


class _Line:
    """All connections; `_underway` is a heap of pieces by the time at which they arrive."""

    def __init__(self, listener: socket.socket, server: tuple[str, int], seconds: float) -> None:
        self._listener = listener
        self._server = server
        self._half = seconds / 2
        self._poll = select.epoll()
        self._ends: dict[int, _End] = {}
        self._underway: list[tuple[float, int, _End, bytes]] = []
        self._numbers = count()

    def run(self) -> None:
        """Pass everything on, until the process is killed."""
        self._poll.register(self._listener, _READ)
        while True:
            for fd, events in self._poll.poll(self._pause()):
                if fd == self._listener.fileno():
                    self._accept()
                elif end := self._ends.get(fd):
                    if events & _WRITE:
                        self._write(end)
                    if events & (_READ | _GONE):
                        self._read(end)
            self._deliver()

    def _pause(self) -> float | None:
        # It rounds up to milliseconds.
        return max(0.0, self._underway[0][0] - time.monotonic() - _EARLY_SECONDS) if self._underway else None

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        try:
            server = socket.create_connection(self._server)
        except OSError:
            # As a server that refuses connections.
            client.close()
            return
        # The client has its connection at once: what it sends first comes later for that.
        ends = [_End(client, time.monotonic() + 2 * self._half), _End(server, 0.0)]
        for end, other in zip(ends, reversed(ends), strict=True):
            end.socket.setblocking(False)  # noqa: FBT003 - no keyword
            end.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            end.other = other
            self._ends[end.socket.fileno()] = end
            self._poll.register(end.socket, _READ)

    def _read(self, end: _End) -> None:
        try:
            piece = end.socket.recv(_PIECE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            piece = b""
        arrives_at = max(time.monotonic(), end.opened_at) + self._half
        heappush(self._underway, (arrives_at, next(self._numbers), end, piece))
        end.size_bytes += len(piece)
        if not piece or end.size_bytes > _ON_THE_LINE_BYTES:
            self._watch(end, end.events & ~_READ)

    def _deliver(self) -> None:
        """Write what has arrived."""
        now = time.monotonic() + _EARLY_SECONDS
        while self._underway and self._underway[0][0] <= now:
            *_, end, piece = heappop(self._underway)
            if not piece:
                end.other.closing = True
            end.other.waiting += piece
            self._write(end.other)

    def _write(self, sink: _End) -> None:
        if sink.socket.fileno() < 0:
            return
        try:
            sent = sink.socket.send(sink.waiting) if sink.waiting else 0
        except BlockingIOError:
            sent = 0
        except OSError:
            self._close(sink)
            return
        del sink.waiting[:sent]
        source = sink.other
        source.size_bytes -= sent
        if not source.events & _READ and not sink.closing and source.size_bytes < _ON_THE_LINE_BYTES // 2:
            self._watch(source, source.events | _READ)
        self._watch(sink, sink.events | _WRITE if sink.waiting else sink.events & ~_WRITE)
        if sink.closing and not sink.waiting:
            if source.closing:
                self._close(sink)
            else:
                with suppress(OSError):
                    sink.socket.shutdown(socket.SHUT_WR)

    def _watch(self, end: _End, events: int) -> None:
        if events == end.events or end.socket.fileno() < 0:
            return
        if not events:
            # An end that hung up would be reported for ever.
            self._poll.unregister(end.socket)
        elif not end.events:
            self._poll.register(end.socket, events)
        else:
            self._poll.modify(end.socket, events)
        end.events = events

    def _close(self, end: _End) -> None:
        for one in (end, end.other):
            if (fd := one.socket.fileno()) >= 0:
                self._watch(one, 0)
                del self._ends[fd]
                one.socket.close()
                one.waiting.clear()


def _main() -> None:
    port, to_port, seconds = sys.argv[1:]
    with socket.create_server((_HOST, int(port)), backlog=1024) as listener:
        _Line(listener, (_HOST, int(to_port)), float(seconds)).run()


if __name__ == "__main__":
    _main()

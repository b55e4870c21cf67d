"""Bytes from one socket to another, at the rate of a lane.

The kernel moves them by way of a pipe, so that this process never holds them: a reader that is slow makes the sender
wait, and costs no memory here.
Source: Linux, splice(2), pipe(7).
"""

import asyncio
import errno
import fcntl
import os
import socket
from collections.abc import Callable, Coroutine
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from datamover.bandwidth.lanes import Lane

__all__ = ["Relay", "relay_all", "run_both"]

_PIPE_BYTES: Final = 2**18
"""More than the default of 64 KiB halves the calls; the kernel gives less to a user who has many pipes."""

_FLAGS: Final = os.SPLICE_F_NONBLOCK | os.SPLICE_F_MOVE


_LAST_SECONDS: Final = 2.0

_T = TypeVar("_T")


class Relay:
    """Moves bytes from `source` to `target`, both non-blocking sockets; a context manager that owns neither."""

    def __init__(self, source: socket.socket, target: socket.socket, lane: Lane) -> None:
        self._source = source
        self._target = target
        self._lane = lane

    def __enter__(self) -> Self:
        """Open the pipe."""
        self._out, self._in = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        with suppress(OSError):
            fcntl.fcntl(self._in, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the pipe."""
        os.close(self._out)
        os.close(self._in)

    async def send(self, content: bytes) -> None:
        """Send bytes that were received before.

        Raises:
            OSError: the connection is broken.
        """
        view = memoryview(content)
        while view:
            piece = view[: self._lane.piece_bytes]
            await self._lane.take(len(piece))
            await asyncio.get_running_loop().sock_sendall(self._target, piece)
            view = view[len(piece) :]

    async def move(self, limit_bytes: int | None = None) -> int:
        """Move bytes until the source ends, or `limit_bytes` were moved; return how many.

        Raises:
            OSError: a connection is broken.
        """
        moved = 0
        while limit_bytes is None or moved < limit_bytes:
            piece = self._lane.piece_bytes if limit_bytes is None else min(self._lane.piece_bytes, limit_bytes - moved)
            size = await self._receive(piece)
            if not size:
                break
            await self._lane.take(size)
            await self._pass_on(size)
            moved += size
        return moved

    def end(self) -> None:
        """Tell the target that nothing more follows; it may still answer."""
        with suppress(OSError):
            self._target.shutdown(socket.SHUT_WR)

    async def _receive(self, most_bytes: int) -> int:
        source = self._source.fileno()
        while True:
            try:
                return os.splice(source, self._in, most_bytes, flags=_FLAGS)
            except BlockingIOError:
                loop = asyncio.get_running_loop()
                await _wait(source, loop.add_reader, loop.remove_reader)

    async def _pass_on(self, size_bytes: int) -> None:
        target = self._target.fileno()
        while size_bytes:
            try:
                size_bytes -= os.splice(self._out, target, size_bytes, flags=_FLAGS)
            except BlockingIOError:
                loop = asyncio.get_running_loop()
                await _wait(target, loop.add_writer, loop.remove_writer)


async def _wait(fd: int, add: Callable[..., None], remove: Callable[[int], bool]) -> None:
    """Return once `fd` is ready, for what `add` registers it."""
    ready = asyncio.get_running_loop().create_future()

    def wake() -> None:
        # The event loop may call it again before the waiter has run.
        if not ready.done():
            ready.set_result(None)

    add(fd, wake)
    try:
        await ready
    finally:
        remove(fd)


async def run_both(sending: Coroutine[Any, Any, _T], answering: Coroutine[Any, Any, None]) -> _T:
    """Return what `sending` returns, once `answering` has ended too; that is canceled if the former returns a value.

    After an error of one, the other has a moment: an answer may come before the request has ended.

    Raises:
        OSError: of `sending`.
    """
    loop = asyncio.get_running_loop()
    upload = loop.create_task(sending, name="upload")
    download = loop.create_task(answering, name="download")
    try:
        done, _ = await asyncio.wait({upload, download}, return_when=asyncio.FIRST_COMPLETED)
        failed = any(task.exception() for task in done)
        if failed or download in done or upload.result() is None:
            await asyncio.wait({upload, download}, timeout=_LAST_SECONDS if failed else None)
        if not upload.done():
            raise ConnectionResetError(errno.ECONNRESET, "answer ended")
        return upload.result()
    finally:
        for task in (upload, download):
            task.cancel()
        await asyncio.wait({upload, download})
        # Read, so that asyncio does not report it as lost.
        _ = download.cancelled() or download.exception()


async def relay_all(source: socket.socket, target: socket.socket, lane: Lane) -> None:
    """Relay everything, also the end.

    Raises:
        OSError: a connection is broken.
    """
    with Relay(source, target, lane) as relay:
        await relay.move()
        relay.end()

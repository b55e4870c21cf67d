"""A sparse file whose content is fetched when a confined child reads it: the image of a device of any size.

The kernel stops each pread of the child until this process has fetched what it asks for. No mount, no FUSE and no
privilege is needed for that, and no more than a part of the image is on the disk at a time.
Source: Linux, Documentation/userspace-api/seccomp_filter.rst ("Userspace Notification"), include/uapi/linux/seccomp.h.
"""

import asyncio
import errno
import fcntl
import logging
import os
import select
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Final

from core.aio import wait_for_fd
from core.errors import AgentError, DataPathError
from datamover.runtime.sandbox import Step, notify_reads
from datamover.runtime.work_dir import NEW, attempting, opened

_logger = logging.getLogger(__name__)

BLOCK_BYTES: Final = 1 << 20
"""What is fetched at least."""

_KEPT_BLOCKS: Final = 32
"""What is on the disk after a read, if that did not ask for more: what is read twice counts as memory of the pod."""

_MOST_BLOCKS: Final = 256
"""What one read may ask for."""

_MOST_AHEAD: Final = 16

_RECEIVE: Final = 0xC0502100
_SEND: Final = 0xC0182101
"""SECCOMP_IOCTL_NOTIF_RECV and _SEND."""

_NOTIFICATION: Final = struct.Struct("=QIIiIQ6Q")
"""`struct seccomp_notif`: id, pid, flags; number, architecture, instruction and arguments of the call."""

_ANSWER: Final = struct.Struct("=QqiI")
"""`struct seccomp_notif_resp`: id, value, error, flags."""

_CONTINUE: Final = 1
"""The kernel executes the call. That is safe here: whatever is read is the child's to read. Since Linux 5.5."""

Fetch = Callable[[int, int], Awaitable[None]]
"""Writes blocks, from a first one on and so many, to the file; holes stay where they are zero."""


class LazyFile:
    """The file `path`, which has `size_bytes`; `fetch` must be set before a read.

    The child gets `error` as an I/O error. `fetching`: a read waits for `fetch`, which says itself what takes too long.
    """

    def __init__(self, path: Path, fd: int, size_bytes: int) -> None:
        self.path = path
        self.fd = fd
        self.size_bytes = size_bytes
        self.fetch: Fetch | None = None
        self.error: AgentError | None = None
        self.fetching = False
        self._fetched: set[int] = set()
        self._next = 0
        self._ahead = 1

    @classmethod
    @contextmanager
    def create(cls, path: Path, size_bytes: int) -> Iterator["LazyFile"]:
        """Create it, and close it at the end; raises DataPathError."""
        with opened(path, NEW) as fd:
            with attempting(f"create a sparse file of {size_bytes} bytes"):
                os.ftruncate(fd, size_bytes)
            yield cls(path, fd, size_bytes)

    async def read(self, offset: int, length: int) -> bytes:
        """Return bytes of the file, fewer at its end. Raises AgentError if they cannot be fetched."""
        await self._provide(offset, length)
        return os.pread(self.fd, length, offset)

    @asynccontextmanager
    async def observed(self) -> AsyncIterator[list[Step]]:
        """Yield the steps of one child between fork and exec; within the block its preads find what they ask for.

        Raises:
            DataPathError: this architecture has no such steps.
        """
        ours, theirs = socket.socketpair()
        with ours, theirs:
            steps = notify_reads(lambda listener: socket.send_fds(theirs, [b"1"], [listener]))
            if not steps:
                raise DataPathError("files of a device cannot be read on this architecture")
            serving = asyncio.create_task(self._serve(ours), name="lazy-file")
            try:
                yield steps
            finally:
                serving.cancel()
                await asyncio.wait({serving})
                if not serving.cancelled() and (error := serving.exception()):
                    _logger.error("serving reads failed", exc_info=error)

    async def _serve(self, ours: socket.socket) -> None:
        await wait_for_fd(ours.fileno())
        _, (listener,), _, _ = socket.recv_fds(ours, 1, 1)
        try:
            while await _has_call(listener):
                call = bytearray(_NOTIFICATION.size)
                try:
                    fcntl.ioctl(listener, _RECEIVE, call)
                except FileNotFoundError:
                    # The child was killed meanwhile.
                    continue
                number, *_, length, offset, _, _ = _NOTIFICATION.unpack(call)
                failed = await self._try_to_provide(offset, length)
                answer = _ANSWER.pack(number, 0, -errno.EIO if failed else 0, 0 if failed else _CONTINUE)
                with suppress(FileNotFoundError):
                    fcntl.ioctl(listener, _SEND, bytearray(answer))
        except OSError as e:
            self.error = DataPathError(
                f"files of a device cannot be read with this kernel (older than Linux 5.5?): {e}"
            )
        finally:
            # A call that waits gets an error then.
            os.close(listener)

    async def _try_to_provide(self, offset: int, length: int) -> bool:
        """Return whether that failed."""
        if self.error is None:
            try:
                await self._provide(offset, length)
            except AgentError as e:
                self.error = e
        return self.error is not None

    async def _provide(self, offset: int, length: int) -> None:
        if self.fetch is None:
            raise RuntimeError("nothing can be fetched yet")
        total = -(-self.size_bytes // BLOCK_BYTES)
        first, end = offset // BLOCK_BYTES, min(total, -(-(offset + length) // BLOCK_BYTES))
        if end - first > _MOST_BLOCKS:
            raise DataPathError(f"a read of {length} bytes at once is not expected: the file system is damaged")
        if not (missing := [block for block in range(first, end) if block not in self._fetched]):
            return
        start = missing[0]
        self._ahead = min(2 * self._ahead, _MOST_AHEAD) if start == self._next else 1
        self._next = max(missing[-1] + 1, min(start + self._ahead, total))
        if len(self._fetched) + self._next - start > _KEPT_BLOCKS:
            # No read goes on at this moment, so all of it may go.
            os.ftruncate(self.fd, 0)
            os.ftruncate(self.fd, self.size_bytes)
            self._fetched.clear()
            start = first
            self._next = max(end, min(self._next, first + _KEPT_BLOCKS))
        self.fetching = True
        try:
            await self.fetch(start, self._next - start)
        finally:
            self.fetching = False
        self._fetched.update(range(start, self._next))


async def _has_call(listener: int) -> bool:
    """Wait for a call, and return True; False: the child has ended, and receiving would wait forever."""
    await wait_for_fd(listener)
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    return any(events & select.POLLIN for _, events in poll.poll(0))

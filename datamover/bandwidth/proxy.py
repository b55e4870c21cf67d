"""The proxy by which kopia reaches its storage where the bandwidth is limited.

The kernel moves the bytes by way of a pipe, so that this process never holds them: a reader that is slow makes the
sender wait, and costs no memory here. It listens on the loopback interface of the mover's pod, and serves only kopia,
which has its password. It does not read what passes through TLS.
Source: Linux, splice(2), pipe(7).
"""

import asyncio
import errno
import fcntl
import logging
import os
import secrets
import socket
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hmac import compare_digest
from typing import Any, Final, TypeVar

from core.aio import wait_for_fd
from core.clock import Clock
from core.models.transfer_settings import BandwidthLimits
from datamover.bandwidth.dialing import (
    BadRequestError,
    DialError,
    HeadReader,
    RequestHead,
    Routes,
    basic_credentials,
    dial,
)

_BURST_SECONDS: Final = 0.25
"""So much of what was not used in the last moment may pass later: this process may get no CPU for a while. A second
has at most a quarter more than its rate, then, and what was received ahead."""

_PIECES_PER_SECOND: Final = 64
"""A connection sends a piece, then it is the turn of the others. It receives one piece ahead of its turn."""

_LARGEST_PIECE_BYTES: Final = 2**20


class Lane:
    """One direction; a `rate` of 0 bytes per second is no limit."""

    def __init__(self, clock: Clock, rate: int = 0) -> None:
        self._clock = clock
        self.rate = rate
        self._free_at = clock.monotonic()

    @property
    def piece_bytes(self) -> int:
        """The most that a connection may pass at once."""
        return min(self.rate // _PIECES_PER_SECOND or 1, _LARGEST_PIECE_BYTES) if self.rate else _LARGEST_PIECE_BYTES

    async def take(self, size_bytes: int) -> None:
        """Return once so many bytes may pass, in the order of the calls."""
        if not self.rate:
            return
        now = self._clock.monotonic()
        begin = max(self._free_at, now - _BURST_SECONDS)
        self._free_at = begin + size_bytes / self.rate
        if begin > now:
            await self._clock.sleep(begin - now)


_PIPE_BYTES: Final = 2**18
"""More than the default of 64 KiB halves the calls; the kernel gives less to a user who has many pipes."""

_FLAGS: Final = os.SPLICE_F_NONBLOCK | os.SPLICE_F_MOVE

_LAST_SECONDS: Final = 2.0

_T = TypeVar("_T")


@dataclass(frozen=True)
class _Relay:
    """Moves bytes from `source` to `target`, both non-blocking sockets, by way of the pipe `pipe_out`, `pipe_in`."""

    source: socket.socket
    target: socket.socket
    lane: Lane
    pipe_out: int
    pipe_in: int

    async def send(self, content: bytes) -> None:
        """Send bytes that were received before. Raises OSError if the connection is broken."""
        view = memoryview(content)
        while view:
            piece = view[: self.lane.piece_bytes]
            await self.lane.take(len(piece))
            await asyncio.get_running_loop().sock_sendall(self.target, piece)
            view = view[len(piece) :]

    async def move(self, limit_bytes: int | None = None) -> int:
        """Move bytes until the source ends, or `limit_bytes` were moved; return how many."""
        moved = 0
        while limit_bytes is None or moved < limit_bytes:
            piece = self.lane.piece_bytes if limit_bytes is None else min(self.lane.piece_bytes, limit_bytes - moved)
            if not (size := await self._receive(piece)):
                break
            await self.lane.take(size)
            await self._pass_on(size)
            moved += size
        return moved

    def end(self) -> None:
        """Let the target know that nothing more follows; it may still answer."""
        with suppress(OSError):
            self.target.shutdown(socket.SHUT_WR)

    async def _receive(self, most_bytes: int) -> int:
        source = self.source.fileno()
        while True:
            try:
                return os.splice(source, self.pipe_in, most_bytes, flags=_FLAGS)
            except BlockingIOError:
                await wait_for_fd(source)

    async def _pass_on(self, size_bytes: int) -> None:
        target = self.target.fileno()
        while size_bytes:
            try:
                size_bytes -= os.splice(self.pipe_out, target, size_bytes, flags=_FLAGS)
            except BlockingIOError:
                await wait_for_fd(target, to_write=True)


@contextmanager
def _open_relay(source: socket.socket, target: socket.socket, lane: Lane) -> Iterator[_Relay]:
    pipe_out, pipe_in = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        with suppress(OSError):
            fcntl.fcntl(pipe_in, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        yield _Relay(source, target, lane, pipe_out, pipe_in)
    finally:
        os.close(pipe_out)
        os.close(pipe_in)


async def run_both(sending: Coroutine[Any, Any, _T], answering: Coroutine[Any, Any, None]) -> _T:
    """Return what `sending` returns, once `answering` has ended too; that is canceled if the former returns a value.

    After an error of one, the other has a moment: an answer may come before the request has ended. Raises an OSError of
    `sending`.
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
    """Relay everything, also the end. Raises OSError if a connection is broken."""
    with _open_relay(source, target, lane) as relay:
        await relay.move()
        relay.end()


_logger = logging.getLogger(__name__)

_USER: Final = "mover"
_VARIABLES: Final = ("HTTP_PROXY", "HTTPS_PROXY")
_FIRST_HEAD_SECONDS: Final = 30.0
"""A process that does not say who it is keeps no connection for longer."""

_LAST_BODY_SECONDS: Final = 2.0
_ACCEPT_SECONDS: Final = 1.0

_SEGMENT_BYTES: Final = 8192
_RECEIVE_BYTES: Final = 2**18
"""Together they limit what kopia's and this end of a connection hold to some 500 KiB. With the loopback interface's
segments of 64 KiB it would be megabytes: at a low rate, an answer would come minutes after kopia believes them sent.
Source: Linux, tcp_init_buffer_space."""

MOST_PARALLEL: Final = 6
"""Files of a backup that kopia should read in parallel, so that it has no more connections: at 100 kB/s, the least
limit, what these hold passes within half a minute."""


class BandwidthProxy:
    """Listens from its creation on until it is closed, and serves while `run` is running."""

    def __init__(self, environment: Mapping[str, str], clock: Clock, limits: BandwidthLimits) -> None:
        """Listen, with limits for all connections together, through proxies of the environment; raises ConfigError."""
        self._routes = Routes(environment)
        self._environment = environment
        # As seen from the node.
        self._upload, self._download = Lane(clock), Lane(clock)
        self.limit(limits)
        self.password = secrets.token_urlsafe(32)
        """What must not be in a message."""
        self._listener = socket.socket()
        self._listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, _SEGMENT_BYTES)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BYTES)
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen()
        self._listener.settimeout(0)

    @property
    def environment(self) -> dict[str, str]:
        """The environment for kopia: every storage is reached through this proxy."""
        excluded = {"NO_PROXY", *_VARIABLES}
        kept = {name: value for name, value in self._environment.items() if name.upper() not in excluded}
        host, port = self._listener.getsockname()
        return kept | dict.fromkeys(_VARIABLES, f"http://{_USER}:{self.password}@{host}:{port}")

    def limit(self, limits: BandwidthLimits) -> None:
        """Apply other limits, also to the connections that exist."""
        self._upload.rate = limits.upload_bytes_per_second
        self._download.rate = limits.download_bytes_per_second

    def close(self) -> None:
        """Listen no more."""
        self._listener.close()

    async def run(self) -> None:
        """Serve until canceled."""
        async with asyncio.TaskGroup() as group:
            while True:
                try:
                    client, _ = await asyncio.get_running_loop().sock_accept(self._listener)
                except OSError as e:
                    # Such as of too many open files; without this proxy, kopia would wait for its storage.
                    _logger.warning("bandwidth proxy: cannot accept a connection, will retry: %s", e)
                    await asyncio.sleep(_ACCEPT_SECONDS)
                    continue
                group.create_task(self._serve(client), name="connection of kopia")

    async def _serve(self, client: socket.socket) -> None:
        with client:
            try:
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                await self._answer(client)
            except DialError as e:
                _logger.debug("bandwidth proxy: %s", e)
                await _refuse(client, f"502 {e}")
            except BadRequestError as e:
                await _refuse(client, f"400 {e}")
            except (OSError, TimeoutError) as e:
                _logger.debug("bandwidth proxy: connection ended: %s", e)
            except Exception:
                # One connection must not end the others.
                _logger.exception("bandwidth proxy: connection failed")

    async def _answer(self, client: socket.socket) -> None:
        reader = HeadReader(client)
        async with asyncio.timeout(_FIRST_HEAD_SECONDS):
            head = await reader.read()
        if head is None:
            return
        expected = basic_credentials(_USER, self.password)
        if not compare_digest((head.authorization or "").encode(), expected.encode()):
            await _refuse(client, "407 Proxy Authentication Required", 'Proxy-Authenticate: Basic realm="mover"')
            return
        while head is not None:
            head = await (self._tunnel if head.tunnels else self._forward)(client, reader, head)

    async def _tunnel(self, client: socket.socket, reader: HeadReader, head: RequestHead) -> None:
        to = head.address
        async with dial(to, self._routes.find("https", to), tunnel=True) as server:
            await asyncio.get_running_loop().sock_sendall(client, b"HTTP/1.1 200 Connection established\r\n\r\n")
            with _open_relay(client, server, self._upload) as relay:
                await relay.send(reader.take(None))
            await run_both(relay_all(client, server, self._upload), relay_all(server, client, self._download))

    async def _forward(self, client: socket.socket, reader: HeadReader, head: RequestHead) -> RequestHead | None:
        """Relay requests to the address of `head`, and answers; return the first one to another, or None at the end."""
        to = head.address
        proxy = self._routes.find("http", to)
        # It finds the address in the requests.
        reads = proxy if proxy is not None and not proxy.scheme.startswith("socks") else None
        authorization = basic_credentials(reads.user, reads.password) if reads is not None and reads.user else None

        async def send() -> RequestHead | None:
            following: RequestHead | None = head
            with _open_relay(client, server, self._upload) as relay:
                while following is not None and following.address == to and not following.tunnels:
                    await relay.send(following.encode(absolute=reads is not None, authorization=authorization))
                    size_bytes = following.body_bytes
                    received = reader.take(size_bytes)
                    await relay.send(received)
                    # A body without a length is everything until the client has no more.
                    await relay.move(None if size_bytes is None else size_bytes - len(received))
                    following = await reader.read()
                if following is None:
                    relay.end()
            return following

        async with dial(to, proxy, tunnel=False) as server:
            return await run_both(send(), relay_all(server, client, self._download))


async def _refuse(client: socket.socket, status: str, *headers: str) -> None:
    """Answer with an error and no more; its text is what kopia reports."""
    loop = asyncio.get_running_loop()
    lines = [f"HTTP/1.1 {status}", *headers, "Content-Length: 0", "Connection: close", "", ""]
    with suppress(OSError):
        await loop.sock_sendall(client, "\r\n".join(lines).encode("ascii", "replace"))
        client.shutdown(socket.SHUT_WR)
        # The answer would be lost if the connection was closed while a body arrives.
        async with asyncio.timeout(_LAST_BODY_SECONDS):
            while await loop.sock_recv(client, _RECEIVE_BYTES):
                pass

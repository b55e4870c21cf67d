"""A service on the loopback interface from which kopia takes what it would otherwise read from a file, again and again.

No link in a volume can name it. It serves who knows its secret, which is in kopia's memory alone.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from hmac import compare_digest
from http import HTTPStatus
from typing import Final

from datamover.bandwidth.dialing import BadRequestError, RequestHead

__all__ = ["Loopback", "LoopbackAnswer", "serve_on_loopback"]

_logger = logging.getLogger(__name__)

_END: Final = b"\r\n\r\n"
_REQUEST_SECONDS: Final = 30.0
_MOST_BODY_BYTES: Final = 65536


@dataclass(frozen=True)
class Loopback:
    """The URL of the service, and the value of the header that a request must have."""

    url: str
    secret: str = field(repr=False)


@dataclass(frozen=True)
class LoopbackAnswer:
    """The body of an answer, and its status."""

    content: bytes = field(repr=False)
    status: HTTPStatus = HTTPStatus.OK


@asynccontextmanager
async def serve_on_loopback(header: str, answer: Callable[[], Awaitable[LoopbackAnswer]]) -> AsyncIterator[Loopback]:
    """Answer each request with what `answer` returns, until the end of the block.

    Args:
        header: the name, in lower case, of the header with the secret.
    """
    secret = secrets.token_urlsafe(32)
    serving: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        work = _serve(reader, writer, lambda head: _knows(head, header, secret), answer)
        task = asyncio.get_running_loop().create_task(work, name="request for credentials")
        serving.add(task)
        task.add_done_callback(serving.discard)

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        try:
            yield Loopback(f"http://{host}:{port}", secret)
        finally:
            server.close()
            for task in serving:
                task.cancel()
            if serving:
                await asyncio.wait(serving)


def _knows(head: RequestHead, header: str, secret: str) -> bool:
    return compare_digest("".join(head.values(header)).encode("latin-1"), secret.encode())


async def _serve(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    is_allowed: Callable[[RequestHead], bool],
    answer: Callable[[], Awaitable[LoopbackAnswer]],
) -> None:
    try:
        async with asyncio.timeout(_REQUEST_SECONDS):
            head = RequestHead.parse((await reader.readuntil(_END)).removesuffix(_END))
            await reader.readexactly(min(head.body_bytes or 0, _MOST_BODY_BYTES))
        found = await answer() if is_allowed(head) else LoopbackAnswer(b"", HTTPStatus.FORBIDDEN)
        lines = [f"HTTP/1.1 {found.status} {found.status.phrase}", f"Content-Length: {len(found.content)}"]
        writer.write("\r\n".join([*lines, "Connection: close", "", ""]).encode() + found.content)
        await writer.drain()
    except (OSError, EOFError, TimeoutError, BadRequestError, asyncio.LimitOverrunError) as e:
        _logger.debug("request for credentials ended: %s", e)
    finally:
        writer.close()

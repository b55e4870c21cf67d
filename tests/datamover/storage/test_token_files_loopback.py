"""The service on loopback: who is served, and that nothing of it is left."""

import asyncio
from http import HTTPStatus
from urllib.parse import urlsplit

import pytest

from datamover.storage.token_files import Loopback, LoopbackAnswer, serve_on_loopback


async def _answer() -> LoopbackAnswer:
    return LoopbackAnswer(b"credentials")


async def _send(loopback: Loopback, head: bytes) -> bytes:
    port = urlsplit(loopback.url).port
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head)
    received = await reader.read()
    writer.close()
    return received


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ("X-Secret: {secret}", b"200 OK"),
        ("X-Secret: {secret}x", b"403 Forbidden"),
        ("Authorization: {secret}", b"403 Forbidden"),
    ],
    ids=["secret", "another secret", "another header"],
)
async def test_only_who_knows_the_secret_is_served(header: str, status: bytes) -> None:
    async with serve_on_loopback("x-secret", _answer) as loopback:
        head = f"POST / HTTP/1.1\r\n{header.format(secret=loopback.secret)}\r\nContent-Length: 4\r\n\r\nbody"
        received = await _send(loopback, head.encode())
    assert received.split(b"\r\n")[0] == b"HTTP/1.1 " + status
    assert received.endswith(b"\r\n\r\ncredentials") == (status == b"200 OK")


async def test_what_is_no_request_gets_no_answer() -> None:
    async with serve_on_loopback("x-secret", _answer) as loopback:
        assert await _send(loopback, b"hello\r\n\r\n") == b""


async def test_an_answer_that_is_still_awaited_ends_with_the_service() -> None:
    asked = asyncio.Event()

    async def never() -> LoopbackAnswer:
        asked.set()
        await asyncio.Event().wait()
        return LoopbackAnswer(b"", HTTPStatus.OK)

    async with serve_on_loopback("x-secret", never) as loopback:
        head = f"GET / HTTP/1.1\r\nX-Secret: {loopback.secret}\r\n\r\n"
        sending = asyncio.get_running_loop().create_task(_send(loopback, head.encode()))
        await asked.wait()
    assert await sending == b""

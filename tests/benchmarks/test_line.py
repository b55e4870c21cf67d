"""The line to a server: it delays each round trip, lets so many bytes pass, and keeps their order."""

import asyncio
import hashlib
import random
import time
from collections.abc import AsyncIterator

import pytest

from benchmarks.line import run_line

_SECONDS = 0.2
_BYTES = 2_000_000
_CONNECTIONS = 8


@pytest.fixture
async def url() -> AsyncIterator[str]:
    """A server that answers each size and so many bytes with their hash."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while size := await reader.read(4):
            writer.write(hashlib.sha256(await reader.readexactly(int.from_bytes(size))).digest())
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def _ask(url: str, seed: int) -> list[float]:
    """Send two requests by a connection of their own; return when each was answered, since it was opened."""
    began = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    answered = []
    for number in range(2):
        content = random.Random(seed + number).randbytes(_BYTES)
        writer.write(_BYTES.to_bytes(4) + content)
        assert await reader.readexactly(32) == hashlib.sha256(content).digest()
        answered.append(time.monotonic() - began)
    writer.write_eof()
    assert await reader.read() == b""
    writer.close()
    return answered


async def test_each_round_trip_is_delayed_and_everything_passes_in_order(url: str) -> None:
    async with run_line(url, round_trip=_SECONDS) as line:
        answered = await asyncio.gather(*(_ask(line, 10 * one) for one in range(_CONNECTIONS)))
    for first, second in answered:
        # One to connect, and one for each answer; none arrives early, but for the rounding of a pause.
        assert first > 2 * _SECONDS - 0.01
        assert second - first > _SECONDS - 0.01


async def test_the_bytes_of_all_connections_have_one_rate(url: str) -> None:
    async with run_line(url, bytes_per_second=4 * _BYTES) as line:
        answered = await asyncio.gather(_ask(line, 1), _ask(line, 2))
    assert max(last for _, last in answered) > 1 - 0.1

"""The agent's HTTP server, over a real socket."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from core.clock import Clock, SystemClock
from core.errors import ConfigError
from core.models.base import JsonDict
from nodeagent.metrics import Metrics
from nodeagent.runtime.settings import ListenAddress
from nodeagent.web.server import _MOST_UNSENT_BYTES, WebPages, WebServer
from tests.nodeagent.support.hand_clock import HandClock

_ANY = ListenAddress("127.0.0.1", 0)


class _Agent:
    """Stands in for the agent."""

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.pages = WebPages(Metrics("node-a"), lambda: self.reasons, lambda: {"node": "node-a"})


@pytest.fixture
def agent() -> _Agent:
    return _Agent()


@asynccontextmanager
async def _served(
    pages: WebPages, clock: Clock | None = None, status_address: ListenAddress | None = None
) -> AsyncIterator[WebServer]:
    server = WebServer(_ANY, pages, clock or SystemClock(), status_address=status_address)
    await server.start()
    yield server
    await server.stop()
    await server.stop()


def _ports(server: WebServer) -> list[int]:
    """Return the ports that the system chose."""
    return [one._server.sockets[0].getsockname()[1] for one in server._listeners if one._server]


@pytest.fixture
async def url(agent: _Agent) -> AsyncIterator[str]:
    async with _served(agent.pages) as server:
        yield f"http://127.0.0.1:{_ports(server)[0]}"


async def _get(url: str) -> tuple[int, str, str]:
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        return response.status, response.headers["Content-Type"], await response.text()


async def test_readyz_names_what_the_agent_waits_for(url: str, agent: _Agent) -> None:
    agent.reasons = ["DataUploads: no watch for 61 s: 403 Forbidden", "mover pods: no watch for 300 s: no answer"]
    status, _, text = await _get(f"{url}/readyz")
    assert (status, text) == (503, f"{agent.reasons[0]}\n{agent.reasons[1]}\n")
    agent.reasons = []
    assert (await _get(f"{url}/readyz"))[0] == 200


async def test_responses_that_are_not_read_take_little_memory(agent: _Agent) -> None:
    pages = replace(agent.pages, status=lambda: {"message": "long " * (_MOST_UNSENT_BYTES // 20)})
    async with _served(pages) as server:
        clients = []
        for _ in range(8):
            client = socket.socket()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            client.connect(("127.0.0.1", _ports(server)[0]))
            client.sendall(b"GET /status HTTP/1.1\r\nHost: a\r\n\r\n")
            clients.append(client)
        url = f"http://127.0.0.1:{_ports(server)[0]}"
        assert (await _get(f"{url}/status"))[0] == (await _get(f"{url}/healthz"))[0] == 200
        connected = server._listeners[0]._runner.server.connections  # type: ignore[union-attr] # it runs
        unsent = [one.transport.get_write_buffer_size() for one in connected if one.transport is not None]
        assert 0 < sum(unsent) <= _MOST_UNSENT_BYTES
        for client in clients:
            client.close()


@pytest.mark.parametrize("flag", ["--metrics-address", "--status-address"])
async def test_a_port_in_use_is_an_error(url: str, agent: _Agent, flag: str) -> None:
    port = int(url.rpartition(":")[2])
    taken = ListenAddress("127.0.0.1", port)
    addresses = (taken, None) if flag == "--metrics-address" else (_ANY, taken)
    with pytest.raises(ConfigError, match=rf"cannot listen on 127\.0\.0\.1:{port} .*{flag}"):
        await WebServer(addresses[0], agent.pages, SystemClock(), status_address=addresses[1]).start()


async def test_the_status_page_may_have_an_address_of_its_own(agent: _Agent) -> None:
    async with _served(agent.pages, status_address=_ANY) as server:
        metrics, status = _ports(server)
        found = {
            (path, port): await _get(f"http://127.0.0.1:{port}{path}")
            for path in ("/metrics", "/healthz", "/readyz", "/status")
            for port in (metrics, status)
        }
    served = {key: answer[1:] for key, answer in found.items() if answer[0] == 200}
    assert served.keys() == {("/metrics", metrics), ("/healthz", metrics), ("/readyz", metrics), ("/status", status)}
    content_type, text = served["/metrics", metrics]
    assert content_type == "text/plain; version=0.0.4; charset=utf-8"
    assert 'podVolume_data_upload_success_total{node="node-a"} 0.0' in text
    content_type, text = served["/status", status]
    assert (content_type, json.loads(text)) == ("application/json; charset=utf-8", {"node": "node-a"})


@pytest.mark.parametrize("page", ["status", "metrics"])
async def test_1000_requests_cost_one_content_a_second(
    agent: _Agent, monkeypatch: pytest.MonkeyPatch, page: str
) -> None:
    """They need no authentication; `/status` sorts all transfers."""
    clock, built = HandClock(), []

    def build(*_: object) -> Any:
        built.append(clock.monotonic())
        return {"queued": 1} if page == "status" else b"queued"

    monkeypatch.setattr(Metrics, "render", build)
    async with _served(replace(agent.pages, status=build), clock) as server, aiohttp.ClientSession() as session:
        for second, requests in ((0.0, 400), (0.999, 300), (1.0, 300)):
            clock.seconds = second
            for _ in range(requests):
                async with session.get(f"http://127.0.0.1:{_ports(server)[0]}/{page}") as response:
                    assert b"queued" in await response.read()
    assert built == [0.0, 1.0]


async def test_a_status_page_that_takes_long_is_built_more_rarely(agent: _Agent) -> None:
    clock, built = HandClock(), []

    def status() -> JsonDict:
        built.append(clock.monotonic())
        clock.seconds += 2
        return {}

    async with _served(replace(agent.pages, status=status), clock) as server:
        for second in (0, 21, 22):
            clock.seconds = max(clock.seconds, second)
            await _get(f"http://127.0.0.1:{_ports(server)[0]}/status")
    assert built == [0, 22]


async def test_the_status_page_shows_no_secrets(agent: _Agent) -> None:
    message = "GET https://a.test/b?sig=0123456789abc: 403, -----BEGIN PRIVATE KEY-----\nMIIE"
    pages = replace(agent.pages, status=lambda: {"transfers": [{"message": message, "name": "token-1"}], "slots": 1})
    async with _served(pages) as server:
        shown = json.loads((await _get(f"http://127.0.0.1:{_ports(server)[0]}/status"))[2])
    redacted = "GET https://a.test/b?sig=***: 403, -----BEGIN PRIVATE KEY-----***"
    assert shown == {"transfers": [{"message": redacted, "name": "token-1"}], "slots": 1}


async def test_a_scrape_beside_1000_half_sent_requests_answers(url: str) -> None:
    """Only the newest connections are kept, so they take little memory."""
    port = int(url.rpartition(":")[2])
    clients = []
    for _ in range(20):
        opened = await asyncio.gather(*(asyncio.open_connection("127.0.0.1", port) for _ in range(50)))
        for _, writer in opened:
            writer.write(b"GET /metrics HTTP/1.1\r\nHost: ")
        clients += opened
    assert (await _get(f"{url}/metrics"))[0] == 200
    async with asyncio.timeout(15):
        ends = await asyncio.gather(*(reader.read() for reader, _ in clients[:700]), return_exceptions=True)
    assert not [end for end in ends if end and not isinstance(end, ConnectionResetError)]
    for _, writer in clients:
        writer.close()


async def test_a_half_sent_request_ends(agent: _Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nodeagent.web.server._IDLE_SECONDS", 0.1)
    async with _served(agent.pages) as server:
        for sent in (b"", b"GET /healthz HTTP/1.1\r\nHost: "):
            reader, writer = await asyncio.open_connection("127.0.0.1", _ports(server)[0])
            writer.write(sent)
            async with asyncio.timeout(10):
                assert not await reader.read()
            writer.close()

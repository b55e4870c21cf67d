"""The agent's HTTP server, over a real socket."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from unittest.mock import Mock

import aiohttp
import pytest
from aiohttp import web

from core.clock import SystemClock
from core.errors import ConfigError
from core.models.base import JsonDict
from core.models.phases import in_order
from nodeagent.leader.admission.writer import QueueView
from nodeagent.leader.index import Entry
from nodeagent.metrics import Metrics
from nodeagent.runtime.settings import ListenAddress
from nodeagent.web.server import _MOST_CONNECTIONS, WebPages, WebServer, _Listener
from tests.nodeagent.leader.admission.test_writer_queue_reports import entry
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


@pytest.fixture
async def url(agent: _Agent) -> AsyncIterator[str]:
    server = WebServer(_ANY, agent.pages, SystemClock())
    await server.start()
    yield f"http://127.0.0.1:{server.port}"
    await server.stop()
    await server.stop()


async def _get(url: str) -> tuple[int, str, str]:
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        return response.status, response.headers["Content-Type"], await response.text()


async def test_metrics_are_served_in_the_text_format(url: str) -> None:
    status, content_type, text = await _get(f"{url}/metrics")
    assert (status, content_type) == (200, "text/plain; version=0.0.4; charset=utf-8")
    assert 'podVolume_data_upload_success_total{node="node-a"} 0.0' in text


async def test_healthz_responds(url: str) -> None:
    assert (await _get(f"{url}/healthz"))[0] == 200


async def test_readyz_names_what_the_agent_waits_for(url: str, agent: _Agent) -> None:
    agent.reasons = ["DataUploads: no watch for 61 s: 403 Forbidden", "mover pods: no watch for 300 s: no answer"]
    status, _, text = await _get(f"{url}/readyz")
    assert (status, text) == (503, f"{agent.reasons[0]}\n{agent.reasons[1]}\n")
    agent.reasons = []
    assert (await _get(f"{url}/readyz"))[0] == 200


async def test_status_is_json(url: str) -> None:
    status, content_type, text = await _get(f"{url}/status")
    assert (status, content_type) == (200, "application/json; charset=utf-8")
    assert json.loads(text) == {"node": "node-a"}


def test_a_connection_needs_a_server_that_was_started() -> None:
    with pytest.raises(RuntimeError, match="not set up"):
        _Listener("--metrics-address", _ANY, web.AppRunner(web.Application()))._connect()


def test_the_oldest_connections_end_above_the_limit() -> None:
    """One without a transport has ended meanwhile."""
    runner = Mock()
    oldest = [Mock(transport=None), Mock(), Mock()]
    runner.server.connections = [*oldest, *[Mock()] * (_MOST_CONNECTIONS - 2)]
    _Listener("--metrics-address", _ANY, runner)._connect()
    oldest[1].transport.abort.assert_called_once_with()
    oldest[2].transport.abort.assert_not_called()


async def test_a_port_in_use_is_an_error(url: str, agent: _Agent) -> None:
    port = int(url.rpartition(":")[2])
    with pytest.raises(ConfigError, match=rf"cannot listen on 127\.0\.0\.1:{port} .*--metrics-address"):
        await WebServer(ListenAddress("127.0.0.1", port), agent.pages, SystemClock()).start()


async def test_the_status_page_may_have_an_address_of_its_own(agent: _Agent) -> None:
    server = WebServer(_ANY, agent.pages, SystemClock(), status_address=_ANY)
    await server.start()
    assert server.port != server.status_port
    found = {
        (path, port == server.port): (await _get(f"http://127.0.0.1:{port}{path}"))[0]
        for path in ("/metrics", "/healthz", "/readyz", "/status")
        for port in (server.port, server.status_port)
    }
    await server.stop()
    assert {key for key, status in found.items() if status == 200} == {
        ("/metrics", True),
        ("/healthz", True),
        ("/readyz", True),
        ("/status", False),
    }


async def test_a_status_port_in_use_is_an_error(url: str, agent: _Agent) -> None:
    taken = ListenAddress("127.0.0.1", int(url.rpartition(":")[2]))
    with pytest.raises(ConfigError, match="--status-address"):
        await WebServer(_ANY, agent.pages, SystemClock(), status_address=taken).start()


async def _request_1000_times(server: WebServer, page: str, clock: HandClock, *, expected: bytes) -> None:
    """Start `server`, request the page at three times within a second and a moment, and stop it."""
    await server.start()
    async with aiohttp.ClientSession() as session:
        for second, requests in ((0.0, 400), (0.999, 300), (1.0, 300)):
            clock.seconds = second
            for _ in range(requests):
                async with session.get(f"http://127.0.0.1:{server.port}/{page}") as response:
                    assert expected in await response.read()
    await server.stop()


async def test_1000_requests_with_100000_transfers_cost_one_sort_a_second(agent: _Agent) -> None:
    clock, sorts = HandClock(), []
    entries = [entry(f"du-{number}", created=f"2026-11-21T12:00:{number % 60:02}Z") for number in range(100_000)]

    def order(queued: Iterable[Entry]) -> Iterable[Entry]:
        sorts.append(clock.monotonic())
        return in_order(queued, after="")

    view = QueueView(agent.pages.metrics, clock, ["DataUpload"], entries=lambda: entries, order=order)
    server = WebServer(_ANY, replace(agent.pages, status=view.report), clock)
    await _request_1000_times(server, "status", clock, expected=b'"queued": 100000,')
    assert sorts == [0.0, 1.0]


async def test_a_status_page_that_takes_long_is_built_more_rarely(agent: _Agent) -> None:
    clock, built = HandClock(), []

    def status() -> JsonDict:
        built.append(clock.monotonic())
        clock.seconds += 2
        return {}

    server = WebServer(_ANY, replace(agent.pages, status=status), clock)
    await server.start()
    for second in (0, 21, 22):
        clock.seconds = max(clock.seconds, second)
        await _get(f"http://127.0.0.1:{server.port}/status")
    await server.stop()
    assert built == [0, 22]


async def test_the_status_page_shows_no_secrets(agent: _Agent) -> None:
    message = "GET https://a.test/b?sig=0123456789abc: 403, -----BEGIN PRIVATE KEY-----\nMIIE"
    pages = replace(agent.pages, status=lambda: {"transfers": [{"message": message, "name": "token-1"}], "slots": 1})
    server = WebServer(_ANY, pages, SystemClock())
    await server.start()
    shown = json.loads((await _get(f"http://127.0.0.1:{server.port}/status"))[2])
    await server.stop()
    redacted = "GET https://a.test/b?sig=***: 403, -----BEGIN PRIVATE KEY-----***"
    assert shown == {"transfers": [{"message": redacted, "name": "token-1"}], "slots": 1}


async def test_1000_scrapes_cost_one_rendering_a_second(agent: _Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    """They need no authentication."""
    clock, rendered = HandClock(), []
    render = Metrics.render

    def count(metrics: Metrics) -> bytes:
        rendered.append(clock.monotonic())
        return render(metrics)

    monkeypatch.setattr(Metrics, "render", count)
    server = WebServer(_ANY, agent.pages, clock)
    await _request_1000_times(server, "metrics", clock, expected=b"podVolume_data_upload_success_total")
    assert rendered == [0.0, 1.0]


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
    server = WebServer(_ANY, agent.pages, SystemClock())
    await server.start()
    for sent in (b"", b"GET /healthz HTTP/1.1\r\nHost: "):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(sent)
        async with asyncio.timeout(10):
            assert not await reader.read()
        writer.close()
    await server.stop()

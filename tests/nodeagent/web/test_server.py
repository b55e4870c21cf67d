"""The agent's HTTP server, over a real socket."""

import json
from collections.abc import AsyncIterator

import aiohttp
import pytest

from core.errors import ConfigError
from nodeagent.runtime.metrics import Metrics
from nodeagent.runtime.settings import ListenAddress
from nodeagent.web.server import WebPages, WebServer


class _Agent:
    """Stands in for the agent."""

    def __init__(self) -> None:
        self.missing: list[str] = []
        self.pages = WebPages(Metrics("node-a"), lambda: self.missing, lambda: {"node": "node-a"})


@pytest.fixture
def agent() -> _Agent:
    return _Agent()


@pytest.fixture
async def url(agent: _Agent) -> AsyncIterator[str]:
    server = WebServer(ListenAddress("127.0.0.1", 0), agent.pages)
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


async def test_readyz_names_what_is_not_synced(url: str, agent: _Agent) -> None:
    agent.missing = ["the list of datauploads", "the list of pods"]
    status, _, text = await _get(f"{url}/readyz")
    assert (status, text) == (503, "not synced: the list of datauploads, the list of pods\n")
    agent.missing = []
    assert (await _get(f"{url}/readyz"))[0] == 200


async def test_status_is_json(url: str) -> None:
    status, content_type, text = await _get(f"{url}/status")
    assert (status, content_type) == (200, "application/json; charset=utf-8")
    assert json.loads(text) == {"node": "node-a"}


async def test_a_port_in_use_is_an_error(url: str, agent: _Agent) -> None:
    port = int(url.rpartition(":")[2])
    with pytest.raises(ConfigError, match=rf"cannot listen on 127\.0\.0\.1:{port} .*--metrics-address"):
        await WebServer(ListenAddress("127.0.0.1", port), agent.pages).start()

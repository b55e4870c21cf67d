"""`nodeagent ui`: what it prints, and a port that is in use."""

import asyncio
import re
import socket
import webbrowser

import pytest

from client.ui.live import Live
from nodeagent.__main__ import main
from tests.client.support.commands import reach
from tests.client.support.status_scene import StatusScene


@pytest.fixture(autouse=True)
def _cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = StatusScene()
    reach(lambda: scene.kube, monkeypatch)


def test_the_address_is_printed_and_opened(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []

    async def run(_: Live) -> None:
        await asyncio.sleep(0)

    monkeypatch.setattr(Live, "run", run)
    monkeypatch.setattr(webbrowser, "open", opened.append)
    assert main(["ui"]) == 0
    captured = capsys.readouterr()
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/\?token=[\w-]{43}\n", captured.out)
    assert opened == [captured.out.strip()]
    assert "works once" in captured.err
    assert main(["ui", "--no-browser"]) == 0
    assert len(opened) == 1


def test_a_port_that_is_in_use_is_an_error_that_names_the_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["ui", "--no-browser", "--port", str(port)]) == 2
    assert f"error: --port: cannot listen on 127.0.0.1:{port}: " in capsys.readouterr().err

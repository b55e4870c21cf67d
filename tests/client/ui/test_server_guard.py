"""Who sees the pages: other users of this machine, other names of it, and other sites in the same browser do not."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from client.ui.server import owner_of
from tests.client.support.browser import visit
from tests.client.support.site import open_site
from tests.client.support.status_scene import StatusScene

_OTHER_USER = 65534


def _socket_of_other_user(monkeypatch: pytest.MonkeyPatch) -> socket.socket:
    """Return a socket that another user has made, or for those who cannot, let the server run as another one."""
    if os.geteuid() != 0:
        monkeypatch.setattr(os, "getuid", lambda: _OTHER_USER)
        return socket.socket()
    os.seteuid(_OTHER_USER)
    try:
        return socket.socket()
    finally:
        os.seteuid(0)


async def _status_of(connection: socket.socket, url: str) -> int:
    _, _, rest = url.partition("://")
    host, _, path = rest.partition("/")
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, (host.partition(":")[0], int(host.partition(":")[2])))
    reader, writer = await asyncio.open_connection(sock=connection)
    writer.write(f"GET /{path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
    status = (await reader.readline()).split()[1]
    writer.close()
    await writer.wait_closed()
    return int(status)


async def test_another_user_who_has_read_the_token_cannot_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in the arguments of the browser that is started with it."""
    async with open_site(StatusScene(), signed_in=False) as site:
        with monkeypatch.context() as patch:
            assert await _status_of(_socket_of_other_user(patch), site.url) == 403
        assert await _status_of(socket.socket(), site.url) == 303


async def test_the_token_works_through_the_tunnel_of_who_became_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: _OTHER_USER)
    monkeypatch.setenv("SUDO_UID", str(os.geteuid()))
    async with open_site(StatusScene(), signed_in=False) as site:
        assert await _status_of(socket.socket(), site.url) == 303


_ATTEMPTS = """async (url) => {
  const found = [];
  for (const path of ["/", "/transfers", "/static/style.css"]) {
    for (const mode of ["cors", "no-cors"]) {
      try {
        const answer = await fetch(url + path, { mode, credentials: "include" });
        found.push(`${path} ${mode} ${answer.type} ${(await answer.text()).length}`);
      } catch (e) { found.push(`${path} ${mode} failed`); }
    }
  }
  const events = new EventSource(url + "/queue", { withCredentials: true });
  found.push(await new Promise((resume) => {
    events.onmessage = () => resume("events arrive");
    events.onerror = () => resume("events failed");
  }));
  events.close();
  const frame = document.createElement("iframe");
  frame.src = url;
  await new Promise((resume) => { frame.onload = resume; document.body.append(frame); });
  try { found.push(frame.contentDocument ? "frame shows" : "frame failed"); } catch { found.push("frame failed"); }
  return found;
}"""


@asynccontextmanager
async def _other_site() -> AsyncIterator[int]:
    """Serve an empty page on another port of this machine, which shares its cookies; yield the port."""

    async def answer(_: web.Request) -> web.Response:
        return web.Response(text="<title>other</title>", content_type="text/html")

    app = web.Application()
    app.add_routes([web.get("/", answer)])
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


@pytest.mark.processes
@pytest.mark.timeout(120)
async def test_another_site_in_the_same_browser_reads_nothing() -> None:
    """Its name is another one, or only its port is, with which the browser sends the cookie."""
    scene = StatusScene()
    scene.put_transfers()
    async with open_site(scene, signed_in=False) as site, _other_site() as port, visit(site.url) as tab:
        assert "du/moving" in await tab.open("/transfers")
        for host in ("127.0.0.1", "localhost"):
            await tab.page.goto(f"http://{host}:{port}/")
            attempts = await tab.page.evaluate(_ATTEMPTS, tab.base)
            assert len(attempts) == 8
            assert {one.rpartition(" ")[2] for one in attempts} == {"failed"}
        assert "du/moving" in await tab.open("/transfers")


@pytest.mark.processes
@pytest.mark.timeout(120)
async def test_a_name_that_leads_to_this_machine_shows_nothing() -> None:
    """DNS rebinding: the page of an attacker's name is served from here."""
    scene = StatusScene()
    scene.put_transfers()
    async with open_site(scene, signed_in=False) as site:
        port = site.base.rpartition(":")[2]
        rules = "--host-resolver-rules=MAP evil.example 127.0.0.1"
        async with visit(site.url, arguments=[rules]) as tab:
            for path in ("/", "/transfers", "/static/page.js", site.url.rpartition("/")[2]):
                answer = await tab.page.goto(f"http://evil.example:{port}/{path.lstrip('/')}")
                assert answer is not None
                assert (answer.status, "moving" in await answer.text()) == (421, False)


def test_a_connection_of_this_process_is_its_user(tmp_path: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as client,
        listener.accept()[0] as accepted,
    ):
        ends = client.getsockname(), accepted.getsockname()
        assert owner_of(*ends) == os.getuid()
        assert owner_of(*ends, tmp_path / "absent") is None
    assert owner_of(*ends) is None


def test_the_line_of_the_client_counts_and_not_that_of_the_server(tmp_path: Path) -> None:
    table = tmp_path / "tcp"
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as client:
        own, other = client.getsockname(), listener.getsockname()
        lines = Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()
        head, *rest = lines

        def of_user(line: str) -> str:
            columns = line.split()
            columns[7] = "4711" if columns[1].endswith(f":{own[1]:04X}") else "815"
            return " ".join(columns)

        table.write_text("\n".join([head, *map(of_user, rest)]), encoding="ascii")
        assert owner_of(own, other, table) == 4711

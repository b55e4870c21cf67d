"""The web server of `nodeagent ui`: its routes, and what each page is made from. It changes nothing in the cluster."""

import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from importlib.resources import files
from typing import Any, Final

import jinja2
from aiohttp import web

from core.errors import AgentError
from core.kube.client import KubeClient
from core.kube.errors import NotFoundError
from nodeagent.cli.text import format_age, format_bytes, format_limits
from nodeagent.operations.status.describe import TransferReader
from nodeagent.operations.status.kinds import TRANSFER_KINDS, Target
from nodeagent.ui.guard import Guard
from nodeagent.ui.live import Live, State
from nodeagent.ui.tables import TransferFilter, choose_transfers, list_volumes

__all__ = ["Pages", "serve"]

_SHORT: Final = {kind.name: kind for kind in TRANSFER_KINDS}
_BY_SHORT: Final = {kind.short: kind for kind in TRANSFER_KINDS}
_FILES: Final = {"style.css": "text/css", "live.js": "text/javascript"}
_SILENCE_SECONDS: Final = 20.0
"""Between two signs of life on the stream of changes; browsers and proxies end one that is silent."""

_OVERVIEW_ROWS: Final = 20


def _environment() -> jinja2.Environment:
    def ago(moment: datetime | None, now: datetime) -> str:
        return f"{format_age(now - moment)} ago" if moment is not None else "-"

    def short(kind: str) -> str:
        return _SHORT[kind].short

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("nodeagent.ui"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "bytes": format_bytes,
        "limits": format_limits,
        "ago": ago,
        "short": short,
        "seconds": lambda seconds: format_age(timedelta(seconds=seconds)),
    }
    return environment


class Pages:
    """The handlers of all pages."""

    def __init__(self, live: Live, client: KubeClient, namespace: str) -> None:
        """Show what `live` has; `client` reads single transfers."""
        self._live = live
        self._client = client
        self._namespace = namespace
        self._templates = _environment()

    def routes(self) -> list[web.RouteDef]:
        """Return the routes of the server."""
        return [
            web.get("/", self._overview),
            web.get("/transfers", self._transfers),
            web.get("/transfers/{kind}/{name}", self._transfer),
            web.get("/queue", self._queue),
            web.get("/repositories", self._repositories),
            web.get("/changes", self._changes),
            web.get("/static/{name}", self._static),
        ]

    async def _overview(self, _: web.Request) -> web.Response:
        state = self._state()
        volumes = list_volumes(state.snapshot.transfers)
        return self._render("overview.html", state, volumes=volumes[:_OVERVIEW_ROWS], count=len(volumes))

    async def _transfers(self, request: web.Request) -> web.Response:
        state, chosen = self._state(), TransferFilter.of(request.query)
        page = choose_transfers(state.snapshot, state.view, chosen)
        kinds = [kind.name for kind in TRANSFER_KINDS]
        return self._render("transfers.html", state, page=page, chosen=chosen, kinds=kinds)

    async def _transfer(self, request: web.Request) -> web.Response:
        state, kind = self._state(), _BY_SHORT.get(request.match_info["kind"])
        if kind is None:
            raise web.HTTPNotFound(text="there is no such kind: du, dd, pvb and pvr are")
        try:
            reader = TransferReader(self._client, self._namespace)
            found = await reader.describe(Target(kind, request.match_info["name"]))
        except NotFoundError as e:
            raise web.HTTPNotFound(text=str(e)) from e
        except AgentError as e:
            raise web.HTTPServiceUnavailable(text=f"the transfer cannot be read: {e}") from e
        key = (found.kind, found.name)
        moving = next((one for one in state.view.transfers if (one.kind, one.name) == key), None)
        waiting = next((one for one in state.view.pending if (one.kind, one.name) == key), None)
        return self._render("transfer.html", state, one=found, moving=moving, waiting=waiting)

    async def _queue(self, _: web.Request) -> web.Response:
        return self._render("queue.html", self._state())

    async def _repositories(self, _: web.Request) -> web.Response:
        return self._render("repositories.html", self._state())

    async def _static(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in _FILES:
            raise web.HTTPNotFound
        body = files("nodeagent.ui").joinpath("static", name).read_bytes()
        return web.Response(body=body, content_type=_FILES[name], charset="utf-8")

    async def _changes(self, request: web.Request) -> web.StreamResponse:
        """Send an event for each change, and now and then a sign of life."""
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        number = self._live.number
        while True:
            newest = await self._live.wait(number, _SILENCE_SECONDS)
            await answer.write(b": still here\n\n" if newest == number else b"data: changed\n\n")
            number = newest

    def _state(self) -> State:
        state = self._live.state
        if state is None:
            why = f": {self._live.error}" if self._live.error else ""
            raise web.HTTPServiceUnavailable(text=f"the cluster was not read yet{why}", headers={"Retry-After": "2"})
        return state

    def _render(self, name: str, state: State, **more: Any) -> web.Response:  # noqa: ANN401 - for a template
        values: Mapping[str, Any] = {"state": state, "view": state.view, "now": state.view.at, **more}
        return web.Response(text=self._templates.get_template(name).render(values), content_type="text/html")


@asynccontextmanager
async def serve(pages: Pages, port: int) -> AsyncIterator[str]:
    """Serve on loopback, and yield the address to open; it works once.

    Raises:
        OSError: the port is in use.
    """
    listener = socket.create_server(("127.0.0.1", port))
    found: int = listener.getsockname()[1]
    guard = Guard(found)
    app = web.Application(middlewares=[guard.middleware])
    app.add_routes(pages.routes())
    # A stream of changes ends with its browser.
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.SockSite(runner, listener).start()
        yield guard.url
    finally:
        await runner.cleanup()
        listener.close()

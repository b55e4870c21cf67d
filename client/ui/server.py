"""The web server of `nodeagent ui`: its routes, what each page is made from, and who may see it. It changes nothing.

A page is text for every browser. One with a script asks for the same address as a stream of server-sent events, and
gets the part that changes again whenever it has changed.

Only the person who started the server sees the pages, in one browser. The URL that is printed has a token that can be
used once; the browser gets a cookie for it. Where the system says whose process is connected, it must be one of the
person: others can read the token in the arguments of the browser that is started with it.
Source: RFC 6265bis (SameSite); Fetch Metadata Request Headers, W3C; Content Security Policy Level 3.
"""

import os
import secrets
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from hmac import compare_digest
from importlib.resources import files
from pathlib import Path, PurePosixPath
from typing import Any, Final

import jinja2
from aiohttp import web

from client.status.describe import tell_story
from client.status.records import TRANSFER_KINDS, Target
from client.text import (
    MOST_SECONDS,
    format_ago,
    format_bytes,
    format_event,
    format_limits,
    format_shrinkage,
    format_verification,
)
from client.ui import tables
from client.ui.live import Details, Live, Observed, State
from client.ui.timeline import build_curves, build_timeline, sum_growth
from core.errors import AgentError
from core.kube.errors import NotFoundError
from core.models.base import parse_time
from core.text import format_age, one_line, printable

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_TOKEN: Final = "token"  # noqa: S105 - the name of a parameter
_METHODS: Final = frozenset({"GET", "HEAD"})
_SAME_SITE: Final = frozenset({"", "same-origin", "none"})
"""Values of Sec-Fetch-Site: the page itself, an address that was typed, and browsers that do not say."""

# The signs of the vendored style sheet are images in it.
_HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; form-action 'self'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class BrowserGuard:
    """Refuses every request that the one browser did not make; `port` is where the server listens."""

    def __init__(self, port: int) -> None:
        self._hosts = frozenset({f"127.0.0.1:{port}", f"localhost:{port}"})
        # Ports share their cookies: each server needs a name of its own.
        self._cookie = f"nodeagent-ui-{port}"
        self._token = secrets.token_urlsafe(32)
        self._value = secrets.token_urlsafe(32)
        self._used = False
        self.url = f"http://127.0.0.1:{port}/?{_TOKEN}={self._token}"

    @web.middleware
    async def middleware(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Answer with what `handler` does, or refuse; both with the headers that protect the page."""
        try:
            answer = self._refuse(request) or await handler(request)
        except web.HTTPException as e:
            e.headers.update(_HEADERS)
            raise
        if not answer.prepared:
            answer.headers.update(_HEADERS)
        return answer

    def _refuse(self, request: web.Request) -> web.Response | None:
        """Return why the request is refused, or the redirect that a token leads to; None: it may pass."""
        if request.host not in self._hosts:
            # Another name that leads to this address: DNS rebinding.
            return web.Response(status=421, text="this server answers for its own address alone")
        if request.method not in _METHODS:
            return web.Response(status=405, text="these pages only show", headers={"Allow": "GET, HEAD"})
        if request.headers.get("Sec-Fetch-Site", "") not in _SAME_SITE:
            return web.Response(status=403, text="requests of other sites are refused")
        if _TOKEN in request.query:
            return self._exchange(request)
        if not compare_digest(request.cookies.get(self._cookie, "").encode(), self._value.encode()):
            return web.Response(status=403, text="open the address that nodeagent ui printed; it works once")
        return None

    def _exchange(self, request: web.Request) -> web.Response:
        token = request.query[_TOKEN]
        if _is_of_others(request):
            return web.Response(status=403, text="this address is for the user who runs nodeagent ui")
        if self._used or not compare_digest(token.encode(), self._token.encode()):
            return web.Response(status=403, text="this address was used before: run nodeagent ui again")
        self._used = True
        answer = web.Response(status=303, headers={"Location": "/"})
        answer.set_cookie(self._cookie, self._value, httponly=True, samesite="Strict", path="/")
        return answer


def _is_of_others(request: web.Request) -> bool:
    """Return whether another user of this machine is connected; root is none, nor who has become root with sudo."""
    transport = request.transport
    if transport is None:
        return True
    owner = owner_of(transport.get_extra_info("peername"), transport.get_extra_info("sockname"))
    return owner is not None and str(owner) not in {"0", str(os.getuid()), os.environ.get("SUDO_UID", "")}


# Which user of this machine has opened a connection to a server on loopback, as Linux knows it.
# Source: proc_net_tcp in the documentation of the Linux kernel, Documentation/networking/proc_net_tcp.rst.

_TABLE: Final = Path("/proc/net/tcp")
_ESTABLISHED: Final = "01"
_LOCAL, _REMOTE, _STATE, _UID = 1, 2, 3, 7


def owner_of(client: tuple[str, int], server: tuple[str, int], table: Path = _TABLE) -> int | None:
    """Return the user ID of the process that has connected from address and port `client` to `server`, both IPv4.

    None: this system does not say, or the connection is closed.
    """
    try:
        lines = table.read_text(encoding="ascii").splitlines()[1:]
    except OSError:
        return None
    wanted = (_shown(client), _shown(server), _ESTABLISHED)
    for line in lines:
        columns = line.split()
        if (columns[_LOCAL], columns[_REMOTE], columns[_STATE]) == wanted:
            return int(columns[_UID])
    return None


def _shown(address: tuple[str, int]) -> str:
    """Return the address as the table has it: the bytes of the IP address as a number of this machine."""
    host, port = address
    (number,) = struct.unpack("=I", socket.inet_aton(host))
    return f"{number:08X}:{port:04X}"


_Values = Mapping[str, Any]
_Build = Callable[[web.Request, State], Awaitable[_Values]]

_SHORT: Final = {kind.name: kind for kind in TRANSFER_KINDS}
_BY_SHORT: Final = {kind.short: kind for kind in TRANSFER_KINDS}
_FOLDER: Final = files("client.ui") / "static"
_TYPES: Final = {".css": "text/css", ".js": "text/javascript"}
_EVENTS: Final = "text/event-stream"
_SILENCE_SECONDS: Final = 20.0
"""Between two signs of life on a stream; browsers and proxies end one that is silent."""

_OVERVIEW_ROWS: Final = 20


def _environment() -> jinja2.Environment:
    def moment(at: datetime | str | None) -> str:
        at = parse_time(at) if isinstance(at, str) and at else at
        return f"{at:%Y-%m-%d %H:%M:%S} UTC" if isinstance(at, datetime) else "-"

    def harmless(value: object) -> object:
        # A subclass of str is what a template has made, and is safe already.
        return printable(value) if type(value) is str else value

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("client.ui"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=harmless,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "bytes": format_bytes,
        "limits": format_limits,
        "ago": format_ago,
        "moment": moment,
        "short": lambda kind: _SHORT[kind].short,
        "seconds": lambda seconds: format_age(timedelta(seconds=min(seconds, MOST_SECONDS))),
        "verified": format_verification,
        "shrunk": format_shrinkage,
        "configuration": tables.describe_configuration,
        "text": one_line,
        "words": lambda event: format_event(event.reason, event.message),
        "count": lambda number, thing: f"{number} {thing}{'' if number == 1 else 's'}",
    }
    return environment


class Pages:
    """The handlers of all pages."""

    def __init__(self, live: Live, details: Details) -> None:
        self._live = live
        self._details = details
        self._templates = _environment()

    def routes(self) -> list[web.RouteDef]:
        """Return the routes of the server."""
        pages: dict[str, tuple[str, _Build]] = {
            "/": ("overview.html", self._overview),
            "/volumes/{namespace}/{name}": ("volume.html", self._volume),
            "/transfers": ("transfers.html", self._transfers),
            "/transfers/{kind}/{name}": ("transfer.html", self._transfer),
            "/nodes/{name}": ("node.html", self._node),
            "/queue": ("queue.html", self._queue),
            "/repositories": ("repositories.html", self._nothing_more),
            "/repositories/{name}": ("repository.html", self._repository),
        }
        shown = [web.get(path, self._handler(template, build)) for path, (template, build) in pages.items()]
        return [*shown, web.get("/static/{path:.+}", self._static)]

    def _handler(self, template: str, build: _Build) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            if _EVENTS in request.headers.get("Accept", ""):
                return await self._stream(request, template, build)
            if (state := self._live.state) is not None:
                text, status = await self._render(request, state, template, build, layout="base.html")
            else:
                text, status = self._templates.get_template("starting.html").render(why=self._live.error), 503
            return web.Response(text=text, content_type="text/html", status=status)

        return handle

    async def _stream(self, request: web.Request, template: str, build: _Build) -> web.StreamResponse:
        """Send the part of the page that changes, now and whenever it has changed, and now and then a sign of life.

        Before the cluster was read, an event `why` has the reason.
        """
        answer = web.StreamResponse(headers={"Content-Type": _EVENTS})
        await answer.prepare(request)
        sent = ""
        while True:
            number, state = self._live.number, self._live.state
            if state is not None:
                part, _ = await self._render(request, state, template, build, layout="part.html")
                text = "".join(f"data: {line}\n" for line in part.splitlines())
            else:
                text = f"event: why\ndata: {one_line(self._live.error)}\n" if self._live.error else ""
            if text != sent:
                await answer.write(f"{text}\n".encode())
                sent = text
            if await self._live.wait(number, _SILENCE_SECONDS) == number:
                await answer.write(b": still here\n\n")

    async def _render(
        self, request: web.Request, state: State, template: str, build: _Build, *, layout: str
    ) -> tuple[str, int]:
        """Return the page in a layout, and its status; what does not exist or cannot be read may be there later."""
        try:
            values, status = await build(request, state), 200
        except AgentError as e:
            why, status = (str(e), 404) if isinstance(e, NotFoundError) else (f"This cannot be read: {e}", 503)
            values, template = {"what": request.match_info.get("name", ""), "why": why}, "error.html"
        view = state.view
        known = {"layout": layout, "here": request.path_qs, "state": state, "view": view, "now": view.at}
        return self._templates.get_template(template).render({**known, **values}), status

    async def _nothing_more(self, _: web.Request, __: State) -> _Values:
        return {}

    async def _overview(self, request: web.Request, state: State) -> _Values:
        volumes, history = state.volumes, await self._details.history(state.lost)
        sections = {"volumes": volumes, "nodes": state.view.nodes}
        chosen = {name: request.query.get(name, "") for name in sections}
        shown = {
            name: tables.cut(rows if chosen[name] else rows[:_OVERVIEW_ROWS], tables.parse_page(chosen[name]))
            for name, rows in sections.items()
        }
        days = history.days.every
        return {
            **shown,
            "chosen": chosen,
            "count": len(volumes),
            "urgent": sum(row.urgent for row in volumes),
            "history": history,
            "curves": build_curves(days),
            "days": days if "days" in request.query else None,
        }

    async def _volume(self, request: web.Request, state: State) -> _Values:
        key = (request.match_info["namespace"], request.match_info["name"])
        history = await self._details.history(state.lost)
        days = history.days.of(key)
        row = next((one for one in state.volumes if (one.namespace, one.volume) == key), None)
        if row is None and all(one.total_bytes is None for one in days):
            raise NotFoundError(f"nothing is known of a volume {'/'.join(key)}", status=404)
        backups = [one for one in state.snapshot.transfers if one.is_backup and tables.volume_of(one) == key]
        backups.sort(key=lambda one: one.created, reverse=True)
        return {
            "key": key,
            "row": row,
            "history": history,
            "curves": build_curves(days),
            "days": days,
            "backups": tables.cut(backups, tables.parse_page(request.query.get("page", ""))),
        }

    async def _transfers(self, request: web.Request, state: State) -> _Values:
        chosen = tables.TransferFilter.of(request.query)
        page = tables.choose_transfers(state.snapshot, state.view, chosen)
        kinds = [kind.name for kind in TRANSFER_KINDS]
        return {"page": page, "chosen": chosen, "kinds": kinds, "grid": tables.build_grid(state.view, state.moving)}

    async def _transfer(self, request: web.Request, state: State) -> _Values:
        kind, name = _BY_SHORT.get(request.match_info["kind"]), request.match_info["name"]
        if kind is None:
            raise NotFoundError("there is no such kind: du, dd, pvb and pvr are", status=404)
        known = next((one for one in state.snapshot.transfers if (one.kind, one.name) == (kind.name, name)), None)
        found = await self._details.transfer(Target(kind, name), Observed(known, state.lost))
        key = (found.kind, found.name)
        moving = next((one for one in state.view.transfers if (one.kind, one.name) == key), None)
        waiting = next((one for one in state.view.pending if (one.kind, one.name) == key), None)
        timeline, story = build_timeline(found, state.view.at), list(tell_story(found, state.view.at))
        return {"one": found, "moving": moving, "waiting": waiting, "timeline": timeline, "story": story}

    async def _node(self, request: web.Request, state: State) -> _Values:
        name = request.match_info["name"]
        node = tables.find_node(state.view, state.snapshot.transfers, name)
        if node is None:
            raise NotFoundError(f"there is no agent on a node {name}", status=404)
        bound = {(one.kind, one.name) for one in state.snapshot.transfers if one.node}
        anywhere = [one for one in state.view.pending if one.position is not None and (one.kind, one.name) not in bound]
        return {"node": node, "anywhere": tables.cut(anywhere, 1)}

    async def _queue(self, request: web.Request, state: State) -> _Values:
        slots, quota = tables.divide(sorted(state.view.transfers, key=lambda one: (one.node, one.name)), state.moving)
        pending = tables.cut(state.view.pending, tables.parse_page(request.query.get("page", "")))
        return {"pending": pending, "quota": tables.cut(quota, 1), "slots": tables.cut(slots, 1)}

    async def _repository(self, request: web.Request, state: State) -> _Values:
        name = request.match_info["name"]
        known = next((one for one in state.snapshot.repositories if one.name == name), None)
        one = await self._details.repository(name, Observed(known, state.lost))
        return {"one": one, "growth": sum_growth(state.snapshot.transfers, one.volume_namespace, one.location)}

    async def _static(self, request: web.Request) -> web.Response:
        path = PurePosixPath(request.match_info["path"])
        file = _FOLDER.joinpath(*path.parts)
        if path.suffix not in _TYPES or ".." in path.parts or path.is_absolute() or not file.is_file():
            raise web.HTTPNotFound
        return web.Response(body=file.read_bytes(), content_type=_TYPES[path.suffix], charset="utf-8")


@asynccontextmanager
async def serve(pages: Pages, port: int) -> AsyncIterator[str]:
    """Serve on loopback, and yield the address to open; it works once; OSError: the port is in use."""
    listener = socket.create_server(("127.0.0.1", port))
    found: int = listener.getsockname()[1]
    guard = BrowserGuard(found)
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

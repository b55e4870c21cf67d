"""The agent's HTTP server: `/metrics`, `/healthz`, `/readyz` and `/status`."""

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, cast

from aiohttp import web

from core.clock import Clock
from core.errors import ConfigError
from core.models.base import JsonDict
from core.redact import redact, redact_values
from nodeagent.metrics import METRICS_CONTENT_TYPE, Metrics
from nodeagent.runtime.settings import ListenAddress

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_REUSE_SECONDS: Final = 1.0
"""How long a content is reused: `/status` sorts all transfers, and `/metrics` may have thousands of series."""

_REUSE_PAUSE: Final = 10
"""Content that takes long to build is reused ten times as long: no client can take more than a tenth of a core."""

_MOST_CONNECTIONS: Final = 200
"""For each address. A further one replaces the oldest: a scrape is over at once, a half-sent request is not."""

_MOST_UNSENT_BYTES: Final = 32 << 20
"""Of all responses of an address that clients have not read yet: each copies its content."""

_ACCEPTED_AT_ONCE: Final = _MOST_CONNECTIONS // 2
"""So that a connection is read before newer ones replace it; for a moment there may be so many more."""

_IDLE_SECONDS: Final = 20.0
"""How long a client may take for the header of a request, or keep a connection without one.

No usual interval of scrapes, so that the two do not meet on one connection.
Source: aiohttp 3.14.5, web_protocol.py (RequestHandler.connection_made, _process_keepalive).
"""

_MOST_HEADERS: Final = 32
_MOST_HEADER_BYTES: Final = 2048
"""Of one field: half-sent headers of all connections take 40 MiB at most, as measured."""


@dataclass(frozen=True)
class WebPages:
    """Sources of the responses.

    Attributes:
        metrics: rendered at most once a second.
        not_ready: called for each `/readyz`; returns why the agent cannot accept transfers; empty means it can.
        status: called for `/status`, at most once a second; returns a dict that json.dumps accepts.
    """

    metrics: Metrics
    not_ready: Callable[[], Sequence[str]]
    status: Callable[[], JsonDict]


class _Reused:
    """A content that takes time to build, and is reused for a while."""

    def __init__(self, build: Callable[[], str], clock: Clock) -> None:
        self._build = build
        self._clock = clock
        self._body = b""
        self._until_seconds = -math.inf

    def get(self) -> bytes:
        """Return the content, encoded."""
        began = self._clock.monotonic()
        if began >= self._until_seconds:
            self._body = self._build().encode()
            ended = self._clock.monotonic()
            self._until_seconds = ended + max(_REUSE_SECONDS, (ended - began) * _REUSE_PAUSE)
        return self._body


class _Listener:
    """One address, the flag that sets it, and the server of its pages."""

    def __init__(self, flag: str, address: ListenAddress, runner: web.AppRunner) -> None:
        self._flag = flag
        self._address = address
        self._runner = runner
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen; raise ConfigError if the address is in use or not available."""
        await self._runner.setup()
        try:
            self._server = await asyncio.get_running_loop().create_server(
                self._connect, self._address.host, self._address.port, backlog=_ACCEPTED_AT_ONCE
            )
        except OSError as e:
            raise ConfigError(f"cannot listen on {self._address} ({e.strerror}): set another {self._flag}") from e

    async def stop(self) -> None:
        """Close all connections; may be called twice."""
        if self._server:
            self._server.close()
        await self._runner.cleanup()

    async def before_response(self, *_: object) -> None:
        """Close the oldest connections above the limit of what is not read."""
        self._close_oldest(_MOST_CONNECTIONS)

    def _connect(self) -> asyncio.Protocol:
        """Return the protocol of a new connection, and close the oldest ones above the limits."""
        return self._close_oldest(_MOST_CONNECTIONS - 1)()

    def _close_oldest(self, most: int) -> web.Server:
        # It is set up before it listens.
        server, unsent_bytes = cast("web.Server", self._runner.server), 0
        transports = [one.transport for one in server.connections if one.transport is not None]
        for number, transport in enumerate(reversed(transports), 1):
            unsent_bytes += transport.get_write_buffer_size()
            if number > most or unsent_bytes > _MOST_UNSENT_BYTES:
                # Not close: that waits for a client that does not read.
                transport.abort()
        return server


class WebServer:
    """Serves `pages` between `start` and `stop`."""

    def __init__(
        self, address: ListenAddress, pages: WebPages, clock: Clock, *, status_address: ListenAddress | None = None
    ) -> None:
        """Serve all pages at `address`, or `/status` at `status_address` instead; nothing is opened yet."""
        self._pages = pages
        self._metrics_text = _Reused(lambda: redact(pages.metrics.render().decode()), clock)
        self._status_text = _Reused(
            lambda: json.dumps(redact_values(pages.status()), indent=2, default=str) + "\n", clock
        )
        scraped = {"/metrics": self._metrics, "/healthz": self._healthz, "/readyz": self._readyz}
        status = {"/status": self._status}
        if status_address is None:
            self._listeners = [_listener("--metrics-address", address, scraped | status)]
        else:
            own = _listener("--status-address", status_address, status)
            self._listeners = [_listener("--metrics-address", address, scraped), own]

    async def start(self) -> None:
        """Listen; raise ConfigError if an address is in use or not available."""
        try:
            for listener in self._listeners:
                await listener.start()
        except ConfigError:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Close all connections; may be called twice."""
        for listener in self._listeners:
            await listener.stop()

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self._metrics_text.get(), headers={"Content-Type": METRICS_CONTENT_TYPE})

    async def _healthz(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _readyz(self, _: web.Request) -> web.Response:
        if reasons := self._pages.not_ready():
            return web.Response(status=503, text="".join(f"{reason}\n" for reason in reasons))
        return web.Response(text="ok\n")

    async def _status(self, _: web.Request) -> web.Response:
        return web.Response(body=self._status_text.get(), content_type="application/json", charset="utf-8")


def _listener(flag: str, address: ListenAddress, pages: Mapping[str, _Handler]) -> _Listener:
    app = web.Application()
    for path, handler in pages.items():
        app.router.add_get(path, handler)
    runner = web.AppRunner(
        app,
        access_log=None,
        keepalive_timeout=_IDLE_SECONDS,
        max_headers=_MOST_HEADERS,
        max_line_size=_MOST_HEADER_BYTES,
        max_field_size=_MOST_HEADER_BYTES,
    )
    listener = _Listener(flag, address, runner)
    app.on_response_prepare.append(listener.before_response)
    return listener

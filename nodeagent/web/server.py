"""The agent's HTTP server: `/metrics`, `/healthz`, `/readyz` and `/status`."""

import json
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from aiohttp import web

from core.clock import Clock
from core.errors import ConfigError
from core.models.base import JsonDict
from core.redact import redact, redact_values
from nodeagent.runtime.metrics import METRICS_CONTENT_TYPE, Metrics
from nodeagent.runtime.settings import ListenAddress

__all__ = ["StatusPage", "WebPages", "WebServer"]

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_REUSE_SECONDS: Final = 1.0
"""How long a content is reused: `/status` sorts all transfers, and `/metrics` may have thousands of series."""

_REUSE_PAUSE: Final = 10
"""Content that takes long to build is reused ten times as long: no client can take more than a tenth of a core."""


class StatusPage(Protocol):
    """Builds the content of `/status`."""

    def __call__(self) -> JsonDict:
        """Return a dict that json.dumps accepts."""
        ...


@dataclass(frozen=True)
class WebPages:
    """Sources of the responses.

    Attributes:
        metrics: rendered at most once a second.
        not_ready: called for each `/readyz`; returns why the agent cannot accept transfers; empty means it can.
        status: called for `/status`, at most once a second.
    """

    metrics: Metrics
    not_ready: Callable[[], Sequence[str]]
    status: StatusPage


class _Reused:
    """A content that takes time to build, and is reused for a while."""

    def __init__(self, build: Callable[[], str], clock: Clock) -> None:
        """Measure on `clock` how old what `build` returned is."""
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


@dataclass(frozen=True)
class _Listener:
    """One address, the flag that sets it, and the server of its pages."""

    flag: str
    address: ListenAddress
    runner: web.AppRunner

    @property
    def port(self) -> int:
        """The port it listens on; the one that the system chose if the address has port 0."""
        return int(self.runner.addresses[0][1]) if self.runner.addresses else self.address.port

    async def start(self) -> None:
        """Listen.

        Raises:
            ConfigError: the address is in use or not available.
        """
        await self.runner.setup()
        try:
            await web.TCPSite(self.runner, self.address.host, self.address.port).start()
        except OSError as e:
            raise ConfigError(f"cannot listen on {self.address} ({e.strerror}): set another {self.flag}") from e


class WebServer:
    """Serves `pages` between `start` and `stop`."""

    def __init__(
        self, address: ListenAddress, pages: WebPages, clock: Clock, *, status_address: ListenAddress | None = None
    ) -> None:
        """Open nothing yet.

        Args:
            address: where all pages are served.
            pages: their sources.
            clock: measures how old the contents of `/status` and `/metrics` are.
            status_address: where `/status` is served instead.
        """
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

    @property
    def port(self) -> int:
        """The port of the metrics."""
        return self._listeners[0].port

    @property
    def status_port(self) -> int:
        """The port of `/status`."""
        return self._listeners[-1].port

    async def start(self) -> None:
        """Listen.

        Raises:
            ConfigError: an address is in use or not available.
        """
        try:
            for listener in self._listeners:
                await listener.start()
        except ConfigError:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Close all connections; may be called twice."""
        for listener in self._listeners:
            await listener.runner.cleanup()

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self._metrics_text.get(), headers={"Content-Type": METRICS_CONTENT_TYPE})

    async def _healthz(self, _: web.Request) -> web.Response:
        """Respond: the event loop is running."""
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
    return _Listener(flag, address, web.AppRunner(app, access_log=None))

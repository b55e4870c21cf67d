"""The agent's HTTP server: `/metrics`, `/healthz`, `/readyz` and `/status`."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from aiohttp import web

from core.errors import ConfigError
from core.models.base import JsonDict
from nodeagent.runtime.metrics import METRICS_CONTENT_TYPE, Metrics
from nodeagent.runtime.settings import ListenAddress

__all__ = ["StatusPage", "WebPages", "WebServer"]


class StatusPage(Protocol):
    """Builds the content of `/status`."""

    def __call__(self) -> JsonDict:
        """Return a dict that json.dumps accepts."""
        ...


@dataclass(frozen=True)
class WebPages:
    """Sources of the responses.

    Attributes:
        metrics: rendered for each scrape.
        not_ready: called for each `/readyz`; returns what is not synced yet; empty means ready.
        status: called for each `/status`.
    """

    metrics: Metrics
    not_ready: Callable[[], Sequence[str]]
    status: StatusPage


class WebServer:
    """Serves `pages` on `address` between `start` and `stop`."""

    def __init__(self, address: ListenAddress, pages: WebPages) -> None:
        """Open nothing yet."""
        self._address = address
        self._pages = pages
        app = web.Application()
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/status", self._status)
        self._runner = web.AppRunner(app, access_log=None)

    @property
    def port(self) -> int:
        """The port it listens on; the one that the system chose if the address has port 0."""
        return int(self._runner.addresses[0][1]) if self._runner.addresses else self._address.port

    async def start(self) -> None:
        """Listen.

        Raises:
            ConfigError: the address is in use or not available.
        """
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._address.host, self._address.port)
        try:
            await site.start()
        except OSError as e:
            await self._runner.cleanup()
            raise ConfigError(f"cannot listen on {self._address} ({e.strerror}): set another --metrics-address") from e

    async def stop(self) -> None:
        """Close all connections; may be called twice."""
        await self._runner.cleanup()

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self._pages.metrics.render(), headers={"Content-Type": METRICS_CONTENT_TYPE})

    async def _healthz(self, _: web.Request) -> web.Response:
        """Respond: the event loop is running."""
        return web.Response(text="ok\n")

    async def _readyz(self, _: web.Request) -> web.Response:
        missing = self._pages.not_ready()
        if missing:
            return web.Response(status=503, text=f"not synced: {', '.join(missing)}\n")
        return web.Response(text="ok\n")

    async def _status(self, _: web.Request) -> web.Response:
        text = json.dumps(self._pages.status(), indent=2, default=str) + "\n"
        return web.Response(text=text, content_type="application/json")

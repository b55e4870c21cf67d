"""The agent's web server: metrics, health, status.

Knows the paths and what each answers. Does not know what is ready or what the status holds;
both are asked for with each request.
"""

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
    """What `/status` shows."""

    def __call__(self) -> JsonDict:
        """Return a dict that can be written as JSON."""
        ...


@dataclass(frozen=True)
class WebPages:
    """Where the answers come from.

    `not_ready` returns what the agent still waits for, in words; nothing means ready.
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
        """The port it listens on; tells the one the system chose where port 0 was asked for."""
        return int(self._runner.addresses[0][1]) if self._runner.addresses else self._address.port

    async def start(self) -> None:
        """Listen.

        Raises:
            ConfigError: the address cannot be had.
        """
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._address.host, self._address.port)
        try:
            await site.start()
        except OSError as e:
            await self._runner.cleanup()
            raise ConfigError(f"cannot listen on {self._address} ({e.strerror}): give another --metrics-address") from e

    async def stop(self) -> None:
        """Close every connection; calling it twice is allowed."""
        await self._runner.cleanup()

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self._pages.metrics.render(), headers={"Content-Type": METRICS_CONTENT_TYPE})

    async def _healthz(self, _: web.Request) -> web.Response:
        """Answer at all: that the event loop turns is what this tells."""
        return web.Response(text="ok\n")

    async def _readyz(self, _: web.Request) -> web.Response:
        waiting = self._pages.not_ready()
        if waiting:
            return web.Response(status=503, text=f"waiting for {', '.join(waiting)}\n")
        return web.Response(text="ok\n")

    async def _status(self, _: web.Request) -> web.Response:
        text = json.dumps(self._pages.status(), indent=2, default=str) + "\n"
        return web.Response(text=text, content_type="application/json")

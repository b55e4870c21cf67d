"""The logs of simulated movers: what an API server asks a kubelet for.

Knows the one address that all simulated nodes share. Does not know which movers there are:
all of them logged the same.
Source: Kubernetes v1.34, pkg/kubelet/server/server.go (containerLogs).
"""

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from aiohttp import web

from core.models.base import JsonDict

__all__ = ["KubeletAddress", "serve_logs"]

HOST: Final = "127.0.0.1"
_LINE: Final = "time=2026-11-21T12:00:00Z level=info msg=moved bytes=1000\n"
_LOG: Final = _LINE * 10


@dataclass(frozen=True)
class KubeletAddress:
    """Where the kubelets listen, and how they authenticate."""

    port: int
    certificate: Path
    key: Path

    @property
    def node_status(self) -> JsonDict:
        """The status of a node whose kubelet listens there."""
        addresses = [{"type": "InternalIP", "address": HOST}]
        return {"addresses": addresses, "daemonEndpoints": {"kubeletEndpoint": {"Port": self.port}}}


@asynccontextmanager
async def serve_logs(address: KubeletAddress) -> AsyncIterator[None]:
    """Answer for the kubelets as long as the context lasts."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(address.certificate, address.key)
    application = web.Application()
    application.router.add_get("/containerLogs/{namespace}/{pod}/{container}", _answer)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, HOST, address.port, ssl_context=context).start()
        yield
    finally:
        await runner.cleanup()


async def _answer(_: web.Request) -> web.Response:
    return web.Response(text=_LOG)

"""What a simulated kubelet has: the logs of movers, which an API server asks for, and the directories of its pods.

Knows the one address, and the one directory, that all simulated nodes share. Does not know which movers there are:
all of them logged the same.
Source: Kubernetes v1.34, pkg/kubelet/server/server.go (containerLogs), pkg/volume/emptydir/empty_dir.go (getPath).
"""

import shutil
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from aiohttp import web

from core.kube.types import Pod
from tests.support.objects import JsonDict

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


@dataclass(frozen=True)
class PodDirectories:
    """The directory `pods` in a kubelet's root directory."""

    root: Path

    def make(self, pod: Pod) -> None:
        """Make the directories of a pod, and of its volumes that are directories of the node."""
        own = self.root / pod["metadata"]["uid"]
        own.mkdir(parents=True, exist_ok=True)
        for volume in pod["spec"].get("volumes") or []:
            if "emptyDir" in volume:
                self.volume(pod, volume["name"]).mkdir(parents=True, exist_ok=True)

    def volume(self, pod: Pod, name: str) -> Path:
        """Return the directory of an emptyDir."""
        return Path(self.root, pod["metadata"]["uid"], "volumes", "kubernetes.io~empty-dir", name)

    def remove(self, pod: Pod) -> None:
        """Remove what there is of a pod."""
        shutil.rmtree(self.root / pod["metadata"]["uid"], ignore_errors=True)


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

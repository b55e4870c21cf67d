"""What a mover finds in its pod, served on this machine: API server, service account, bucket."""

import shutil
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

from aiohttp import web

from core.clock import SystemClock
from core.kube.transport import Request
from tests.datamover.support.pods import MoverPod
from tests.datamover.support.s3server import S3Server
from tests.support.fakekube import FakeKube
from tests.testbed.pki import Authority

BUCKET: Final = "movers"
PREFIX: Final = "kopia/app/"
"""The prefix of the repository of namespace `app` in the bucket."""

REGION: Final = "us-east-1"
"""What versitygw takes a signature to be made for."""

_LOCATION_SECRET: Final = "location"  # noqa: S105 - its name
_WATCH_SECONDS: Final = 3600.0
RUN: Final = Path("/var/run").resolve()
_ACCOUNT: Final = RUN / "secrets/kubernetes.io/serviceaccount"


class Cluster:
    """The objects of a cluster, and where its API server listens."""

    def __init__(self, kube: FakeKube, folder: Path, port: int) -> None:
        self.objects = MoverPod(kube, folder)
        self._port = port

    @property
    def environment(self) -> dict[str, str]:
        """What the kubelet and the agent's manifest put into a mover's environment."""
        return {
            "KUBERNETES_SERVICE_HOST": "127.0.0.1",
            "KUBERNETES_SERVICE_PORT": str(self._port),
            "VELERO_NAMESPACE": "velero",
            "NODE_NAME": "node-a",
        }

    def put_location(self, s3: S3Server) -> None:
        """Set the location to the bucket of a server, with its credentials."""
        self.objects.put_secret(_LOCATION_SECRET, "cloud", s3.credentials_file)
        self.objects.put_location(
            {"region": REGION, "s3Url": s3.url, "s3ForcePathStyle": "true"},
            bucket=BUCKET,
            credential={"name": _LOCATION_SECRET, "key": "cloud"},
        )


def leave_service_account(authority: Authority) -> None:
    """Write the files that a kubelet mounts into each pod; `RUN` is in memory."""
    _ACCOUNT.mkdir(parents=True)
    shutil.copy(authority.pair.certificate, _ACCOUNT / "ca.crt")
    (_ACCOUNT / "token").write_text("token")


@asynccontextmanager
async def run_cluster(folder: Path, authority: Authority) -> AsyncIterator[Cluster]:
    """Serve a cluster that holds a password, and a Ready repository of namespace `app`."""
    kube = FakeKube(SystemClock())
    pair = authority.issue("apiserver", user="apiserver", addresses=("IP:127.0.0.1",))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(pair.certificate, pair.key)
    # A watch ends with its connection.
    runner = web.AppRunner(_application(kube), handler_cancellation=True, shutdown_timeout=0.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
        await site.start()
        (address,) = runner.addresses
        cluster = Cluster(kube, folder, address[1])
        cluster.objects.put_repository(phase="Ready")
        yield cluster
    finally:
        await runner.cleanup()


def _application(kube: FakeKube) -> web.Application:
    """Return what hands each request to the fake API server."""

    async def handle(asked: web.Request) -> web.StreamResponse:
        body = await asked.read()
        content_type, query = asked.content_type, dict(asked.query)
        request = Request(asked.method, asked.path, query, body or None, content_type, timeout_seconds=_WATCH_SECONDS)
        if "watch" not in asked.query:
            answer = await kube.request(request)
            return web.Response(status=answer.status, body=answer.body, content_type="application/json")
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(asked)
        with suppress(ConnectionError):
            async with kube.stream(request) as lines:
                async for line in lines:
                    await response.write(line + b"\n")
        return response

    application = web.Application()
    application.router.add_route("*", "/{path:.*}", handle)
    return application

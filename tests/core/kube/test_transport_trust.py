"""Agents and data movers trust the API servers that other clients trust, also after their authority was replaced."""

import asyncio
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.request import Request as GrantRequest

import pytest
from aiohttp import web

from core.clock import SystemClock
from core.kube.errors import UnreachableError
from core.kube.transport import Request, Transport
from datamover.pod.api_transport import pod_transport
from datamover.storage.token_requests import build_client, send
from nodeagent.runtime.transport import load_transport

pytestmark = pytest.mark.processes  # openssl makes certificates

_NO_IDENTIFIERS = ("-addext", "subjectKeyIdentifier=none", "-addext", "authorityKeyIdentifier=none")
_AUTHORITY = ("-addext", "basicConstraints=critical,CA:TRUE")
_SERVER = ("-addext", "basicConstraints=CA:FALSE", "-addext", "subjectAltName=IP:127.0.0.1")


@dataclass(frozen=True)
class _Pair:
    certificate: Path
    key: Path

    @classmethod
    def make(cls, folder: Path, name: str, *extensions: str, by: "_Pair | None" = None) -> "_Pair":
        pair = cls(folder / f"{name}.crt", folder / f"{name}.key")
        config = folder / "openssl.cnf"
        config.write_text("[req]\ndistinguished_name=name\n[name]\n")
        argv = ["openssl", "req", "-x509", "-config", str(config), "-newkey", "ec", "-nodes", "-subj", f"/CN={name}"]
        argv += ["-pkeyopt", "ec_paramgen_curve:P-256", "-keyout", str(pair.key), "-out", str(pair.certificate)]
        argv += extensions
        argv += ["-CA", str(by.certificate), "-CAkey", str(by.key)] if by else []
        subprocess.run(argv, check=True, capture_output=True)
        return pair


async def _answer(_: web.Request) -> web.Response:
    return web.json_response({})


@asynccontextmanager
async def _serving(pair: _Pair) -> AsyncIterator[int]:
    """Serve with the certificate; yield the port."""
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(pair.certificate, pair.key)
    app = web.Application()
    app.router.add_get("/version", _answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


async def _connect(account: Path, port: int, kind: str) -> Transport:
    """Return the transport of an agent or of a data mover, which has this ServiceAccount."""
    (account / "token").write_text("t")
    if kind == "data mover":
        place = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(port)}
        return pod_transport(place, SystemClock(), account)
    config = account / "kubeconfig"
    config.write_text(f"""
current-context: c
clusters: [{{name: k, cluster: {{server: "https://127.0.0.1:{port}", certificate-authority: {account / "ca.crt"}}}}}]
contexts: [{{name: c, context: {{cluster: k, user: u}}}}]
users: [{{name: u, user: {{token: t}}}}]
""")
    return (await load_transport(str(config)))[0]


@pytest.fixture
def _strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """As from Python 3.13 on."""
    build: Callable[..., ssl.SSLContext] = ssl.create_default_context

    def build_strict(*args: object, **kwargs: object) -> ssl.SSLContext:
        context = build(*args, **kwargs)
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        return context

    monkeypatch.setattr(ssl, "create_default_context", build_strict)


@pytest.mark.usefixtures("_strict")
@pytest.mark.parametrize("kind", ["agent", "data mover"])
@pytest.mark.parametrize("authority", ["without identifiers", "of another one"])
async def test_the_authority_of_a_cluster_is_trusted_as_it_is(authority: str, kind: str, tmp_path: Path) -> None:
    root = _Pair.make(tmp_path, "root", *_AUTHORITY, *_NO_IDENTIFIERS)
    issuer = root if authority == "without identifiers" else _Pair.make(tmp_path, "issuer", *_AUTHORITY, by=root)
    server = _Pair.make(tmp_path, "server", *_SERVER, by=issuer)
    (tmp_path / "ca.crt").write_bytes(issuer.certificate.read_bytes())
    async with _serving(server) as port:
        transport = await _connect(tmp_path, port, kind)
        assert (await transport.request(Request("GET", "/version"))).status == 200
        await transport.close()
        # So does a data mover a service that grants credentials, by a location's authority: kopia does.
        client, request = (
            build_client(issuer.certificate.read_bytes()),
            GrantRequest(f"https://127.0.0.1:{port}/version"),
        )
        assert await asyncio.to_thread(send, client, request, "ask") == b"{}"


async def test_an_agent_trusts_the_authority_that_has_replaced_another_one(tmp_path: Path) -> None:
    before, after = (_Pair.make(tmp_path, name, *_AUTHORITY) for name in ("before", "after"))
    server = _Pair.make(tmp_path, "server", *_SERVER, by=after)
    (tmp_path / "ca.crt").write_bytes(before.certificate.read_bytes())
    async with _serving(server) as port:
        transport = await _connect(tmp_path, port, "agent")
        for content in (b"", after.certificate.read_bytes()):
            with pytest.raises(UnreachableError, match="certificate verify failed"):
                await transport.request(Request("GET", "/version"))
            (tmp_path / "ca.crt").write_bytes(content)
        with pytest.raises(UnreachableError, match="certificate verify failed"):
            await transport.request(Request("GET", "/version"))
        assert (await transport.request(Request("GET", "/version"))).status == 200
        await transport.close()

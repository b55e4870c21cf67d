"""AWS's token service on loopback, accessed as from a cluster behind a proxy.

kopia accesses it under its real name and with TLS; the proxy is configured by the
variables that every Go program reads.
Source: minio-go 7, pkg/credentials/sts_web_identity.go; Go, net/http.ProxyFromEnvironment.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from urllib.parse import parse_qs

import pytest

from tests.testbed.pki import Authority

_GRANTED = """\
<AssumeRoleWithWebIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/">
<AssumeRoleWithWebIdentityResult><Credentials>
<AccessKeyId>{access_key}</AccessKeyId><SecretAccessKey>{secret_key}</SecretAccessKey>
<SessionToken>token-of-the-session</SessionToken><Expiration>2099-01-01T00:00:00Z</Expiration>
</Credentials></AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>"""
_DENIED = "<ErrorResponse><Error><Code>AccessDenied</Code><Message>not for you</Message></Error></ErrorResponse>"


@dataclass
class TokenService:
    """Issues one pair of keys for one token, and records the requests."""

    token: str
    access_key: str
    secret_key: str
    hosts: list[str] = field(default_factory=list)
    received: list[dict[str, str]] = field(default_factory=list)

    def answer(self, body: str) -> bytes:
        received = {name: values[0] for name, values in parse_qs(body).items()}
        self.received.append(received)
        granted = received["WebIdentityToken"] == self.token
        text = _GRANTED.format(access_key=self.access_key, secret_key=self.secret_key) if granted else _DENIED
        status = "200 OK" if granted else "403 Forbidden"
        return f"HTTP/1.1 {status}\r\nContent-Length: {len(text)}\r\nConnection: close\r\n\r\n{text}".encode()


@asynccontextmanager
async def serve_tokens(
    service: TokenService, authority: Authority, region: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[None]:
    """Serve the proxy to the service of a region, and the service behind it."""
    host = f"sts.{region}.amazonaws.com"
    pair = authority.issue("sts", user="sts", addresses=(f"DNS:{host}",))
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(pair.certificate, pair.key)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            service.hosts.append(head.split()[1])
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            await writer.start_tls(tls)
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            length = int(head.split("content-length:")[1].split()[0])
            writer.write(service.answer((await reader.readexactly(length)).decode()))
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("SSL_CERT_FILE", str(authority.pair.certificate))
        yield

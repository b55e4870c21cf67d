"""The clouds' hosts on loopback, which kopia and the data mover access as from a cluster behind a proxy.

They are accessed under their real names and with TLS. The proxy is configured by the variables that Go and Python
read; it relays to an emulator, or answers in the place of a service. A host that a test does not name is refused, so
no request leaves the machine.
Source: Go, net/http.ProxyFromEnvironment; RFC 9110, section 9.3.6.
"""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.testbed.pki import Authority, KeyPair

_Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(frozen=True)
class Request:
    """A request to a service, with lower-case names of headers."""

    method: str
    host: str
    target: str
    headers: Mapping[str, str]
    body: str

    @property
    def path(self) -> str:
        return urlsplit(self.target).path

    @property
    def query(self) -> dict[str, str]:
        return {name: values[0] for name, values in parse_qs(urlsplit(self.target).query).items()}

    @property
    def form(self) -> dict[str, str]:
        return {name: values[0] for name, values in parse_qs(self.body).items()}


@dataclass(frozen=True)
class Answer:
    """The answer of a service; a dict is sent as JSON."""

    body: dict[str, Any] | str
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)

    def encode(self) -> bytes:
        body = (self.body if isinstance(self.body, str) else json.dumps(self.body)).encode()
        kind = "application/xml" if isinstance(self.body, str) else "application/json"
        headers = {"Content-Length": len(body), "Content-Type": kind, "Connection": "close", **self.headers}
        lines = [f"HTTP/1.1 {self.status} status", *(f"{name}: {value}" for name, value in headers.items())]
        return "\r\n".join([*lines, "", ""]).encode() + body


Service = Callable[[Request], Answer]


@dataclass
class Internet:
    """Who answers for which host: a port on loopback that speaks TLS, a URL there that does not, or a service."""

    authority: Authority
    hosts: dict[str, int | str | Service] = field(default_factory=dict)
    connected: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    @property
    def ca_pem(self) -> str:
        return self.authority.pair.certificate.read_text()

    def certificate(self, host: str) -> KeyPair:
        return self.authority.issue(host.replace("*", "any"), user="server", addresses=(f"DNS:{host}",))

    def context(self, host: str) -> ssl.SSLContext:
        pair = self.certificate(host)
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load_cert_chain(pair.certificate, pair.key)
        return tls

    async def _tunnel(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            host = (await reader.readuntil(b"\r\n\r\n")).decode().split()[1].removesuffix(":443")
            behind = self.hosts.get(host)
            if behind is None:
                self.refused.append(host)
                writer.write(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")
                return
            self.connected.append(host)
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            if isinstance(behind, int):
                await _relay((reader, writer), await asyncio.open_connection("127.0.0.1", behind))
                return
            await writer.start_tls(self.context(host))
            if isinstance(behind, str):
                await _relay((reader, writer), await asyncio.open_connection("127.0.0.1", urlsplit(behind).port))
            else:
                await _serve_once(behind, reader, writer, host)
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            writer.close()


async def _relay(client: _Streams, server: _Streams) -> None:
    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while piece := await reader.read(65536):
                writer.write(piece)
                await writer.drain()
        writer.close()

    await asyncio.gather(copy(client[0], server[1]), copy(server[0], client[1]))


async def _serve_once(service: Service, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str) -> None:
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
    body = (await reader.readexactly(int(headers.get("content-length", "0")))).decode()
    method, target, _ = first.split()
    writer.write(service(Request(method, host, target, headers, body)).encode())
    await writer.drain()


@asynccontextmanager
async def serve_internet(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Internet]:
    """Serve the proxy, and make this process and its children use it.

    No variable makes them trust `authority`: a location does, by its caCert.
    """
    internet = Internet(authority)
    async with await asyncio.start_server(internet._tunnel, "127.0.0.1", 0) as server:
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
        for name in ("HTTPS_PROXY", "https_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        yield internet
    assert internet.refused == []


@asynccontextmanager
async def serve_plain(service: Service) -> AsyncIterator[str]:
    """Serve a service that is accessed without TLS and without the proxy, and yield its URL."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await _serve_once(service, reader, writer, "127.0.0.1")
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

"""Connections to a storage, directly or through the proxy that the environment names, and heads of requests to a proxy.

Errors have the words of Go's, as the causes of kopia's errors are found by them (`datamover.kopia.causes`). kopia would
decide the same about a proxy. It never uses one for its own machine.
Source: RFC 9110, sections 7.6.1 (hop-by-hop) and 9.3.6 (CONNECT); RFC 9112, sections 3.2.2 (absolute form) and 6.3
(length of a body); RFC 1928 and RFC 1929 (SOCKS 5); Go 1.26, net (dial.go, net.go); golang.org/x/net v0.40,
http/httpproxy.
"""

import asyncio
import os
import socket
import ssl
from base64 import b64encode
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from ipaddress import ip_address, ip_network
from typing import Final
from urllib.parse import unquote, urlsplit

from core.errors import ConfigError
from core.kube.transport import trust_like_go
from datamover.runtime.cancellation import call_in_thread

_PORTS: Final = {"http": 80, "https": 443, "socks5": 1080, "socks5h": 1080}


@dataclass(frozen=True)
class Address:
    """A host, without brackets, and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str, default_port: int) -> Address:
    """Return the address in `host:port`, `[host]:port` or `host`. Raises ValueError if it is none."""
    parts = urlsplit(f"//{text}")
    if not parts.hostname:
        raise ValueError(f'not an address: "{text}"')
    return Address(parts.hostname, parts.port or default_port)


@dataclass(frozen=True)
class NextProxy:
    """A proxy: `http`, `https`, `socks5` or `socks5h`, its address, and the user's name and password, or None."""

    scheme: str
    address: Address
    user: str | None = None
    password: str = field(default="", repr=False)


class Routes:
    """The proxies in an environment."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Read HTTPS_PROXY, HTTP_PROXY and NO_PROXY, in either case. Raises ConfigError if one has an invalid URL."""
        self._proxies = {scheme: _parse_proxy(scheme, environment) for scheme in ("http", "https")}
        self._excluded = [entry.strip().lower() for entry in _variable("NO_PROXY", environment).split(",")]

    def find(self, scheme: str, to: Address) -> NextProxy | None:
        """Return the proxy for a URL of `scheme`; None: it is reached directly."""
        proxy = self._proxies[scheme]
        if proxy is None or _is_local(to.host) or any(_excludes(entry, to) for entry in self._excluded if entry):
            return None
        return proxy


def _variable(name: str, environment: Mapping[str, str]) -> str:
    return environment.get(name) or environment.get(name.lower()) or ""


def _parse_proxy(scheme: str, environment: Mapping[str, str]) -> NextProxy | None:
    name = f"{scheme.upper()}_PROXY"
    if not (text := _variable(name, environment)):
        return None
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        address = parse_address(parts.netloc.rpartition("@")[2], _PORTS[parts.scheme])
    except (KeyError, ValueError) as e:
        # Not quoted: it may contain a password.
        raise ConfigError(f"{name}: not the URL of a proxy, such as http://proxy.example.com:3128") from e
    return NextProxy(parts.scheme, address, unquote(parts.username or "") or None, unquote(parts.password or ""))


def _is_local(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _excludes(entry: str, to: Address) -> bool:
    """Return whether an entry of NO_PROXY, in lower case, is about that address."""
    if entry == "*":
        return True
    host = to.host.lower()
    if "/" in entry:
        try:
            return ip_address(host) in ip_network(entry, strict=False)
        except ValueError:
            return False
    # It may be an IPv6 address, with or without brackets.
    named = Address(entry, to.port)
    if entry.count(":") == 1 or "]" in entry:
        with suppress(ValueError):
            named = parse_address(entry, to.port)
    if named.port != to.port:
        return False
    try:
        return ip_address(host) == ip_address(named.host)
    except ValueError:
        domain = named.host.removeprefix("*")
        # A name stands for its subdomains too, one with a leading dot for these alone.
        return host.endswith(domain if domain.startswith(".") else f".{domain}") or host == domain


_CONNECT_SECONDS: Final = 30.0
"""As Go's default dialer."""

_OPTIONS: Final = {socket.TCP_NODELAY: 1, socket.TCP_KEEPIDLE: 30, socket.TCP_KEEPINTVL: 30}
"""As Go's default dialer: kopia waits for an answer for as long as there is a connection."""

_END: Final = b"\r\n\r\n"
_MOST_BYTES: Final = 65536

_SOCKS_FAILURES: Final = {
    1: "general failure",
    2: "connection not allowed",
    3: "network is unreachable",
    4: "no route to host",
    5: "connection refused",
    6: "connection timed out",
}
"""Source: RFC 1928, section 6."""

_SOCKS_SIZES: Final = {1: 4, 4: 16}
"""Bytes of an IPv4 and an IPv6 address in an answer, by its type; of a name, the first byte says it."""

_SOCKS_BYTES: Final = 255
"""The most that a name, a user name or a password may have."""


class DialError(Exception):
    """There is no connection; the message says why in the words of Go's library."""


def basic_credentials(user: str, password: str) -> str:
    """Return the value of a header for basic authentication."""
    return f"Basic {b64encode(f'{user}:{password}'.encode()).decode()}"


@asynccontextmanager
async def dial(to: Address, proxy: NextProxy | None, *, tunnel: bool) -> AsyncIterator[socket.socket]:
    """Yield a connection to the address, a non-blocking socket, through the proxy, if any.

    Without `tunnel`, an HTTP proxy is to read the requests, and to find the address in them.

    Raises:
        DialError: it does not accept the connection, or the proxy refuses it.
    """
    async with AsyncExitStack() as stack:
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                link = stack.enter_context(await _connect(proxy.address if proxy else to))
                if proxy is not None:
                    if proxy.scheme == "https":
                        link = await stack.enter_async_context(_encrypt(link, proxy.address.host))
                    if proxy.scheme.startswith("socks"):
                        await _pass_socks(link, to, proxy)
                    elif tunnel:
                        await _pass_proxy(link, to, proxy)
        except TimeoutError as e:
            raise DialError(f"dial tcp {to}: i/o timeout") from e
        except (OSError, EOFError, UnicodeError) as e:
            raise DialError(f"dial tcp {proxy.address if proxy else to}: {_words(e)}") from e
        yield link


def _words(error: Exception) -> str:
    if isinstance(error, UnicodeError):
        # The name, or a label of it, is empty or too long.
        return "lookup: no such host"
    if isinstance(error, socket.gaierror):
        return "lookup: no such host" if error.errno != socket.EAI_AGAIN else "lookup: server misbehaving"
    if isinstance(error, ssl.SSLError):
        # Its number is none of the system's.
        return f"x509: {error.verify_message}" if isinstance(error, ssl.SSLCertVerificationError) else f"tls: {error}"
    if isinstance(error, OSError) and error.errno:
        return f"connect: {os.strerror(error.errno).lower()}"
    return "EOF" if isinstance(error, EOFError) else str(error)


async def _connect(to: Address) -> socket.socket:
    """Return a connection to one of the host's addresses, in their order."""
    # A name server may not answer: asyncio's own thread would keep this process until then.
    look_up = partial(socket.getaddrinfo, to.host, to.port, type=socket.SOCK_STREAM)
    found = await call_in_thread(look_up, name="lookup")
    failure: OSError = OSError("no address")
    for family, kind, protocol, _, address in found:
        try:
            with ExitStack() as stack:
                link = stack.enter_context(socket.socket(family, kind, protocol))
                link.settimeout(0)
                link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for option, value in _OPTIONS.items():
                    link.setsockopt(socket.IPPROTO_TCP, option, value)
                # One that drops packets must leave time for the next, as with Go.
                async with asyncio.timeout(_CONNECT_SECONDS / len(found)):
                    await asyncio.get_running_loop().sock_connect(link, address)
                stack.pop_all()
                return link
        except OSError as e:
            failure = e
    raise failure


async def _pass_proxy(link: socket.socket, to: Address, proxy: NextProxy) -> None:
    loop = asyncio.get_running_loop()
    lines = [f"CONNECT {to} HTTP/1.1", f"Host: {to}"]
    if proxy.user:
        lines.append(f"Proxy-Authorization: {basic_credentials(proxy.user, proxy.password)}")
    await loop.sock_sendall(link, "\r\n".join([*lines, "", ""]).encode())
    head = b""
    # Byte by byte at the end: what follows the head is the storage's.
    while not head.endswith(_END):
        if not (piece := await loop.sock_recv(link, 1)) or len(head) > _MOST_BYTES:
            raise EOFError
        head += piece
    _, _, status = head.split(b"\r\n", 1)[0].decode("latin-1").partition(" ")
    if not status.startswith("2"):
        raise DialError(f"proxy {proxy.address}: {status}")


async def _pass_socks(link: socket.socket, to: Address, proxy: NextProxy) -> None:
    """Have a SOCKS proxy connect to the address, whose name it resolves."""
    loop = asyncio.get_running_loop()

    async def read(size: int) -> bytes:
        content = b""
        while len(content) < size:
            if not (piece := await loop.sock_recv(link, size - len(content))):
                raise EOFError
            content += piece
        return content

    await loop.sock_sendall(link, b"\x05\x01\x02" if proxy.user else b"\x05\x01\x00")
    _, method = await read(2)
    if method == 2:  # noqa: PLR2004 - user name and password, in RFC 1928
        user, password = (proxy.user or "").encode(), proxy.password.encode()
        if max(len(user), len(password)) > _SOCKS_BYTES:
            raise DialError(f"proxy {proxy.address}: the user name or the password is too long")
        await loop.sock_sendall(link, bytes([1, len(user)]) + user + bytes([len(password)]) + password)
        if (await read(2))[1]:
            raise DialError(f"proxy {proxy.address}: username/password authentication failed")
    elif method:
        raise DialError(f"proxy {proxy.address}: no acceptable authentication methods")
    host = to.host.encode()
    if len(host) > _SOCKS_BYTES:
        raise UnicodeError(f"{len(host)} bytes")
    await loop.sock_sendall(link, b"\x05\x01\x00\x03" + bytes([len(host)]) + host + to.port.to_bytes(2))
    _, failed, _, kind = await read(4)
    if failed:
        raise DialError(f"proxy {proxy.address}: {_SOCKS_FAILURES.get(failed, 'unknown error')}")
    size = _SOCKS_SIZES[kind] if kind in _SOCKS_SIZES else (await read(1))[0]
    await read(size + 2)


@asynccontextmanager
async def _encrypt(link: socket.socket, host: str) -> AsyncIterator[socket.socket]:
    """Yield a socket whose bytes travel through TLS on `link`: the relay needs one that the kernel can read."""
    tls = ssl.create_default_context()
    trust_like_go(tls)
    reader, writer = await asyncio.open_connection(sock=link, ssl=tls, server_hostname=host)
    inner, outer = socket.socketpair()
    inner.settimeout(0)
    plain_reader, plain_writer = await asyncio.open_connection(sock=outer)

    async def copy_both() -> None:
        await asyncio.gather(_copy(plain_reader, writer), _copy(reader, plain_writer))

    copying = asyncio.get_running_loop().create_task(copy_both(), name="TLS to the proxy")
    try:
        yield inner
    finally:
        copying.cancel()
        await asyncio.wait({copying})
        for end in (plain_writer, writer, inner):
            end.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while piece := await reader.read(_MOST_BYTES):
            writer.write(piece)
            await writer.drain()
    with suppress(OSError):
        if writer.can_write_eof():
            writer.write_eof()
        else:
            # TLS has no end of one direction alone, and the proxy would keep the connection.
            writer.close()


_AUTHORIZATION: Final = "proxy-authorization"
_PROXY_HEADERS: Final = frozenset({_AUTHORIZATION, "proxy-connection"})
_CONNECTION: Final = "connection"


class BadRequestError(Exception):
    """What was received is no request to a proxy; the message says why."""


@dataclass(frozen=True)
class RequestHead:
    """The head of one request; `headers` in their order."""

    method: str
    url: str
    version: str
    headers: tuple[tuple[str, str], ...]

    @classmethod
    def parse(cls, head: bytes) -> "RequestHead":
        """Return the head in the bytes before its empty line. Raises BadRequestError if it is not one."""
        first, *lines = head.decode("latin-1").split("\r\n")
        words, fields = first.split(" "), [line.partition(":") for line in lines]
        # What else servers accept, they may read in another way than this proxy does.
        if len(words) != len(("method", "url", "version")) or not all(
            colon and name and name == name.strip() for name, colon, _ in fields
        ):
            raise BadRequestError("malformed head")
        return cls(words[0], words[1], words[2], tuple((name, value.strip()) for name, _, value in fields))

    def values(self, name: str) -> list[str]:
        """Return the values of the header with that name in lower case."""
        return [value for key, value in self.headers if key.lower() == name]

    @property
    def tunnels(self) -> bool:
        """Whether all that follows goes to the address."""
        return self.method == "CONNECT"

    @property
    def authorization(self) -> str | None:
        """The credentials for the proxy; None: there are none."""
        return next(iter(self.values(_AUTHORIZATION)), None)

    @property
    def address(self) -> Address:
        """Where the request goes. Raises BadRequestError if it does not say, or it is no URL for a proxy."""
        try:
            if self.tunnels:
                return parse_address(self.url, 443)
            parts = urlsplit(self.url)
            if parts.scheme == "http":
                return parse_address(parts.netloc.rpartition("@")[2], 80)
        except ValueError as e:
            raise BadRequestError("malformed URL") from e
        raise BadRequestError("not a URL of http")

    @property
    def body_bytes(self) -> int | None:
        """The length of the body; None: it is chunked. Raises BadRequestError if the headers contradict each other."""
        lengths = set(self.values("content-length"))
        if self.values("transfer-encoding"):
            if lengths:
                raise BadRequestError("a length and a transfer encoding")
            return None
        if not lengths:
            return 0
        (length, *others) = lengths
        if others or not (length.isascii() and length.isdecimal()):
            raise BadRequestError("malformed length")
        return int(length)

    def encode(self, *, absolute: bool, authorization: str | None = None) -> bytes:
        """Return the head to send on, without what is for this proxy; `absolute`: with the whole URL, to another."""
        # As it was signed: a parsed one may lose a character.
        _, _, path = self.url.removeprefix("http://").partition("/")
        url = self.url if absolute else f"/{path}"
        dropped = _PROXY_HEADERS | ({_CONNECTION} if self.body_bytes is None else set())
        headers = [(name, value) for name, value in self.headers if name.lower() not in dropped]
        if self.body_bytes is None:
            # Its end is not looked for: so nothing may follow it.
            headers.append(("Connection", "close"))
        if authorization:
            headers.append(("Proxy-Authorization", authorization))
        lines = [f"{self.method} {url} {self.version}", *(f"{name}: {value}" for name, value in headers)]
        return "\r\n".join([*lines, "", ""]).encode("latin-1")


class HeadReader:
    """Reads heads from a socket, and keeps what it received after one."""

    def __init__(self, source: socket.socket) -> None:
        self._source = source
        self._received = b""

    async def read(self) -> RequestHead | None:
        """Return the next head, None at the end of the connection; raises BadRequestError, or OSError if it broke."""
        while _END not in self._received:
            if len(self._received) > _MOST_BYTES:
                raise BadRequestError("head too long")
            if not (piece := await asyncio.get_running_loop().sock_recv(self._source, _MOST_BYTES)):
                return None
            self._received += piece
        head, _, self._received = self._received.partition(_END)
        return RequestHead.parse(head)

    def take(self, most_bytes: int | None) -> bytes:
        """Return what was received after the head, up to so many bytes; None: all of it."""
        end = len(self._received) if most_bytes is None else most_bytes
        taken, self._received = self._received[:end], self._received[end:]
        return taken

"""A proxy before an S3 server that delays or refuses requests, as a storage does that is slow, busy or restarting."""

import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from email.message import Message
from email.utils import format_datetime, parsedate_to_datetime
from enum import Enum, auto
from http import HTTPStatus
from http.client import HTTPConnection, HTTPSConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.datamover.support.s3server import S3Server
from tests.support.sockets import free_port

_HOP_HEADERS = frozenset({"connection", "keep-alive", "transfer-encoding"})


class Fault(Enum):
    """What the proxy does with every connection instead of forwarding."""

    REFUSE = auto()
    SILENCE = auto()


@dataclass(frozen=True)
class Answer:
    """What the proxy answers every request instead of forwarding it."""

    status: int
    body: str = ""


_DENIAL = Answer(403, "<Error><Code>AccessDenied</Code><Message>Access Denied.</Message></Error>")


@dataclass
class S3Proxy:
    """The address of the proxy, and what it does at present.

    `latency_seconds` delays each request, and `seconds_per_request` all requests together, for objects
    whose key contains `slow`. `armed` is a fault that begins after the first request that contains its
    text. `requests` are the lines of all requests; those that contain `denied` are answered with `denial`.
    `stored_bytes` is the size of all objects that were written. At `hold_bytes` writes begin to wait (`holding`) until
    that is 0 again. `skew` is how far the storage's clock is ahead. `check` returns what refuses a request with such
    headers.
    """

    server: S3Server
    port: int
    fault: Fault | Answer | None = None
    armed: tuple[str, Fault | Answer] | None = None
    slow: str = ""
    denied: str = ""
    denial: Answer = _DENIAL
    latency_seconds: float = 0.0
    seconds_per_request: float = 0.0
    skew: timedelta = timedelta()
    check: Callable[[Message], Answer | None] | None = None
    requests: list[str] = field(default_factory=list)
    stored_bytes: int = 0
    hold_bytes: int = 0
    holding: bool = False
    _pace: threading.Lock = field(default_factory=threading.Lock)
    _writing: threading.Lock = field(default_factory=threading.Lock)
    _listening: "_Listener | None" = None
    _ended: threading.Event = field(default_factory=threading.Event)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def fail(self, fault: Fault | Answer) -> None:
        """Begin to fail all requests, also on connections that are open."""
        self.fault = fault
        if fault is Fault.REFUSE:
            self._stop_listening()

    def count(self, size_bytes: int) -> None:
        """Note the size of an object that was written."""
        with self._writing:
            self.stored_bytes += size_bytes

    def hold(self) -> None:
        """Return when an object may be written."""
        while 0 < self.hold_bytes <= self.stored_bytes and not self._ended.wait(0.02):
            self.holding = True
        self.holding = False

    def take(self, request_line: str) -> None:
        """Note a request that was forwarded."""
        if self.armed is not None and self.armed[0] in request_line:
            fault, self.armed = self.armed[1], None
            threading.Thread(target=self.fail, args=(fault,), name="s3-proxy-fault").start()

    def recover(self) -> None:
        """Forward requests again."""
        self.fault = None
        if self._listening is None:
            self.listen()

    def listen(self) -> None:
        self._listening = _Listener(self)

    def end(self) -> None:
        self._ended.set()
        self._stop_listening()

    def delay(self, path: str) -> None:
        """Return when a request may be forwarded."""
        if self.slow not in path:
            return
        with self._pace:
            time.sleep(self.seconds_per_request)
        time.sleep(self.latency_seconds)

    def hang(self) -> None:
        """Return when the fault or the proxy has ended."""
        while self.fault is Fault.SILENCE and not self._ended.wait(0.1):
            pass

    def _stop_listening(self) -> None:
        if self._listening is not None:
            self._listening.close()
            self._listening = None


class _Listener:
    """The listening socket of a proxy, and the thread that serves it."""

    def __init__(self, proxy: S3Proxy) -> None:
        handler = type("Handler", (_Handler,), {"proxy": proxy})
        self._server = _Server(("127.0.0.1", proxy.port), handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), name="s3-proxy", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    # Threads end with their connections, which kopia closes when it exits.
    block_on_close = False
    request_queue_size = 128

    def handle_error(self, *_: Any) -> None:
        """A client that goes away is no error."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Else the body of an answer waits for the acknowledgment of its headers, 40 ms each.
    disable_nagle_algorithm = True
    proxy: S3Proxy
    upstream: HTTPConnection | None = None

    def _forward(self) -> None:
        body, proxy = self._read_body(), self.proxy
        proxy.requests.append(self.requestline)
        refusal = proxy.check(self.headers) if proxy.check is not None else None
        proxy.delay(self.path)
        if self.command == "PUT":
            proxy.hold()
        fault = refusal or (proxy.denial if proxy.denied and proxy.denied in self.requestline else proxy.fault)
        if isinstance(fault, Answer):
            self._answer(fault.status, [], fault.body.encode())
            return
        if fault is Fault.SILENCE:
            proxy.hang()
        if fault is not None:
            self.close_connection = True
            return
        if self.upstream is None:
            scheme, _, address = proxy.server.url.partition("://")
            # The certificate is for the storage's real name.
            tls = ssl._create_unverified_context()
            self.upstream = HTTPConnection(address) if scheme == "http" else HTTPSConnection(address, context=tls)
        sent = {name: value for name, value in self.headers.items() if name.lower() not in _HOP_HEADERS}
        self.upstream.request(self.command, self.path, body, sent)
        answer = self.upstream.getresponse()
        if self.command == "PUT" and answer.status == HTTPStatus.OK:
            proxy.count(len(body))
        proxy.take(self.requestline)
        kept = [(name, value) for name, value in answer.getheaders() if name.lower() not in _HOP_HEADERS]
        shown = [(name, self._shift(value) if name.lower() == "last-modified" else value) for name, value in kept]
        self._answer(answer.status, shown, answer.read())

    def _read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        chunks = []
        while size := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def _shift(self, time_text: str) -> str:
        return format_datetime(parsedate_to_datetime(time_text) + self.proxy.skew, usegmt=True)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _forward  # noqa: N815 - names of http.server

    def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        self.send_response_only(status)
        for name, value in headers:
            if self.command == "HEAD" or name.lower() != "content-length":
                self.send_header(name, value)
        if self.command != "HEAD":
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def finish(self) -> None:
        with suppress(OSError, ValueError):
            super().finish()
        if self.upstream is not None:
            self.upstream.close()


@contextmanager
def run_s3_proxy(server: S3Server) -> Iterator[S3Proxy]:
    """Forward requests to the server until the end of the block."""
    proxy = S3Proxy(server, free_port())
    proxy.listen()
    try:
        yield proxy
    finally:
        proxy.end()

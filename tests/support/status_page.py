"""The status page of an agent that is not there, on an address that an API server forwards to."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer


def forwarded_address() -> str:
    """Return an address of this machine that an API server forwards to: it refuses loopback.

    Raises:
        OSError: there is none.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        address: str = probe.getsockname()[0]
    return address


@contextmanager
def serve_status_page(address: str, body: bytes) -> Iterator[int]:
    """Serve `body` under `/status` as an agent does; yield the port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = self.path == "/status"
            self.send_response(200 if found else 404)
            self.end_headers()
            self.wfile.write(body if found else b"")

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    with HTTPServer((address, 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, name="status page")
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()

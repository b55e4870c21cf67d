"""Simulated time: a clock that is moved on, the server that gives it to kopia's test build, and that build.

Knows how kopia reads a simulated clock. Does not know what is done with it.
Source: kopia 0.23.1, internal/clock/now_testing.go.
"""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Final

from tests.support.tools import tool

__all__ = ["SimulatedClock", "kopia_following"]

_VALID: Final = timedelta(hours=1)
"""How long kopia goes on by the machine's clock before it asks again: longer than any of its runs."""


class SimulatedClock:
    """A Clock whose time of day runs as the machine's does, and is moved on from time to time."""

    def __init__(self, ahead: timedelta) -> None:
        """Begin `ahead` of the machine's time of day."""
        self.ahead = ahead

    def now(self) -> datetime:
        """Return the simulated time of day in UTC."""
        return datetime.now(UTC) + self.ahead

    def monotonic(self) -> float:
        """Return seconds on the machine's clock, which is not moved."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Return after so many of the machine's seconds."""
        await asyncio.sleep(seconds)

    def move_to(self, moment: datetime) -> None:
        """Let it be that time; it never goes back."""
        self.ahead += max(moment - self.now(), timedelta())


@contextmanager
def kopia_following(clock: SimulatedClock, folder: Path) -> Iterator[Path]:
    """Yield a new folder with a program `kopia` that is the test build, and follows the clock until the end.

    The mover removes kopia's variables from its environment, so a script sets this one.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"time": clock.now().isoformat(), "validFor": _VALID // timedelta(microseconds=1) * 1000})
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None:
            """Write nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), name="fake-clock", daemon=True)
    thread.start()
    folder.mkdir()
    script = folder / "kopia"
    kopia = tool("kopia", "kopia-testing")
    script.write_text(
        f"#!/bin/sh\nKOPIA_FAKE_CLOCK_ENDPOINT=http://127.0.0.1:{server.server_port} exec '{kopia}' \"$@\"\n"
    )
    script.chmod(0o755)
    try:
        yield folder
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

"""A server of a test on loopback: a program that runs until the test ends."""

import os
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

_START_SECONDS = 30.0
"""Node.js loads Azurite in two seconds, on a machine with nothing else to do."""

_SHOWN_CHARACTERS = 4000


class ServerError(Exception):
    """The server exited too early."""


@contextmanager
def run_server(argv: Sequence[str | Path], variables: Mapping[str, str], folder: Path, port: int) -> Iterator[None]:
    """Start a server that keeps its data in `folder`, wait for its port, and kill it at the end.

    Raises:
        ServerError: it exited by itself; the message has its last errors.
    """
    # Not in the directory itself, where it might be a bucket.
    log_file = folder.with_name(f"{folder.name}.log")
    with log_file.open("wb") as log:
        process = subprocess.Popen(argv, env={**os.environ, **variables}, stdout=subprocess.DEVNULL, stderr=log)
    try:
        _wait_for(port, process)
        yield
    finally:
        ended = process.poll()
        process.kill()
        process.wait()
    if ended is not None:
        raise ServerError(f"{Path(argv[0]).name} ended with {ended}: {log_file.read_text()[-_SHOWN_CHARACTERS:]}")


def _wait_for(port: int, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + _START_SECONDS
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            if time.monotonic() > deadline or process.poll() is not None:
                raise
            time.sleep(0.05)
        else:
            return

"""The process that is executed in the pod of `send-files`: it passes what the mover sends on to its caller.

The stream goes to standard output, and then SentFiles, as JSON, to standard error. It stays as long as the mover: what
an API server has yet to pass on may be lost when it ends. It is a process of its own because what the mover itself
writes to its standard output would be kept in the node's logs. It loads little.
"""

import os
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

SOCKET_NAME: Final = "node-agent-files.sock"
"""In the directory in which the mover has its work directory (`datamover.runtime.work_dir`)."""

RESULT_SUFFIX: Final = ".json"
"""The ending of the file beside the socket with the SentFiles; it is written before the stream ends."""

_TEMPORARY: Final = "/tmp"  # noqa: S108 - nothing is written to it

_WAIT_SECONDS: Final = 900.0
"""The mover opens the repository first; if it fails, its end ends this process too."""

_POLL_SECONDS: Final = 0.2
_PIECE_BYTES: Final = 256 * 1024


def _find_socket(environment: Mapping[str, str]) -> Path | None:
    parents = (environment.get("VELERO_SCRATCH_DIR", ""), "/scratch", environment.get("TMPDIR", ""), _TEMPORARY)
    return next((path for one in parents if one and (path := Path(one, SOCKET_NAME)).exists()), None)


def relay(environment: Mapping[str, str], output: int, *, wait_seconds: float = _WAIT_SECONDS) -> tuple[str, int]:
    """Copy the stream to `output`, until OSError; return what the mover says about it, as JSON, and the exit code."""
    end = time.monotonic() + wait_seconds
    while (path := _find_socket(environment)) is None:
        if time.monotonic() > end:
            return '{"error":"the mover sends nothing"}', 1
        time.sleep(_POLL_SECONDS)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        try:
            connection.connect(str(path))
        except OSError as e:
            return f'{{"error":"another process reads the files: {e.strerror}"}}', 1
        buffer = memoryview(bytearray(_PIECE_BYTES))
        while count := connection.recv_into(buffer):
            piece = buffer[:count]
            while piece:
                piece = piece[os.write(output, piece) :]
        try:
            result = path.with_suffix(RESULT_SUFFIX).read_text()
        except OSError:
            return '{"error":"the mover ended"}', 1
        return result, 1 if '"error"' in result else 0


def main() -> int:
    """Relay to standard output, and return the exit code once the mover has ended."""
    try:
        result, code = relay(os.environ, sys.stdout.fileno())
    except OSError as e:
        result, code = f'{{"error":"cannot pass the files on: {e.strerror}"}}', 1
    sys.stderr.write(f"{result}\n")
    while _find_socket(os.environ) is not None:
        time.sleep(_POLL_SECONDS)
    return code


if __name__ == "__main__":
    sys.exit(main())

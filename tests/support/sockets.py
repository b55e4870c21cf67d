"""The TCP connections of this process, as the kernel has them: opened by any part of it, through any library."""

import os
import socket
from pathlib import Path

__all__ = ["connections_to"]


def connections_to(port: int) -> list[socket.socket]:
    """Return a duplicate of each socket of this process that is connected to that port; close them."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            connection = socket.socket(fileno=os.dup(int(entry.name)))
        except OSError:
            # No socket, or closed meanwhile.
            continue
        if _peer_port(connection) == port:
            found.append(connection)
        else:
            connection.close()
    return found


def _peer_port(connection: socket.socket) -> int:
    try:
        peer = connection.getpeername()
    except OSError:
        return 0
    return int(peer[1]) if connection.family in {socket.AF_INET, socket.AF_INET6} else 0

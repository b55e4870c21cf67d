"""Ports for servers of tests, and the TCP connections of this process as the kernel has them."""

import os
import socket
from pathlib import Path


def free_port() -> int:
    """Return a port of the loopback interface that is reserved until this process ends.

    It is bound, but nothing listens: connections are refused, the kernel gives it to no process that asks for any port,
    and a server that sets SO_REUSEADDR, as most do, can listen on it.
    """
    probe = socket.socket()
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    probe.bind(("127.0.0.1", 0))
    port: int = probe.getsockname()[1]
    probe.detach()
    return port


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

"""Keepalive of the connections to the API server, so that one that dies without a packet is noticed.

A flow that a load balancer or a virtual IP drops sends no FIN and no RST. Without keepalive a watch on
it is silent until its own timeout, minutes later, and nothing else shows that it is dead.
"""

import socket
from collections.abc import Mapping
from typing import Final, Protocol

__all__ = ["KEEPALIVE_OPTIONS", "keep_alive"]

KEEPALIVE_OPTIONS: Final[Mapping[tuple[int, int], int]] = {
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE): 1,
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE): 15,
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL): 5,
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT): 3,
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT): 30_000,
}
"""Level and name of each option, and its value; seconds, except milliseconds for TCP_USER_TIMEOUT.

The first probe follows 15 s of silence. The connection is closed at most 30 s after the last packet from
the server, or 30 s after the first data that it does not acknowledge: the probes alone do not count while data
is in flight. Source: Linux, tcp(7).
"""


class _Socket(Protocol):
    """A socket, or asyncio's wrapper of one."""

    def setsockopt(self, level: int, name: int, value: int, /) -> None: ...


def keep_alive(connection: _Socket) -> None:
    """Set the options on a TCP socket, connected or not."""
    for (level, name), value in KEEPALIVE_OPTIONS.items():
        connection.setsockopt(level, name, value)

"""Ports for servers that are about to be started.

Knows which ports no other program takes meanwhile. Does not know who listens there.
"""

import os
import socket
from contextlib import suppress
from itertools import count
from typing import Final

__all__ = ["free_ports"]

_HOST: Final = "127.0.0.1"
_LEAST_PORT: Final = 10_000
_PORTS_A_RANGE: Final = 50
_RANGES: Final = 400
"""Each process searches a range of its own; all lie below the ports that the kernel gives to connections,
which begin at 32,768. Source: Linux, Documentation/networking/ip-sysctl.rst, ip_local_port_range."""

_OFFERED: Final = count()


def free_ports(number: int) -> list[int]:
    """Return so many ports that are free, and that the kernel gives to no connection."""
    first = _LEAST_PORT + os.getpid() % _RANGES * _PORTS_A_RANGE
    ports: list[int] = []
    while len(ports) < number:
        port = first + next(_OFFERED) % _PORTS_A_RANGE
        with socket.socket() as probe, suppress(OSError):
            probe.bind((_HOST, port))
            ports.append(port)
    return ports

"""Which user of this machine has opened a connection to a server on loopback, as Linux knows it.

Source: proc_net_tcp in the documentation of the Linux kernel, Documentation/networking/proc_net_tcp.rst.
"""

import socket
import struct
from pathlib import Path
from typing import Final

__all__ = ["owner_of"]

_TABLE: Final = Path("/proc/net/tcp")
_ESTABLISHED: Final = "01"
_LOCAL, _REMOTE, _STATE, _UID = 1, 2, 3, 7


def owner_of(client: tuple[str, int], server: tuple[str, int], table: Path = _TABLE) -> int | None:
    """Return the user ID of the process that has connected from address and port `client` to `server`, both IPv4.

    None: this system does not say, or the connection is closed.
    """
    try:
        lines = table.read_text(encoding="ascii").splitlines()[1:]
    except OSError:
        return None
    wanted = (_shown(client), _shown(server), _ESTABLISHED)
    for line in lines:
        columns = line.split()
        if (columns[_LOCAL], columns[_REMOTE], columns[_STATE]) == wanted:
            return int(columns[_UID])
    return None


def _shown(address: tuple[str, int]) -> str:
    """Return the address as the table has it: the bytes of the IP address as a number of this machine."""
    host, port = address
    (number,) = struct.unpack("=I", socket.inet_aton(host))
    return f"{number:08X}:{port:04X}"

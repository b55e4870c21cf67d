"""Whose process is connected to a server on loopback."""

import os
import socket
from pathlib import Path

from client.ui.server import owner_of


def test_a_connection_of_this_process_is_its_user(tmp_path: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as client,
        listener.accept()[0] as accepted,
    ):
        ends = client.getsockname(), accepted.getsockname()
        assert owner_of(*ends) == os.getuid()
        assert owner_of(*ends, tmp_path / "absent") is None
    assert owner_of(*ends) is None


def test_the_line_of_the_client_counts_and_not_that_of_the_server(tmp_path: Path) -> None:
    table = tmp_path / "tcp"
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as client:
        own, other = client.getsockname(), listener.getsockname()
        lines = Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()
        head, *rest = lines

        def of_user(line: str) -> str:
            columns = line.split()
            columns[7] = "4711" if columns[1].endswith(f":{own[1]:04X}") else "815"
            return " ".join(columns)

        table.write_text("\n".join([head, *map(of_user, rest)]), encoding="ascii")
        assert owner_of(own, other, table) == 4711

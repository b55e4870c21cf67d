"""Keepalive of connections: the options reach the kernel."""

import socket

from core.kube.transport import KEEPALIVE_OPTIONS, keep_alive


def test_a_dead_connection_is_closed_within_30_seconds() -> None:
    with socket.socket() as connection:
        keep_alive(connection)
        assert {option: connection.getsockopt(*option) for option in KEEPALIVE_OPTIONS} == KEEPALIVE_OPTIONS
        idle, interval, probes = (
            connection.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert idle + interval * probes == 30
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000

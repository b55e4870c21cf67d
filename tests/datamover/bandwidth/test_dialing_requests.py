"""Heads of requests to the proxy: where they go, what follows, and what is refused."""

import socket

import pytest

from datamover.bandwidth.dialing import Address, BadRequestError, HeadReader, RequestHead

_PUT = (
    b"PUT http://s3.example.com:9000/b/x%20y?z=1 HTTP/1.1\r\nHost: s3.example.com:9000\r\n"
    b"Proxy-Authorization: Basic abc\r\nProxy-Connection: keep-alive\r\nContent-Length: 5"
)


def test_a_request_is_sent_on_without_what_is_for_the_proxy() -> None:
    head = RequestHead.parse(_PUT)
    assert (head.address, head.body_bytes, head.authorization) == (Address("s3.example.com", 9000), 5, "Basic abc")
    assert head.encode(absolute=False) == (
        b"PUT /b/x%20y?z=1 HTTP/1.1\r\nHost: s3.example.com:9000\r\nContent-Length: 5\r\n\r\n"
    )
    whole = head.encode(absolute=True, authorization="Basic own")
    assert whole.startswith(b"PUT http://s3.example.com:9000/b/x%20y?z=1 HTTP/1.1\r\n")
    assert b"Proxy-Authorization: Basic own\r\n" in whole


def test_a_chunked_body_ends_the_connection() -> None:
    head = RequestHead.parse(b"PUT http://a/x HTTP/1.1\r\nTransfer-Encoding: chunked\r\nConnection: keep-alive")
    assert head.body_bytes is None
    assert b"Connection: close\r\n" in head.encode(absolute=False)
    assert b"keep-alive" not in head.encode(absolute=False)


def test_connect_names_the_address_of_a_tunnel() -> None:
    head = RequestHead.parse(b"CONNECT s3.example.com:443 HTTP/1.1")
    assert (head.tunnels, head.address) == (True, Address("s3.example.com", 443))


@pytest.mark.parametrize(
    "head",
    [
        b"GET http://a/ HTTP/1.1 x",
        b"GET http://a/ HTTP/1.1\r\nno colon",
        b"GET http://a/ HTTP/1.1\r\nName : x",
        b"GET http://a/ HTTP/1.1\r\n continued: x",
    ],
)
def test_what_servers_read_in_different_ways_is_refused(head: bytes) -> None:
    with pytest.raises(BadRequestError, match="malformed head"):
        RequestHead.parse(head)


@pytest.mark.parametrize(
    ("head", "error"),
    [
        (b"GET /x HTTP/1.1", "not a URL of http"),
        (b"GET https://a/x HTTP/1.1", "not a URL of http"),
        (b"CONNECT :443 HTTP/1.1", "malformed URL"),
        (b"GET http://a:x/ HTTP/1.1", "malformed URL"),
    ],
)
def test_a_request_for_no_address_is_refused(head: bytes, error: str) -> None:
    with pytest.raises(BadRequestError, match=error):
        _ = RequestHead.parse(head).address


@pytest.mark.parametrize(
    "lines",
    [b"Content-Length: 1\r\nContent-Length: 2", b"Content-Length: +1", b"Content-Length: 1\r\nTransfer-Encoding: x"],
)
def test_a_contradictory_length_is_refused(lines: bytes) -> None:
    with pytest.raises(BadRequestError):
        _ = RequestHead.parse(b"GET http://a/ HTTP/1.1\r\n" + lines).body_bytes


async def test_what_follows_a_head_is_kept() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(0)
        theirs.sendall(_PUT + b"\r\n\r\nbodyGET http://a/ HTTP/1.1\r\n\r\n")
        reader = HeadReader(ours)
        first = await reader.read()
        assert first is not None
        assert first.method == "PUT"
        assert reader.take(4) == b"body"
        second = await reader.read()
        assert second is not None
        assert second.method == "GET"
        theirs.close()
        assert await reader.read() is None


async def test_a_head_has_a_largest_size() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(0)
        theirs.settimeout(0)
        for _ in range(2):
            theirs.send(b"x" * 40_000)
        with pytest.raises(BadRequestError, match="head too long"):
            await HeadReader(ours).read()

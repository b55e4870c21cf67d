"""Which proxy of the environment leads to a host: as kopia would decide without ours."""

import pytest

from core.errors import ConfigError
from datamover.bandwidth.dialing import Address, NextProxy, Routes, parse_address

_PROXY = {"HTTPS_PROXY": "http://user:pass%40word@proxy.example.com:3128", "http_proxy": "proxy.example.com"}


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("s3.example.com:443", Address("s3.example.com", 443)),
        ("s3.example.com", Address("s3.example.com", 80)),
        ("[2001:db8::1]:9000", Address("2001:db8::1", 9000)),
    ],
)
def test_an_address_has_a_host_and_a_port(text: str, address: Address) -> None:
    assert parse_address(text, 80) == address


def test_a_text_without_a_host_is_no_address() -> None:
    with pytest.raises(ValueError, match="not an address"):
        parse_address(":80", 80)


def test_each_scheme_has_its_proxy() -> None:
    routes, storage = Routes(_PROXY), Address("s3.example.com", 443)
    proxy = Address("proxy.example.com", 3128)
    assert routes.find("https", storage) == NextProxy("http", proxy, "user", "pass@word")
    assert routes.find("http", storage) == NextProxy("http", Address("proxy.example.com", 80))
    assert Routes({}).find("https", storage) is None
    assert "pass" not in repr(routes.find("https", storage))


@pytest.mark.parametrize(
    ("excluded", "host", "direct"),
    [
        ("*", "s3.example.com", True),
        ("example.com", "s3.example.com", True),
        ("example.com", "example.com", True),
        (".example.com", "example.com", False),
        ("*.example.com", "s3.example.com", True),
        ("example.com", "s3.example.org", False),
        ("10.0.0.0/8", "10.1.2.3", True),
        ("10.0.0.0/8", "11.1.2.3", False),
        ("10.1.2.3", "10.1.2.3", True),
        ("s3.example.com:9000", "s3.example.com", False),
        ("s3.example.com:443", "s3.example.com", True),
        ("2001:db8::1", "2001:db8::1", True),
        ("other, S3.EXAMPLE.COM", "s3.example.com", True),
        ("", "127.0.0.1", True),
        ("", "localhost", True),
        ("", "::1", True),
    ],
)
def test_what_no_proxy_excludes_is_reached_directly(excluded: str, host: str, *, direct: bool) -> None:
    routes = Routes({**_PROXY, "NO_PROXY": excluded})
    assert (routes.find("https", Address(host, 443)) is None) is direct


@pytest.mark.parametrize("url", ["ftp://proxy:1", "http://", "http://proxy:port", "://secret@x"])
def test_an_invalid_proxy_is_an_error_that_does_not_quote_it(url: str) -> None:
    with pytest.raises(ConfigError, match=r"^HTTPS_PROXY: not the URL of a proxy, such as ") as e:
        Routes({"HTTPS_PROXY": url})
    assert "secret" not in str(e.value)

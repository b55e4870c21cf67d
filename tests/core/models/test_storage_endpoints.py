"""Addresses of S3: a host, perhaps a port, and nothing else."""

import pytest

from core.errors import ConfigError
from core.models.storage import parse_endpoint


@pytest.mark.parametrize(
    "url",
    [
        "ftp://h",
        "https://",
        "http://::1:9",
        "fd00::1",
        "https://[fd00::1",
        "https://h:port",
        "https://h:",
        "https://h:0",
        "https://h:65536",
        "https://h h",
        "https://h\n",
        "“https://h”",
        "https://“h”",
        '"https://h"',
        "https://h?x=1",
        "https://h#x",
    ],
)
def test_an_invalid_address_is_rejected(url: str) -> None:
    with pytest.raises(ConfigError, match="invalid S3 URL"):
        parse_endpoint(url)


@pytest.mark.parametrize(
    "address", ["h", "h_1.example:9000", "127.0.0.1:1", "[fd00::1]", "[fe80::1%eth0]:9000", "bücher.example"]
)
def test_a_valid_address_is_passed_on_as_it_is(address: str) -> None:
    assert parse_endpoint(f"http://{address}") == (address, False)
    assert parse_endpoint(f"{address}/") == (address, True)

"""Addresses of storages, as locations and command lines give them."""

import re
from typing import Final
from urllib.parse import urlsplit

from core.errors import ConfigError

__all__ = ["parse_endpoint"]

_ADDRESS: Final = re.compile(r"(?:[\w.-]+|\[[0-9A-Fa-f:.]+(?:%[\w.-]+)?\])(?::(?P<port>[0-9]{1,5}))?")
_BLANK: Final = re.compile(r"[\s\x00-\x1f\x7f]")
_LAST_PORT: Final = 65535
_EXAMPLE: Final = "examples: https://s3.example.com:9000, or with an IPv6 address https://[fd00::1]:9000"


def parse_endpoint(url: str) -> tuple[str, bool]:
    """Return host and port of an S3 URL, and whether it uses TLS.

    Raises:
        ConfigError: it is not the URL of an endpoint.
    """
    try:
        parts = urlsplit(url if "://" in url else f"https://{url}")
    except ValueError:
        raise ConfigError(f"invalid S3 URL: {_EXAMPLE}") from None
    if "@" in parts.netloc:
        # Not quoted: it may contain a password.
        raise ConfigError("invalid S3 URL: it must not contain a user or password (keys come from the credentials)")
    # kopia would take it for a host that does not answer. urlsplit removes some of these characters.
    address = _ADDRESS.fullmatch(parts.netloc)
    if parts.scheme not in {"http", "https"} or not address or _BLANK.search(url):
        raise ConfigError(f'invalid S3 URL: "{url}" ({_EXAMPLE})')
    if not 0 < int(address["port"] or 1) <= _LAST_PORT:
        raise ConfigError(f'invalid S3 URL: it has no such port: "{url}"')
    if parts.path.strip("/") or parts.query or parts.fragment:
        # Velero rejects a path too: if it was ignored, the data would not be where the user expects it.
        raise ConfigError(f'invalid S3 URL: it must not have a path: "{url}" (the prefix is a separate setting)')
    return parts.netloc, parts.scheme == "https"

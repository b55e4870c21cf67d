"""Which proxy of the environment, if any, leads to a host.

Source: golang.org/x/net v0.40, http/httpproxy: kopia would decide the same. It never uses one for its own machine.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address, ip_network
from typing import Final
from urllib.parse import SplitResult, unquote, urlsplit

from core.errors import ConfigError

__all__ = ["Address", "NextProxy", "Routes", "parse_address"]

_PORTS: Final = {"http": 80, "https": 443, "socks5": 1080, "socks5h": 1080}


@dataclass(frozen=True)
class Address:
    """A host, without brackets, and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str, default_port: int) -> Address:
    """Return the address in `host:port`, `[host]:port` or `host`.

    Raises:
        ValueError: it is none.
    """
    parts = urlsplit(f"//{text}")
    if not parts.hostname:
        raise ValueError(f'not an address: "{text}"')
    return Address(parts.hostname, parts.port or default_port)


@dataclass(frozen=True)
class NextProxy:
    """A proxy: `http`, `https`, `socks5` or `socks5h`, its address, and the user's name and password, or empty."""

    scheme: str
    address: Address
    user: str = ""
    password: str = field(default="", repr=False)


class Routes:
    """The proxies in an environment."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Read HTTPS_PROXY, HTTP_PROXY and NO_PROXY, or their names in lower case.

        Raises:
            ConfigError: one of the proxies has an invalid URL.
        """
        self._proxies = {scheme: _parse_proxy(scheme, environment) for scheme in ("http", "https")}
        self._excluded = [entry.strip().lower() for entry in _variable("NO_PROXY", environment).split(",")]

    def find(self, scheme: str, to: Address) -> NextProxy | None:
        """Return the proxy for a URL of `scheme`; None: it is reached directly."""
        proxy = self._proxies[scheme]
        if proxy is None or _is_local(to.host) or any(_excludes(entry, to) for entry in self._excluded if entry):
            return None
        return proxy


def _variable(name: str, environment: Mapping[str, str]) -> str:
    return environment.get(name) or environment.get(name.lower()) or ""


def _parse_proxy(scheme: str, environment: Mapping[str, str]) -> NextProxy | None:
    name = f"{scheme.upper()}_PROXY"
    text = _variable(name, environment)
    if not text:
        return None
    try:
        return _proxy_of(urlsplit(text if "://" in text else f"http://{text}"))
    except ValueError as e:
        # Not quoted: it may contain a password.
        raise ConfigError(f"{name}: not the URL of a proxy, such as http://proxy.example.com:3128") from e


def _proxy_of(parts: SplitResult) -> NextProxy:
    if not parts.hostname or parts.scheme not in _PORTS:
        raise ValueError
    address = Address(parts.hostname, parts.port or _PORTS[parts.scheme])
    return NextProxy(parts.scheme, address, unquote(parts.username or ""), unquote(parts.password or ""))


def _is_local(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _excludes(entry: str, to: Address) -> bool:
    """Return whether an entry of NO_PROXY, in lower case, is about that address."""
    if entry == "*":
        return True
    host = to.host.lower()
    if "/" in entry:
        try:
            return ip_address(host) in ip_network(entry, strict=False)
        except ValueError:
            return False
    name, port = _split_port(entry)
    if port not in {None, to.port}:
        return False
    try:
        return ip_address(host) == ip_address(name)
    except ValueError:
        domain = name.removeprefix("*")
        # A name stands for its subdomains too, one with a leading dot for these alone.
        return host.endswith(domain if domain.startswith(".") else f".{domain}") or host == domain


def _split_port(entry: str) -> tuple[str, int | None]:
    """Return the name and the port of an entry, which may be an IPv6 address with or without brackets."""
    try:
        parts = urlsplit(f"//{entry}")
        return (parts.hostname or entry, parts.port) if entry.count(":") == 1 or "]" in entry else (entry, None)
    except ValueError:
        return entry, None

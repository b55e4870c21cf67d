"""The API server, reached from inside a pod with its service account.

Knows addresses, token and authority as the kubelet mounts them. Does not know how a request
is sent (`core.kube.http`), kinds, retries or watches.
Source: Kubernetes v1.34, "Accessing the Kubernetes API from a Pod".
"""

import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import aiohttp

from core.errors import ConfigError
from core.kube.http import HttpTransport

__all__ = ["PodEndpoint", "pod_transport"]

_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class PodEndpoint:
    """An API server that knows this pod's service account."""

    def __init__(self, url: str, *, token_file: Path, authority: ssl.SSLContext | None) -> None:
        """Reach the API server at `url`; `token_file` is read anew for each request."""
        self.url = url.rstrip("/")
        self.options: Mapping[str, Any] = {} if authority is None else {"ssl": authority}
        self._token_file = token_file

    def open_session(self) -> aiohttp.ClientSession:
        """Return a new session; proxies of the environment are not for the API server."""
        return aiohttp.ClientSession(trust_env=False)

    async def headers(self) -> Mapping[str, str]:
        """Return who asks.

        Raises:
            ConfigError: the token cannot be read.
        """
        try:
            # The kubelet replaces the file before the token in it expires.
            token = self._token_file.read_text().strip()
        except OSError as e:
            raise ConfigError(f"service account token {self._token_file} cannot be read: {e.strerror}") from e
        return {"User-Agent": "datamover", "Authorization": f"Bearer {token}"}


def pod_transport(environment: Mapping[str, str], account: Path = _ACCOUNT) -> HttpTransport:
    """Return the transport of the pod this process runs in.

    Raises:
        ConfigError: it does not run in one.
    """
    host, port = environment.get("KUBERNETES_SERVICE_HOST", ""), environment.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise ConfigError(
            "this is no pod (KUBERNETES_SERVICE_HOST is not set); by hand, name --repository and what to move"
        )
    if ":" in host:
        host = f"[{host}]"
    try:
        authority = ssl.create_default_context(cafile=str(account / "ca.crt"))
    except OSError as e:
        raise ConfigError(f"{account / 'ca.crt'} cannot be read: {e.strerror}") from e
    return HttpTransport(PodEndpoint(f"https://{host}:{port}", token_file=account / "token", authority=authority))

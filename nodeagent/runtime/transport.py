"""The API server, reached as kubernetes_asyncio's configuration says.

Knows kubernetes_asyncio, which nothing else imports: where a kubeconfig or a pod's service
account come from, tokens that rotate, exec plugins, TLS. Does not know how a request is sent
(`nodeagent.runtime.http`) or what it asks.
"""

import os
import sys
from asyncio.sslproto import SSLProtocol
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Final
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp

from core.errors import ConfigError
from core.kube.errors import UnauthorizedError
from core.models.base import JsonDict
from core.version import VERSION
from nodeagent.runtime.http import HttpTransport

__all__ = ["load_transport"]


def _leave_out_generated_code() -> None:
    """Let the library's packages be empty ones, so that importing a part of it loads that part only.

    Its own `__init__` files load a class for each resource of Kubernetes, 1,400 modules that
    nobody here uses: 20 MiB in each agent.
    """
    spec = find_spec("kubernetes_asyncio")
    for root in (spec.submodule_search_locations or []) if spec else []:
        for name in ("kubernetes_asyncio", "kubernetes_asyncio.client", "kubernetes_asyncio.client.models"):
            package = ModuleType(name)
            package.__path__ = [str(Path(root, *name.split(".")[1:]))]
            parent, _, child = name.rpartition(".")
            if parent:
                setattr(sys.modules[parent], child, package)
            sys.modules[name] = package


if "kubernetes_asyncio" not in sys.modules:
    _leave_out_generated_code()

from kubernetes_asyncio import client  # noqa: E402 - what is left out has to be left out before
from kubernetes_asyncio.client.api_client import ApiClient  # noqa: E402 - as above
from kubernetes_asyncio.client.configuration import Configuration  # noqa: E402 - as above

# Where the library's own configuration looks for both.
vars(client).update(ApiClient=ApiClient, Configuration=Configuration)

from kubernetes_asyncio.config import ConfigException, load_incluster_config, load_kube_config  # noqa: E402 - as above

_TLS_BUFFER_BYTES: Final = 32 * 1024
"""What a TLS connection reads at a time; a record has 16 KiB at most. asyncio's own size is
256 KiB, zeroed and so in memory for each connection: an idle agent holds a dozen, a busy one
several dozen. Source: CPython 3.11, Lib/asyncio/sslproto.py; RFC 8446, 5.2."""


class _LibraryEndpoint:
    """What the library made of a configuration: its session with TLS, its credentials."""

    def __init__(self, configuration: Configuration) -> None:
        self._configuration = configuration
        self.url = (configuration.host or "").rstrip("/")
        proxy = configuration.proxy or _proxy_of_environment(self.url)
        named = {"proxy": proxy, "server_hostname": configuration.tls_server_name}
        self.options: Mapping[str, Any] = {key: value for key, value in named.items() if value}

    def open_session(self) -> aiohttp.ClientSession:
        """Return a session on the library's connections: one TLS context for everything.

        The library's own session asks the environment about proxies and ~/.netrc for each
        request, on threads: that is a tenth of an agent's work, and of its memory.
        """
        session: aiohttp.ClientSession = ApiClient(self._configuration).rest_client.pool_manager
        connector = session.connector
        session.detach()
        return aiohttp.ClientSession(connector=connector)

    async def headers(self) -> Mapping[str, str]:
        """Return who asks; a token that is due is read or made anew by the library."""
        try:
            settings = await self._configuration.auth_settings()
        except (ConfigException, OSError) as e:
            # An exec plugin or a token that is just being replaced may do better next time.
            raise UnauthorizedError(f"the credentials for {self.url} cannot be had: {e}") from e
        token = settings.get("BearerToken", {}).get("value")
        agent = {"User-Agent": f"node-agent/{VERSION}"}
        return agent | {"Authorization": token.strip()} if token else agent


def _proxy_of_environment(url: str) -> str:
    """Return the proxy that HTTPS_PROXY, HTTP_PROXY and NO_PROXY name for `url`; empty where none."""
    parts = urlsplit(url)
    if not parts.hostname or proxy_bypass(parts.hostname):
        return ""
    return getproxies().get(parts.scheme, "")


async def load_transport(kubeconfig: str | None) -> tuple[HttpTransport, str]:
    """Return the way to the API server, and the namespace the kubeconfig names, if any.

    Without `kubeconfig` a pod uses its service account; elsewhere KUBECONFIG and then the
    user's own file count, as for kubectl.

    Raises:
        ConfigError: there is no usable configuration; one line says what was tried.
    """
    SSLProtocol.max_size = _TLS_BUFFER_BYTES
    configuration = Configuration()
    # Watches hold a connection each; the library's bound of 100 would be reached by them.
    configuration.connection_pool_maxsize = 0
    if kubeconfig is None and "KUBERNETES_SERVICE_HOST" in os.environ:
        try:
            load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]  # the library's own gap
        except (ConfigException, OSError) as e:
            raise ConfigError(f"the pod's service account cannot be used: {e}") from e
        return HttpTransport(_LibraryEndpoint(configuration)), ""
    where = kubeconfig or os.environ.get("KUBECONFIG") or "~/.kube/config"
    if not _is_there(where):
        raise ConfigError(f"kubeconfig {where} does not exist: give --kubeconfig FILE, or run the agent in a pod")
    try:
        loader = await load_kube_config(config_file=where, client_configuration=configuration, persist_config=False)
    # The library lets what its parser and its exec plugins raise through.
    except Exception as e:
        raise ConfigError(f"kubeconfig {where} cannot be used: {' '.join(str(e).split())}") from e
    context: JsonDict = loader.current_context or {}
    namespace: str = context.get("context", {}).get("namespace") or ""
    return HttpTransport(_LibraryEndpoint(configuration)), namespace


def _is_there(where: str) -> bool:
    """Whether any of the files that KUBECONFIG may list exists; the library reads others as empty ones."""
    return any(Path(path).expanduser().is_file() for path in where.split(os.pathsep))

"""The transport to the API server, configured by kubernetes_asyncio: kubeconfig, ServiceAccount, tokens, TLS.

The library and asyncio are patched in six places, each a function `_patch_…` with what it saves and the versions that
it was tried with; its test in tests/nodeagent/runtime/test_transport_patches.py fails once it is not needed any more.
"""

import asyncio
import os
import socket
import ssl
import sys
from asyncio.sslproto import SSLProtocol
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from io import StringIO
from ipaddress import ip_address, ip_network
from pathlib import Path
from types import ModuleType
from typing import Final
from urllib.parse import quote, urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
import yaml

from core.clock import SystemClock
from core.errors import ConfigError, Translated
from core.kube.errors import UnauthorizedError
from core.kube.transport import keep_alive, trust_like_go
from core.models.base import JsonDict
from core.version import VERSION
from nodeagent.runtime.http import Endpoint, HttpTransport


def _patch_out_generated_code() -> None:
    """Replace the library's packages by empty ones, so that importing a module loads that module only.

    Their `__init__` files load a class for each Kubernetes resource: 1,400 modules and 20 MiB per
    agent. Tried with kubernetes_asyncio 33 to 36.
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
    _patch_out_generated_code()

from kubernetes_asyncio import client  # noqa: E402 - after the patch
from kubernetes_asyncio.client.api_client import ApiClient  # noqa: E402 - after the patch
from kubernetes_asyncio.client.configuration import Configuration  # noqa: E402 - after the patch


def _patch_in_needed_classes() -> None:
    """Put into the emptied package the two classes that the library's own modules look up there.

    Tried with kubernetes_asyncio 33 to 36.
    """
    vars(client).update(ApiClient=ApiClient, Configuration=Configuration)


_patch_in_needed_classes()

from kubernetes_asyncio.config import ConfigException, load_incluster_config, load_kube_config  # noqa: E402 - as above
from kubernetes_asyncio.config.kube_config import KubeConfigLoader  # noqa: E402 - as above

_TLS_BUFFER_BYTES: Final = 32 * 1024
"""A TLS record has 16 KiB at most. Source: RFC 8446, 5.2."""

_IN_HEADERS: Final = "!#$&'*+^`|"
"""What the name of a header may have beside letters, digits and "-._~". Source: RFC 9110, 5.6.2."""


def _patch_tls_buffer() -> None:
    """Let asyncio read 32 KiB at a time from a TLS connection, in this process.

    asyncio zeroes a buffer of 256 KiB for each connection; an idle agent has a dozen connections, a
    busy one several dozen: 3 to 10 MiB. Source: CPython, Lib/asyncio/sslproto.py. Tried with 3.11 to 3.13.
    """
    SSLProtocol.max_size = _TLS_BUFFER_BYTES


def _patch_connection_limit(configuration: Configuration) -> None:
    """Remove the library's limit of 100 connections, which watches alone can reach.

    Requests are limited by `nodeagent.runtime.api_server`. Tried with kubernetes_asyncio 33 to 36.
    """
    configuration.connection_pool_maxsize = 0


def _patch_keepalive(connector: aiohttp.BaseConnector | None) -> None:
    """Let the library's connector open sockets with keepalive.

    The library passes no `socket_factory`, so a watch on a connection that died without a packet would be
    silent for minutes. Tried with kubernetes_asyncio 33 to 36, aiohttp 3.12 to 3.14.
    """
    vars(connector).update(_socket_factory=_open_socket)


def _open_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    family, kind, protocol, *_ = address
    opened = socket.socket(family, kind, protocol)
    keep_alive(opened)
    return opened


def _patch_session(configuration: Configuration, headers: Sequence[tuple[str, str]] = ()) -> aiohttp.ClientSession:
    """Return a session on the library's connector that does not read the environment per request, with these headers.

    The library's session looks for proxies and ~/.netrc for each request, in threads: a tenth of
    an agent's CPU time and memory. Tried with kubernetes_asyncio 33 to 36, aiohttp 3.12 to 3.14.
    """
    session: aiohttp.ClientSession = ApiClient(configuration).rest_client.pool_manager
    connector = session.connector
    session.detach()
    _patch_keepalive(connector)
    trust_like_go(_tls_of(connector))
    return aiohttp.ClientSession(connector=connector, headers=headers)


def _tls_of(connector: aiohttp.BaseConnector | None) -> ssl.SSLContext:
    context: ssl.SSLContext = vars(connector)["_ssl"]
    return context


def _reload_authorities(configuration: Configuration, session: aiohttp.ClientSession) -> None:
    """Trust what the file with the cluster's authorities has now: they may have been replaced since the start."""
    if configuration.ssl_ca_cert:
        with suppress(OSError):
            _tls_of(session.connector).load_verify_locations(cafile=configuration.ssl_ca_cert)


def _endpoint_of(configuration: Configuration, headers: Sequence[tuple[str, str]] = ()) -> Endpoint:
    """Return the endpoint of a library configuration: its session with TLS and more headers, its credentials."""
    url = (configuration.host or "").rstrip("/")
    proxy = configuration.proxy or _proxy_of_environment(url)
    named = {"proxy": proxy, "server_hostname": configuration.tls_server_name}
    return Endpoint(
        url,
        partial(_patch_session, configuration, headers),
        partial(_read_headers, configuration, url),
        {key: value for key, value in named.items() if value},
        partial(_reload_authorities, configuration),
    )


async def _read_headers(configuration: Configuration, url: str) -> Mapping[str, str]:
    """Return the headers with the credentials; the library reads or renews a token that expires."""
    # The library does not wrap all errors of an exec plugin; it, or a token that is being replaced, may succeed later.
    with Translated(Exception, UnauthorizedError, f"cannot get credentials for {url}"):
        settings = await configuration.auth_settings()
    token = settings.get("BearerToken", {}).get("value")
    agent = {"User-Agent": f"node-agent/{VERSION}"}
    return agent | {"Authorization": token.strip()} if token else agent


def _proxy_of_environment(url: str) -> str | None:
    """Return the proxy that HTTPS_PROXY, HTTP_PROXY and NO_PROXY set for `url`, or None, as for kubectl and Velero.

    Source: golang.org/x/net v0.40, http/httpproxy.
    """
    parts, proxies = urlsplit(url), getproxies()
    proxy, host = proxies.get(parts.scheme), parts.hostname
    if not proxy or not host or proxy_bypass(host) or _is_excluded(host, proxies.get("no", "")):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"


def _is_excluded(host: str, no_proxy: str) -> bool:
    """Return whether `host` is this machine, or in a network of `no_proxy`: the library knows names and addresses."""
    try:
        address = ip_address(host)
    except ValueError:
        return host == "localhost"
    for entry in no_proxy.split(","):
        with suppress(ValueError):
            if "/" in entry and address in ip_network(entry.strip(), strict=False):
                return True
    return address.is_loopback


async def load_transport(kubeconfig: str | None, context: str | None = None) -> tuple[HttpTransport, str | None]:
    """Return the transport to the API server, and the namespace of the kubeconfig's context, if any.

    Without `kubeconfig`, $KUBECONFIG and then ~/.kube/config apply, as for kubectl; if there is none, a pod uses its
    ServiceAccount. `context` is the name of a context in it; None: the current one.

    Raises:
        ConfigError: no usable configuration; the message names what was tried.
    """
    _patch_tls_buffer()
    configuration = Configuration()
    _patch_connection_limit(configuration)
    where = kubeconfig or os.environ.get("KUBECONFIG") or "~/.kube/config"
    if kubeconfig is None and "KUBERNETES_SERVICE_HOST" in os.environ and not _is_there(where):
        if context:
            raise ConfigError(
                f"--kubecontext {context} needs --kubeconfig PATH: a pod's ServiceAccount has no contexts"
            )
        with Translated((ConfigException, OSError), ConfigError, "cannot use the pod's ServiceAccount"):
            load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]  # the library has no types
        return HttpTransport(_endpoint_of(configuration)), None
    if not _is_there(where):
        raise ConfigError(f"kubeconfig {where} does not exist: set --kubeconfig PATH, or run the agent in a pod")
    try:
        loader = await load_kube_config(
            config_file=where,
            context=context or _current_context(where),
            client_configuration=configuration,
            persist_config=False,
        )
    # The library does not wrap the errors of its parser and of exec plugins.
    except Exception as e:
        raise ConfigError(f"cannot use kubeconfig {where}: {' '.join(str(e).split())}") from e
    user = vars(loader)["_user"].value if vars(loader)["_user"] else {}
    if "exec_plugin_expiry" in vars(loader) or "tokenFile" in user:
        configuration.refresh_api_key_hook = partial(_renew_token, loader, asyncio.Lock())
    used: JsonDict = loader.current_context or {}
    namespace: str | None = used.get("context", {}).get("namespace") or None
    return HttpTransport(_endpoint_of(configuration, _impersonate(user))), namespace


def _impersonate(user: JsonDict) -> list[tuple[str, str]]:
    """Return the headers by which a user of a kubeconfig acts as another one; the library does not know these fields.

    Source: Kubernetes v1.34, staging/src/k8s.io/client-go/transport/round_trippers.go.
    """
    if not user.get("as"):
        return []
    extra = {f"Extra-{quote(key, _IN_HEADERS)}": values for key, values in (user.get("as-user-extra") or {}).items()}
    fields = {"User": [user["as"]], "Group": user.get("as-groups"), "Uid": user.get("as-uid") and [user["as-uid"]]}
    return [(f"Impersonate-{name}", value) for name, values in (fields | extra).items() for value in values or []]


async def _renew_token(loader: KubeConfigLoader, renewing: asyncio.Lock, configuration: Configuration) -> None:
    """Read a file's token again; ask an exec plugin before its token expires: after a quarter of an hour in EKS."""
    async with renewing:
        expiry = vars(loader).get("exec_plugin_expiry")
        # In its last five minutes, the library would ask for each request.
        if expiry is None or expiry - SystemClock().now() < timedelta(seconds=10):
            await loader.load_and_set(configuration)


def _current_context(where: str) -> str | None:
    """Return the current context of the first file that sets one, as kubectl does; the library takes the last one's.

    Source: Kubernetes v1.34, "Organizing Cluster Access Using kubeconfig Files" (rules of merging).
    """
    texts = (Path(path).expanduser().read_text() for path in where.split(os.pathsep) if _is_there(path))
    # An error quotes the lines of a string, and not of a file: there may be a token in them.
    return next(filter(None, (yaml.safe_load(StringIO(text)).get("current-context") for text in texts)), None)


def _is_there(where: str) -> bool:
    """Return whether a file in `where`, a list as in $KUBECONFIG, exists; the library ignores missing ones."""
    return any(Path(path).expanduser().is_file() for path in where.split(os.pathsep))

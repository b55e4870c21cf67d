"""What a node agent was started with: flags and environment, as one frozen value.

Knows defaults and what a value may be. Does not know the command line's words
(`nodeagent.cli.serve`) or the ConfigMap's content (`nodeagent.config.parse`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Final

from core.errors import ConfigError

__all__ = [
    "DEFAULT_NAMESPACE",
    "ListenAddress",
    "RepositoryControllerMode",
    "Settings",
    "node_name_from",
    "parse_address",
]

DEFAULT_NAMESPACE: Final = "velero"
_LARGEST_PORT: Final = 65535


class RepositoryControllerMode(StrEnum):
    """Whether this agent, while it is the dispatcher, makes BackupRepositories ready."""

    AUTO = "auto"
    """It does unless a Velero server's Deployment is in the namespace."""
    ON = "on"
    OFF = "off"


@dataclass(frozen=True)
class ListenAddress:
    """Where to listen; `host` None means all addresses of the machine."""

    host: str | None
    port: int

    def __str__(self) -> str:
        host = self.host or ""
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"


def parse_address(text: str) -> ListenAddress:
    """Return the address that `text`, such as `:8085`, `127.0.0.1:8085` or `[::1]:8085`, names.

    Raises:
        ValueError: `text` names none.
    """
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not port.isdecimal() or int(port) > _LARGEST_PORT:
        raise ValueError(f"{text!r} is not an address such as :8085 or 127.0.0.1:8085")
    return ListenAddress(host or None, int(port))


@dataclass(frozen=True)
class Settings:
    """Everything `serve` was told.

    `namespace` is empty where neither flag nor environment name one: the kubeconfig's then
    counts, else `DEFAULT_NAMESPACE`. `config_map_name` and `backup_repository_config_map` are
    empty where none is named. `datamover_names` are the values of `spec.datamover` that this
    agent carries out. The defaults of the first two timeouts are the peer's. `node_gone_after` is
    how long a node may be not Ready before its loads are ended. `client_qps` requests a second
    go to the API server in the long run, `client_burst` at once: an agent alone asks a few a
    minute, the dispatcher some hundred a second while it admits a large backup.
    """

    node_name: str
    namespace: str = ""
    kubeconfig: str | None = None
    config_map_name: str = ""
    backup_repository_config_map: str = ""
    prepare_timeout: timedelta = timedelta(minutes=30)
    resource_timeout: timedelta = timedelta(minutes=10)
    node_gone_after: timedelta = timedelta(minutes=5)
    metrics_address: ListenAddress = ListenAddress(None, 8085)
    log_level: str = "info"
    log_format: str = "text"
    datamover_names: frozenset[str] = frozenset({"velero", ""})
    repository_controller: RepositoryControllerMode = RepositoryControllerMode.AUTO
    lease_duration: timedelta = timedelta(seconds=15)
    client_qps: float = 400.0
    client_burst: int = 800


def node_name_from(flag: str, environ: Mapping[str, str], *, kubeconfig: str | None) -> str:
    """Return the name of the node this agent serves: the flag's, else NODE_NAME's.

    Raises:
        ConfigError: neither is there; the message tells a pod without the variable from a
            process outside of any cluster.
    """
    name = flag or environ.get("NODE_NAME", "")
    if name:
        return name
    inside = "KUBERNETES_SERVICE_HOST" in environ
    if not inside and not kubeconfig and not environ.get("KUBECONFIG"):
        raise ConfigError(
            "this is no pod of a cluster: run the agent from deploy/, "
            "or give --kubeconfig FILE and --node-name NODE to run it by hand"
        )
    raise ConfigError(
        "which node to serve is not known: set NODE_NAME from spec.nodeName as deploy/agent/daemonset.yaml does, "
        "or give --node-name NODE"
    )

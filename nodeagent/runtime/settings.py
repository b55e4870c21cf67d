"""The settings a node agent is started with: flags and environment as one frozen value."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Final

from core.errors import ConfigError
from core.models.names import BLOCK_DATA_MOVER, BUILT_IN_DATA_MOVERS

__all__ = [
    "DEFAULT_NAMESPACE",
    "ListenAddress",
    "MaintenanceSwitch",
    "RepositoryControllerMode",
    "Settings",
    "node_name_from",
    "parse_address",
]

DEFAULT_NAMESPACE: Final = "velero"
_LARGEST_PORT: Final = 65535


class RepositoryControllerMode(StrEnum):
    """Whether the leader makes BackupRepositories ready."""

    AUTO = "auto"
    """Yes, unless a Velero server's Deployment is in the namespace."""
    ON = "on"
    OFF = "off"


class MaintenanceSwitch(StrEnum):
    """Whether the leader runs the maintenance of backup repositories; never where there is a Velero server."""

    AUTO = "auto"
    """An hour after the last sign of a server, and not where another cluster maintains the repository."""
    ON = "on"
    OFF = "off"


@dataclass(frozen=True)
class ListenAddress:
    """An address to listen on; `host` None means all addresses of the machine."""

    host: str | None
    port: int

    def __str__(self) -> str:
        host = self.host or ""
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"


def parse_address(text: str) -> ListenAddress:
    """Parse an address such as `:8085`, `127.0.0.1:8085` or `[::1]:8085`.

    Raises:
        ValueError: `text` is not an address.
    """
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not port.isdecimal() or int(port) > _LARGEST_PORT:
        raise ValueError(f'not an address such as :8085 or 127.0.0.1:8085: "{text}"')
    return ListenAddress(host or None, int(port))


@dataclass(frozen=True)
class Settings:
    """The settings of `nodeagent serve`.

    Attributes:
        namespace: empty if neither flag nor environment names one; then the kubeconfig's
            namespace counts, else `DEFAULT_NAMESPACE`.
        kubecontext: empty for the kubeconfig's current context.
        config_map_name: empty if no ConfigMap is named; so are `backup_repository_config_map` and
            `maintenance_config_map`.
        maintenance_frequency: `spec.maintenanceFrequency` of repositories that have none; not positive: 1 hour.
        mover_service_account: the account of mover pods; empty: the agent's own.
        prepare_timeout: from Accepted to Prepared. Default: Velero's; so is the default of
            `resource_timeout`. Source: Velero v1.18, pkg/cmd/cli/nodeagent/server.go.
        node_gone_after: how long a node may be not Ready before its transfers are Failed.
        status_address: where `/status` is served; None: where the metrics are.
        datamover_names: the values of `spec.datamover` that this agent handles.
        client_qps: sustained requests per second to the API server, and `client_burst` at once:
            an agent makes a few per minute, the leader about a hundred per second while it
            admits a large backup.
    """

    node_name: str
    namespace: str = ""
    kubeconfig: str | None = None
    kubecontext: str = ""
    config_map_name: str = ""
    backup_repository_config_map: str = ""
    maintenance_config_map: str = ""
    mover_service_account: str = ""
    prepare_timeout: timedelta = timedelta(minutes=30)
    resource_timeout: timedelta = timedelta(minutes=10)
    node_gone_after: timedelta = timedelta(minutes=5)
    metrics_address: ListenAddress = ListenAddress(None, 8085)
    status_address: ListenAddress | None = None
    log_level: str = "info"
    log_format: str = "text"
    datamover_names: frozenset[str] = BUILT_IN_DATA_MOVERS | {BLOCK_DATA_MOVER}
    repository_controller: RepositoryControllerMode = RepositoryControllerMode.AUTO
    maintenance: MaintenanceSwitch = MaintenanceSwitch.AUTO
    maintenance_frequency: timedelta = timedelta()
    lease_duration: timedelta = timedelta(seconds=15)
    client_qps: float = 400.0
    client_burst: int = 800


def node_name_from(flag: str, environ: Mapping[str, str], *, kubeconfig: str | None) -> str:
    """Return the name of the agent's node: the flag's value, else NODE_NAME's.

    Raises:
        ConfigError: neither is set; the message differs for a pod without the variable and for a
            process outside of a cluster.
    """
    name = flag or environ.get("NODE_NAME", "")
    if name:
        return name
    inside = "KUBERNETES_SERVICE_HOST" in environ
    if not inside and not kubeconfig and not environ.get("KUBECONFIG"):
        raise ConfigError(
            "not running in a pod: install the agent from deploy/, "
            "or set --kubeconfig PATH and --node-name NAME to run it outside of a cluster"
        )
    raise ConfigError(
        "unknown node name: set NODE_NAME from spec.nodeName as deploy/agent/daemonset.yaml does, "
        "or set --node-name NAME"
    )

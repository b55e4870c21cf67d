"""What mover pods inherit: reads the DaemonSets of the node agent.

Knows their names, and which of them must be there. Does not know what is inherited of them
(`exposer.template`).
"""

import logging
from dataclasses import dataclass, replace

from core.errors import ConfigError, ContractError
from core.kube.client import KubeClient
from core.kube.errors import KubeError
from core.kube.resources import DAEMON_SETS
from core.models.names import AGENT_DAEMONSET, AGENT_DAEMONSET_WINDOWS
from exposer.template import AgentTemplate
from nodeagent.config.parse import ParsedConfig
from nodeagent.config.repository import RepositoryConfig
from nodeagent.config.source import read_config
from nodeagent.runtime.preflight import check_cluster
from nodeagent.runtime.settings import Settings

__all__ = ["Plan", "prepare", "read_template"]


_log = logging.getLogger(__name__)


async def read_template(client: KubeClient, namespace: str) -> AgentTemplate:
    """Return what movers inherit, on Linux nodes and, where it has a DaemonSet, on Windows nodes.

    Raises:
        ConfigError: there is no DaemonSet to inherit from; one line says what is missing.
    """
    linux = await _read(client, namespace, AGENT_DAEMONSET)
    if linux is None:
        place = f"DaemonSet {namespace}/{AGENT_DAEMONSET}"
        raise ConfigError(f"{place} does not exist: data movers take their image and volumes from it; see deploy/")
    return replace(linux, windows=await _read(client, namespace, AGENT_DAEMONSET_WINDOWS))


async def _read(client: KubeClient, namespace: str, name: str) -> AgentTemplate | None:
    try:
        daemonset = await client.read(DAEMON_SETS, namespace, name)
    except KubeError as e:
        raise ConfigError(f"DaemonSet {namespace}/{name} cannot be read: {e}") from e
    try:
        return None if daemonset is None else AgentTemplate.parse(daemonset)
    except ContractError as e:
        raise ConfigError(str(e)) from e


@dataclass(frozen=True)
class Plan:
    """What an agent is built from, once all of it was read and found usable.

    `namespace` is where the agent, its mover pods and the loads live.
    """

    settings: Settings
    namespace: str
    config: ParsedConfig
    template: AgentTemplate


async def prepare(client: KubeClient, settings: Settings, namespace: str) -> Plan:
    """Read all that an agent is built from.

    Raises:
        ConfigError: the cluster, the configuration or the DaemonSet cannot be used; one line
            says what is missing.
    """
    await check_cluster(client, namespace)
    parsed = await read_config(client, namespace, settings.config_map_name)
    for warning in parsed.warnings:
        _log.warning("configuration: %s", warning)
    await RepositoryConfig(client, namespace, settings.backup_repository_config_map).check()
    return Plan(settings, namespace, parsed, await read_template(client, namespace))

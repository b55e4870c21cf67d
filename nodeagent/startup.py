"""The inputs of a node agent: what it reads before it is built, and the parts that its halves share."""

import logging
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from core.clock import Clock
from core.errors import ConfigError
from core.kube.client import KubeClient
from core.kube.errors import KubeError, ServerError, ThrottledError
from core.kube.types import Pod
from exposer.causes import CauseFinder
from exposer.template import AgentTemplate
from nodeagent.config.current import LiveConfig
from nodeagent.config.expose_settings import read_cluster, read_template
from nodeagent.config.parse import ParsedConfig, read_config
from nodeagent.config.repositories import MaintenanceConfig, RepositoryConfig
from nodeagent.metrics import Metrics
from nodeagent.runtime.api_server import ClockSkew
from nodeagent.runtime.own_pod import OwnPod, find_own_pod
from nodeagent.runtime.permissions import MOVER_PERMISSIONS, agent_permissions, copy_permissions
from nodeagent.runtime.preflight import check_cluster, check_permissions
from nodeagent.runtime.settings import Settings
from nodeagent.transfers.kinds.base import Kind
from nodeagent.transfers.status import EventLog

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AgentSpec:
    """What an agent is built from, read and validated.

    `namespace` has the agent, its mover pods and the transfers. `cluster` identifies the cluster in snapshots, and
    `pod` is the agent's own; None: it is not known.
    """

    settings: Settings
    namespace: str
    config: ParsedConfig
    template: AgentTemplate
    cluster: str | None = None
    pod: Pod | None = None


@dataclass(frozen=True)
class AgentParts:
    """The parts that the leader's and the node's half share."""

    spec: AgentSpec
    client: KubeClient
    clock: Clock
    metrics: Metrics
    events: EventLog
    own_pod: OwnPod
    live: LiveConfig
    causes: CauseFinder
    skew: ClockSkew
    kinds: Sequence[Kind[Any]]


async def read_spec(client: KubeClient, settings: Settings, namespace: str) -> AgentSpec:
    """Read everything that an agent is built from; ConfigError, in one line: something is missing or invalid."""
    permissions = agent_permissions(
        settings.config_map_name, settings.backup_repository_config_map, settings.maintenance_config_map
    )
    await check_cluster(client, namespace, permissions)
    parsed = await read_config(client, namespace, settings.config_map_name)
    if parsed.fatal:
        errors = "; ".join(map(str, parsed.fatal))
        raise ConfigError(f"ConfigMap {namespace}/{settings.config_map_name}: {errors}")
    if not (parsed.config.own.mover_service_account or settings.mover_service_account):
        await check_permissions(client, namespace, MOVER_PERMISSIONS)
    copies = copy_permissions(parsed.config.copied_secrets, parsed.config.copied_config_maps)
    await check_permissions(client, namespace, copies)
    for warning in parsed.warnings:
        _log.warning("configuration: %s", warning)
    await RepositoryConfig(client, namespace, settings.backup_repository_config_map).check()
    await MaintenanceConfig(client, namespace, settings.maintenance_config_map).check()
    template = await read_template(client, namespace)
    try:
        pod = await find_own_pod(client, namespace, node=settings.node_name, hostname=socket.gethostname())
    except (ServerError, ThrottledError) as e:
        # Movers might get an image with another program as long as the agent runs.
        raise ConfigError(f"the agent's pod cannot be read: {e}") from e
    except KubeError as e:
        _log.warning("the agent's pod cannot be read, data movers get the image of the DaemonSet: %s", e)
        pod = None
    template = template if pod is None else template.with_image_of(pod)
    return AgentSpec(settings, namespace, parsed, template, await read_cluster(client), pod)

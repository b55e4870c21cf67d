"""The inputs of a node agent: what it reads before it is built, and the parts that its halves share.

Knows what must exist before an agent can start. Does not know what mover pods inherit from a
DaemonSet (`exposer.template`), nor how an agent is built (`nodeagent.app`).
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from core.clock import Clock, SystemClock
from core.errors import ConfigError, ContractError
from core.kube.client import KubeClient
from core.kube.errors import ForbiddenError, KubeError, MalformedObjectError, UnreachableError
from core.kube.resources import DAEMON_SETS, NAMESPACES
from core.models.base import JsonDict
from core.models.names import AGENT_DAEMONSET, AGENT_DAEMONSET_WINDOWS, CLUSTER_NAMESPACE, is_ours
from core.models.units import parse_duration
from exposer.causes import CauseFinder
from exposer.settings import ExposeSettings, MoverOptions, PodSettings
from exposer.template import AgentTemplate
from nodeagent.config.live import LiveConfig
from nodeagent.config.maintenance import MaintenanceConfig
from nodeagent.config.parse import ParsedConfig
from nodeagent.config.repository import RepositoryConfig
from nodeagent.config.source import read_config
from nodeagent.runtime.clock_skew import ClockSkew
from nodeagent.runtime.metrics import Metrics
from nodeagent.runtime.own_pod import OwnPod
from nodeagent.runtime.permissions import MOVER_PERMISSIONS, agent_permissions, copy_permissions
from nodeagent.runtime.preflight import check_cluster, check_permissions
from nodeagent.runtime.settings import Settings
from nodeagent.transfers.events import EventLog
from nodeagent.transfers.kinds.base import Kind

__all__ = ["AgentParts", "AgentSpec", "build_clock", "read_cluster", "read_spec", "read_template"]


_log = logging.getLogger(__name__)

_CLOCK_OFFSET: Final = "NODE_AGENT_CLOCK_OFFSET"
"""Only tests set it: a duration by which the wall clock is ahead, or behind if it is negative."""


@dataclass(frozen=True)
class AgentSpec:
    """What an agent is built from, read and validated.

    `namespace` is that of the agent, its mover pods and the transfers. `cluster` identifies the cluster in snapshots;
    empty: it is not known.
    """

    settings: Settings
    namespace: str
    config: ParsedConfig
    template: AgentTemplate
    cluster: str = ""

    @property
    def expose_defaults(self) -> ExposeSettings:
        """The expose settings that no configuration changes."""
        options = MoverOptions(
            resource_timeout=self.settings.resource_timeout,
            log_level=self.settings.log_level,
            log_format=self.settings.log_format,
            cluster=self.cluster,
        )
        pod = PodSettings(service_account=self.settings.mover_service_account)
        return ExposeSettings(self.template, pod, options)


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


def build_clock(environment: Mapping[str, str]) -> SystemClock:
    """Return the machine's clock, with its wall clock moved if a test asks for that in `environment`.

    Raises:
        ConfigError: the offset is no duration.
    """
    text = environment.get(_CLOCK_OFFSET, "")
    if not text:
        return SystemClock()
    try:
        offset = parse_duration(text)
    except ValueError as e:
        raise ConfigError(f"{_CLOCK_OFFSET}: {e}") from e
    _log.warning("wall clock moved by %s, as %s asks: for tests only", text, _CLOCK_OFFSET)
    return SystemClock(offset)


async def read_spec(client: KubeClient, settings: Settings, namespace: str) -> AgentSpec:
    """Read everything that an agent is built from.

    Raises:
        ConfigError: the cluster, the configuration or the DaemonSet is missing or invalid; the
            message is one line.
    """
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
    return AgentSpec(settings, namespace, parsed, template, await read_cluster(client))


async def read_cluster(client: KubeClient) -> str:
    """Return what identifies the cluster: the UID of its namespace `kube-system`; empty where it cannot be read.

    Raises:
        ConfigError: the API server does not answer.
    """
    try:
        namespace = await client.read(NAMESPACES, "", CLUSTER_NAMESPACE)
    except (ForbiddenError, MalformedObjectError):
        # The check of the permissions has logged what is missing.
        return ""
    except UnreachableError as e:
        raise ConfigError(f"Namespace {CLUSTER_NAMESPACE} cannot be read: {e}") from e
    except KubeError as e:
        _log.warning("Namespace %s cannot be read, snapshots do not name the cluster: %s", CLUSTER_NAMESPACE, e)
        return ""
    return "" if namespace is None else str(namespace["metadata"].get("uid", ""))


async def read_template(client: KubeClient, namespace: str) -> AgentTemplate:
    """Return what mover pods inherit, and whether Velero has a DaemonSet for Windows nodes.

    Raises:
        ConfigError: there is no DaemonSet to inherit from; the message is one line.
    """
    found = await _read_daemonset(client, namespace, AGENT_DAEMONSET)
    if found is None:
        place = f"DaemonSet {namespace}/{AGENT_DAEMONSET}"
        raise ConfigError(f"{place} does not exist: data movers take their image and volumes from it; see deploy/")
    windows = await _read_daemonset(client, namespace, AGENT_DAEMONSET_WINDOWS)
    try:
        # One of an earlier version of ours moves nothing.
        return replace(AgentTemplate.parse(found), windows=windows is not None and not is_ours(windows))
    except ContractError as e:
        raise ConfigError(str(e)) from e


async def _read_daemonset(client: KubeClient, namespace: str, name: str) -> JsonDict | None:
    try:
        return await client.read(DAEMON_SETS, namespace, name)
    except KubeError as e:
        raise ConfigError(f"DaemonSet {namespace}/{name} cannot be read: {e}") from e

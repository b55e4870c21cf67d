"""What mover pods inherit: the DaemonSet of the agents, their settings, and the cluster that they are in.

Does not know how a DaemonSet is read into a template (`exposer.template`), nor which keys of the configuration change
a setting (`nodeagent.config.expose_settings`).
"""

import logging
from dataclasses import replace

from core.errors import ConfigError, ContractError
from core.kube.client import KubeClient
from core.kube.errors import ForbiddenError, KubeError, MalformedObjectError, UnreachableError
from core.kube.resources import DAEMON_SETS, NAMESPACES
from core.kube.types import DaemonSet
from core.models.names import AGENT_DAEMONSET, AGENT_DAEMONSET_WINDOWS, CLUSTER_NAMESPACE, is_ours
from exposer.settings import ExposeSettings, MoverOptions, PodSettings
from exposer.template import AgentTemplate
from nodeagent.runtime.settings import Settings

__all__ = ["build_defaults", "read_cluster", "read_template"]

_log = logging.getLogger(__name__)


def build_defaults(settings: Settings, template: AgentTemplate, cluster: str = "") -> ExposeSettings:
    """Return the expose settings that no configuration changes; `cluster` identifies the cluster in snapshots."""
    options = MoverOptions(
        resource_timeout=settings.resource_timeout,
        log_level=settings.log_level,
        log_format=settings.log_format,
        cluster=cluster,
    )
    return ExposeSettings(template, PodSettings(service_account=settings.mover_service_account), options)


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


async def _read_daemonset(client: KubeClient, namespace: str, name: str) -> DaemonSet | None:
    try:
        return await client.read(DAEMON_SETS, namespace, name)
    except KubeError as e:
        raise ConfigError(f"DaemonSet {namespace}/{name} cannot be read: {e}") from e

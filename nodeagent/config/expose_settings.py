"""The settings of exposers: translated from the active configuration, and inherited from the agents' DaemonSet."""

import logging
from dataclasses import replace
from typing import cast

from core.errors import ConfigError, ContractError, Translated
from core.kube.client import KubeClient
from core.kube.errors import ForbiddenError, KubeError, MalformedObjectError, UnreachableError
from core.kube.resources import CONFIG_MAPS, DAEMON_SETS, NAMESPACES, SECRETS
from core.kube.types import DaemonSet, NodeRequirement
from core.models.names import AGENT_DAEMONSET, AGENT_DAEMONSET_WINDOWS, CLUSTER_NAMESPACE, is_ours
from core.models.phases import RetryRules
from core.models.transfers import KIND_NAMES
from exposer import settings as expose
from exposer.template import AgentTemplate
from nodeagent.config.keys import INHERIT, AffinityMode, AgentConfig, BackupPVC, RestorePVC
from nodeagent.config.own_keys import rules_of_kind
from nodeagent.config.value_types import LabelSelector
from nodeagent.runtime.settings import Settings


def build_expose_settings(
    defaults: expose.ExposeSettings, config: AgentConfig, *, priority_class: str | None, cache_limit_mib: int
) -> expose.ExposeSettings:
    """Return `defaults`, which no configuration changes, with every setting that `config` determines.

    `priority_class` is of mover pods, None: the default; `cache_limit_mib` of cache volumes, 0: there are none.
    """
    cache = config.cache_pvc
    return replace(
        defaults,
        mover=replace(defaults.mover, require_attributes=config.own.require_file_attributes, method=config.own.mover),
        pod=_pod_settings(defaults.pod, config, priority_class),
        nodes=_node_rules(config),
        backup_pvcs={source: _backup_pvc(entry) for source, entry in config.backup_pvc.items()},
        excluded_metadata=tuple(config.own.excluded_metadata),
        repository_volumes=tuple(
            expose.RepositoryMount(one.mount_path, one.to_wire()) for one in config.own.repository_volumes
        ),
        ignore_delay_binding=config.restore_pvc.ignore_delay_binding,
        restore_copies=_copies(config.restore_pvc),
        cache=expose.CacheRule(cache.storage_class, cache_limit_mib, cache.resident_threshold_in_mb)
        if cache.storage_class
        else None,
        compression=expose.CompressionRules(
            config.own.compression.default, dict(config.own.compression.per_storage_class)
        ),
        ignore_files_namespaces=frozenset(config.own.ignore_files_namespaces),
        exclusions=expose.ExclusionRules(
            tuple(
                expose.ExclusionRule(rule.exclusions, frozenset(rule.namespaces), frozenset(rule.storage_classes))
                for rule in config.own.exclude.rules
            ),
            frozenset(config.own.exclude.annotation_namespaces),
        ),
        read_all_files_namespaces=frozenset(config.own.read_all_files_namespaces),
        block_classes=frozenset(config.own.block_storage_classes),
        retries=_retries(config),
    )


def _retries(config: AgentConfig) -> dict[str, RetryRules]:
    """Return the rules of the kinds that have not the default ones; the deadline means nothing to an exposer."""
    every = {kind: rules_of_kind(config.own.retry, kind, velero_server=True) for kind in KIND_NAMES}
    return {kind: rules for kind, rules in every.items() if rules != RetryRules()}


def _backup_pvc(entry: BackupPVC) -> expose.BackupPVCSettings:
    return expose.BackupPVCSettings(
        storage_class=entry.storage_class or None,
        read_only=entry.read_only,
        one_pod=entry.read_write_once_pod,
        no_relabeling=entry.spc_no_relabeling,
        annotations=dict(entry.annotations),
        copies=_copies(entry),
    )


def _copies(pvc: BackupPVC | RestorePVC) -> tuple[str, ...]:
    """Return the copied objects, with their kinds, in one order: transfers with several never wait for each other."""
    named = ((SECRETS, pvc.secret_names), (CONFIG_MAPS, pvc.config_map_names))
    return tuple(sorted({f"{resource.kind}/{name}" for resource, names in named for name in names}))


def _pod_settings(defaults: expose.PodSettings, config: AgentConfig, priority_class: str | None) -> expose.PodSettings:
    inherit = config.tolerations == INHERIT
    return expose.PodSettings(
        service_account=config.own.mover_service_account or defaults.service_account,
        priority_class_name=priority_class,
        resources=config.pod_resources.to_wire(),
        labels=dict(config.pod_labels),
        annotations=dict(config.pod_annotations),
        tolerations=() if inherit else tuple(t.to_wire() for t in config.tolerations if not isinstance(t, str)),
        inherit_tolerations=inherit,
        privileged_fs_backup=config.privileged_fs_backup,
    )


def _node_rules(config: AgentConfig) -> expose.PlacementRules:
    rules = tuple(
        expose.PlacementRule(tuple(node_requirements(entry.node_selector)), entry.storage_class or None)
        for entry in config.load_affinity
    )
    return expose.PlacementRules(rules, any_of=config.load_affinity_mode is AffinityMode.ANY)


def node_requirements(selector: LabelSelector) -> list[NodeRequirement]:
    """Return a node selector as the `matchExpressions` of a pod."""
    labels: list[NodeRequirement] = [
        {"key": key, "operator": "In", "values": [value]} for key, value in sorted(selector.match_labels.items())
    ]
    expressions = [requirement.model_dump(mode="json", by_alias=True) for requirement in selector.match_expressions]
    # The API server rejects an empty list of values beside Exists.
    return labels + [
        cast("NodeRequirement", {key: value for key, value in one.items() if value != []}) for one in expressions
    ]


_log = logging.getLogger(__name__)


def build_defaults(settings: Settings, template: AgentTemplate, cluster: str | None = None) -> expose.ExposeSettings:
    """Return the expose settings that no configuration changes; `cluster` identifies the cluster in snapshots."""
    options = expose.MoverOptions(
        resource_timeout=settings.resource_timeout,
        log_level=settings.log_level,
        log_format=settings.log_format,
        cluster=cluster,
    )
    return expose.ExposeSettings(template, expose.PodSettings(service_account=settings.mover_service_account), options)


async def read_cluster(client: KubeClient) -> str | None:
    """Return what identifies the cluster: the UID of its namespace `kube-system`; None where it cannot be read.

    Raises:
        ConfigError: the API server does not answer.
    """
    try:
        namespace = await client.read(NAMESPACES, "", CLUSTER_NAMESPACE)
    except (ForbiddenError, MalformedObjectError):
        # The check of the permissions has logged what is missing.
        return None
    except UnreachableError as e:
        raise ConfigError(f"Namespace {CLUSTER_NAMESPACE} cannot be read: {e}") from e
    except KubeError as e:
        _log.warning("Namespace %s cannot be read, snapshots do not name the cluster: %s", CLUSTER_NAMESPACE, e)
        return None
    return None if namespace is None else namespace["metadata"]["uid"]


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
    with Translated(KubeError, ConfigError, f"DaemonSet {namespace}/{name} cannot be read"):
        return await client.read(DAEMON_SETS, namespace, name)

"""The check of a configuration before an agent uses it, for `nodeagent check-config`: what is printed. Reads only."""

import json
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from core.errors import AgentError, ConfigError, Translated
from core.kube.client import KubeClient, Selection
from core.kube.errors import KubeError
from core.kube.resources import DAEMON_SETS, NODES, PODS, PRIORITY_CLASSES, STORAGE_CLASSES, Resource
from core.kube.types import Object, StorageClass
from core.kube.velero_server import flags_of
from core.models.base import JsonDict
from core.models.names import AGENT_DAEMONSET, AGENT_SELECTOR, CONFIG_ANNOTATION, NO_CONFIG
from core.text import guess
from nodeagent.config.keys import NO_QUEUE_LENGTH, AgentConfig, LoadAffinity
from nodeagent.config.own_keys import OWN_KEY
from nodeagent.config.parse import FLAG, ParsedConfig, parse_config, read_config, read_config_map, read_document
from nodeagent.config.repositories import FLAG as MAINTENANCE_FLAG
from nodeagent.config.repositories import ParsedMaintenance, parse_maintenance, read_maintenance
from nodeagent.config.schema import ConfigFinding, show_key
from nodeagent.config.value_types import LabelSelector
from nodeagent.runtime.connection import ClusterAccess, connect
from nodeagent.runtime.own_pod import shown
from nodeagent.runtime.preflight import judge_definitions, read_definitions


async def check_names(client: KubeClient, config: AgentConfig) -> list[ConfigFinding]:
    """Return a finding for each name in `config` that the cluster has not, and for each list that is rejected."""
    findings: list[ConfigFinding] = []
    if names := [(path, name) for path, name in _storage_classes(config) if name]:
        check = partial(_check_storage_classes, names, config.cache_pvc.storage_class)
        findings += await _check(client, STORAGE_CLASSES, "storage classes", check)
    rules = config.load_concurrency.per_node_config
    selectors = [(f"loadConcurrency.perNodeConfig[{n}]", rule.node_selector) for n, rule in enumerate(rules)]
    return findings + await _check_pods(client, config.priority_class_name, config.load_affinity, selectors)


async def check_queue_length(client: KubeClient, config: AgentConfig) -> list[ConfigFinding]:
    """Return a finding if `prepareQueueLength` is not set beside Velero 1.19; none where that is not known."""
    if config.load_concurrency.prepare_queue_length is not None:
        return []
    try:
        beside = judge_definitions(await read_definitions(client)).next_velero
    except AgentError:
        return []
    return [ConfigFinding("loadConcurrency.prepareQueueLength", NO_QUEUE_LENGTH)] if beside else []


def _storage_classes(config: AgentConfig) -> Iterator[tuple[str, str]]:
    for index, entry in enumerate(config.load_affinity):
        yield f"loadAffinity[{index}].storageClass", entry.storage_class
    for source, claim in config.backup_pvc.items():
        path = f"backupPVC{show_key(source)}"
        yield path, source
        yield f"{path}.storageClass", claim.storage_class
    own, above = config.own, f"[{json.dumps(OWN_KEY)}]"
    for source in own.compression.per_storage_class:
        yield f"{above}.compression.perStorageClass{show_key(source)}", source
    for index, rule in enumerate(own.exclude.rules):
        yield from ((f"{above}.exclude.rules[{index}].storageClasses", name) for name in rule.storage_classes)
    yield from ((f"{above}.blockStorageClasses", name) for name in own.block_storage_classes)
    yield f"{above}.verification.restoreTestStorageClass", own.verification.restore_test_storage_class
    yield "cachePVC.storageClass", config.cache_pvc.storage_class


def _check_storage_classes(
    named: Iterable[tuple[str, str]], cache: str, listed: Sequence[StorageClass]
) -> list[ConfigFinding]:
    known = {obj["metadata"]["name"]: obj for obj in listed}
    found = [
        ConfigFinding(path, f"StorageClass {name} does not exist", guess(name, known))
        for path, name in named
        if name not in known
    ]
    policy = known[cache].get("reclaimPolicy", "Delete") if cache in known else "Delete"
    if policy != "Delete":
        problem = f"StorageClass {cache} has reclaimPolicy {policy}: no cache volume without Delete"
        found.append(ConfigFinding("cachePVC.storageClass", problem))
    return found


async def check_maintenance_names(client: KubeClient, parsed: ParsedMaintenance) -> list[ConfigFinding]:
    """Return a finding for each name in the configuration of maintenance Jobs that does not exist in the cluster."""
    findings: list[ConfigFinding] = []
    for key, entry in parsed.entries.items():
        above = f"{show_key(key).removeprefix('.')}."
        findings += await _check_pods(client, entry.priority_class_name, entry.load_affinity, above=above)
    return findings


async def _check_pods(
    client: KubeClient,
    priority_class: str,
    affinity: Iterable[LoadAffinity],
    selectors: Iterable[tuple[str, LabelSelector]] = (),
    *,
    above: str = "",
) -> list[ConfigFinding]:
    """Return the findings about the priority class and the nodes of pods; `above` is what precedes their paths."""
    findings: list[ConfigFinding] = []
    if priority_class:
        check = partial(_check_priority_class, priority_class, above)
        findings += await _check(client, PRIORITY_CLASSES, "priority classes", check)
    paths = [*selectors, *((f"{above}loadAffinity[{n}]", entry.node_selector) for n, entry in enumerate(affinity))]
    if chosen := [(f"{path}.nodeSelector", selector) for path, selector in paths if not selector.empty]:
        findings += await _check(client, NODES, "nodes", partial(_check_selectors, chosen))
    return findings


def _check_priority_class(name: str, above: str, listed: Sequence[Object]) -> list[ConfigFinding]:
    known = {obj["metadata"]["name"] for obj in listed}
    if name in known:
        return []
    problem = f"PriorityClass {name} does not exist: {'Jobs' if above else 'data movers'} get the default priority"
    return [ConfigFinding(f"{above}priorityClassName", problem, guess(name, known))]


def _check_selectors(selectors: Iterable[tuple[str, LabelSelector]], listed: Sequence[Object]) -> list[ConfigFinding]:
    labels = [obj["metadata"].get("labels") or {} for obj in listed]
    return [
        ConfigFinding(path, f"matches none of the {len(labels)} nodes")
        for path, selector in selectors
        if not any(map(selector.matches, labels))
    ]


async def _check(
    client: KubeClient, resource: Resource, what: str, check: Callable[[list[Any]], list[ConfigFinding]]
) -> list[ConfigFinding]:
    try:
        return check(await client.list(Selection(resource)))
    except KubeError as e:
        return [ConfigFinding("", f"{what} could not be checked: {e}")]


@dataclass(frozen=True)
class CheckRequest:
    """What is checked, and how.

    `path` is a file, or "" for the ConfigMap in the cluster. `maintenance` selects the one of maintenance Jobs.
    `strict` treats warnings as errors. `offline` accesses no cluster.
    """

    path: str
    access: ClusterAccess
    config_map_name: str | None = None
    maintenance: bool = False
    strict: bool = False
    offline: bool = False
    as_json: bool = False


@dataclass(frozen=True)
class _CheckResult:
    """The findings about the document at `source`: errors, and warnings about what is tolerated."""

    source: str
    errors: Sequence[ConfigFinding]
    warnings: Sequence[ConfigFinding] = ()

    def write(self, *, as_json: bool) -> None:
        """Print one line for each finding and a summary line; or one JSON object."""
        if as_json:
            found = {"source": self.source, "errors": _listed(self.errors), "warnings": _listed(self.warnings)}
            sys.stdout.write(json.dumps(found, indent=2) + "\n")
            return
        lines = [f"error: {finding}" for finding in self.errors]
        lines += [f"warning: {finding}" for finding in self.warnings]
        lines.append(f"{self.source}: {_count(self.errors, 'error')}, {_count(self.warnings, 'warning')}")
        sys.stdout.write("\n".join(lines) + "\n")


async def check_config(request: CheckRequest) -> int:
    """Print the findings about a configuration, and return the exit code: 0 if it is valid, else 1.

    Raises:
        ConfigError: the configuration could not be read.
    """
    result = await _check_file(request) if request.path else await _check_cluster(request)
    result.write(as_json=request.as_json)
    return 1 if result.errors or (request.strict and result.warnings) else 0


async def _find_names(client: KubeClient, parsed: ParsedConfig | ParsedMaintenance) -> list[ConfigFinding]:
    if isinstance(parsed, ParsedMaintenance):
        return await check_maintenance_names(client, parsed)
    return [*await check_names(client, parsed.config), *await check_queue_length(client, parsed.config)]


async def _check_file(request: CheckRequest) -> _CheckResult:
    parsed: ParsedConfig | ParsedMaintenance
    if request.maintenance:
        parsed = parse_maintenance(read_config_map(request.path))
    else:
        text = read_document(request.path)
        try:
            parsed = parse_config(text)
        except ConfigError as e:
            return _CheckResult(request.path, [ConfigFinding("", str(e))])
    if request.offline or not _has_cluster(request):
        return _CheckResult(request.path, parsed.errors, parsed.notes)
    try:
        async with connect(request.access) as cluster:
            names = await _find_names(cluster.client, parsed)
    except ConfigError as e:
        names = [ConfigFinding("", f"names were not checked against a cluster: {e}")]
    return _CheckResult(request.path, parsed.errors, [*parsed.notes, *names])


async def _check_cluster(request: CheckRequest) -> _CheckResult:
    async with connect(request.access) as cluster:
        client, namespace = cluster.client, cluster.namespace
        flag = MAINTENANCE_FLAG if request.maintenance else FLAG
        name = request.config_map_name or await _read_flag(client, namespace, flag)
        source = f"ConfigMap {namespace}/{name}" if name else "no ConfigMap"
        parsed: ParsedConfig | ParsedMaintenance
        try:
            if request.maintenance:
                parsed = parse_maintenance(await read_maintenance(client, namespace, name) if name else {})
            else:
                parsed = await read_config(client, namespace, name)
        except ConfigError as e:
            # What prevents the agent from starting is an error; an API server that cannot be reached is not a finding.
            if isinstance(e.__cause__, KubeError):
                raise
            return _CheckResult(source, [ConfigFinding("", str(e))])
        found = await _find_names(client, parsed)
        if isinstance(parsed, ParsedConfig):
            found += await _check_active(client, namespace, parsed.digest or NO_CONFIG)
        return _CheckResult(source, parsed.errors, [*parsed.notes, *found])


async def _check_active(client: KubeClient, namespace: str, digest: str) -> list[ConfigFinding]:
    """Return a finding for each other configuration that agents announce as active."""
    try:
        pods = await client.list(Selection(PODS, namespace, label_selector=AGENT_SELECTOR))
    except KubeError as e:
        return [ConfigFinding("", f"the active configuration of the agents could not be checked: {e}")]
    others = defaultdict(list)
    for pod in pods:
        announced = (pod["metadata"].get("annotations") or {}).get(CONFIG_ANNOTATION, "")
        if announced and announced != digest:
            others[announced].append((pod.get("spec") or {}).get("nodeName", ""))
    return [
        ConfigFinding(
            "", f"{len(nodes)} of {len(pods)} agents use {other} instead of this document ({digest}): {shown(nodes)}"
        )
        for other, nodes in sorted(others.items())
    ]


async def _read_flag(client: KubeClient, namespace: str, flag: str) -> str | None:
    """Return the ConfigMap that the installed agent uses; None if it uses none.

    Raises:
        ConfigError: the namespace has no agent, or its DaemonSet cannot be read.
    """
    with Translated(KubeError, ConfigError, f"DaemonSet {namespace}/{AGENT_DAEMONSET} cannot be read"):
        daemonset = await client.read(DAEMON_SETS, namespace, AGENT_DAEMONSET)
    if daemonset is None:
        raise ConfigError(f"DaemonSet {namespace}/{AGENT_DAEMONSET} does not exist: use {flag} NAME, or --namespace")
    return flags_of(daemonset).get(flag.removeprefix("--")) or None


def _has_cluster(request: CheckRequest) -> bool:
    """Return whether a cluster is configured; otherwise a file is checked without one."""
    named = request.access.kubeconfig or os.environ.get("KUBECONFIG") or "KUBERNETES_SERVICE_HOST" in os.environ
    return bool(named) or (Path.home() / ".kube" / "config").is_file()


def _listed(findings: Sequence[ConfigFinding]) -> list[JsonDict]:
    return [{"path": finding.path, "problem": finding.problem, "hint": finding.hint or ""} for finding in findings]


def _count(findings: Sequence[ConfigFinding], word: str) -> str:
    return f"{len(findings) or 'no'} {word}{'' if len(findings) == 1 else 's'}"

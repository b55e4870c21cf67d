"""`nodeagent check-config`: says all that is wrong with a configuration before an agent meets it.

Knows what is printed and with which code the command ends. Does not know what a document may
say (`nodeagent.config.parse`) or what the cluster has (`nodeagent.config.check`).

Whether the names in a configuration mean anything in the cluster.

Knows which keys name storage classes, a priority class or nodes. Does not know whether the
document itself is right (`nodeagent.config.parse`); reads only.
"""

import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from core.clock import SystemClock
from core.errors import ConfigError
from core.kube.client import KubeClient, Selection
from core.kube.errors import KubeError
from core.kube.resources import DAEMON_SETS, NODES, PODS, PRIORITY_CLASSES, STORAGE_CLASSES, Resource
from core.kube.retry import Retry
from core.models.base import JsonDict
from core.models.names import AGENT_DAEMONSET, CONFIG_ANNOTATION
from nodeagent.config.keys import Finding, guess, show_key
from nodeagent.config.live import NO_CONFIG
from nodeagent.config.models import AgentConfig
from nodeagent.config.parse import parse_config
from nodeagent.config.selectors import LabelSelector
from nodeagent.config.source import read_config, read_document
from nodeagent.runtime.own_pod import AGENT_SELECTOR, shown
from nodeagent.runtime.settings import DEFAULT_NAMESPACE
from nodeagent.runtime.transport import load_transport

__all__ = ["CheckRequest", "check_config", "check_names"]


async def check_names(client: KubeClient, config: AgentConfig) -> list[Finding]:
    """Return a finding for each name in `config` that the cluster does not know.

    What may not be listed is a finding too, and checks no further.
    """
    findings: list[Finding] = []
    if names := [(path, name) for path, name in _storage_classes(config) if name]:
        findings += await _check_storage_classes(client, names, cache=config.cache_pvc.storage_class)
    if config.priority_class_name:
        findings += await _check_priority_class(client, config.priority_class_name)
    if selectors := list(_selectors(config)):
        findings += await _check_selectors(client, selectors)
    return findings


def _storage_classes(config: AgentConfig) -> Iterator[tuple[str, str]]:
    """Yield each storage class that is named, with its path."""
    for index, entry in enumerate(config.load_affinity):
        yield f"loadAffinity[{index}].storageClass", entry.storage_class
    for source, claim in config.backup_pvc.items():
        path = f"backupPVC{show_key(source)}"
        yield path, source
        yield f"{path}.storageClass", claim.storage_class
    yield "cachePVC.storageClass", config.cache_pvc.storage_class


def _selectors(config: AgentConfig) -> Iterator[tuple[str, LabelSelector]]:
    """Yield each selector of nodes that asks for something, with its path."""
    for index, rule in enumerate(config.load_concurrency.per_node_config):
        if not rule.node_selector.empty:
            yield f"loadConcurrency.perNodeConfig[{index}].nodeSelector", rule.node_selector
    for index, entry in enumerate(config.load_affinity):
        if not entry.node_selector.empty:
            yield f"loadAffinity[{index}].nodeSelector", entry.node_selector


async def _check_storage_classes(client: KubeClient, named: Iterable[tuple[str, str]], *, cache: str) -> list[Finding]:
    listed = await _list(client, STORAGE_CLASSES, "storage classes")
    if isinstance(listed, Finding):
        return [listed]
    known = {obj["metadata"]["name"]: obj for obj in listed}
    found = [
        Finding(path, f"the cluster has no storage class {name}", guess(name, known))
        for path, name in named
        if name not in known
    ]
    policy = known[cache].get("reclaimPolicy", "Delete") if cache in known else "Delete"
    if policy != "Delete":
        problem = f"storage class {cache} has reclaimPolicy {policy}: without Delete there is no cache volume"
        found.append(Finding("cachePVC.storageClass", problem))
    return found


async def _check_priority_class(client: KubeClient, name: str) -> list[Finding]:
    listed = await _list(client, PRIORITY_CLASSES, "priority classes")
    if isinstance(listed, Finding):
        return [listed]
    known = {obj["metadata"]["name"] for obj in listed}
    if name in known:
        return []
    problem = f"the cluster has no priority class {name}: data movers get the default priority"
    return [Finding("priorityClassName", problem, guess(name, known))]


async def _check_selectors(client: KubeClient, selectors: Iterable[tuple[str, LabelSelector]]) -> list[Finding]:
    listed = await _list(client, NODES, "nodes")
    if isinstance(listed, Finding):
        return [listed]
    labels = [obj["metadata"].get("labels") or {} for obj in listed]
    return [
        Finding(path, f"it matches none of the {len(labels)} nodes")
        for path, selector in selectors
        if not any(map(selector.matches, labels))
    ]


async def _list(client: KubeClient, resource: Resource, words: str) -> list[JsonDict] | Finding:
    try:
        return await client.list(Selection(resource))
    except KubeError as e:
        return Finding("", f"{words} could not be checked: {e}")


_FLAG: Final = "--node-agent-configmap"


_FOUND_SOMETHING: Final = 1


@dataclass(frozen=True)
class CheckRequest:
    """What is checked and how.

    `path` is a file, or empty for what the cluster has. `strict` makes warnings count like
    mistakes. `offline` asks no cluster.
    """

    path: str
    kubeconfig: str | None = None
    namespace: str = ""
    config_map_name: str = ""
    strict: bool = False
    offline: bool = False
    as_json: bool = False


@dataclass(frozen=True)
class _Report:
    """What was found: mistakes, and warnings about what is tolerated."""

    source: str
    mistakes: Sequence[Finding]
    warnings: Sequence[Finding] = field(default_factory=list)

    def write(self, *, as_json: bool) -> None:
        """Print one line for each finding and one that counts them; or one JSON object."""
        if as_json:
            found = {"source": self.source, "mistakes": _listed(self.mistakes), "warnings": _listed(self.warnings)}
            sys.stdout.write(json.dumps(found, indent=2) + "\n")
            return
        lines = [f"error: {finding}" for finding in self.mistakes]
        lines += [f"warning: {finding}" for finding in self.warnings]
        lines.append(f"{self.source}: {_count(self.mistakes, 'mistake')}, {_count(self.warnings, 'warning')}")
        sys.stdout.write("\n".join(lines) + "\n")


async def check_config(request: CheckRequest) -> int:
    """Print what is wrong with the configuration, and return the exit code: 0 for nothing.

    Raises:
        ConfigError: it could not be read.
    """
    if request.path:
        report = await _check_file(request)
    else:
        report = await _check_cluster(request)
    report.write(as_json=request.as_json)
    return _FOUND_SOMETHING if report.mistakes or (request.strict and report.warnings) else 0


async def _check_file(request: CheckRequest) -> _Report:
    text = read_document(request.path)
    try:
        parsed = parse_config(text)
    except ConfigError as e:
        return _Report(request.path, [Finding("", str(e))])
    if request.offline or not _may_ask(request):
        return _Report(request.path, parsed.mistakes, parsed.notes)
    try:
        transport, _ = await load_transport(request.kubeconfig)
    except ConfigError as e:
        unchecked = Finding("", f"names were not checked against a cluster: {e}")
        return _Report(request.path, parsed.mistakes, [*parsed.notes, unchecked])
    try:
        names = await check_names(KubeClient(transport, _retry()), parsed.config)
    finally:
        await transport.close()
    return _Report(request.path, parsed.mistakes, [*parsed.notes, *names])


async def _check_cluster(request: CheckRequest) -> _Report:
    transport, context_namespace = await load_transport(request.kubeconfig)
    try:
        client = KubeClient(transport, _retry())
        namespace = request.namespace or context_namespace or DEFAULT_NAMESPACE
        name = request.config_map_name or await _named_in_daemonset(client, namespace)
        source = f"ConfigMap {namespace}/{name}" if name else "no ConfigMap is named"
        try:
            parsed = await read_config(client, namespace, name)
        except ConfigError as e:
            # What the agent would not start with is a mistake; a server that is not there is none.
            if isinstance(e.__cause__, KubeError):
                raise
            return _Report(source, [Finding("", str(e))])
        warnings = [*parsed.notes, *await check_names(client, parsed.config)]
        warnings += await _check_in_force(client, namespace, parsed.digest or NO_CONFIG)
        return _Report(source, parsed.mistakes, warnings)
    finally:
        await transport.close()


async def _check_in_force(client: KubeClient, namespace: str, digest: str) -> list[Finding]:
    """Return a finding where agents say that they have something else in force."""
    try:
        pods = await client.list(Selection(PODS, namespace, label_selector=AGENT_SELECTOR))
    except KubeError as e:
        return [Finding("", f"what the agents have in force could not be checked: {e}")]
    others = defaultdict(list)
    for pod in pods:
        told = (pod["metadata"].get("annotations") or {}).get(CONFIG_ANNOTATION, "")
        if told and told != digest:
            others[told].append((pod.get("spec") or {}).get("nodeName", ""))
    return [
        Finding("", f"{len(nodes)} of {len(pods)} agents have {told} in force and not this ({digest}): {shown(nodes)}")
        for told, nodes in sorted(others.items())
    ]


async def _named_in_daemonset(client: KubeClient, namespace: str) -> str:
    """Return the ConfigMap that the installed agent was told; empty where it was told none.

    Raises:
        ConfigError: there is no agent in that namespace, or the server did not say.
    """
    try:
        daemonset = await client.read(DAEMON_SETS, namespace, AGENT_DAEMONSET)
    except KubeError as e:
        raise ConfigError(f"DaemonSet {namespace}/{AGENT_DAEMONSET} cannot be read: {e}") from e
    if daemonset is None:
        raise ConfigError(f"there is no DaemonSet {namespace}/{AGENT_DAEMONSET}: give {_FLAG} NAME, or --namespace")
    return _told_name(daemonset)


def _told_name(daemonset: JsonDict) -> str:
    """Return the value of the flag among the arguments of the DaemonSet's first container."""
    container = daemonset["spec"]["template"]["spec"]["containers"][0]
    words = [str(word) for word in (*(container.get("command") or []), *(container.get("args") or []))]
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word == _FLAG:
            return following
        if word.startswith(f"{_FLAG}="):
            return word.removeprefix(f"{_FLAG}=")
    return ""


def _may_ask(request: CheckRequest) -> bool:
    """Whether there is any way to a cluster; without one a file is checked by itself."""
    told = request.kubeconfig or os.environ.get("KUBECONFIG") or "KUBERNETES_SERVICE_HOST" in os.environ
    return bool(told) or (Path.home() / ".kube" / "config").is_file()


def _retry() -> Retry:
    return Retry(SystemClock(), attempts=2)


def _listed(findings: Sequence[Finding]) -> list[JsonDict]:
    return [{"path": finding.path, "problem": finding.problem, "hint": finding.hint} for finding in findings]


def _count(findings: Sequence[Finding], word: str) -> str:
    return f"{len(findings) or 'no'} {word}{'' if len(findings) == 1 else 's'}"

"""Whether the names in a configuration mean anything in the cluster.

Knows which keys name storage classes, a priority class or nodes. Does not know whether the
document itself is right (`nodeagent.config`); reads only.
"""

from collections.abc import Iterable, Iterator

from core.kube.client import KubeClient, Selection
from core.kube.errors import KubeError
from core.kube.resources import NODES, PRIORITY_CLASSES, STORAGE_CLASSES, Resource
from core.models.base import JsonDict
from nodeagent.config_keys import Finding, guess, show_key
from nodeagent.config_models import AgentConfig, LabelSelector

__all__ = ["check_names"]


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

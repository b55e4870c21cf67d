"""The template of mover pods: which fields they inherit from the agents' DaemonSet, and on which nodes they may run.

Pure. The other fields of a mover pod are built by `exposer.pod_manifest`. A node affinity combines configured rules
with the volume's topology, without Windows nodes.
Source: Velero v1.18, pkg/util/kube/pod.go (GetLoadAffinityByStorageClass, ToSystemAffinity),
pkg/nodeagent/node_agent.go and pkg/util/third_party.go.
"""

import posixpath
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, Final, Self

from core.errors import ContractError
from core.kube.types import (
    Container,
    DaemonSet,
    EnvVar,
    Manifest,
    NodeRequirement,
    NodeSelectorTerm,
    Pod,
    PodSpec,
    PodToleration,
    Volume,
    VolumeMount,
)
from core.models.names import AGENT_DAEMONSET

__all__ = [
    "LINUX",
    "WINDOWS",
    "AgentTemplate",
    "Alternatives",
    "Placement",
    "PlacementRule",
    "PlacementRules",
    "build_node_affinity",
    "describe_nodes",
]

DEFAULT_KUBELET_ROOT: Final = "/var/lib/kubelet"
"""The kubelet's default root directory."""

_HOST_PODS: Final = "host-pods"

_INHERITED_LABELS: Final = ("azure.workload.identity/use",)
_INHERITED_ANNOTATIONS: Final = ("iam.amazonaws.com/role",)
_INHERITED_TOLERATIONS: Final = ("kubernetes.azure.com/scalesetpriority", "CriticalAddonsOnly")


@dataclass(frozen=True)
class AgentTemplate:
    """The inheritable part of the node agent's pod template.

    `pod_fields` and `container_fields` hold fields of a pod's spec and of its container as
    JSON, `kubelet_root` is a path on the node. `tolerations` are always
    inherited, `all_tolerations` are the agent's own. `host_pods` is where the agent's container has
    the kubelet's pods directory; None: it has none, and pod volumes cannot be exposed. `windows`:
    Velero's DaemonSet for Windows nodes exists, from which nothing is inherited.
    """

    image: str
    labels: dict[str, str] = field(default_factory=dict)
    annotations: dict[str, str] = field(default_factory=dict)
    tolerations: tuple[PodToleration, ...] = ()
    all_tolerations: tuple[PodToleration, ...] = ()
    volumes: tuple[Volume, ...] = ()
    volume_mounts: tuple[VolumeMount, ...] = ()
    env: tuple[EnvVar, ...] = ()
    pod_fields: Manifest = field(default_factory=dict)
    container_fields: Manifest = field(default_factory=dict)
    kubelet_root: str = DEFAULT_KUBELET_ROOT
    host_pods: str | None = None
    windows: bool = False

    @classmethod
    def parse(cls, daemonset: DaemonSet) -> Self:
        """Return what mover pods inherit from `daemonset` (apps/v1 as JSON).

        Raises:
            ContractError: it has no container with an image.
        """
        template = daemonset.get("spec", {}).get("template", {})
        spec = template.get("spec", {})
        container = _agent_container(daemonset, spec)
        volumes = spec.get("volumes") or []
        mounts = container.get("volumeMounts") or []
        root, host_pods = _host_pods(volumes, mounts)
        kept = {volume["name"]: volume for volume in volumes if not _shows_kubelet(volume, root)}
        meta = template.get("metadata") or {}
        tolerations = tuple(spec.get("tolerations") or [])
        return cls(
            image=container["image"],
            labels=_allowed(meta.get("labels"), _INHERITED_LABELS),
            annotations=_allowed(meta.get("annotations"), _INHERITED_ANNOTATIONS),
            tolerations=tuple(
                toleration for toleration in tolerations if toleration.get("key") in _INHERITED_TOLERATIONS
            ),
            all_tolerations=tolerations,
            volumes=tuple(kept.values()),
            volume_mounts=tuple(mount for mount in mounts if mount["name"] in kept),
            env=tuple(container.get("env") or []),
            pod_fields=_pick(spec, ("serviceAccountName", "dnsPolicy", "dnsConfig", "imagePullSecrets")),
            container_fields=_pick(container, ("envFrom",)),
            kubelet_root=str(root),
            host_pods=host_pods,
        )


def _agent_container(daemonset: DaemonSet, spec: PodSpec) -> Container:
    containers = spec.get("containers") or []
    named = [c for c in containers if c.get("name") == AGENT_DAEMONSET] or containers
    if not named or not named[0].get("image"):
        meta = daemonset.get("metadata") or {}
        place = f"{meta.get('namespace', '')}/{meta.get('name', '?')}"
        message = f"DaemonSet {place} has no container with an image for data movers"
        raise ContractError(message)
    return named[0]


def _allowed(marks: dict[str, str] | None, names: tuple[str, ...]) -> dict[str, str]:
    """Return the labels or annotations with these names; an empty value is one, too."""
    return {name: marks[name] for name in names if marks and name in marks}


def _pick(fields: Mapping[str, Any], names: tuple[str, ...]) -> Manifest:
    return {name: fields[name] for name in names if fields.get(name)}


def _host_pods(volumes: list[Volume], mounts: list[VolumeMount]) -> tuple[PurePosixPath, str | None]:
    """Return the kubelet's root directory on the node, and where its `pods` directory is mounted; None: nowhere."""
    for volume in volumes:
        path = (volume.get("hostPath") or {}).get("path", "")
        if volume["name"] == _HOST_PODS and path:
            mounted = [mount["mountPath"] for mount in mounts if mount["name"] == _HOST_PODS]
            return _parse_path(path).parent, mounted[0] if mounted else None
    return PurePosixPath(DEFAULT_KUBELET_ROOT), None


def _shows_kubelet(volume: Volume, root: PurePosixPath) -> bool:
    """Return whether the volume is a hostPath at, above or below the kubelet's root directory."""
    raw = (volume.get("hostPath") or {}).get("path")
    if not raw:
        return False
    path = _parse_path(raw)
    return path.is_relative_to(root) or root.is_relative_to(path)


def _parse_path(path: str) -> PurePosixPath:
    """Return an absolute path on a node in normal form."""
    # Two slashes at the start are one: POSIX leaves their meaning open.
    return PurePosixPath("/" + posixpath.normpath(path).lstrip("/"))


LINUX: Final = "linux"
WINDOWS: Final = "windows"

_NOT_WINDOWS: Final[NodeRequirement] = {"key": "kubernetes.io/os", "operator": "NotIn", "values": [WINDOWS]}

Alternatives = tuple[tuple[NodeRequirement, ...], ...]
"""Sets of requirements on a node's labels, as in a pod's `matchExpressions`: one set must match."""


@dataclass(frozen=True)
class PlacementRule:
    """The nodes for transfers of a storage class; without a class: for those without a rule.

    `requirements` are entries of a pod's `matchExpressions`; all must match.
    """

    requirements: tuple[NodeRequirement, ...] = ()
    storage_class: str | None = None


@dataclass(frozen=True)
class PlacementRules:
    """All rules, in their order; `any_of` makes those for the same class alternatives."""

    rules: tuple[PlacementRule, ...] = ()
    any_of: bool = False

    def choose(self, storage_class: str | None) -> Alternatives:
        """Return the requirements on nodes for volumes of `storage_class`; empty: any node."""
        own = [rule for rule in self.rules if rule.storage_class == storage_class]
        found = own or [rule for rule in self.rules if not rule.storage_class]
        # Velero uses the first one and ignores the others.
        return tuple(rule.requirements for rule in (found if self.any_of else found[:1]))


@dataclass(frozen=True)
class Placement:
    """The eligible nodes; every field but the last narrows them.

    `node` is the only eligible node, `avoid_nodes` are excluded. `alternatives` come from rules;
    `topology` holds the `nodeSelectorTerms` of a volume; one must match. `tolerations` are
    added to what all movers have.
    """

    node: str | None = None
    avoid_nodes: tuple[str, ...] = ()
    alternatives: Alternatives = ()
    topology: tuple[NodeSelectorTerm, ...] = field(default=())
    tolerations: tuple[PodToleration, ...] = ()


def build_node_affinity(placement: Placement) -> Manifest:
    """Return the affinity of a pod: one term for each combination of topology and rule."""
    terms = [
        _build_term(placement, topology, rule)
        for topology in placement.topology or ({},)
        for rule in placement.alternatives or ((),)
    ]
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}


def _build_term(
    placement: Placement, topology: NodeSelectorTerm, rule: tuple[NodeRequirement, ...]
) -> NodeSelectorTerm:
    # Nodes with an operating system label of their own are Linux nodes too, as with Velero.
    expressions = [*(topology.get("matchExpressions") or []), *rule, _NOT_WINDOWS]
    fields: list[NodeRequirement] = list(topology.get("matchFields") or [])
    if placement.node:
        fields.append(_requirement("metadata.name", "In", placement.node))
    # The scheduler accepts one value for metadata.name, with In and NotIn only.
    fields.extend(_requirement("metadata.name", "NotIn", node) for node in placement.avoid_nodes)
    term: NodeSelectorTerm = {"matchExpressions": expressions}
    if fields:
        term["matchFields"] = fields
    return term


def _requirement(key: str, operator: str, value: str) -> NodeRequirement:
    return {"key": key, "operator": operator, "values": [value]}


def describe_nodes(pod: Pod) -> str | None:
    """Return the nodes that `pod` (a v1 Pod as JSON dict) requires, as text; None: any Linux node."""
    affinity = ((pod.get("spec") or {}).get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    terms = [_describe_term(term) for term in required.get("nodeSelectorTerms") or []]
    return "; or ".join(filter(None, terms)) or None


def _describe_term(term: NodeSelectorTerm) -> str:
    requirements = [*(term.get("matchExpressions") or []), *(term.get("matchFields") or [])]
    # Every pod of ours excludes Windows nodes.
    return ", ".join(_describe(one) for one in requirements if one != _NOT_WINDOWS)


def _describe(requirement: NodeRequirement) -> str:
    values = "|".join(requirement.get("values") or [])
    forms = {"In": f"={values}", "NotIn": f"!={values}", "Exists": " is set", "DoesNotExist": " is not set"}
    operator = requirement["operator"]
    return f"{requirement['key']}{forms.get(operator, f' {operator} {values}')}"

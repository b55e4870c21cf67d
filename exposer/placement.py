"""The nodes that a mover pod may run on.

Combines configured rules and the volume's topology into one node affinity, without Windows nodes.
Pure: the inputs come from elsewhere (`exposer.source_volume`, `exposer.generic_restore`).
Source: Velero v1.18.2, GetLoadAffinityByStorageClass and ToSystemAffinity in pkg/util/kube/pod.go.
"""

from dataclasses import dataclass, field
from typing import Final

from core.kube.types import Manifest, NodeRequirement, NodeSelectorTerm, Pod, PodToleration

__all__ = [
    "LINUX",
    "WINDOWS",
    "Alternatives",
    "Placement",
    "PlacementRule",
    "PlacementRules",
    "build_node_affinity",
    "describe_nodes",
]

LINUX: Final = "linux"
WINDOWS: Final = "windows"

_NOT_WINDOWS: Final[NodeRequirement] = {"key": "kubernetes.io/os", "operator": "NotIn", "values": [WINDOWS]}

Alternatives = tuple[tuple[NodeRequirement, ...], ...]
"""Sets of requirements on a node's labels, as in a pod's `matchExpressions`: one set must match."""


@dataclass(frozen=True)
class PlacementRule:
    """The nodes for transfers of a storage class; an empty class: for the classes without a rule.

    `requirements` are entries of a pod's `matchExpressions`; all must match.
    """

    requirements: tuple[NodeRequirement, ...] = ()
    storage_class: str = ""


@dataclass(frozen=True)
class PlacementRules:
    """All rules, in their order; `any_of` makes those for the same class alternatives."""

    rules: tuple[PlacementRule, ...] = ()
    any_of: bool = False

    def choose(self, storage_class: str) -> Alternatives:
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

    node: str = ""
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


def describe_nodes(pod: Pod) -> str:
    """Return the nodes that `pod` (a v1 Pod as JSON dict) requires, as text; empty: any Linux node."""
    affinity = ((pod.get("spec") or {}).get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    return "; or ".join(filter(None, (_describe_term(term) for term in required.get("nodeSelectorTerms") or [])))


def _describe_term(term: NodeSelectorTerm) -> str:
    requirements = [*(term.get("matchExpressions") or []), *(term.get("matchFields") or [])]
    # Every pod of ours excludes Windows nodes.
    return ", ".join(_describe(one) for one in requirements if one != _NOT_WINDOWS)


def _describe(requirement: NodeRequirement) -> str:
    values = "|".join(requirement.get("values") or [])
    forms = {"In": f"={values}", "NotIn": f"!={values}", "Exists": " is set", "DoesNotExist": " is not set"}
    operator = requirement["operator"]
    return f"{requirement['key']}{forms.get(operator, f' {operator} {values}')}"

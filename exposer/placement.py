"""Which nodes a mover pod may run on.

Knows how rules, the volume's own reach and the operating system become one node affinity. Pure:
does not know where they come from (`exposer.source_volume`, `exposer.generic_restore`).
Source: Velero v1.18.2, GetLoadAffinityByStorageClass and ToSystemAffinity in pkg/util/kube/pod.go.
"""

from dataclasses import dataclass, field
from typing import Final

from core.models.base import JsonDict

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

_OS_LABEL: Final = "kubernetes.io/os"

Alternatives = tuple[tuple[JsonDict, ...], ...]
"""Sets of requirements on a node's labels, as in a pod's `matchExpressions`: one set has to hold."""


@dataclass(frozen=True)
class PlacementRule:
    """The nodes for loads of a storage class; an empty class: for those that have no rule of their own.

    `requirements` are entries of a pod's `matchExpressions`, and all have to hold.
    """

    requirements: tuple[JsonDict, ...] = ()
    storage_class: str = ""


@dataclass(frozen=True)
class PlacementRules:
    """All rules, in their order; `any_of` makes those for the same class alternatives."""

    rules: tuple[PlacementRule, ...] = ()
    any_of: bool = False

    def choose(self, storage_class: str) -> Alternatives:
        """Return what a node has to fulfil for volumes of `storage_class`; nothing: any node will do."""
        own = [rule for rule in self.rules if rule.storage_class == storage_class]
        found = own or [rule for rule in self.rules if not rule.storage_class]
        # The peer takes the first one and passes over the others.
        return tuple(rule.requirements for rule in (found if self.any_of else found[:1]))


@dataclass(frozen=True)
class Placement:
    """The nodes that will do; every field narrows them.

    `node` is the only one, `avoid_nodes` are those that will not. `alternatives` come from
    rules; `topology` holds the `nodeSelectorTerms` of a volume, from one of which it can be
    reached.
    """

    node_os: str = LINUX
    node: str = ""
    avoid_nodes: tuple[str, ...] = ()
    alternatives: Alternatives = ()
    topology: tuple[JsonDict, ...] = field(default=())


def build_node_affinity(placement: Placement) -> JsonDict:
    """Return the affinity of a pod: a term for each way to fulfil all that is asked."""
    terms = [
        _build_term(placement, reach, rule)
        for reach in placement.topology or ({},)
        for rule in placement.alternatives or ((),)
    ]
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}


def _build_term(placement: Placement, reach: JsonDict, rule: tuple[JsonDict, ...]) -> JsonDict:
    operator = "In" if placement.node_os == WINDOWS else "NotIn"
    expressions = [*(reach.get("matchExpressions") or []), *rule, _requirement(_OS_LABEL, operator, WINDOWS)]
    fields: list[JsonDict] = list(reach.get("matchFields") or [])
    if placement.node:
        fields.append(_requirement("metadata.name", "In", placement.node))
    # The scheduler takes only one value for a name, and only in In and NotIn.
    fields.extend(_requirement("metadata.name", "NotIn", node) for node in placement.avoid_nodes)
    term: JsonDict = {"matchExpressions": expressions}
    if fields:
        term["matchFields"] = fields
    return term


def _requirement(key: str, operator: str, value: str) -> JsonDict:
    return {"key": key, "operator": operator, "values": [value]}


def describe_nodes(pod: JsonDict) -> str:
    """Return which nodes `pod` (a v1 Pod as JSON dict) asks for, in words; empty where any Linux node will do."""
    affinity = ((pod.get("spec") or {}).get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    return "; or ".join(filter(None, (_describe_term(term) for term in required.get("nodeSelectorTerms") or [])))


def _describe_term(term: JsonDict) -> str:
    asked = [*(term.get("matchExpressions") or []), *(term.get("matchFields") or [])]
    # That a Linux node is asked for goes without saying.
    return ", ".join(_describe(one) for one in asked if one != _requirement(_OS_LABEL, "NotIn", WINDOWS))


def _describe(requirement: JsonDict) -> str:
    values = "|".join(requirement.get("values") or [])
    words = {"In": f"={values}", "NotIn": f"!={values}", "Exists": " is set", "DoesNotExist": " is not set"}
    operator = requirement["operator"]
    return f"{requirement['key']}{words.get(operator, f' {operator} {values}')}"

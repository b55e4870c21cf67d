"""Volume policies of Velero: which action the ConfigMap of `spec.resourcePolicy` has for a volume.

Scalars are read as text, which is how Velero decodes them into its fields of type string, and most nulls as absent.
Source: Velero v1.18 and main at d2241adba, internal/resourcepolicies (resource_policies.go, volume_resources.go,
volume_resources_validator.go).
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum
from itertools import chain
from typing import Any, Final, Self

import msgspec
import yaml

from core.errors import ContractError
from core.models.base import WireModel, explain_invalid
from core.models.units import parse_quantity
from nodeagent.coverage.cluster import CsiSource, NfsSource, PodVolume, StoredVolume, VolumeClaim

_VERSION: Final = "v1"

_MOST_NODES: Final = 500_000
"""Without aliases, 1 MiB has about as many, the limit of a ConfigMap. Velero's decoder has a similar limit.
Source: gopkg.in/yaml.v3 v3.0.1, decode.go (allowedAliasRatio)."""


class PolicyAction(StrEnum):
    """What a policy asks for."""

    SKIP = "skip"
    FS_BACKUP = "fs-backup"
    SNAPSHOT = "snapshot"
    CUSTOM = "custom"


class _Conditions(WireModel, forbid_unknown_fields=True):
    """The conditions of one policy: all must hold; absent ones do."""

    capacity: str = ""
    storage_class: list[str] = msgspec.field(default_factory=list)
    nfs: NfsSource | None = None
    csi: CsiSource | None = None
    volume_types: list[str] = msgspec.field(default_factory=list)
    pvc_labels: dict[str, str] = msgspec.field(default_factory=dict)
    pvc_phase: list[str] = msgspec.field(default_factory=list)
    pvc_volume_mode: str = ""
    pvc_access_modes: list[str] = msgspec.field(default_factory=list)

    def __post_init__(self) -> None:
        """Reject attributes of no driver, as Velero does; msgspec converts the ValueError."""
        if self.csi is not None and self.csi.volume_attributes and not self.csi.driver:
            raise ValueError("csi: volumeAttributes without driver")


class _ActionText(WireModel, forbid_unknown_fields=True):
    type: PolicyAction
    parameters: dict[str, Any] = msgspec.field(default_factory=dict)


class _Policy(WireModel, forbid_unknown_fields=True):
    conditions: _Conditions = msgspec.field(default_factory=_Conditions)
    action: _ActionText


class ResourceFilter(WireModel, forbid_unknown_fields=True):
    """`includeExcludePolicy`: more resources that a Backup takes or leaves out."""

    included_namespace_scoped_resources: list[str] = msgspec.field(default_factory=list)
    excluded_namespace_scoped_resources: list[str] = msgspec.field(default_factory=list)
    included_cluster_scoped_resources: list[str] = msgspec.field(default_factory=list)
    excluded_cluster_scoped_resources: list[str] = msgspec.field(default_factory=list)

    def __post_init__(self) -> None:
        """Reject what Velero rejects; msgspec converts the ValueError."""
        for included, excluded in (
            (self.included_namespace_scoped_resources, self.excluded_namespace_scoped_resources),
            (self.included_cluster_scoped_resources, self.excluded_cluster_scoped_resources),
        ):
            if "*" in (*included, *excluded):
                raise ValueError("includeExcludePolicy: * is no resource")
            if both := set(included) & set(excluded):
                raise ValueError(f"includeExcludePolicy: {min(both)} is included and excluded")


class _Document(WireModel, forbid_unknown_fields=True):
    version: str = ""
    volume_policies: list[_Policy] = msgspec.field(default_factory=list)
    include_exclude_policy: ResourceFilter | None = None
    # Of main; they are not evaluated.
    cluster_scoped_filter_policy: Any = None
    namespaced_filter_policies: Any = None


class _Loader(yaml.SafeLoader):
    """Reads scalars as text, except null, and rejects repeated keys, as Velero's decoder does."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - an attribute of PyYAML
        first: [one for one in resolvers if one[0].endswith((":null", ":merge"))]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_document(self, node: yaml.Node) -> Any:  # noqa: ANN401 - what YAML may have
        """Return the document of a node."""
        if _count(node, {}) > _MOST_NODES:
            raise yaml.YAMLError("its aliases stand for too much")
        return super().construct_document(node)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:  # noqa: FBT001, FBT002 - PyYAML's
        """Return the mapping of a node."""
        keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        if repeated := [key for key, times in keys.items() if times > 1]:
            raise yaml.MarkedYAMLError(problem=f"key {repeated[0]} is repeated", problem_mark=node.start_mark)
        return super().construct_mapping(node, deep=deep)


def _count(node: yaml.Node, known: dict[yaml.Node, int]) -> int:
    """Return how many nodes a node is with all below it, those behind aliases each time; `known` are counted ones."""
    if node not in known:
        below = [] if isinstance(node, yaml.ScalarNode) else node.value
        parts = chain.from_iterable(one if isinstance(one, tuple) else (one,) for one in below)
        known[node] = 1 + sum(_count(one, known) for one in parts)
    return known[node]


@dataclass(frozen=True)
class _Range:
    """Sizes in bytes, both ends included; 0 as an end: no limit on that side."""

    lowest: Decimal
    highest: Decimal

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the range in a text such as `1Gi,10Gi`, `,10Gi` or `1Gi,`; ValueError: it is none."""
        ends = [end.strip() for end in (text or ",").split(",")]
        if len(ends) != 2:  # noqa: PLR2004 - lowest and highest
            raise ValueError(f'capacity: "{text}" is no range such as "1Gi,10Gi"')
        lowest, highest = (parse_quantity(end) if end else Decimal() for end in ends)
        if highest and lowest > highest:
            raise ValueError(f'capacity: "{text}" begins above its end')
        return cls(lowest, highest)

    def has(self, size: Decimal) -> bool:
        """Return whether the size is in the range."""
        return self.lowest <= size and (not self.highest or size <= self.highest)


@dataclass(frozen=True)
class _Rule:
    """A policy with its sizes, which are parsed once for all volumes."""

    conditions: _Conditions
    sizes: _Range
    action: PolicyAction


@dataclass(frozen=True)
class Policies:
    """The policies of a Backup in their order: the first that matches counts."""

    policies: tuple[_Rule, ...] = ()
    resources: ResourceFilter | None = None

    def __add__(self, others: "Policies") -> "Policies":
        """Return these policies, followed by the server's global ones; of them only volume policies count."""
        return Policies((*self.policies, *others.policies), self.resources)

    def match(
        self, claim: VolumeClaim | None, volume: StoredVolume | None, pod_volume: PodVolume | None = None
    ) -> PolicyAction | None:
        """Return the action for a PVC with its PersistentVolume, or for a volume of a pod without one."""
        if not self.policies:
            return None
        seen, stored, source = claim or _NO_CLAIM, volume or _NO_VOLUME, volume or pod_volume or _NO_VOLUME
        size = parse_quantity(stored.capacity)
        sized = (one for one in self.policies if one.sizes.has(size))
        return next((one.action for one in sized if _matches(one.conditions, seen, stored, source)), None)


_NO_CLAIM: Final = VolumeClaim.from_wire({"metadata": {"name": ""}})
_NO_VOLUME: Final = StoredVolume.from_wire({"metadata": {"name": ""}})


def parse_policies(data: Mapping[str, str] | None) -> Policies:
    """Return the policies in a ConfigMap, which has one key; ContractError: Velero rejects Backups that name them."""
    texts = list((data or {}).values())
    if len(texts) != 1:
        raise ContractError(f"the ConfigMap has {len(texts)} keys instead of one")
    try:
        # Velero reads the first document alone.
        raw: Any = next(yaml.load_all(texts[0], Loader=_Loader), None)
        document = msgspec.convert(_without_nulls(raw), _Document)
        rules = tuple(
            _Rule(one.conditions, _Range.parse(one.conditions.capacity), one.action.type)
            for one in document.volume_policies
        )
    except (yaml.YAMLError, ValueError, RecursionError) as e:
        raise ContractError(explain_invalid(e) if isinstance(e, ValueError) else str(e)) from e
    if document.version != _VERSION:
        raise ContractError(f'version "{document.version}" is not {_VERSION}')
    return Policies(rules, document.include_exclude_policy)


_TEXTS: Final = frozenset({"pvcLabels", "volumeAttributes"})
"""Maps of texts, in which null is an empty text."""

_NEVER_NULL: Final = frozenset({"pvcLabels", "pvcVolumeMode", "pvcAccessModes"})


def _without_nulls(value: Any, name: str = "") -> Any:  # noqa: ANN401 - what YAML may have
    """Return `value`, the field `name`, without the fields whose null Velero takes for absent."""
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    if not isinstance(value, dict):
        return value
    if name in _TEXTS:
        return {key: "" if text is None else text for key, text in value.items()}
    kept = ((key, item) for key, item in value.items() if item is not None or key in _NEVER_NULL)
    return {key: _without_nulls(item, key) for key, item in kept}


def _matches(wanted: _Conditions, claim: VolumeClaim, volume: StoredVolume, source: StoredVolume | PodVolume) -> bool:
    return (
        (not wanted.storage_class or volume.storage_class in filter(None, wanted.storage_class))
        and (wanted.nfs is None or _matches_nfs(wanted.nfs, source.nfs))
        and (wanted.csi is None or _matches_csi(wanted.csi, source.csi))
        and (not wanted.volume_types or source.type in wanted.volume_types)
        and wanted.pvc_labels.items() <= claim.metadata.labels.items()
        and (not wanted.pvc_phase or claim.status.phase in wanted.pvc_phase)
        and wanted.pvc_volume_mode in {"", claim.spec.volume_mode}
        and (not wanted.pvc_access_modes or sorted(wanted.pvc_access_modes) == sorted(claim.spec.access_modes))
    )


def _matches_nfs(wanted: NfsSource, found: NfsSource | None) -> bool:
    return found is not None and wanted.server in {"", found.server} and wanted.path in {"", found.path}


def _matches_csi(wanted: CsiSource, found: CsiSource | None) -> bool:
    if found is None or wanted.driver not in {"", found.driver}:
        return False
    return wanted.volume_attributes.items() <= found.volume_attributes.items()

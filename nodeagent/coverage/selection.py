"""Which volumes a Schedule of Velero backs up, and how: matched as its server does. Pure.

Source: Velero v1.18 and main at d2241adba: pkg/controller/backup_controller.go (defaults, validation),
pkg/backup/item_collector.go and item_backupper.go (selection), internal/volumehelper/volume_policy_helper.go and
pkg/podvolume/backupper.go (how a volume is backed up), pkg/itemblock/actions/pvc_action.go and
pkg/backup/actions/pod_action.go (what a pod and a PVC bring with them).
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from functools import cache, cached_property
from typing import Final

import msgspec

from core.models.base import ObjectMeta, Time, WireModel
from nodeagent.config.value_types import is_met
from nodeagent.coverage.cluster import ClusterVolumes, PodVolume, VolumeClaim, VolumeKey, WorkloadPod
from nodeagent.coverage.policies import Policies, PolicyAction


class LabelRequirement(WireModel):
    """One of `matchExpressions`."""

    key: str
    operator: str
    values: list[str] = msgspec.field(default_factory=list)

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Return whether the labels meet it; with an operator that is none, no labels do."""
        return is_met(self.operator, labels.get(self.key), self.values)


class Selector(WireModel):
    """A label selector: all parts must match; empty: every object.

    Source: Kubernetes v1.34, apimachinery pkg/apis/meta/v1, LabelSelectorAsSelector.
    """

    match_labels: dict[str, str] = msgspec.field(default_factory=dict)
    match_expressions: list[LabelRequirement] = msgspec.field(default_factory=list)

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Return whether an object with these labels is selected."""
        return self.match_labels.items() <= labels.items() and all(
            one.matches(labels) for one in self.match_expressions
        )


_TERM: Final = re.compile(
    r"\s*(?:(?P<absent>!)\s*(?P<no>[^\s!=<>,()]+)"
    r"|(?P<key>[^\s!=<>,()]+)\s*(?:(?P<sign>==|=|!=)\s*(?P<value>[^\s!=<>,()]*)|(?P<set>in|notin)\s*\((?P<values>[^()]*)\))?"
    r")\s*(?:,|$)"
)


def parse_selector(text: str) -> Selector:
    """Return the selector in a text such as `tier=web,env in (a,b),!old`; empty: every object.

    Source: Kubernetes v1.34, apimachinery pkg/labels/selector.go. ValueError: it is none.
    """
    requirements, position = [], 0
    while position < len(text):
        term = _TERM.match(text, position)
        if term is None or term.end() == position:
            raise ValueError(f'not a label selector: "{text}"')
        requirements.append(_requirement(term))
        position = term.end()
    return Selector(match_expressions=requirements)


_OPERATORS: Final = {None: "Exists", "!": "DoesNotExist", "=": "In", "==": "In", "in": "In"}
"""The others are NotIn."""


def _requirement(term: re.Match[str]) -> LabelRequirement:
    operator = _OPERATORS.get(term["absent"] or term["set"] or term["sign"], "NotIn")
    values = (term["values"] or term["value"] or "").split(",")
    return LabelRequirement(key=term["no"] or term["key"], operator=operator, values=list(map(str.strip, values)))


def includes(name: str, included: Sequence[str], excluded: Sequence[str]) -> bool:
    """Return whether a name is included: `*`, `?` and `[a-z]` are wildcards, and an empty list includes every name.

    Source: Velero v1.18, ShouldInclude in pkg/util/collections/includes_excludes.go; its globs are from
    gobwas/glob, in which these wildcards mean the same as in fnmatch.
    """
    if any(fnmatchcase(name, pattern) for pattern in excluded):
        return False
    return not included or any(pattern == "*" or fnmatchcase(name, pattern) for pattern in included)


class BackupMethod(StrEnum):
    """How a volume is backed up; the last three keep no copy of its files in the bucket."""

    MOVED = "data-mover"
    FS_BACKUP = "fs-backup"
    SNAPSHOT = "snapshot"
    SKIPPED = "skipped"
    NONE = "none"

    @property
    def copies(self) -> bool:
        """Whether the data is copied to the bucket."""
        return self in {BackupMethod.MOVED, BackupMethod.FS_BACKUP}


@dataclass(frozen=True, slots=True)
class VolumeChoice:
    """How a volume is backed up, and why if no data is copied."""

    method: BackupMethod
    why: str = ""


class _PolicyReference(WireModel):
    kind: str = ""
    name: str = ""


class BackupTemplate(WireModel):
    """`spec.template` of a Schedule: what decides which volumes its Backups have."""

    included_namespaces: list[str] = msgspec.field(default_factory=list)
    excluded_namespaces: list[str] = msgspec.field(default_factory=list)
    included_resources: list[str] = msgspec.field(default_factory=list)
    excluded_resources: list[str] = msgspec.field(default_factory=list)
    include_cluster_resources: bool | None = None
    included_namespace_scoped_resources: list[str] = msgspec.field(default_factory=list)
    excluded_namespace_scoped_resources: list[str] = msgspec.field(default_factory=list)
    label_selector: Selector | None = None
    or_label_selectors: list[Selector] = msgspec.field(default_factory=list)
    snapshot_volumes: bool | None = None
    snapshot_move_data: bool | None = None
    default_volumes_to_fs_backup: bool | None = None
    default_volumes_to_restic: bool | None = None
    volume_group_snapshot_label_key: str = ""
    resource_policy: _PolicyReference | None = None

    @property
    def policy_name(self) -> str | None:
        """The ConfigMap with its volume policies; None: it has none."""
        reference = self.resource_policy
        return reference.name or None if reference is not None and reference.kind.lower() == "configmap" else None

    @property
    def selectors(self) -> Sequence[Selector]:
        """Its label selectors: one must match; none: every object is selected."""
        return self.or_label_selectors or ([self.label_selector] if self.label_selector is not None else [])

    @property
    def has_old_filters(self) -> bool:
        """Whether it filters resources by the older fields. Source: UseOldResourceFilters."""
        return bool(self.included_resources or self.excluded_resources) or self.include_cluster_resources is not None


class _ScheduleSpec(WireModel):
    schedule: str = ""
    paused: bool = False
    template: BackupTemplate = msgspec.field(default_factory=BackupTemplate)


class _ScheduleStatus(WireModel):
    """Source: Velero v1.18, ScheduleStatus in pkg/apis/velero/v1/schedule_types.go."""

    last_backup: Time | None = None


class BackupSchedule(WireModel):
    """A Schedule of Velero."""

    metadata: ObjectMeta
    spec: _ScheduleSpec
    status: _ScheduleStatus = msgspec.field(default_factory=_ScheduleStatus)


@dataclass(frozen=True)
class ServerDefaults:
    """What the flags of the server say about Backups that leave it open; without `csi`, it ignores CSI drivers.

    `fault` is why it rejects every Backup; None: it does not.
    """

    fs_backup: bool = False
    move_data: bool = False
    csi: bool = True
    group_label: str = "velero.io/volume-group"
    policies: Policies = field(default_factory=Policies)
    fault: str | None = None


_INVALID: Final = frozenset("|()!{},")


def explain_fault(template: BackupTemplate) -> str | None:
    """Return why the server rejects each Backup of the template; None: it does not, as far as volumes are concerned."""
    old, new = template.has_old_filters, template.included_namespace_scoped_resources
    for pattern in (*template.included_namespaces, *template.excluded_namespaces):
        if _INVALID & set(pattern) or "**" in pattern or pattern.count("[") != pattern.count("]"):
            return f'"{pattern}" is no name or pattern of namespaces'
    if both := set(template.included_namespaces) & set(template.excluded_namespaces):
        return f"namespace {min(both)} is included and excluded"
    if "*" in template.excluded_namespaces:
        return "all namespaces are excluded"
    if "*" in template.included_namespaces and len(template.included_namespaces) > 1:
        return "includedNamespaces has * beside others"
    if old and (new or template.excluded_namespace_scoped_resources):
        return "it has older and newer filters of resources"
    if "*" in template.excluded_resources:
        return "all resources are excluded"
    fault = _explain_resources(template.included_resources, template.excluded_resources)
    if fault or (fault := _explain_resources(new, template.excluded_namespace_scoped_resources)):
        return fault
    if template.label_selector is not None and template.or_label_selectors:
        return "it has both labelSelector and orLabelSelectors"
    return None


def _explain_resources(included: Sequence[str], excluded: Sequence[str]) -> str | None:
    if any("*" in names and len(set(names)) > 1 for names in (included, excluded)) or (included and "*" in excluded):
        return "a list of resources has * beside others"
    both = set(included) & set(excluded)
    return f"resource {min(both)} is included and excluded" if both else None


def select_volumes(
    template: BackupTemplate, cluster: ClusterVolumes, defaults: ServerDefaults, policies: Policies | None = None
) -> Mapping[VolumeKey, VolumeChoice]:
    """Return the bound volumes that a Backup by template and `policies` concerns now, and what it does with each."""
    merged = (policies or Policies()) + defaults.policies
    return _Selection(template, cluster, defaults, merged).choices()


_RESOURCE_NAMES: Final = {
    "persistentvolumeclaim": "persistentvolumeclaims",
    "pvc": "persistentvolumeclaims",
    "pod": "pods",
    "po": "pods",
}
"""What API discovery resolves to a resource beside its plural: the singular and the short name."""


def _resolve(names: Sequence[str]) -> list[str]:
    lowered = (name.lower() for name in names)
    return [_RESOURCE_NAMES.get(name, name) for name in lowered]


@dataclass(frozen=True)
class _Selection:
    """One Backup that is planned."""

    template: BackupTemplate
    cluster: ClusterVolumes
    defaults: ServerDefaults
    policies: Policies

    @cached_property
    def _fs_by_default(self) -> bool:
        template = self.template
        chosen = True if template.default_volumes_to_restic else template.default_volumes_to_fs_backup
        return self.defaults.fs_backup if chosen is None else chosen

    def _includes_resource(self, resource: str) -> bool:
        template = self.template
        if template.has_old_filters:
            excluded = _resolve(template.excluded_resources)
            return includes(resource, _resolve(template.included_resources), excluded)
        included = _resolve(template.included_namespace_scoped_resources)
        excluded = _resolve(template.excluded_namespace_scoped_resources)
        if (more := self.policies.resources) is not None:
            # What the Backup itself says about a resource has priority.
            said = {*included, *excluded}
            excluded += [name for name in _resolve(more.excluded_namespace_scoped_resources) if name not in said]
            said.update(excluded)
            included += [name for name in _resolve(more.included_namespace_scoped_resources) if name not in said]
        return includes(resource, included, excluded)

    @cached_property
    def _takes_claims(self) -> bool:
        return self._includes_resource("persistentvolumeclaims")

    @cached_property
    def _takes_pods(self) -> bool:
        return self._includes_resource("pods")

    @cached_property
    def _namespaces(self) -> Callable[[str], bool]:
        left_out = (name for name, one in self.cluster.namespaces.items() if one.metadata.left_out)
        excluded = (*self.template.excluded_namespaces, *left_out)
        return cache(lambda namespace: includes(namespace, self.template.included_namespaces, excluded))

    def _passes(self, one: VolumeClaim | WorkloadPod) -> bool:
        """Return whether nothing but labels may keep the object out."""
        meta = one.metadata
        return (
            (self._takes_pods if isinstance(one, WorkloadPod) else self._takes_claims)
            and meta.deletion_timestamp is None
            and not meta.left_out
            and self._namespaces(meta.namespace)
        )

    @cached_property
    def _selected(self) -> tuple[Mapping[VolumeKey, VolumeClaim], Mapping[tuple[str, str], WorkloadPod]]:
        """The PVCs and pods by namespace and name that the Backup has: selected ones, and what they bring with them."""
        claims: dict[VolumeKey, VolumeClaim] = {}
        pods: dict[tuple[str, str], WorkloadPod] = {}
        chosen = [objects for name, objects in self.cluster.by_namespace.items() if self._namespaces(name)]
        selectors = self.template.selectors
        passing = (one for each in chosen for one in each if self._passes(one))
        found = [
            one for one in passing if not selectors or any(each.matches(one.metadata.labels) for each in selectors)
        ]
        while found:
            one = found.pop()
            key = (one.metadata.namespace, one.metadata.name)
            if key in (pods if isinstance(one, WorkloadPod) else claims):
                continue
            if isinstance(one, WorkloadPod):
                pods[key] = one
            else:
                claims[key] = one
            if selectors:
                found += [each for each in self._related(one) if self._passes(each)]
        return claims, pods

    def _related(self, one: VolumeClaim | WorkloadPod) -> Iterator[VolumeClaim | WorkloadPod]:
        """Yield what an object brings with it whatever its labels: a pod its PVCs, a bound PVC its running pods."""
        namespace = one.metadata.namespace
        if isinstance(one, WorkloadPod):
            names = {volume.claim for volume in one.spec.volumes if volume.claim}
            yield from (claim for name in names if (claim := self.cluster.claims.get((namespace, name))) is not None)
        elif one.bound:
            yield from (pod for pod in self.cluster.pods_by_claim.get(one.key, ()) if pod.running)
            yield from self._groups.get(self._group_key(one), ())

    def _group_key(self, claim: VolumeClaim) -> tuple[str, str]:
        label = self.template.volume_group_snapshot_label_key or self.defaults.group_label
        return claim.metadata.namespace, claim.metadata.labels.get(label, "")

    @cached_property
    def _groups(self) -> Mapping[tuple[str, str], Sequence[VolumeClaim]]:
        """The PVCs whose snapshots are taken together."""
        groups: dict[tuple[str, str], list[VolumeClaim]] = {}
        for claim in self.cluster.claims.values():
            if (key := self._group_key(claim))[1]:
                groups.setdefault(key, []).append(claim)
        return groups

    def choices(self) -> Mapping[VolumeKey, VolumeChoice]:
        """Return what the Backup does with each volume."""
        claims, pods = self._selected
        choices: dict[VolumeKey, VolumeChoice] = {}
        for pod in pods.values():
            for volume in pod.spec.volumes:
                if pod.running and pod.is_mounted(volume) and self._is_fs_backup(pod, volume):
                    choices[pod.key_of(volume)] = VolumeChoice(BackupMethod.FS_BACKUP)
        for key, claim in claims.items():
            if claim.bound and key not in choices:
                choices[key] = self._snapshot_of(claim)
        return choices

    def _is_fs_backup(self, pod: WorkloadPod, volume: PodVolume) -> bool:
        claim = self.cluster.claims.get(pod.key_of(volume)) if volume.claim else None
        if not volume.has_data or (volume.claim and (claim is None or not self._takes_claims)):
            return False
        stored = self.cluster.volume_of(claim) if claim is not None else None
        if stored is not None and stored.type == "hostPath":
            return False
        action = self.policies.match(claim, stored, volume)
        return action is PolicyAction.FS_BACKUP if action is not None else self._is_opted_in(pod, volume)

    def _is_opted_in(self, pod: WorkloadPod, volume: PodVolume) -> bool:
        annotations = pod.metadata.annotations
        if self._fs_by_default:
            return volume.name not in annotations.opted_out.split(",")
        return volume.name in annotations.opted_in.split(",")

    def _snapshot_of(self, claim: VolumeClaim) -> VolumeChoice:
        """Return what becomes of a PVC whose files no fs-backup copies."""
        stored = self.cluster.volume_of(claim)
        match self.policies.match(claim, stored):
            case PolicyAction.SKIP:
                return VolumeChoice(BackupMethod.SKIPPED, "its volume policy skips the volume")
            case PolicyAction.CUSTOM:
                return VolumeChoice(BackupMethod.SNAPSHOT, "its volume policy leaves the volume to another plugin")
            case PolicyAction.FS_BACKUP:
                why = "its volume policy asks for fs-backup, and no running pod mounts the volume"
                return VolumeChoice(BackupMethod.NONE, why)
            case PolicyAction.SNAPSHOT:
                pass
            case None:
                for pod in self.cluster.pods_by_claim.get(claim.key, ()):
                    mounts = (one for one in pod.spec.volumes if one.claim == claim.metadata.name)
                    if any(self._is_opted_in(pod, one) for one in mounts):
                        why = f"fs-backup needs pod {pod.metadata.name} to run and to mount it"
                        return VolumeChoice(BackupMethod.NONE, why)
                if self.template.snapshot_volumes is False:
                    return self._unsaved(claim)
        return self._moved_or_not(claim)

    def _unsaved(self, claim: VolumeClaim) -> VolumeChoice:
        """Return that no data is saved: by hooks at most, which is what such a backup may be meant for."""
        pods = self.cluster.pods_by_claim.get(claim.key, ())
        if any(pod.has_hooks for pod in pods):
            return VolumeChoice(BackupMethod.SNAPSHOT, "it runs hooks only: snapshotVolumes is false")
        opted_out = [pod.metadata.name for pod in pods if pod.metadata.annotations.opted_out]
        if self._fs_by_default and opted_out:
            return VolumeChoice(BackupMethod.SKIPPED, f"pod {opted_out[0]} opts out of fs-backup")
        return VolumeChoice(BackupMethod.NONE, "snapshotVolumes is false")

    def _moved_or_not(self, claim: VolumeClaim) -> VolumeChoice:
        stored = self.cluster.volume_of(claim)
        if stored is not None and stored.type in {"nfs", "hostPath", "local", ""}:
            why = f"no snapshot of a volume of type {stored.type or 'unknown'} is possible"
            return VolumeChoice(BackupMethod.NONE, why)
        if stored is not None and stored.type != "csi":
            return VolumeChoice(BackupMethod.SNAPSHOT, "it takes native snapshots, which are not moved")
        if claim.spec.storage_class_name is None:
            return VolumeChoice(BackupMethod.NONE, "the PVC has no storage class, which a snapshot needs")
        if not self.defaults.csi:
            # Source: ShouldSkipAction in pkg/util/csi/util.go.
            why = "the server runs without --features=EnableCSI, which moves snapshots of CSI drivers"
            return VolumeChoice(BackupMethod.NONE, why)
        moves = self.template.snapshot_move_data
        if not (self.defaults.move_data if moves is None else moves):
            why = "it takes snapshots, which are not moved: snapshotMoveData is not true"
            return VolumeChoice(BackupMethod.SNAPSHOT, why)
        return VolumeChoice(BackupMethod.MOVED)

"""The models of the document in the ConfigMap named by `--node-agent-configmap`: every key.

The schema in docs/config.schema.json and the page docs/configuration-keys.md are generated from these models.
Source: Velero v1.18, pkg/types/node_agent.go and pkg/cmd/cli/nodeagent/server.go. Keys that Velero
does not have are marked as our own.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Final, Literal, cast

from pydantic import AfterValidator, Discriminator, Field, StrictBool, StrictInt, StrictStr, Tag, field_validator
from pydantic_core.core_schema import ValidationInfo

from core.kube.types import Quantities, ResourceRequirements
from core.models import names
from nodeagent.config.own_keys import OWN_KEY, OwnKeys
from nodeagent.config.value_types import (
    NUMBER_OPERATORS,
    AnnotationMap,
    LabelMap,
    LabelSelector,
    ObjectName,
    QuantityText,
    Section,
    Toleration,
    expected,
    is_at_most,
    is_zero,
    setting,
    toggle,
)

LARGEST_PREPARE_QUEUE: Final = 20_000
"""The admission ledger is one ConfigMap of at most 1 MiB, and a reservation takes 37 bytes."""

_LARGEST_NUMBER: Final = 2**31 - 1
"""Far beyond any use; keeps sums and sizes within the range of every consumer."""

_LARGEST_MIB: Final = 2**43 - 1
"""In bytes, the largest number of Velero; a size that no backup has switches cache volumes off."""

INHERIT: Final = "inherit"

_PositiveNumber = Annotated[StrictInt, Field(ge=1, le=_LARGEST_NUMBER)]

_RESERVED: Final = {
    *(names.CREDENTIALS_SECRET, names.REPO_CREDENTIALS_SECRET, names.ADMISSIONS_CONFIGMAP, names.DELETIONS_CONFIGMAP),
    *names.HISTORY_CONFIGMAPS,
}
"""What the agent itself reads under a fixed name: the copy of a user's object must not take its place."""


def _check_copied(name: str) -> str:
    if not name or name in _RESERVED:
        raise expected("the name of an object that the agent does not use itself")
    return name


_CopiedNames = tuple[Annotated[ObjectName, AfterValidator(_check_copied)], ...]


def _copied(what: str, example: str) -> Any:  # noqa: ANN401 - pydantic's own
    return setting((), f"{what} that are copied beside the PVC while it exists", [example])


def _check_no_agent_labels(labels: dict[str, str]) -> dict[str, str]:
    # A mover pod with them would count as the agent of its node, and transfers would be assigned to it.
    if labels.items() >= names.AGENT_LABELS.items():
        raise expected(f"labels other than {names.AGENT_LABELS}, which select the agents")
    return labels


PodLabels = Annotated[LabelMap, AfterValidator(_check_no_agent_labels)]
"""Labels of our pods."""


class NodeRule(Section):
    """One of `loadConcurrency.perNodeConfig`."""

    node_selector: LabelSelector = setting(LabelSelector, "the nodes of this rule", {"matchLabels": {"pool": "backup"}})
    number: _PositiveNumber = setting(..., "slots of each of these nodes", 3)

    @field_validator("node_selector")
    @classmethod
    def _check_operators(cls, selector: LabelSelector) -> LabelSelector:
        # Source: Kubernetes, metav1.LabelSelectorAsSelector.
        if any(requirement.operator in NUMBER_OPERATORS for requirement in selector.match_expressions):
            raise expected("no Gt and no Lt, which only loadAffinity supports")
        return selector


NO_QUEUE_LENGTH: Final = "is not set: any number of transfers is prepared at a time; Velero 1.19 prepares 5"
"""Said beside definitions of Velero 1.19.

Source: github.com/velero-io/velero/pull/10575.
"""


class LoadConcurrency(Section):
    """Concurrency of transfers."""

    global_config: _PositiveNumber = setting(1, "slots of a node: how many transfers may be InProgress at a time", 2)
    per_node_config: tuple[NodeRule, ...] = setting(
        (),
        "other numbers of slots for some nodes; if several rules match, the smallest applies",
        [{"nodeSelector": {"matchLabels": {"pool": "backup"}}, "number": 8}],
    )
    prepare_queue_length: Annotated[StrictInt, Field(ge=1, le=LARGEST_PREPARE_QUEUE)] | None = setting(
        None, "how many transfers of all kinds in the cluster may be Accepted or Prepared at a time", 100
    )
    restores_first: StrictBool = toggle("admit restores before backups (our own key)")


class LoadAffinity(Section):
    """One of `loadAffinity`: nodes for data movers."""

    node_selector: LabelSelector = setting(
        LabelSelector,
        "nodes on which data movers of DataUploads and DataDownloads may run",
        {"matchLabels": {"pool": "backup"}},
    )
    # Also no valid name, as in Velero: the entry then applies to nothing.
    storage_class: StrictStr = setting(
        "", "storage class to which the entry applies; for backups, the class in backupPVC", "fast"
    )


class AffinityMode(StrEnum):
    """The meaning of several matching entries of `loadAffinity`."""

    FIRST = "first"
    """The first one applies, as in Velero."""
    ANY = "any"
    """All of them are alternatives."""


class BackupPVC(Section):
    """An entry of `backupPVC`: the PVC that a backup reads from."""

    storage_class: ObjectName = setting("", "storage class of the PVC; empty: the source's", "fast-single-replica")
    read_only: StrictBool = toggle("access mode ReadOnlyMany instead of ReadWriteOnce, and a read-only mount")
    read_write_once_pod: StrictBool = toggle(
        "access mode ReadWriteOncePod, with which SELinux labels the whole volume as it is mounted; not with readOnly"
    )
    spc_no_relabeling: StrictBool = toggle(
        "SELinux type spc_t for the data mover, which avoids relabeling of every file; requires readOnly"
    )
    annotations: AnnotationMap = setting(dict, "annotations of the PVC", {"example.com/clone": "shallow"})
    secret_names: _CopiedNames = _copied("Secrets of the source's namespace", "ceph-csi-kms-token")
    config_map_names: _CopiedNames = _copied("ConfigMaps of the source's namespace", "ceph-csi-kms-config")


class RestorePVC(Section):
    """The PVC that a restore writes to."""

    ignore_delay_binding: StrictBool = toggle(
        "restore to a class that binds WaitForFirstConsumer without a pod that uses the target PVC"
    )
    secret_names: _CopiedNames = _copied("Secrets of the target's namespace", "ceph-csi-kms-token")
    config_map_names: _CopiedNames = _copied("ConfigMaps of the target's namespace", "ceph-csi-kms-config")


class CachePVC(Section):
    """A separate PVC for the cache of a restore."""

    other_names: ClassVar[Mapping[str, str]] = {"residentThresholdMB": "residentThresholdInMB"}

    storage_class: ObjectName = setting("", "storage class of the PVC; empty: no cache volume", "fast")
    resident_threshold_in_mb: Annotated[StrictInt, Field(ge=0, le=_LARGEST_MIB)] = setting(
        0,
        "size of a backup, in MiB, from which its restore uses a cache volume; also residentThresholdMB",
        1024,
        alias="residentThresholdInMB",
    )


class PodResources(Section):
    """Requests and limits of data movers; empty or `0`: none."""

    cpu_request: QuantityText = setting("", "CPU request", "500m")
    cpu_limit: QuantityText = setting("", "CPU limit", "2")
    memory_request: QuantityText = setting("", "memory request", "512Mi")
    memory_limit: QuantityText = setting("", "memory limit", "2Gi")
    ephemeral_storage_request: QuantityText = setting("", "request of ephemeral storage", "6Gi")
    ephemeral_storage_limit: QuantityText = setting("", "limit of ephemeral storage, kopia's cache included", "8Gi")

    @field_validator("cpu_limit", "memory_limit", "ephemeral_storage_limit")
    @classmethod
    def _covers_request(cls, limit: str, info: ValidationInfo) -> str:
        request = info.data.get((info.field_name or "").replace("_limit", "_request"))
        if limit and request and not is_at_most(request, limit):
            raise expected(f"at least the request, {request}")
        return limit

    def to_wire(self) -> ResourceRequirements:
        """Return it as `resources` of a container; empty if nothing is set."""
        found: dict[str, Quantities] = {}
        for name in ("cpu", "memory", "ephemeral-storage"):
            for kind in ("request", "limit"):
                text: str = getattr(self, f"{name.replace('-', '_')}_{kind}")
                # Source: Velero v1.18, pkg/util/kube/resource_requirements.go: 0 is unbounded.
                if text and not is_zero(text):
                    found.setdefault(f"{kind}s", {})[name] = text
        return cast("ResourceRequirements", found)


def _form_of_tolerations(value: Any) -> str | None:  # noqa: ANN401 - raw JSON
    if isinstance(value, (list, tuple)):
        return ":list"
    return ":word" if value == INHERIT else None


_Tolerations = Annotated[
    Annotated[tuple[Toleration, ...], Tag(":list")] | Annotated[Literal["inherit"], Tag(":word")],
    Discriminator(
        _form_of_tolerations,
        custom_error_type="expected",
        custom_error_message="expected {expected}",
        custom_error_context={"expected": 'a list of tolerations, or "inherit"'},
    ),
]


class AgentConfig(Section):
    """The whole document; every default is Velero's."""

    other_names: ClassVar[Mapping[str, str]] = {"cacheVolume": "cachePVC"}

    load_concurrency: LoadConcurrency = setting(LoadConcurrency, "concurrency of transfers", {"globalConfig": 2})
    load_affinity: tuple[LoadAffinity, ...] = setting(
        (),
        "node affinity of DataUploads and DataDownloads: the first entry for the volume's storage class "
        "applies, else the first without a class",
        [{"nodeSelector": {"matchLabels": {"pool": "backup"}}, "storageClass": "fast"}],
    )
    load_affinity_mode: AffinityMode = setting(
        AffinityMode.FIRST,
        "any: all matching entries are alternatives; first: only the first one applies (our own key)",
        "any",
    )
    backup_pvc: dict[str, BackupPVC] = setting(
        dict,
        "PVCs that backups read from, by the storage class of the source volume",
        {"fast": {"storageClass": "fast-single-replica"}},
        alias="backupPVC",
    )
    restore_pvc: RestorePVC = setting(
        RestorePVC, "PVCs that restores write to", {"ignoreDelayBinding": True}, alias="restorePVC"
    )
    cache_pvc: CachePVC = setting(
        CachePVC, "volume for the cache of a restore; also cacheVolume", {"storageClass": "fast"}, alias="cachePVC"
    )
    pod_resources: PodResources = setting(
        PodResources,
        "requests and limits of mover pods; one invalid value invalidates all of them",
        {"cpuRequest": "500m", "memoryLimit": "2Gi"},
    )
    priority_class_name: ObjectName = setting(
        "", "priority class of mover pods; if it does not exist, it is ignored with a warning", "data-mover"
    )
    privileged_fs_backup: StrictBool = toggle(
        "run data movers of PodVolumeBackups and PodVolumeRestores as privileged, if nodes require it"
    )
    pod_labels: PodLabels = setting(dict, "labels of mover pods, instead of the inherited ones", {"team": "storage"})
    pod_annotations: AnnotationMap = setting(
        dict, "annotations of mover pods, instead of the inherited ones", {"sidecar.istio.io/inject": "false"}
    )
    tolerations: _Tolerations = setting(
        (),
        'tolerations of mover pods, in addition to the inherited ones; "inherit": all of the DaemonSet (our own key)',
        [{"key": "dedicated", "operator": "Equal", "value": "backup", "effect": "NoSchedule"}],
    )

    own: OwnKeys = setting(
        OwnKeys,
        "keys that Velero does not have (our own key)",
        {"moverServiceAccount": "node-agent-mover"},
        alias=OWN_KEY,
    )

    @property
    def copied_secrets(self) -> tuple[str, ...]:
        """The names of all Secrets that are copied beside PVCs."""
        return tuple(dict.fromkeys(name for pvc in self._pvcs for name in pvc.secret_names))

    @property
    def copied_config_maps(self) -> tuple[str, ...]:
        """The names of all ConfigMaps that are copied beside PVCs."""
        return tuple(dict.fromkeys(name for pvc in self._pvcs for name in pvc.config_map_names))

    @property
    def _pvcs(self) -> list[BackupPVC | RestorePVC]:
        return [*self.backup_pvc.values(), self.restore_pvc]

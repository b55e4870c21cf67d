"""Jobs for one backup repository or storage location: maintenance, reports of snapshots; a mover pod's spec, run once.

Does no I/O; when a Job runs, and what it may use, is decided elsewhere.
Source: Velero v1.18, buildJob in pkg/repository/maintenance/maintenance.go, as recorded in
tests/recordings/velero-1.18.2/maintenance; tests/exposer/test_maintenance_job.py lists every difference.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Final

from core.contract import MoverVerb
from core.kube.types import Manifest, PodToleration, ResourceRequirements, Volume
from core.models.names import (
    MAINTENANCE_CONTAINER,
    OWNER_UID_LABEL,
    SNAPSHOT_DELETION_LABEL,
    SNAPSHOT_FILES_LABEL,
    SNAPSHOT_LIST_LABEL,
    SNAPSHOT_REPORT_LABEL,
    SNAPSHOT_VERIFICATION_LABEL,
    label_value,
)
from core.models.storage import DEFAULT_CACHE_LIMIT_MIB
from core.mover_specs import MaintainRepository, MoverSpec, SendFiles, VerifySnapshots
from exposer.model import Owner
from exposer.placement import Alternatives, Placement
from exposer.pod_files import MoverVolume
from exposer.pod_manifest import MoverPod, build_mover_pod, complete_spec
from exposer.settings import CacheVolume, ExposeSettings, StorageAccess

__all__ = [
    "JobSettings",
    "MaintenanceRun",
    "build_command_job",
    "build_maintenance_job",
    "is_reserved_label",
]

_LABELS: Final = {
    MoverVerb.REPORT_SNAPSHOTS: SNAPSHOT_REPORT_LABEL,
    MoverVerb.LIST_SNAPSHOTS: SNAPSHOT_LIST_LABEL,
    MoverVerb.VERIFY_SNAPSHOTS: SNAPSHOT_VERIFICATION_LABEL,
    MoverVerb.DELETE_SNAPSHOTS: SNAPSHOT_DELETION_LABEL,
    MoverVerb.LIST_FILES: SNAPSHOT_FILES_LABEL,
    MoverVerb.SEND_FILES: SNAPSHOT_FILES_LABEL,
}
"""The label of a command's Job, by what it does."""

_POD_NAME: Final = "velero-repo-maintenance-pod"

_JOB_EXTRA: Final = timedelta(minutes=15)
"""The Job's own deadline comes after its pod's: a Job that fails by its own counts no failed pod, for which a
Velero server would wait."""

_REPORT_DEADLINE_SECONDS: Final = 3600
"""Reading the metadata of tens of thousands of snapshots and thousands of backups takes minutes."""

_SEND_DEADLINE_SECONDS: Final = 86_400
"""A terabyte takes hours. A pod that is not read ends much sooner by itself."""

_REPORT_KEPT_SECONDS: Final = 3600
"""For readers of the log."""

_TEMPORARY_GIB: Final = 2
"""Room for kopia's temporary files beside its cache: sets of contents, from some ten million on."""

_TOLERATIONS: Final[tuple[PodToleration, ...]] = (
    {"key": "os", "operator": "Equal", "value": "windows", "effect": "NoSchedule"},
)
"""As in Velero's Jobs, though no Windows node is eligible."""

_RESERVED_PREFIXES: Final = ("velero.io/", "nodeagent.io/", "batch.kubernetes.io/")
_RESERVED_LABELS: Final = frozenset({"job-name", "controller-uid"})


def is_reserved_label(key: str) -> bool:
    """Return whether the label decides whose pod it is, so that no configuration may set it."""
    return key in _RESERVED_LABELS or key.startswith(_RESERVED_PREFIXES)


@dataclass(frozen=True)
class JobSettings:
    """The configuration of a maintenance Job.

    `resources` are its container's; None: the leader decides. `alternatives` are the requirements on its node.
    `labels` and `annotations` replace the inherited ones, if there are any. `tolerations` are added to the inherited.
    """

    resources: ResourceRequirements | None = None
    alternatives: Alternatives = ()
    priority_class_name: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    active_deadline: timedelta = timedelta(hours=6)
    tolerations: tuple[PodToleration, ...] = ()


@dataclass(frozen=True)
class MaintenanceRun:
    """One run: the Job `name` works on `owner`, a BackupRepository or BackupStorageLocation.

    `cache_limit_mib` is the limit of kopia's cache. `volume` is what a Job mounts that compares a restored volume with
    its snapshot.
    """

    owner: Owner
    name: str
    settings: JobSettings
    storage: StorageAccess
    cache_limit_mib: int = DEFAULT_CACHE_LIMIT_MIB
    volume: MoverVolume | None = None


def build_maintenance_job(run: MaintenanceRun, expose: ExposeSettings, spec: MaintainRepository) -> Manifest:
    """Return the manifest of the Job, a batch/v1 Job as JSON dict.

    It has no owner reference: Kubernetes would delete it with the BackupRepository, and a Velero server would wait for
    ever for a Job that vanished before its end. Its label says whose it is. It has no label of Velero's either: the
    leader adds that once the pod runs.
    """
    seconds = int(run.settings.active_deadline.total_seconds())
    template = _build_template(run, expose, spec, seconds)
    # A pod that is deleted counts as failed only when it has ended: on a lost node it may still write.
    more = {"podReplacementPolicy": "Failed", "activeDeadlineSeconds": seconds + int(_JOB_EXTRA.total_seconds())}
    return _build_job(run, run.owner.labels, more, template)


def build_command_job(run: MaintenanceRun, expose: ExposeSettings, spec: MoverSpec) -> Manifest:
    """Return the manifest of a Job that a command runs, a batch/v1 Job as JSON dict.

    Its labels say that it is neither maintenance nor the object of a transfer. Kubernetes deletes it an hour after its
    end. A verification may take as long as the settings of `run` say.
    """
    match spec:
        case VerifySnapshots():
            seconds = int(run.settings.active_deadline.total_seconds())
        case SendFiles():
            seconds = _SEND_DEADLINE_SECONDS
        case _:
            seconds = _REPORT_DEADLINE_SECONDS
    labels = {_LABELS[spec.verb]: label_value(run.owner.name)}
    more = {"activeDeadlineSeconds": seconds, "ttlSecondsAfterFinished": _REPORT_KEPT_SECONDS}
    return _build_job(run, labels, more, _build_template(run, expose, spec, seconds))


def _build_job(run: MaintenanceRun, labels: Mapping[str, str], more: Manifest, template: Manifest) -> Manifest:
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": run.name, "namespace": run.owner.namespace, "labels": dict(labels)},
        # A run that failed is judged before the next one.
        "spec": {"backoffLimit": 0, **more, "template": template},
    }


def _build_template(run: MaintenanceRun, expose: ExposeSettings, spec: MoverSpec, deadline_seconds: int) -> Manifest:
    configured = run.settings
    pod_settings = replace(
        expose.pod,
        resources=configured.resources or {},
        priority_class_name=configured.priority_class_name,
        labels={key: value for key, value in configured.labels.items() if not is_reserved_label(key)},
        annotations=dict(configured.annotations),
    )
    args = complete_spec(spec, run.owner, expose.mover)
    placement = Placement(alternatives=configured.alternatives)
    plan = MoverPod(
        run.owner,
        run.name,
        args,
        run.storage,
        volume=run.volume,
        placement=placement,
        tolerations=(*_TOLERATIONS, *configured.tolerations),
    )
    pod = build_mover_pod(plan, replace(expose, pod=pod_settings))
    meta, pod_spec = pod["metadata"], pod["spec"]
    (container,) = pod_spec["containers"]
    return {
        "metadata": {
            "name": _POD_NAME,
            # With it, garbage collection would take the pod for a deleted transfer's.
            "labels": {key: value for key, value in meta["labels"].items() if key != OWNER_UID_LABEL},
            "annotations": meta.get("annotations") or {},
        },
        "spec": pod_spec
        | {
            "activeDeadlineSeconds": deadline_seconds,
            "containers": [container | {"name": MAINTENANCE_CONTAINER}],
            "volumes": [_limit(volume, run.cache_limit_mib) for volume in pod_spec["volumes"]],
        },
    }


def _limit(volume: Volume, cache_limit_mib: int) -> Volume:
    """Return the volume of a pod; a directory of the node that has no size limit gets one."""
    directory = volume.get("emptyDir")
    if directory is None or directory.get("sizeLimit"):
        return volume
    size_gib = CacheVolume("", cache_limit_mib).size_gib + _TEMPORARY_GIB
    return volume | {"emptyDir": directory | {"sizeLimit": f"{size_gib}Gi"}}

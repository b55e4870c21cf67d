"""Jobs for one backup repository or storage location: maintenance, reports of snapshots; a mover pod's spec, run once.

Does no I/O; when a Job runs, and what it may use, is decided elsewhere.
Source: Velero v1.18, buildJob in pkg/repository/maintenance/maintenance.go, as recorded in
tests/recordings/velero-1.18.2/maintenance; tests/exposer/test_maintenance_job.py lists every difference.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Final

from core.contract import MoverArgs, MoverVerb
from core.file_contract import encode_path
from core.kube.resources import BACKUP_REPOSITORIES, BACKUP_STORAGE_LOCATIONS
from core.models.base import JsonDict
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
from exposer.model import Owner
from exposer.placement import Alternatives, Placement
from exposer.pod_files import MoverVolume
from exposer.pod_manifest import MoverPod, build_mover_pod
from exposer.settings import CacheVolume, ExposeSettings, StorageAccess

__all__ = [
    "FileRequest",
    "JobSettings",
    "MaintenanceRun",
    "build_deletion_job",
    "build_file_job",
    "build_list_job",
    "build_maintenance_job",
    "build_report_job",
    "build_verification_job",
    "is_reserved_label",
]

_FLAGS: Final = {
    BACKUP_REPOSITORIES.kind: "backup-repository",
    BACKUP_STORAGE_LOCATIONS.kind: "backup-storage-location",
}
"""The mover's flag that names the owner of a Job."""

_POD_NAME: Final = "velero-repo-maintenance-pod"

_JOB_EXTRA: Final = timedelta(minutes=15)
"""The Job's own deadline comes after that of its pod: a Job that fails by its own counts no failed pod, for which a
Velero server would wait."""

_REPORT_DEADLINE_SECONDS: Final = 3600
"""Reading the metadata of tens of thousands of snapshots and thousands of backups takes minutes."""

_SEND_DEADLINE_SECONDS: Final = 86_400
"""A terabyte takes hours. A pod that is not read ends much sooner by itself."""

_REPORT_KEPT_SECONDS: Final = 3600
"""For readers of the log."""

_TEMPORARY_GIB: Final = 2
"""Room for kopia's temporary files beside its cache: sets of contents, from some ten million on."""

_TOLERATIONS: Final[tuple[JsonDict, ...]] = (
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

    `resources` are those of its container; None: the leader decides. `alternatives` are the requirements on its node.
    `labels` and `annotations` replace the inherited ones, if there are any. `tolerations` are added to the inherited.
    """

    resources: JsonDict | None = None
    alternatives: Alternatives = ()
    priority_class_name: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    active_deadline: timedelta = timedelta(hours=6)
    tolerations: tuple[JsonDict, ...] = ()


@dataclass(frozen=True)
class MaintenanceRun:
    """One run: the Job `name` maintains the repository of `owner`, a BackupRepository, or lists a whole location.

    With `ignore_foreign` it also runs where another cluster maintains the repository. `verify_blobs` is up to how many
    blobs kopia checks its index against the bucket; None: the mover's default. `full_interval` is set in the
    repository before; None: it stays. `report_snapshots`: the report of its snapshots follows. `cache_limit_mib` is the
    limit of kopia's cache. `volume` is what a Job mounts that compares a restored volume with its snapshot.
    """

    owner: Owner
    name: str
    settings: JobSettings
    storage: StorageAccess
    ignore_foreign: bool = False
    verify_blobs: int | None = None
    full_interval: timedelta | None = None
    report_snapshots: bool = False
    cache_limit_mib: int = DEFAULT_CACHE_LIMIT_MIB
    volume: MoverVolume | None = None

    @property
    def options(self) -> tuple[str, ...]:
        """The flags of a maintenance."""
        flags = [f"--job={self.name}"]
        if self.ignore_foreign:
            flags.append("--ignore-foreign")
        if self.verify_blobs is not None:
            flags.append(f"--verify-blobs={self.verify_blobs}")
        if self.full_interval is not None:
            flags.append(f"--full-interval={int(self.full_interval.total_seconds())}")
        if self.report_snapshots:
            flags.append("--report-snapshots")
        return tuple(flags)


@dataclass(frozen=True)
class FileRequest:
    """A file or directory of a snapshot in the repository of a namespace; of a block `device`, there is no path.

    It is listed up to `limit` entries, of names after `after`; 0: it is sent.
    """

    volume_namespace: str
    snapshot_id: str
    path: str = ""
    device: bool = False
    limit: int = 0
    after: str = ""

    @property
    def options(self) -> tuple[str, ...]:
        """The flags of the mover."""
        flags = [f"--volume-namespace={self.volume_namespace}", f"--snapshot={self.snapshot_id}"]
        if self.path:
            flags.append(f"--path={encode_path(self.path)}")
        if self.device:
            flags.append("--device")
        if self.limit:
            flags.append(f"--limit={self.limit}")
        if self.after:
            flags.append(f"--after={encode_path(self.after)}")
        return tuple(flags)


def build_maintenance_job(run: MaintenanceRun, expose: ExposeSettings) -> JsonDict:
    """Return the manifest of the Job, a batch/v1 Job as JSON dict.

    It has no owner reference: Kubernetes would delete it with the BackupRepository, and a Velero server would wait for
    ever for a Job that vanished before its end. Its label says whose it is. It has no label of Velero's either: the
    leader adds that once the pod runs.
    """
    seconds = int(run.settings.active_deadline.total_seconds())
    template = _build_template(run, expose, MoverVerb.MAINTAIN_REPOSITORY, seconds, run.options)
    # A pod that is deleted counts as failed only when it has ended: on a lost node it may still write.
    more = {"podReplacementPolicy": "Failed", "activeDeadlineSeconds": seconds + int(_JOB_EXTRA.total_seconds())}
    return _build_job(run, run.owner.labels, more, template)


def build_report_job(run: MaintenanceRun, expose: ExposeSettings) -> JsonDict:
    """Return the manifest of a Job that reports the snapshots of the repository and changes nothing.

    It is a batch/v1 Job as JSON dict. Of `run`, what concerns maintenance alone has no effect. Its labels say that it
    is neither maintenance nor the object of a transfer; Kubernetes deletes it an hour after its end. The snapshots are
    in its pod's log (`core.snapshot_contract.REPORTED_LINE`), the SnapshotReport in the termination message.
    """
    return _build_command_job(run, expose, SNAPSHOT_REPORT_LABEL, MoverVerb.REPORT_SNAPSHOTS)


def build_list_job(run: MaintenanceRun, expose: ExposeSettings, volume_namespaces: Sequence[str] = ()) -> JsonDict:
    """Return the manifest of a Job that lists the snapshots in `run.owner`, a BackupStorageLocation.

    `volume_namespaces` are those whose repositories are listed; none: all. It is like that of a report. The snapshots
    are in its pod's log (`core.snapshot_contract.STORED_LINE`), the SnapshotListing in the termination message.
    """
    options = tuple(f"--volume-namespace={name}" for name in volume_namespaces)
    return _build_command_job(run, expose, SNAPSHOT_LIST_LABEL, MoverVerb.LIST_SNAPSHOTS, options)


def build_verification_job(
    run: MaintenanceRun, expose: ExposeSettings, snapshots: Sequence[str], percent: float
) -> JsonDict:
    """Return the manifest of a Job that reads these kopia snapshots back; with `run.volume`, it is compared with one.

    It is like that of a report, and may take as long as the settings of `run` say. The results are in its pod's log
    (`core.models.verification.VERIFIED_LINE`), the SnapshotVerification in the termination message.
    """
    options = (*(f"--snapshot={one}" for one in snapshots), f"--percent={percent:g}")
    seconds = int(run.settings.active_deadline.total_seconds())
    template = _build_template(run, expose, MoverVerb.VERIFY_SNAPSHOTS, seconds, options)
    labels = {SNAPSHOT_VERIFICATION_LABEL: label_value(run.owner.name)}
    more = {"activeDeadlineSeconds": seconds, "ttlSecondsAfterFinished": _REPORT_KEPT_SECONDS}
    return _build_job(run, labels, more, template)


def build_deletion_job(run: MaintenanceRun, expose: ExposeSettings, options: Sequence[str]) -> JsonDict:
    """Return the manifest of a Job that deletes snapshots in `run.owner`, a BackupStorageLocation.

    `options` are the flags of the verb. It is like that of a list; the snapshots are in its pod's log
    (`core.snapshot_contract.DELETED_LINE`), the SnapshotDeletion in the termination message.
    """
    return _build_command_job(run, expose, SNAPSHOT_DELETION_LABEL, MoverVerb.DELETE_SNAPSHOTS, tuple(options))


def build_file_job(run: MaintenanceRun, expose: ExposeSettings, request: FileRequest) -> JsonDict:
    """Return the manifest of a Job that lists or sends files of a snapshot in `run.owner`, a BackupStorageLocation.

    It is like that of a report. With a `limit`, the entries are in its pod's log (`core.file_contract.ENTRY_LINE`),
    the FileListing in the termination message. Without, the pod sends them to `core.file_contract.SEND_COMMAND`.
    """
    verb = MoverVerb.LIST_FILES if request.limit else MoverVerb.SEND_FILES
    return _build_command_job(run, expose, SNAPSHOT_FILES_LABEL, verb, request.options)


def _build_command_job(
    run: MaintenanceRun, expose: ExposeSettings, label: str, verb: MoverVerb, options: tuple[str, ...] = ()
) -> JsonDict:
    seconds = _SEND_DEADLINE_SECONDS if verb is MoverVerb.SEND_FILES else _REPORT_DEADLINE_SECONDS
    labels = {label: label_value(run.owner.name)}
    template = _build_template(run, expose, verb, seconds, options)
    more = {"activeDeadlineSeconds": seconds, "ttlSecondsAfterFinished": _REPORT_KEPT_SECONDS}
    return _build_job(run, labels, more, template)


def _build_job(run: MaintenanceRun, labels: Mapping[str, str], more: JsonDict, template: JsonDict) -> JsonDict:
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": run.name, "namespace": run.owner.namespace, "labels": dict(labels)},
        # A run that failed is judged before the next one.
        "spec": {"backoffLimit": 0, **more, "template": template},
    }


def _build_template(
    run: MaintenanceRun, expose: ExposeSettings, verb: MoverVerb, deadline_seconds: int, options: tuple[str, ...] = ()
) -> JsonDict:
    configured = run.settings
    pod_settings = replace(
        expose.pod,
        resources=configured.resources or {},
        priority_class_name=configured.priority_class_name,
        labels={key: value for key, value in configured.labels.items() if not is_reserved_label(key)},
        annotations=dict(configured.annotations),
    )
    args = MoverArgs(
        verb=verb,
        kind_flag=_FLAGS[run.owner.kind],
        resource_name=run.owner.name,
        resource_timeout=expose.mover.resource_timeout,
        log_level=expose.mover.log_level,
        log_format=expose.mover.log_format,
        options=options,
    )
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
    meta, spec = pod["metadata"], pod["spec"]
    (container,) = spec["containers"]
    return {
        "metadata": {
            "name": _POD_NAME,
            # With it, garbage collection would take the pod for that of a deleted transfer.
            "labels": {key: value for key, value in meta["labels"].items() if key != OWNER_UID_LABEL},
            "annotations": meta.get("annotations") or {},
        },
        "spec": spec
        | {
            "activeDeadlineSeconds": deadline_seconds,
            "containers": [container | {"name": MAINTENANCE_CONTAINER}],
            "volumes": [_limit(volume, run.cache_limit_mib) for volume in spec["volumes"]],
        },
    }


def _limit(volume: JsonDict, cache_limit_mib: int) -> JsonDict:
    """Return the volume of a pod; a directory of the node that has no size limit gets one."""
    directory = volume.get("emptyDir")
    if directory is None or directory.get("sizeLimit"):
        return volume
    size_gib = CacheVolume("", cache_limit_mib).size_gib + _TEMPORARY_GIB
    return volume | {"emptyDir": directory | {"sizeLimit": f"{size_gib}Gi"}}

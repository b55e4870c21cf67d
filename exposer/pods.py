"""Builders of pods: of data movers, one for each kind, of Jobs for a repository or location, and of client commands.

`exposer.pod_manifest` builds what movers share; `storage` is what a pod needs to reach the bucket of its location. A
pod of a client command has the agents' image, an account of its own, and nothing of a data mover. Does no I/O.
Source: Velero v1.18, buildJob in pkg/repository/maintenance/maintenance.go, as recorded in
tests/recordings/velero-1.18.2/maintenance; tests/exposer/test_pods_maintenance_job.py lists every difference.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Final

from core.contract import MoverArgs, MoverMethod, MoverVerb, SnapshotMetadata, TrackedSnapshot, VolumeMode
from core.kube.resources import JOBS
from core.kube.types import (
    ClaimSource,
    DaemonSet,
    Manifest,
    MetadataServiceSpec,
    PersistentVolumeClaim,
    PodToleration,
    ResourceRequirements,
    Volume,
)
from core.models import names
from core.models.storage import DEFAULT_CACHE_LIMIT_MIB, BlockHash
from core.models.transfer_settings import Compression
from core.mover_specs import InitRepository, MaintainRepository, MoverSpec, SendFiles, ValidateLocation, VerifySnapshots
from exposer.manifests import ONE_POD, READ_ONLY, cache_claim_name, volume_mode
from exposer.model import LocatedVolume, Owner, PodVolumeRequest, RestoreRequest, SnapshotRequest
from exposer.pod_manifest import (
    MoverPod,
    MoverVolume,
    Placement,
    build_mover_pod,
    build_node_affinity,
    complete_spec,
    escape_words,
)
from exposer.settings import Alternatives, CacheVolume, ExposeSettings, MoverOptions, StorageAccess
from exposer.template import AgentTemplate, find_agent

_SNAPSHOT_GROUP: Final = "snapshot-exposer"
_RESTORE_GROUP: Final = "generic-restore-exposer"


def build_backup_pod(
    request: SnapshotRequest,
    claim: PersistentVolumeClaim,
    placement: Placement,
    *,
    storage: StorageAccess,
    excluded: str | None = None,
    tracked: TrackedSnapshot | None = None,
    service: MetadataServiceSpec | None = None,
) -> Manifest:
    """Return the pod that backs up the volume created from a snapshot.

    `claim` is the backup PVC as created: settings may have changed since. `excluded` is what the annotation of the
    source PVC names. `tracked` is the snapshot if its changed blocks may be known, and `service` says which they are.
    """
    if tracked is not None and service is not None:
        tracked = replace(tracked, metadata=SnapshotMetadata(address=service["address"], ca_cert=service["caCert"]))
    owner, mode, access = request.owner, volume_mode(claim), claim["spec"].get("accessModes")
    read_only = access == [READ_ONLY]
    volume: ClaimSource = {"claimName": owner.name}
    if read_only:
        volume["readOnly"] = True
    options = request.settings.mover_options(request.operation_timeout)
    plan = MoverPod(
        owner=owner,
        name=owner.name,
        args=_choose_for_backup(
            replace(_build_args(owner, MoverVerb.BACKUP, "data-upload", options), tracked=tracked),
            request.settings,
            namespace=request.source_namespace,
            storage_class=request.storage_class,
            excluded=excluded,
        ),
        storage=storage,
        volume=MoverVolume({"persistentVolumeClaim": volume}, mode, read_only=read_only),
        label=names.DATA_UPLOAD_LABEL,
        group=_SNAPSHOT_GROUP,
        placement=placement,
        no_relabeling=read_only and request.backup_pvc.no_relabeling,
        label_at_mount=access == [ONE_POD],
        token_audience=service["audience"] if tracked is not None and service is not None else None,
    )
    return build_mover_pod(plan, request.settings)


def build_restore_pod(
    request: RestoreRequest,
    mode: VolumeMode,
    *,
    placement: Placement,
    storage: StorageAccess,
    cache: CacheVolume | None = None,
) -> Manifest:
    """Return the pod that restores into a new volume; without a `cache` volume its cache is on the node."""
    owner, options = request.owner, request.settings.mover_options(request.operation_timeout)
    plan = MoverPod(
        owner=owner,
        name=owner.name,
        args=_build_args(owner, MoverVerb.RESTORE, "data-download", options, cache),
        storage=storage,
        volume=MoverVolume({"persistentVolumeClaim": {"claimName": owner.name}}, mode),
        cache_claim=cache_claim_name(owner) if cache else None,
        label=names.DATA_DOWNLOAD_LABEL,
        group=_RESTORE_GROUP,
        placement=placement,
    )
    return build_mover_pod(plan, request.settings)


def build_pod_volume_pod(
    request: PodVolumeRequest, located: LocatedVolume, *, storage: StorageAccess, cache: CacheVolume | None = None
) -> Manifest:
    """Return the pod that backs up or restores a volume where its workload pod has it mounted.

    It is bound to its node without the scheduler, since it can run nowhere else.
    Source: Velero v1.18, pkg/exposer/pod_volume.go.
    """
    owner, backup = request.owner, request.verb is MoverVerb.BACKUP
    kind_flag = "pod-volume-backup" if backup else "pod-volume-restore"
    args = _build_args(owner, request.verb, kind_flag, request.settings.mover, cache)
    args = replace(args, followed=located.followed)
    if backup:
        namespace = request.workload.namespace
        args = _choose_for_backup(
            args, request.settings, namespace=namespace, storage_class=located.storage_class, excluded=located.excluded
        )
    plan = MoverPod(
        owner=owner,
        name=owner.name,
        args=args,
        storage=storage,
        # With this type a missing directory fails the mount, instead of being created empty.
        volume=MoverVolume(
            {"hostPath": {"path": located.directory, "type": "Directory"}},
            read_only=backup,
            propagation="HostToContainer",
        ),
        cache_claim=cache_claim_name(owner) if cache else None,
        label=names.POD_VOLUME_BACKUP_LABEL if backup else names.POD_VOLUME_RESTORE_LABEL,
        node=located.node,
        placement=Placement(tolerations=located.tolerations),
        privileged=request.settings.pod.privileged_fs_backup,
    )
    return build_mover_pod(plan, request.settings)


def init_pod_name(owner: Owner) -> str:
    """Return the fixed name of a repository's init pod, so that no two run at a time."""
    return f"{owner.name}-init"


def build_init_pod(
    owner: Owner, settings: ExposeSettings, *, storage: StorageAccess, block_hash: BlockHash | None = None
) -> Manifest:
    """Return the pod that connects the repository of `owner`, a BackupRepository, or creates it with `block_hash`."""
    spec = complete_spec(InitRepository(block_hash=block_hash), owner, settings.mover)
    return build_mover_pod(MoverPod(owner, init_pod_name(owner), spec, storage), settings)


def validation_pod_name(owner: Owner) -> str:
    """Return the fixed name of the pod that validates a location, so that no two run at a time."""
    return f"{owner.name}-validation"


def build_validation_pod(owner: Owner, settings: ExposeSettings, *, storage: StorageAccess) -> Manifest:
    """Return the pod that validates `owner`, a BackupStorageLocation; it can only read the storage."""
    spec = complete_spec(ValidateLocation(), owner, settings.mover)
    return build_mover_pod(MoverPod(owner, validation_pod_name(owner), spec, storage), settings)


def _choose_for_backup(
    args: MoverArgs, settings: ExposeSettings, *, namespace: str, storage_class: str | None, excluded: str | None
) -> MoverArgs:
    """Return `args` with what the settings, and the source PVC's annotation `excluded`, choose for such backups."""
    compression = settings.compression.of_class(storage_class)
    return replace(
        args,
        # Each data mover knows what an absent flag means.
        compression=None if compression is Compression.NONE else str(compression),
        ignore_files=namespace in settings.ignore_files_namespaces,
        exclude=settings.exclusions.exclude(namespace, storage_class, excluded),
        read_all_files=namespace in settings.read_all_files_namespaces,
    )


def _build_args(
    owner: Owner, verb: MoverVerb, kind_flag: str, options: MoverOptions, cache: CacheVolume | None = None
) -> MoverArgs:
    return MoverArgs(
        verb=verb,
        kind_flag=kind_flag,
        resource_name=owner.name,
        cache_limit_mib=cache.limit_mib if cache else None,
        attempt=owner.attempt,
        cluster=options.cluster if verb is MoverVerb.BACKUP else None,
        mover=None if options.method is MoverMethod.PLAIN else str(options.method),
        require_attributes=options.require_attributes and verb is MoverVerb.RESTORE,
        resource_timeout=options.resource_timeout,
        log_level=options.log_level,
        log_format=options.log_format,
    )


_LABELS: Final = {
    MoverVerb.REPORT_SNAPSHOTS: names.SNAPSHOT_REPORT_LABEL,
    MoverVerb.LIST_SNAPSHOTS: names.SNAPSHOT_LIST_LABEL,
    MoverVerb.VERIFY_SNAPSHOTS: names.SNAPSHOT_VERIFICATION_LABEL,
    MoverVerb.PLAN_RESTORE: names.RESTORE_PLAN_LABEL,
    MoverVerb.DELETE_SNAPSHOTS: names.SNAPSHOT_DELETION_LABEL,
    MoverVerb.LIST_FILES: names.SNAPSHOT_FILES_LABEL,
    MoverVerb.SEND_FILES: names.SNAPSHOT_FILES_LABEL,
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
    priority_class_name: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    active_deadline: timedelta = timedelta(hours=6)
    tolerations: tuple[PodToleration, ...] = ()


@dataclass(frozen=True)
class MaintenanceRun:
    """One run: the Job `name` works on `owner`, a BackupRepository or BackupStorageLocation.

    `cache_limit_mib` is the limit of kopia's cache. `volume` is what a Job mounts that compares it with a snapshot.
    """

    owner: Owner
    name: str
    settings: JobSettings
    storage: StorageAccess
    cache_limit_mib: int = DEFAULT_CACHE_LIMIT_MIB
    volume: MoverVolume | None = None


def build_maintenance_job(run: MaintenanceRun, expose: ExposeSettings, spec: MaintainRepository) -> Manifest:
    """Return the manifest of the Job, a batch/v1 Job as JSON dict.

    It has no owner reference: Kubernetes would delete it with the BackupRepository, and a Velero server wait for it for
    ever. Its label says whose it is; Velero's is added by the leader once the pod runs.
    """
    seconds = int(run.settings.active_deadline.total_seconds())
    template = _build_template(run, expose, spec, seconds)
    # A pod that is deleted counts as failed only when it has ended: on a lost node it may still write.
    more = {"podReplacementPolicy": "Failed", "activeDeadlineSeconds": seconds + int(_JOB_EXTRA.total_seconds())}
    return _build_job(run, run.owner.labels, more, template)


def build_command_job(run: MaintenanceRun, expose: ExposeSettings, spec: MoverSpec) -> Manifest:
    """Return the manifest of a Job that a command runs, a batch/v1 Job; Kubernetes deletes it an hour after its end.

    Its labels say that it is neither maintenance nor a transfer's. A verification may take as long as the settings of
    `run` say.
    """
    seconds = _SEND_DEADLINE_SECONDS if isinstance(spec, SendFiles) else _REPORT_DEADLINE_SECONDS
    if isinstance(spec, VerifySnapshots):
        seconds = int(run.settings.active_deadline.total_seconds())
    labels = {_LABELS[spec.verb]: names.label_value(run.owner.name)}
    more = {"activeDeadlineSeconds": seconds, "ttlSecondsAfterFinished": _REPORT_KEPT_SECONDS}
    return _build_job(run, labels, more, _build_template(run, expose, spec, seconds))


def _build_job(run: MaintenanceRun, labels: Mapping[str, str], more: Manifest, template: Manifest) -> Manifest:
    meta = {"name": run.name, "namespace": run.owner.namespace, "labels": dict(labels)}
    # A run that failed is judged before the next one.
    return JOBS.build(meta, spec={"backoffLimit": 0, **more, "template": template})


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
    tolerations = (*_TOLERATIONS, *configured.tolerations)
    placement = Placement(alternatives=configured.alternatives, tolerations=tolerations)
    plan = MoverPod(run.owner, run.name, args, run.storage, volume=run.volume, placement=placement)
    pod = build_mover_pod(plan, replace(expose, pod=pod_settings))
    meta, pod_spec = pod["metadata"], pod["spec"]
    (container,) = pod_spec["containers"]
    return {
        "metadata": {
            "name": _POD_NAME,
            # With it, garbage collection would take the pod for a deleted transfer's.
            "labels": {key: value for key, value in meta["labels"].items() if key != names.OWNER_UID_LABEL},
            "annotations": meta.get("annotations") or {},
        },
        "spec": pod_spec
        | {
            "activeDeadlineSeconds": deadline_seconds,
            "containers": [container | {"name": names.MAINTENANCE_CONTAINER}],
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


JOB_VARIABLE: Final = "NODE_AGENT_JOB"
"""Environment variable of the pod: the name of its Job."""

_JOB_LABEL: Final = "batch.kubernetes.io/job-name"
"""Source: Kubernetes v1.27 and later, Job."""

_RESOURCES: Final = {"requests": {"cpu": "10m", "memory": "96Mi"}, "limits": {"memory": "512Mi"}}

WITHOUT_SIDECAR: Final = {"linkerd.io/inject": "disabled", "sidecar.istio.io/inject": "false"}
"""Annotations of the pod of a client's Job: a sidecar of a mesh may not end, and so the Job would not, for days. All it
needs is the API server."""


@dataclass(frozen=True)
class AgentImage:
    """The image of the agents, and how it is pulled."""

    image: str
    pull_policy: str = "IfNotPresent"
    pull_secrets: tuple[str, ...] = ()

    @classmethod
    def of(cls, daemonset: DaemonSet) -> "AgentImage":
        """Return the image of the agents' apps/v1 DaemonSet; raise ContractError if it has none."""
        found = cls.inherited(AgentTemplate.parse(daemonset))
        container = find_agent(daemonset["spec"]["template"]["spec"]["containers"])
        policy = container.get("imagePullPolicy") if container else None
        return replace(found, pull_policy=policy or "IfNotPresent")

    @classmethod
    def inherited(cls, template: AgentTemplate) -> "AgentImage":
        """Return what data movers inherit of it."""
        secrets = tuple(one["name"] for one in template.pod_fields.get("imagePullSecrets") or [])
        return cls(template.image, pull_secrets=secrets)


def build_client_pod(
    account: str,
    argv: Sequence[str],
    agent: AgentImage,
    *,
    container: str,
    placement: Placement = Placement(),  # noqa: B008 - frozen
    tolerations: Sequence[PodToleration] = (),
) -> Manifest:
    """Return the spec of a pod whose only `container` runs `python -m nodeagent` with these words."""
    job = {"fieldRef": {"fieldPath": f"metadata.labels['{_JOB_LABEL}']"}}
    built = {
        "name": container,
        "image": agent.image,
        "imagePullPolicy": agent.pull_policy,
        "command": ["python", "-m", "nodeagent"],
        "args": escape_words(argv),
        "env": [{"name": JOB_VARIABLE, "valueFrom": job}],
        "resources": _RESOURCES,
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
    }
    return {
        "serviceAccountName": account,
        "restartPolicy": "Never",
        "enableServiceLinks": False,
        "affinity": build_node_affinity(placement),
        # Without a user: the image has one, and OpenShift allows only one of the namespace's own.
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        **({"tolerations": list(tolerations)} if tolerations else {}),
        **({"imagePullSecrets": [{"name": one} for one in agent.pull_secrets]} if agent.pull_secrets else {}),
        "containers": [built],
    }

"""The manifest of a mover pod and its file systems, for every kind of mover.

Does no I/O; `exposer.pods` has the differences between the kinds. The scratch volume holds everything that a mover may
write: temporary files, and below them the mount points of volume and cache. The root file system is read-only, and so
is every other mount, except the one that holds a repository in a directory. kopia touches `<target>.kopia-entry` beside
the target of a restore, which is in the scratch volume for that reason. A node affinity combines configured rules with
the volume's topology, without Windows nodes.
Source: Velero v1.18, pkg/util/kube/pod.go (GetLoadAffinityByStorageClass, ToSystemAffinity),
pkg/exposer/csi_snapshot.go and generic_restore.go, as recorded in
tests/recordings/velero-1.18.2/pod-of-*.json (tests/exposer/test_pods_velero.py lists every difference); kopia 0.23.1,
snapshot/restore/local_fs_output.go, placeholders of shallow restores.
"""

import posixpath
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, cast

from msgspec import structs

from core.contract import EVENTS_VARIABLE, MOVER_GRACE, SNAPSHOT_METADATA_TOKEN, MoverArgs, MoverVerb, VolumeMode
from core.kube.resources import BACKUP_REPOSITORIES, BACKUP_STORAGE_LOCATIONS, PODS
from core.kube.types import (
    EnvVar,
    Manifest,
    NodeRequirement,
    NodeSelectorTerm,
    PodToleration,
    Volume,
    VolumeDevice,
    VolumeMount,
    VolumeSource,
)
from core.models.names import ATTEMPT_LABEL, EXPOSER_POD_GROUP_LABEL, label_value
from core.models.units import format_duration
from core.mover_specs import MoverSpec
from exposer.model import LINUX, NOT_WINDOWS, Owner
from exposer.settings import Alternatives, ExposeSettings, MoverOptions, PodSettings, StorageAccess
from exposer.template import AgentTemplate
from exposer.workload import EVENTS_VOLUME

_SCRATCH_VARIABLE: Final = "VELERO_SCRATCH_DIR"
_SCRATCH_PATH: Final = "/scratch"
_SCRATCH_VOLUME: Final = "mover-scratch"

_VOLUME_NAME: Final = "volume"
_CACHE_NAME: Final = "cache"
"""Mount points in the scratch volume: short, since every byte shortens the paths that fit into PATH_MAX."""

_EVENTS_PATH: Final = "/mover-events"
"""Outside of the scratch volume, in which kopia is confined."""

_REPOSITORY_VOLUME: Final = "mover-repository"

_TOKEN_VOLUME: Final = "snapshot-metadata-token"  # noqa: S105 - a name
_TOKEN_SECONDS: Final = 600
"""The least that the API server accepts; the kubelet renews it."""

_PRIVATE_SOURCES: Final = ("emptyDir", "ephemeral")
"""Volumes that every pod has for itself."""

_CREDENTIALS_VOLUME: Final = "cloud-credentials"
"""The volume with the credentials of locations that have none of their own.

Source: Velero v1.18, pkg/install/daemonset.go.
"""


@dataclass(frozen=True)
class Placement:
    """The eligible nodes; every field but the last narrows them.

    `node` is the only eligible node, `avoid_nodes` are excluded. `alternatives` come from rules; `topology` holds the
    `nodeSelectorTerms` of a volume; one must match. `tolerations` are added to what all movers have.
    """

    node: str | None = None
    avoid_nodes: tuple[str, ...] = ()
    alternatives: Alternatives = ()
    topology: tuple[NodeSelectorTerm, ...] = ()
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
    expressions = [*(topology.get("matchExpressions") or []), *rule, NOT_WINDOWS]
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


@dataclass(frozen=True)
class MoverVolume:
    """The volume of a mover: a `v1.Volume` without its name, and how it is mounted.

    `propagation` is the mount propagation, if it has any.
    """

    source: VolumeSource
    mode: VolumeMode = VolumeMode.FILESYSTEM
    read_only: bool = False
    propagation: str | None = None


@dataclass(frozen=True)
class MoverPod:
    """What one mover pod differs in from all others.

    `args` lack the paths, and `storage` is what the pod needs to reach the bucket. `label` is the label that names its
    custom resource, `group` Velero's spread key. `node` is the node that the pod is bound to without the scheduler;
    None: the scheduler places it. `privileged` of None leaves that to the cluster. With `no_relabeling` the volume
    keeps its SELinux labels; with `label_at_mount` it gets the pod's by a mount option. `token_audience` is the
    audience of its token; None: it gets none.
    """

    owner: Owner
    name: str
    args: MoverArgs | MoverSpec
    storage: StorageAccess
    volume: MoverVolume | None = None
    cache_claim: str | None = None
    label: str | None = None
    group: str | None = None
    placement: Placement = field(default_factory=Placement)
    node: str | None = None
    privileged: bool | None = None
    no_relabeling: bool = False
    label_at_mount: bool = False
    token_audience: str | None = None


@dataclass(frozen=True)
class PodFiles:
    """Fields of a pod and its container, as JSON dicts, and the paths that they result in.

    A path is None if there is no such volume; `volume_path` is a directory, or a device.
    """

    volumes: list[Volume]
    mounts: list[VolumeMount]
    devices: list[VolumeDevice]
    env: list[EnvVar]
    volume_path: str | None
    cache_path: str | None


def build_pod_files(plan: MoverPod, expose: ExposeSettings) -> PodFiles:
    """Return the file systems of the mover pod, each of its own volumes named after the UID of its custom resource."""
    template = expose.template
    storage = replace(plan.storage, read_only=True) if plan.args.verb in _READERS else plan.storage
    repository = expose.repository_volume(plan.storage)
    env, scratch = _build_env(template)
    uid, volume = plan.owner.uid, plan.volume
    block = volume is not None and volume.mode is VolumeMode.BLOCK
    # A device node cannot be created in a file system of the node.
    volume_path = None if volume is None else f"/{uid}" if block else f"{scratch}/{_VOLUME_NAME}"
    cache_path = f"{scratch}/{_CACHE_NAME}" if plan.cache_claim else None
    mounts = _inherited_mounts(template, storage, scratch)
    if repository is not None:
        # An own mount of the agent at the same path would be a second one.
        mounts = [each for each in mounts if posixpath.normpath(each["mountPath"]) != repository.mount_path]
    mounted = {mount["name"] for mount in mounts}
    inherited = [each for each in template.volumes if each["name"] in mounted]
    if not any(mount["mountPath"] == scratch for mount in mounts):
        inherited.append({"name": _SCRATCH_VOLUME, "emptyDir": {}})
        mounts.insert(0, {"name": _SCRATCH_VOLUME, "mountPath": scratch})
    if plan.label and template.host_pods:
        # There the agent of the node finds the mover's Events.
        inherited.append({"name": EVENTS_VOLUME, "emptyDir": {}})
        mounts.append({"name": EVENTS_VOLUME, "mountPath": _EVENTS_PATH})
        env.append({"name": EVENTS_VARIABLE, "value": _EVENTS_PATH})
    volumes: list[Volume] = []
    if volume is not None:
        volumes.append({"name": uid, **volume.source})
        if volume_path is not None and not block:
            mount = _mount(uid, volume_path, read_only=volume.read_only)
            mounts.append(mount | {"mountPropagation": volume.propagation} if volume.propagation else mount)
    if repository is not None:
        volumes.append({"name": _REPOSITORY_VOLUME, **_restrict(repository.source, read_only=storage.read_only)})
        mounts.append(_mount(_REPOSITORY_VOLUME, repository.mount_path, read_only=storage.read_only))
    if plan.token_audience:
        volumes.append(_build_token(plan.token_audience))
        mounts.append(_mount(_TOKEN_VOLUME, posixpath.dirname(SNAPSHOT_METADATA_TOKEN), read_only=True))
    if plan.cache_claim and cache_path is not None:
        volumes.append({"name": f"{uid}-cache", "persistentVolumeClaim": {"claimName": plan.cache_claim}})
        mounts.append({"name": f"{uid}-cache", "mountPath": cache_path})
    devices: list[VolumeDevice] = [{"name": uid, "devicePath": volume_path}] if volume_path and block else []
    return PodFiles([*volumes, *inherited], mounts, devices, env, volume_path, cache_path)


def _build_token(audience: str) -> Volume:
    """Return the volume with a token that is valid as long as the pod exists, and at most some minutes.

    So neither the agent nor the mover needs the permission to create tokens.
    """
    token = {
        "audience": audience,
        "expirationSeconds": _TOKEN_SECONDS,
        "path": posixpath.basename(SNAPSHOT_METADATA_TOKEN),
    }
    return {"name": _TOKEN_VOLUME, "projected": {"sources": [{"serviceAccountToken": token}]}}


def _restrict(source: VolumeSource, *, read_only: bool) -> VolumeSource:
    """Return the volume's source; a read-only one has no other mount either that could be written to."""
    fields = cast("Mapping[str, Manifest]", source)
    restricted = {kind: {**part, "readOnly": True} if read_only else part for kind, part in fields.items()}
    return cast("VolumeSource", restricted)


def _mount(name: str, path: str, *, read_only: bool) -> VolumeMount:
    mount: VolumeMount = {"name": name, "mountPath": path}
    if read_only:
        mount["readOnly"] = True
    return mount


def _inherited_mounts(template: AgentTemplate, storage: StorageAccess, scratch: str) -> list[VolumeMount]:
    private = {each["name"] for each in template.volumes if any(source in each for source in _PRIVATE_SOURCES)}
    mounts: list[VolumeMount] = []
    for mount in template.volume_mounts:
        path = posixpath.normpath(mount["mountPath"])
        if mount["name"] == _CREDENTIALS_VOLUME and not storage.inherits_credentials:
            continue
        if path == scratch:
            # Movers of different tenants must not see each other's temporary files.
            if mount["name"] in private:
                mounts.append(mount | {"mountPath": scratch})
        elif storage.is_below(path) and not storage.read_only:
            mounts.append(mount)
        else:
            mounts.append(mount | {"readOnly": True})
    return mounts


def _build_env(template: AgentTemplate) -> tuple[list[EnvVar], str]:
    """Return the environment, and the directory for temporary files that the agent's names, or the default."""
    named = [variable.get("value") for variable in template.env if variable["name"] == _SCRATCH_VARIABLE]
    default: list[EnvVar] = [] if named else [{"name": _SCRATCH_VARIABLE, "value": _SCRATCH_PATH}]
    return [*template.env, *default], posixpath.normpath(next(filter(None, named), _SCRATCH_PATH))


_NO_RELABELING: Final = "spc_t"
"""The SELinux type of a container that is not subject to a volume's labels."""

_READERS: Final = frozenset(
    {
        MoverVerb.RESTORE,
        MoverVerb.VALIDATE_LOCATION,
        MoverVerb.LIST_SNAPSHOTS,
        MoverVerb.VERIFY_SNAPSHOTS,
        MoverVerb.PLAN_RESTORE,
        MoverVerb.LIST_FILES,
        MoverVerb.SEND_FILES,
    }
)
"""What only reads the storage."""

MOVER_CAPABILITIES: Final = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "SYS_CHROOT")
"""What root keeps: to read and write files of any owner and mode, to restore both, and to confine kopia to a directory.

The agent cannot know whether the node's kernel confines kopia without the last one.
"""

_SUBJECTS: Final = {
    BACKUP_REPOSITORIES.kind: "backup_repository",
    BACKUP_STORAGE_LOCATIONS.kind: "backup_storage_location",
}
"""The field of a specification that names the owner of the pod."""


def complete_spec(spec: MoverSpec, owner: Owner, options: MoverOptions) -> MoverSpec:
    """Return the specification about `owner`, a BackupRepository or BackupStorageLocation, with these options."""
    return structs.replace(
        spec,
        resource_timeout=format_duration(options.resource_timeout),
        log_level=options.log_level,
        log_format=options.log_format,
        **{_SUBJECTS[owner.kind]: owner.name},
    )


def build_mover_pod(plan: MoverPod, settings: ExposeSettings) -> Manifest:
    """Return the manifest of a mover pod, a v1 Pod as JSON dict."""
    template, configured = settings.template, settings.pod
    # As in Velero, an empty configured set does not replace the inherited one.
    labels = dict(configured.labels or template.labels) | plan.owner.temporary_labels
    if plan.label:
        labels[plan.label] = label_value(plan.owner.name)
        labels[ATTEMPT_LABEL] = str(plan.owner.attempt)
    if plan.group:
        labels[EXPOSER_POD_GROUP_LABEL] = plan.group
    annotations = dict(configured.annotations or template.annotations)
    meta: Manifest = {
        "name": plan.name,
        "namespace": plan.owner.namespace,
        "labels": labels,
        "ownerReferences": [plan.owner.reference],
    }
    if annotations:
        meta["annotations"] = annotations
    return PODS.build(meta, spec=_build_spec(plan, settings))


def _build_spec(plan: MoverPod, expose: ExposeSettings) -> Manifest:
    template, settings = expose.template, expose.pod
    files = build_pod_files(plan, expose)
    tolerations = _build_tolerations(plan, template, settings)
    spec: Manifest = {
        **template.pod_fields,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": int(MOVER_GRACE.total_seconds()),
        "os": {"name": LINUX},
        "securityContext": _build_pod_security(plan),
        "affinity": build_node_affinity(plan.placement),
        "containers": [_build_container(plan, files, template, settings)],
        "volumes": files.volumes,
    }
    if plan.node:
        spec["nodeName"] = plan.node
    if tolerations:
        spec["tolerations"] = tolerations
    if settings.service_account:
        spec["serviceAccountName"] = settings.service_account
    if settings.priority_class_name:
        spec["priorityClassName"] = settings.priority_class_name
    if plan.group:
        spec["topologySpreadConstraints"] = [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": {EXPOSER_POD_GROUP_LABEL: plan.group}},
            }
        ]
    return spec


def _build_tolerations(plan: MoverPod, template: AgentTemplate, settings: PodSettings) -> list[PodToleration]:
    tolerations = (
        *(template.all_tolerations if settings.inherit_tolerations else template.tolerations),
        *settings.tolerations,
        *plan.placement.tolerations,
    )
    return [toleration for index, toleration in enumerate(tolerations) if toleration not in tolerations[:index]]


def _build_pod_security(plan: MoverPod) -> Manifest:
    security: Manifest = {"runAsUser": 0, "seccompProfile": {"type": "RuntimeDefault"}}
    if plan.no_relabeling:
        security["seLinuxOptions"] = {"type": _NO_RELABELING}
    if plan.label_at_mount:
        security["seLinuxChangePolicy"] = "MountOption"
    return security


def _build_container(plan: MoverPod, files: PodFiles, template: AgentTemplate, settings: PodSettings) -> Manifest:
    mode = plan.volume.mode if plan.volume is not None else VolumeMode.FILESYSTEM
    args = plan.args.mount(files.volume_path, mode, files.cache_path)
    if isinstance(args, MoverArgs) and files.cache_path is None and (room_mib := settings.cache_room_mib):
        # Otherwise a large restore is evicted, in each attempt.
        args = replace(args, cache_limit_mib=room_mib)
    container: Manifest = {
        **template.container_fields,
        "name": plan.owner.uid,
        "image": template.image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["python", "-m", "datamover"],
        "args": escape_words(args.argv),
        "env": files.env,
        "volumeMounts": files.mounts,
        # A mover that exits without a message reports the end of its log instead.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": _build_security(plan),
    }
    if files.devices:
        container["volumeDevices"] = files.devices
    if settings.resources:
        container["resources"] = settings.resources
    return container


def escape_words(words: Iterable[str]) -> list[str]:
    """Return a container's `args` or `env` with these words: of `$(NAME)` Kubernetes makes a variable, of `$$` a `$`.

    A word may be chosen by a tenant, and a variable may be a key of the storage.
    Source: Kubernetes v1.34, third_party/forked/golang/expansion/expand.go.
    """
    return [word.replace("$", "$$") for word in words]


def _build_security(plan: MoverPod) -> Manifest:
    security: Manifest = {"readOnlyRootFilesystem": True}
    if plan.privileged is not None:
        security["privileged"] = plan.privileged
    if plan.privileged:
        # It has all capabilities, and the API server rejects a privileged container that may gain none.
        return security
    return security | {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"], "add": list(MOVER_CAPABILITIES)},
    }

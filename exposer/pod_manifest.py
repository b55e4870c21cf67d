"""The manifest of a mover pod, for every kind of mover.

Does no I/O; what the kinds of movers differ in is in `exposer.pods`, and what is mounted where in
`exposer.pod_files`.
Source: Velero v1.18, pkg/exposer/csi_snapshot.go and generic_restore.go, as recorded in
tests/recordings/velero-1.18.2/pod-of-*.json; tests/exposer/test_pods_velero.py lists
every difference from them.
"""

from dataclasses import dataclass, field, replace
from typing import Final

from msgspec import structs

from core.contract import MOVER_GRACE, MoverArgs, MoverVerb, VolumeMode
from core.kube.resources import BACKUP_REPOSITORIES, BACKUP_STORAGE_LOCATIONS
from core.kube.types import Manifest, PodToleration
from core.models.names import ATTEMPT_LABEL, EXPOSER_POD_GROUP_LABEL, label_value
from core.models.units import format_duration
from core.mover_specs import MoverSpec
from exposer.model import Owner
from exposer.placement import LINUX, Placement, build_node_affinity
from exposer.pod_files import MoverVolume, OwnVolumes, PodFiles, build_pod_files
from exposer.settings import ExposeSettings, MoverOptions, PodSettings, StorageAccess
from exposer.template import AgentTemplate

__all__ = ["MOVER_CAPABILITIES", "MoverPod", "build_mover_pod", "complete_spec"]

_NO_RELABELING: Final = "spc_t"
"""The SELinux type of a container that is not subject to a volume's labels."""

_READERS: Final = frozenset(
    {
        MoverVerb.RESTORE,
        MoverVerb.VALIDATE_LOCATION,
        MoverVerb.LIST_SNAPSHOTS,
        MoverVerb.VERIFY_SNAPSHOTS,
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


@dataclass(frozen=True)
class MoverPod:
    """What one mover pod differs in from all others.

    `args` lack the paths, and `storage` is what the pod needs to reach the bucket.
    `label` is the label that names its custom resource, `group` Velero's spread key; empty: none.
    `node` is the node that the pod is bound to without the scheduler; empty: the scheduler places it.
    `tolerations` are added to inherited and configured ones. `privileged` of None leaves that to
    the cluster. With `no_relabeling` the volume keeps its SELinux labels; with `label_at_mount` it gets
    the pod's by a mount option.
    """

    owner: Owner
    name: str
    args: MoverArgs | MoverSpec
    storage: StorageAccess
    volume: MoverVolume | None = None
    cache_claim: str = ""
    label: str = ""
    group: str = ""
    placement: Placement = field(default_factory=Placement)
    node: str = ""
    tolerations: tuple[PodToleration, ...] = ()
    privileged: bool | None = None
    no_relabeling: bool = False
    label_at_mount: bool = False


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
    labels = dict(configured.labels or template.labels) | plan.owner.labels
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
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": meta,
        "spec": _build_spec(plan, settings),
    }


def _build_spec(plan: MoverPod, expose: ExposeSettings) -> Manifest:
    template, settings = expose.template, expose.pod
    own = OwnVolumes(
        plan.owner.uid,
        plan.volume,
        plan.cache_claim,
        repository=expose.repository_volume(plan.storage.directory),
        events=bool(plan.label and template.host_pods),
    )
    storage = replace(plan.storage, read_only=True) if plan.args.verb in _READERS else plan.storage
    files = build_pod_files(own, template, storage)
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
    """Return all tolerations without duplicates: inherited, configured, the pod's own."""
    tolerations = (
        *(template.all_tolerations if settings.inherit_tolerations else template.tolerations),
        *settings.tolerations,
        *plan.tolerations,
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
    container: Manifest = {
        **template.container_fields,
        "name": plan.owner.uid,
        "image": template.image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["python", "-m", "datamover"],
        "args": args.argv,
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

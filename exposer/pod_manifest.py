"""The manifest of a mover pod, for every kind of mover.

Does no I/O; what the kinds of movers differ in is in `exposer.pods`.
Source: Velero v1.18, pkg/exposer/csi_snapshot.go and generic_restore.go, as recorded in
tests/recordings/velero-1.18.2/pod-of-*.json; tests/exposer/test_pods_velero.py lists
every difference from them.
"""

from dataclasses import dataclass, field
from typing import Final

from core.contract import MoverArgs, MoverVerb, VolumeMode
from core.models.base import JsonDict
from core.models.names import EXPOSER_POD_GROUP_LABEL, label_value
from exposer.model import Owner
from exposer.placement import WINDOWS, Placement, build_node_affinity
from exposer.settings import ExposeSettings, PodSettings
from exposer.template import AgentTemplate

__all__ = [
    "MoverPod",
    "MoverVolume",
    "build_mover_pod",
    "cache_path",
    "volume_path",
]

_GRACE_SECONDS: Final = 30
"""A mover exits within 2 s of SIGTERM; with 0, as in Velero, a pod would be deleted from the API
while it still writes."""

_SCRATCH_VARIABLE: Final = "VELERO_SCRATCH_DIR"
_SCRATCH_PATH: Final = "/scratch"
_SCRATCH_VOLUME: Final = "mover-scratch"

_WINDOWS_TOLERATIONS: Final = tuple(
    {"key": "os", "operator": "Equal", "value": WINDOWS, "effect": effect} for effect in ("NoSchedule", "NoExecute")
)
_NO_RELABELING: Final = "spc_t"
"""The SELinux type of a container that is not subject to a volume's labels."""


@dataclass(frozen=True)
class MoverVolume:
    """The volume of a mover: a `v1.Volume` without its name, and how it is mounted.

    `propagation` is the mount propagation; empty: none.
    """

    source: JsonDict
    mode: VolumeMode = VolumeMode.FILESYSTEM
    read_only: bool = False
    propagation: str = ""


@dataclass(frozen=True)
class MoverPod:
    """What one mover pod differs in from all others.

    `label` is the label that names its custom resource, `group` Velero's spread key; empty: none.
    `tolerations` are added to inherited and configured ones. `privileged` of None leaves that to
    the cluster. With `no_relabeling` the volume keeps its SELinux labels.
    """

    owner: Owner
    name: str
    args: MoverArgs
    volume: MoverVolume | None = None
    cache_claim: str = ""
    label: str = ""
    group: str = ""
    placement: Placement = field(default_factory=Placement)
    tolerations: tuple[JsonDict, ...] = ()
    privileged: bool | None = None
    no_relabeling: bool = False

    @property
    def for_windows(self) -> bool:
        """Whether the pod runs on a Windows node."""
        return self.placement.node_os == WINDOWS


def volume_path(owner: Owner) -> str:
    """Return the path of the volume in the mover pod: a folder, or a device."""
    return f"/{owner.uid}"


def cache_path(owner: Owner) -> str:
    """Return the path of the cache volume in the mover pod."""
    return f"/{owner.uid}-cache"


def build_mover_pod(plan: MoverPod, settings: ExposeSettings) -> JsonDict:
    """Return the manifest of a mover pod, a v1 Pod as JSON dict.

    Raises:
        ExposeError: no agent runs on nodes of its operating system.
    """
    template, configured = settings.template.for_os(plan.placement.node_os), settings.pod
    # As in Velero, an empty configured set does not replace the inherited one.
    labels = dict(configured.labels or template.labels) | plan.owner.labels
    if plan.label:
        labels[plan.label] = label_value(plan.owner.name)
    if plan.group:
        labels[EXPOSER_POD_GROUP_LABEL] = plan.group
    annotations = dict(configured.annotations or template.annotations)
    meta: JsonDict = {
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
        "spec": _build_spec(plan, template, configured),
    }


def _build_spec(plan: MoverPod, template: AgentTemplate, settings: PodSettings) -> JsonDict:
    tolerations = _build_tolerations(plan, template, settings)
    spec: JsonDict = {
        **template.pod_fields,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": _GRACE_SECONDS,
        "os": {"name": plan.placement.node_os},
        "securityContext": _build_pod_security(plan),
        "affinity": build_node_affinity(plan.placement),
        "containers": [_build_container(plan, template, settings)],
        "volumes": [*_own_volumes(plan), *template.volumes, *_scratch_volumes(template)],
    }
    if tolerations:
        spec["tolerations"] = tolerations
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


def _build_tolerations(plan: MoverPod, template: AgentTemplate, settings: PodSettings) -> list[JsonDict]:
    """Return all tolerations without duplicates: inherited, configured, the pod's own."""
    tolerations = (
        *(template.all_tolerations if settings.inherit_tolerations else template.tolerations),
        *settings.tolerations,
        *plan.tolerations,
        *(_WINDOWS_TOLERATIONS if plan.for_windows else ()),
    )
    return [toleration for index, toleration in enumerate(tolerations) if toleration not in tolerations[:index]]


def _build_pod_security(plan: MoverPod) -> JsonDict:
    if plan.for_windows:
        return {"windowsOptions": {"runAsUserName": "ContainerAdministrator"}}
    security: JsonDict = {"runAsUser": 0}
    if plan.no_relabeling:
        security["seLinuxOptions"] = {"type": _NO_RELABELING}
    return security


def _build_container(plan: MoverPod, template: AgentTemplate, settings: PodSettings) -> JsonDict:
    uid = plan.owner.uid
    mounts: list[JsonDict] = []
    devices: list[JsonDict] = []
    if plan.volume is not None and plan.volume.mode is VolumeMode.BLOCK:
        devices.append({"name": uid, "devicePath": volume_path(plan.owner)})
    elif plan.volume is not None:
        mount: JsonDict = {"name": uid, "mountPath": volume_path(plan.owner)}
        if plan.volume.read_only:
            mount["readOnly"] = True
        if plan.volume.propagation:
            mount["mountPropagation"] = plan.volume.propagation
        mounts.append(mount)
    if plan.cache_claim:
        mounts.append({"name": f"{uid}-cache", "mountPath": cache_path(plan.owner)})
    mounts += [*template.volume_mounts, *_scratch_mounts(template)]
    container: JsonDict = {
        **template.container_fields,
        "name": uid,
        "image": template.image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["python", "-m", "datamover"],
        "args": plan.args.argv,
        "env": [*template.env, *_scratch_env(template)],
        "volumeMounts": mounts,
        # A mover that exits without a message reports the end of its log instead.
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    if devices:
        container["volumeDevices"] = devices
    if settings.resources:
        container["resources"] = settings.resources
    security = _build_security(plan, template)
    if security:
        container["securityContext"] = security
    return container


def _build_security(plan: MoverPod, template: AgentTemplate) -> JsonDict:
    security: JsonDict = {}
    if plan.for_windows:
        # The API server rejects each of the fields below on a Windows pod.
        return security
    if plan.privileged is not None:
        security["privileged"] = plan.privileged
    # kopia touches `<target>.kopia-entry` beside a restore's target, which is in the root file system.
    # Source: kopia 0.23.1, snapshot/restore/local_fs_output.go, placeholders of shallow restores.
    writes_root = plan.args.verb is MoverVerb.RESTORE
    if template.read_only_root and not writes_root:
        security["readOnlyRootFilesystem"] = True
    return security


def _own_volumes(plan: MoverPod) -> list[JsonDict]:
    volumes: list[JsonDict] = []
    if plan.volume is not None:
        volumes.append({"name": plan.owner.uid, **plan.volume.source})
    if plan.cache_claim:
        claim = {"claimName": plan.cache_claim}
        volumes.append({"name": f"{plan.owner.uid}-cache", "persistentVolumeClaim": claim})
    return volumes


def _scratch_path(template: AgentTemplate) -> str:
    """Return the folder for temporary files that the agent's environment names, or the default."""
    for variable in template.env:
        if variable.get("name") == _SCRATCH_VARIABLE and variable.get("value"):
            return str(variable["value"])
    return _SCRATCH_PATH


def _has_scratch(template: AgentTemplate) -> bool:
    path = _scratch_path(template)
    return any(mount.get("mountPath") == path for mount in template.volume_mounts)


def _scratch_volumes(template: AgentTemplate) -> list[JsonDict]:
    return [] if _has_scratch(template) else [{"name": _SCRATCH_VOLUME, "emptyDir": {}}]


def _scratch_mounts(template: AgentTemplate) -> list[JsonDict]:
    return [] if _has_scratch(template) else [{"name": _SCRATCH_VOLUME, "mountPath": _scratch_path(template)}]


def _scratch_env(template: AgentTemplate) -> list[JsonDict]:
    if any(variable.get("name") == _SCRATCH_VARIABLE for variable in template.env):
        return []
    return [{"name": _SCRATCH_VARIABLE, "value": _SCRATCH_PATH}]

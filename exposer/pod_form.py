"""The one builder of mover pods.

Knows what a mover pod looks like, whatever volume it reaches. Does no I/O and does not know
which kinds of mover there are (`exposer.pod`).
Source: Velero v1.18, pkg/exposer/csi_snapshot.go and generic_restore.go, as recorded in
tests/recordings/velero-1.18.2/pod-of-*.json; tests/exposer/test_pod_against_peer.py lists
every difference from these.
"""

from dataclasses import dataclass
from typing import Final

from core.contract import MoverArgs, MoverVerb, VolumeMode
from core.models.base import JsonDict
from core.models.names import EXPOSER_POD_GROUP_LABEL, label_value
from exposer.model import Owner, PodSettings
from exposer.template import AgentTemplate

__all__ = [
    "MoverPod",
    "MoverVolume",
    "build_mover_pod",
    "cache_path",
    "volume_path",
]

_GRACE_SECONDS: Final = 30
"""A mover ends within 2 s of SIGTERM; with 0, as the peer has it, a pod would vanish from the
API while it still writes."""

_SCRATCH_VARIABLE: Final = "VELERO_SCRATCH_DIR"
_SCRATCH_PATH: Final = "/scratch"
_SCRATCH_VOLUME: Final = "mover-scratch"

_WINDOWS: Final = "windows"
_WINDOWS_TOLERATIONS: Final = tuple(
    {"key": "os", "operator": "Equal", "value": _WINDOWS, "effect": effect} for effect in ("NoSchedule", "NoExecute")
)


@dataclass(frozen=True)
class MoverVolume:
    """The volume a mover works on: a `v1.Volume` less its name, and how it is mounted.

    `propagation` is the mount propagation; empty: none.
    """

    source: JsonDict
    mode: VolumeMode = VolumeMode.FILESYSTEM
    read_only: bool = False
    propagation: str = ""


@dataclass(frozen=True)
class MoverPod:
    """What one mover pod differs in from all others.

    `label` is the label that names its custom resource, `group` the peer's spread key; empty:
    none. `node` is the only node that will do, `avoid_nodes` those that will not. `privileged`
    of None leaves that to the cluster.
    """

    owner: Owner
    name: str
    args: MoverArgs
    volume: MoverVolume | None = None
    cache_claim: str = ""
    label: str = ""
    group: str = ""
    node: str = ""
    avoid_nodes: tuple[str, ...] = ()
    tolerations: tuple[JsonDict, ...] = ()
    privileged: bool | None = None
    node_os: str = "linux"


def volume_path(owner: Owner) -> str:
    """Return where a mover finds its volume: a folder, or a device."""
    return f"/{owner.uid}"


def cache_path(owner: Owner) -> str:
    """Return where a mover finds its cache volume."""
    return f"/{owner.uid}-cache"


def build_mover_pod(plan: MoverPod, template: AgentTemplate, settings: PodSettings) -> JsonDict:
    """Return the manifest of a mover pod, a v1 Pod as JSON dict."""
    labels = dict(template.labels if settings.labels is None else settings.labels) | plan.owner.labels
    if plan.label:
        labels[plan.label] = label_value(plan.owner.name)
    if plan.group:
        labels[EXPOSER_POD_GROUP_LABEL] = plan.group
    annotations = dict(template.annotations if settings.annotations is None else settings.annotations)
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
        "spec": _build_spec(plan, template, settings),
    }


def _build_spec(plan: MoverPod, template: AgentTemplate, settings: PodSettings) -> JsonDict:
    windows = plan.node_os == _WINDOWS
    asked = (
        *template.tolerations,
        *settings.tolerations,
        *plan.tolerations,
        *(_WINDOWS_TOLERATIONS if windows else ()),
    )
    tolerations = [toleration for index, toleration in enumerate(asked) if toleration not in asked[:index]]
    spec: JsonDict = {
        **template.pod_fields,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": _GRACE_SECONDS,
        "os": {"name": plan.node_os},
        "securityContext": (
            {"windowsOptions": {"runAsUserName": "ContainerAdministrator"}} if windows else {"runAsUser": 0}
        ),
        "affinity": _build_affinity(plan),
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


def _build_affinity(plan: MoverPod) -> JsonDict:
    """Return the nodes that will do, as one term: all of it has to hold."""
    if plan.node_os == _WINDOWS:
        expressions = [_requirement("kubernetes.io/os", "In", (_WINDOWS,))]
    else:
        expressions = [_requirement("kubernetes.io/os", "NotIn", (_WINDOWS,))]
    fields = []
    if plan.node:
        fields.append(_requirement("metadata.name", "In", (plan.node,)))
    # The scheduler takes only one value for a name, and only in In and NotIn.
    fields.extend(_requirement("metadata.name", "NotIn", (node,)) for node in plan.avoid_nodes)
    term: JsonDict = {"matchExpressions": expressions}
    if fields:
        term["matchFields"] = fields
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}}


def _requirement(key: str, operator: str, values: tuple[str, ...]) -> JsonDict:
    return {"key": key, "operator": operator, "values": list(values)}


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
        # A mover that dies without a word leaves the end of its log instead.
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
    if plan.privileged is not None:
        security["privileged"] = plan.privileged
    # kopia touches `<target>.kopia-entry` beside a restore's target, and that stands in the root.
    # Source: kopia 0.23.1, snapshot/restore/local_fs_output.go, placeholders of shallow restores.
    writes_root = plan.args.verb is MoverVerb.RESTORE
    if template.read_only_root and not writes_root and plan.node_os != _WINDOWS:
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
    """Return the folder for temporary files that the agent's environment names, or ours."""
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

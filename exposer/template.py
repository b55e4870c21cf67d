"""The template of mover pods: which fields they inherit from the agents' DaemonSet.

Pure. The other fields of a mover pod are built by `exposer.pod_manifest`.
Source: Velero v1.18, pkg/nodeagent/node_agent.go and pkg/util/third_party.go.
"""

import posixpath
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any, Final, Self

from core.errors import ContractError
from core.kube.types import Container, DaemonSet, EnvVar, Manifest, Pod, PodToleration, Volume, VolumeMount
from core.models.names import AGENT_DAEMONSET

DEFAULT_KUBELET_ROOT: Final = "/var/lib/kubelet"
"""The kubelet's default root directory."""

_HOST_PODS: Final = "host-pods"

_INHERITED_LABELS: Final = ("azure.workload.identity/use",)
_INHERITED_ANNOTATIONS: Final = ("iam.amazonaws.com/role",)
_INHERITED_TOLERATIONS: Final = ("kubernetes.azure.com/scalesetpriority", "CriticalAddonsOnly")

_INHERITED_NODE_SELECTOR: Final = ("kubernetes.io/os",)
"""`velero install` of 1.17 places agents by it. Where such an agent finds a mover pod of ours on its node, as while a
DaemonSet is rolled over, it fails a DataUpload whose pod lacks it.

Source: Velero v1.17.2, pkg/install/daemonset.go; GetExposed in pkg/exposer/csi_snapshot.go.
"""


@dataclass(frozen=True)
class AgentTemplate:
    """The inheritable part of the node agent's pod template.

    `pod_fields` and `container_fields` hold fields of a pod's spec and of its container as JSON, `kubelet_root` is a
    path on the node. `tolerations` are always inherited, `all_tolerations` are the agent's own. `host_pods` is where
    the agent's container has the kubelet's pods directory; None: it has none, and pod volumes cannot be exposed.
    `windows`: Velero's DaemonSet for Windows nodes exists, from which nothing is inherited.
    """

    image: str
    labels: dict[str, str] = field(default_factory=dict)
    annotations: dict[str, str] = field(default_factory=dict)
    tolerations: tuple[PodToleration, ...] = ()
    all_tolerations: tuple[PodToleration, ...] = ()
    volumes: tuple[Volume, ...] = ()
    volume_mounts: tuple[VolumeMount, ...] = ()
    env: tuple[EnvVar, ...] = ()
    pod_fields: Manifest = field(default_factory=dict)
    container_fields: Manifest = field(default_factory=dict)
    kubelet_root: str = DEFAULT_KUBELET_ROOT
    host_pods: str | None = None
    windows: bool = False

    @classmethod
    def parse(cls, daemonset: DaemonSet) -> Self:
        """Return what movers inherit from an apps/v1 DaemonSet; ContractError: it has no container with an image."""
        template = daemonset.get("spec", {}).get("template", {})
        spec = template.get("spec", {})
        container = find_agent(spec.get("containers") or [])
        if container is None or not container.get("image"):
            own = daemonset["metadata"]
            place = f"{own.get('namespace', '')}/{own['name']}"
            raise ContractError(f"DaemonSet {place} has no container with an image for data movers")
        volumes = spec.get("volumes") or []
        mounts = container.get("volumeMounts") or []
        root, host_pods = _host_pods(volumes, mounts)
        kept = {volume["name"]: volume for volume in volumes if not _shows_kubelet(volume, root)}
        meta = template.get("metadata") or {}
        tolerations = tuple(spec.get("tolerations") or [])
        selector = _allowed(_pick(spec, ("nodeSelector",)).get("nodeSelector"), _INHERITED_NODE_SELECTOR)
        return cls(
            image=container["image"],
            labels=_allowed(meta.get("labels"), _INHERITED_LABELS),
            annotations=_allowed(meta.get("annotations"), _INHERITED_ANNOTATIONS),
            tolerations=tuple(one for one in tolerations if one.get("key") in _INHERITED_TOLERATIONS),
            all_tolerations=tolerations,
            volumes=tuple(kept.values()),
            volume_mounts=tuple(mount for mount in mounts if mount["name"] in kept),
            env=tuple(container.get("env") or []),
            pod_fields=_pick(spec, ("serviceAccountName", "dnsPolicy", "dnsConfig", "imagePullSecrets"))
            | ({"nodeSelector": selector} if selector else {}),
            container_fields=_pick(container, ("envFrom",)),
            kubelet_root=str(root),
            host_pods=host_pods,
        )

    def with_image_of(self, agent: Pod) -> Self:
        """Return the template for movers of the running agent: with its image, and the pull secrets of another one.

        The DaemonSet may have got an image since, which has another program, until the agent's v1 Pod is replaced.
        """
        spec = agent["spec"]
        containers = spec.get("containers") or []
        image = next((one.get("image") for one in containers if one["name"] == AGENT_DAEMONSET), None)
        if not image or image == self.image:
            return self
        secret = "imagePullSecrets"  # noqa: S105 - the name of a field
        fields = {key: value for key, value in self.pod_fields.items() if key != secret}
        return replace(self, image=image, pod_fields=fields | _pick(spec, (secret,)))


def find_agent(containers: list[Container]) -> Container | None:
    """Return the agent's container, whatever sidecars others have put before it: the one of its name, or the first."""
    named = [one for one in containers if one.get("name") == AGENT_DAEMONSET] or containers
    return named[0] if named else None


def _allowed(marks: dict[str, str] | None, names: tuple[str, ...]) -> dict[str, str]:
    """Return the labels, annotations or entries of a selector with these names; an empty value is one, too."""
    return {name: marks[name] for name in names if marks and name in marks}


def _pick(fields: Mapping[str, Any], names: tuple[str, ...]) -> Manifest:
    return {name: fields[name] for name in names if fields.get(name)}


def _host_pods(volumes: list[Volume], mounts: list[VolumeMount]) -> tuple[PurePosixPath, str | None]:
    """Return the kubelet's root directory on the node, and where its `pods` directory is mounted; None: nowhere."""
    for volume in volumes:
        path = (volume.get("hostPath") or {}).get("path", "")
        if volume["name"] == _HOST_PODS and path:
            mounted = [mount["mountPath"] for mount in mounts if mount["name"] == _HOST_PODS]
            return _parse_path(path).parent, mounted[0] if mounted else None
    return PurePosixPath(DEFAULT_KUBELET_ROOT), None


def _shows_kubelet(volume: Volume, root: PurePosixPath) -> bool:
    """Return whether the volume is a hostPath at, above or below the kubelet's root directory."""
    raw = (volume.get("hostPath") or {}).get("path")
    if not raw:
        return False
    path = _parse_path(raw)
    return path.is_relative_to(root) or root.is_relative_to(path)


def _parse_path(path: str) -> PurePosixPath:
    # Two slashes at the start are one: POSIX leaves their meaning open.
    return PurePosixPath("/" + posixpath.normpath(path).lstrip("/"))

"""What mover pods inherit from the node agent's own DaemonSet.

Knows which fields of a DaemonSet's pod template are handed down and which are held back.
Does not know what else a mover pod holds (`exposer.pod_manifest`).
Source: Velero v1.18, pkg/util/kube/pod.go, pkg/nodeagent/node_agent.go and
pkg/util/third_party.go.
"""

import posixpath
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Final, Self

from core.errors import ContractError, ExposeError
from core.models.base import JsonDict
from core.models.names import AGENT_DAEMONSET_WINDOWS
from exposer.placement import WINDOWS

__all__ = ["DEFAULT_KUBELET_ROOT", "AgentTemplate"]

DEFAULT_KUBELET_ROOT: Final = "/var/lib/kubelet"
"""Where kubelets keep their state unless told otherwise."""

_CONTAINER: Final = "node-agent"
_HOST_PODS: Final = "host-pods"

_INHERITED_LABELS: Final = ("azure.workload.identity/use",)
_INHERITED_ANNOTATIONS: Final = ("iam.amazonaws.com/role",)
_INHERITED_TOLERATIONS: Final = ("kubernetes.azure.com/scalesetpriority", "CriticalAddonsOnly")


@dataclass(frozen=True)
class AgentTemplate:
    """The inheritable part of the node agent's pod template.

    `pod_fields` and `container_fields` hold fields of a pod's spec and of its container as
    JSON, `kubelet_root` is a path on the node. `tolerations` are those that are always handed
    down, `all_tolerations` what the agent itself has. `host_pods_mounted` says whether the agent
    may reach the volumes of other pods: without it pod volumes cannot be served. `windows` is
    what movers on Windows nodes inherit; None: there is no DaemonSet for them.
    """

    image: str
    labels: dict[str, str] = field(default_factory=dict)
    annotations: dict[str, str] = field(default_factory=dict)
    tolerations: tuple[JsonDict, ...] = ()
    all_tolerations: tuple[JsonDict, ...] = ()
    volumes: tuple[JsonDict, ...] = ()
    volume_mounts: tuple[JsonDict, ...] = ()
    env: tuple[JsonDict, ...] = ()
    pod_fields: JsonDict = field(default_factory=dict)
    container_fields: JsonDict = field(default_factory=dict)
    read_only_root: bool = False
    kubelet_root: str = DEFAULT_KUBELET_ROOT
    host_pods_mounted: bool = False
    windows: "AgentTemplate | None" = None

    def for_os(self, node_os: str) -> "AgentTemplate":
        """Return what movers on nodes of that operating system inherit.

        Raises:
            ExposeError: no DaemonSet is there to inherit from.
        """
        if node_os != WINDOWS:
            return self
        if self.windows is None:
            raise ExposeError(
                f"the volume belongs on Windows nodes, and no data mover runs there: DaemonSet "
                f"{AGENT_DAEMONSET_WINDOWS}, which it would take its image and volumes from, does not exist"
            )
        return self.windows

    @classmethod
    def parse(cls, daemonset: JsonDict) -> Self:
        """Return what the pods of `daemonset` (apps/v1 as JSON) hand down to mover pods.

        Raises:
            ContractError: it has no container with an image.
        """
        template: JsonDict = daemonset.get("spec", {}).get("template", {})
        spec: JsonDict = template.get("spec", {})
        container = _agent_container(daemonset, spec)
        volumes: list[JsonDict] = spec.get("volumes") or []
        mounts: list[JsonDict] = container.get("volumeMounts") or []
        root, mounted = _kubelet_root(volumes, mounts)
        kept = {volume["name"]: volume for volume in volumes if not _shows_kubelet(volume, root)}
        meta: JsonDict = template.get("metadata") or {}
        tolerations: tuple[JsonDict, ...] = tuple(spec.get("tolerations") or [])
        return cls(
            image=container["image"],
            labels=_picked(meta.get("labels"), _INHERITED_LABELS),
            annotations=_picked(meta.get("annotations"), _INHERITED_ANNOTATIONS),
            tolerations=tuple(
                toleration for toleration in tolerations if toleration.get("key") in _INHERITED_TOLERATIONS
            ),
            all_tolerations=tolerations,
            volumes=tuple(kept.values()),
            volume_mounts=tuple(mount for mount in mounts if mount["name"] in kept),
            env=tuple(container.get("env") or []),
            pod_fields=_picked(spec, ("serviceAccountName", "dnsPolicy", "dnsConfig", "imagePullSecrets")),
            container_fields=_picked(container, ("envFrom",)),
            read_only_root=bool((container.get("securityContext") or {}).get("readOnlyRootFilesystem")),
            kubelet_root=root,
            host_pods_mounted=mounted,
        )


def _agent_container(daemonset: JsonDict, spec: JsonDict) -> JsonDict:
    containers: list[JsonDict] = spec.get("containers") or []
    named = [c for c in containers if c.get("name") == _CONTAINER] or containers
    if not named or not named[0].get("image"):
        meta = daemonset.get("metadata") or {}
        place = f"{meta.get('namespace', '')}/{meta.get('name', '?')}"
        message = f"DaemonSet {place} has no container with an image to start data movers from"
        raise ContractError(message)
    return named[0]


def _picked(fields: JsonDict | None, names: tuple[str, ...]) -> JsonDict:
    return {name: fields[name] for name in names if fields and fields.get(name)}


def _kubelet_root(volumes: list[JsonDict], mounts: list[JsonDict]) -> tuple[str, bool]:
    """Return the kubelet's folder on the node, and whether its pods' folder is mounted."""
    for volume in volumes:
        path = (volume.get("hostPath") or {}).get("path", "")
        if volume["name"] == _HOST_PODS and path:
            mounted = any(mount["name"] == _HOST_PODS for mount in mounts)
            return posixpath.dirname(posixpath.normpath(path)), mounted
    return DEFAULT_KUBELET_ROOT, False


def _shows_kubelet(volume: JsonDict, root: str) -> bool:
    """Whether the volume is a folder of the node at, above or below the kubelet's."""
    raw = (volume.get("hostPath") or {}).get("path")
    if not raw:
        return False
    path, kubelet = PurePosixPath(posixpath.normpath(raw)), PurePosixPath(root)
    return path.is_relative_to(kubelet) or kubelet.is_relative_to(path)

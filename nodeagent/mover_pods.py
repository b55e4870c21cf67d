"""What the life cycle reads of a mover pod: whose it is, how it is, and who took it away.

Knows a v1 Pod as JSON dict, and where to read it. Does not know the rules (`nodeagent.lifecycle`).
"""

import signal
from typing import Final

from core.kube.client import KubeClient
from core.kube.resources import PODS
from core.models.base import JsonDict
from core.models.names import OWNER_UID_LABEL
from core.models.transfers import Load
from exposer.pod_status import PodEnd, explain_exit, memory_limit, parse_pod_end, signal_of
from nodeagent.lifecycle import PodState

__all__ = [
    "belongs_to",
    "explain_loss",
    "has_ended",
    "is_ours",
    "pod_node",
    "pod_state",
    "read_mover",
    "trim_pod",
    "was_killed",
]

_LOST_CONTAINER: Final = frozenset({"ContainerStatusUnknown", "Unknown"})
"""The kubelet, or the container runtime, came back and found the container gone.

Source: Kubernetes v1.34, pkg/kubelet/kubelet_pods.go; containerd v2, internal/cri/server/restart.go.
"""

_NOT_STARTED: Final = "StartError"
_STARTER_LOST: Final = ("signal: killed", "context canceled", "context deadline exceeded")
"""A kubelet that dies while it has a container started takes the start with it; other errors are the image's.

Source: containerd v2, internal/cri/server/container_start.go, and a kubelet that got SIGKILL.
"""

_OUT_OF_MEMORY: Final = "OOMKilled"
"""Another pod would come to the same end; a kill for any other reason came from outside."""


def pod_state(pod: JsonDict | None) -> PodState:
    """Return the state of a mover pod."""
    if pod is None:
        return PodState.ABSENT
    leaving = bool(pod["metadata"].get("deletionTimestamp"))
    end = parse_pod_end(pod)
    if end is not None:
        return PodState.DISPLACED if leaving or _displaced(pod, end) else PodState.ENDED
    if leaving:
        return PodState.LEAVING
    phase = (pod.get("status") or {}).get("phase", "")
    return PodState.RUNNING if phase == "Running" else PodState.PENDING


def has_ended(pod: JsonDict) -> bool:
    """Whether `pod` has ended, however that came about."""
    return pod_state(pod) in {PodState.ENDED, PodState.DISPLACED}


def belongs_to(pod: JsonDict, cr: Load) -> bool:
    """Whether `pod` was made for `cr`; a peer's mover has no label of ours, but an owner."""
    meta = pod["metadata"]
    owners = {reference["uid"] for reference in meta.get("ownerReferences") or []}
    return cr.uid in owners or (meta.get("labels") or {}).get(OWNER_UID_LABEL) == cr.uid


async def read_mover(client: KubeClient, cr: Load) -> JsonDict | None:
    """Return the mover pod of `cr`; None where there is none, or the pod of that name is another's."""
    pod = await client.read(PODS, cr.metadata.namespace, cr.name)
    return pod if pod is not None and belongs_to(pod, cr) else None


def is_ours(pod: JsonDict) -> bool:
    """Whether an agent of ours made `pod`, and not a peer's."""
    return OWNER_UID_LABEL in (pod["metadata"].get("labels") or {})


def pod_node(pod: JsonDict) -> str:
    """Return the node of `pod`; empty before the scheduler chose one."""
    return str((pod.get("spec") or {}).get("nodeName", ""))


def explain_loss(pod: JsonDict) -> str:
    """Return who took `pod` from its node and why, as far as it tells; empty where it does not."""
    status = pod.get("status") or {}
    by = _disruption(status)
    reason = status.get("reason") or by.get("reason") or ""
    words = status.get("message") or by.get("message") or ""
    end = parse_pod_end(pod)
    if not reason and not words and end is not None and end.exit_code is not None:
        return explain_exit(end)
    return ": ".join(part for part in (reason, words) if part)


def was_killed(pod: JsonDict) -> bool:
    """Whether `pod` got SIGKILL, and nobody says that he had it end: the next one may fare alike."""
    end = parse_pod_end(pod)
    leaving = bool(pod["metadata"].get("deletionTimestamp"))
    return end is not None and signal_of(end) == signal.SIGKILL and end.plain and not leaving


def trim_pod(pod: JsonDict) -> JsonDict:
    """Return what the life cycle reads of a pod: whose it is, and how it is."""
    meta, status = pod["metadata"], pod.get("status") or {}
    kept = ("name", "namespace", "uid", "labels", "ownerReferences", "deletionTimestamp")
    told = ("phase", "reason", "message", "conditions", "containerStatuses")
    limit = memory_limit(pod)
    containers = {"containers": [{"resources": {"limits": {"memory": limit}}}]} if limit else {}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {key: meta[key] for key in (*kept, "resourceVersion") if key in meta},
        "spec": {"nodeName": pod_node(pod), **containers},
        "status": {key: status[key] for key in told if key in status},
    }


def _displaced(pod: JsonDict, end: PodEnd) -> bool:
    """Whether somebody else than the mover itself made it end."""
    status = pod.get("status") or {}
    rejected = end.exit_code is None and status.get("phase") == "Failed"
    killed = signal_of(end) == signal.SIGKILL and end.reason != _OUT_OF_MEMORY
    told = bool(status.get("reason")) or bool(_disruption(status))
    not_started = end.reason == _NOT_STARTED and any(words in end.message for words in _STARTER_LOST)
    return rejected or killed or told or not_started or end.reason in _LOST_CONTAINER


def _disruption(status: JsonDict) -> JsonDict:
    """Return the condition that says that somebody ends the pod; empty where none does.

    Source: Kubernetes v1.34, pkg/apis/core/types.go (DisruptionTarget).
    """
    for condition in status.get("conditions") or []:
        if condition.get("type") == "DisruptionTarget" and condition.get("status") == "True":
            found: JsonDict = condition
            return found
    return {}

"""What a mover pod's status says: why it does not run yet, and how it ended.

Knows the words of scheduler and kubelet. Pure: knows nothing beside the pod it is shown;
where its status tells too little, `exposer.causes` asks further.
Source: Kubernetes v1.34, pkg/kubelet/images/types.go, pkg/kubelet/container/sync_result.go and
pkg/kubelet/kuberuntime/kuberuntime_container.go (reasons of a waiting container),
pkg/apis/core/types.go (conditions PodScheduled and DisruptionTarget),
pkg/scheduler/framework/plugins/{volumebinding,nodeaffinity} (words about claims and nodes).
"""

import signal
from dataclasses import dataclass
from typing import Final

from core.errors import ExposeError
from core.models.base import JsonDict
from core.models.reasons import PendingReason
from exposer.model import Pending
from exposer.placement import describe_nodes

__all__ = [
    "PodEnd",
    "diagnose_pod",
    "explain_exit",
    "memory_limit",
    "parse_pod_end",
    "signal_of",
]

_PERMANENT: Final = frozenset({"ErrImageNeverPull", "InvalidImageName"})
"""Reasons of a waiting container that only another pod manifest would change."""

_PULLING: Final = PendingReason.IMAGE_PULL_BACK_OFF
"""The kubelet changes between this reason and ErrImagePull with every try: it is one wait."""

_IMAGE: Final = frozenset(
    {"ErrImagePull", _PULLING, "ImageInspectError", "RegistryUnavailable", "SignatureValidationFailed"}
)
_STARTING: Final = frozenset({"", PendingReason.CONTAINER_CREATING, "PodInitializing"})
_PLAIN: Final = frozenset({"", "Error"})
"""What the kubelet says of a container that ended badly by itself."""

_SIGNALS: Final = 128
"""A container's exit code is this and the number of the signal that ended it."""

_ABOUT_AFFINITY: Final = "didn't match Pod's node affinity"
_ABOUT_CLAIMS: Final = ("unbound immediate PersistentVolumeClaims", "binding volumes", 'persistentvolumeclaim "')


@dataclass(frozen=True)
class PodEnd:
    """How a mover pod ended.

    `exit_code` is None where no container ran to an end; `message` is the termination
    message, or the pod's own where there is none; `reason` is such as `OOMKilled`, `Evicted`.
    `memory_limit` is the container's, a quantity; empty where it has none, or the pod was to go anyway.
    """

    exit_code: int | None
    message: str
    reason: str
    memory_limit: str = ""

    @property
    def plain(self) -> bool:
        """Whether nobody but the container itself says why it ended."""
        return self.reason in _PLAIN


def diagnose_pod(pod: JsonDict) -> Pending | None:
    """Return what keeps `pod` (a v1 Pod as JSON dict) from running; None where nothing does.

    Raises:
        ExposeError: it will never run.
    """
    status: JsonDict = pod.get("status") or {}
    if status.get("phase", "Pending") != "Pending":
        return None
    place = _place(pod)
    node = (pod.get("spec") or {}).get("nodeName", "")
    if not node:
        return _diagnose_placement(pod, status, place)
    waiting = _waiting_state(status)
    reason, words = waiting.get("reason", ""), waiting.get("message", "")
    if reason in _PERMANENT:
        raise ExposeError(f"pod {place} cannot start on node {node}: {_told(reason, words)}")
    if reason in _IMAGE:
        text = f"pod {place} waits for its image on node {node}: {_told(reason, words)}"
        return Pending(_PULLING if reason == "ErrImagePull" else reason, text, blocked=True)
    if reason in _STARTING:
        return Pending(PendingReason.CONTAINER_CREATING, f"pod {place} is being started on node {node}")
    return Pending(reason, f"pod {place} cannot start on node {node} yet: {_told(reason, words)}", blocked=True)


def parse_pod_end(pod: JsonDict) -> PodEnd | None:
    """Return how `pod` (a v1 Pod as JSON dict) ended, None while it has not."""
    status: JsonDict = pod.get("status") or {}
    disruption = _condition(status, "DisruptionTarget")
    # Whoever ended the whole pod knows more than the container that was killed for it.
    above = status.get("reason") or disruption.get("reason") or ""
    words = status.get("message") or disruption.get("message") or ""
    for container in status.get("containerStatuses") or []:
        terminated = (container.get("state") or {}).get("terminated")
        if terminated:
            exit_code = int(terminated.get("exitCode", 0))
            if exit_code == 0:
                return PodEnd(0, terminated.get("message", ""), terminated.get("reason", ""))
            said = "; ".join(part for part in (words, terminated.get("message", "")) if part)
            leaving = (pod.get("metadata") or {}).get("deletionTimestamp")
            limit = "" if leaving else memory_limit(pod)
            return PodEnd(exit_code, said, above or terminated.get("reason", ""), limit)
    if status.get("phase") in {"Failed", "Succeeded"}:
        # No container to speak for it: rejected by the kubelet, or evicted before it began.
        return PodEnd(None, words, above or str(status["phase"]))
    return None


def memory_limit(pod: JsonDict) -> str:
    """Return the memory limit of the pod's container, a quantity; empty where it has none."""
    containers = (pod.get("spec") or {}).get("containers") or [{}]
    return str(((containers[0].get("resources") or {}).get("limits") or {}).get("memory", ""))


def signal_of(end: PodEnd) -> int:
    """Return the signal that ended the container, 0 where none did."""
    return max(0, (end.exit_code or 0) - _SIGNALS)


def explain_exit(end: PodEnd) -> str:
    """Return how the container ended: the kubelet's reason, or the signal that nobody gives a reason for.

    A runtime may not say that the kernel killed a container for lack of memory: it can hear of the
    end before it hears of that. Source: https://github.com/containerd/containerd/issues/12372
    """
    number = signal_of(end) if end.plain else 0
    words = f"killed by signal {number}" if number else end.reason or "Error"
    if end.exit_code is not None:
        words += f" (exit code {end.exit_code})"
    if number == signal.SIGKILL and end.memory_limit:
        words += f", probably for lack of memory (its limit is {end.memory_limit})"
    return words


def _diagnose_placement(pod: JsonDict, status: JsonDict, place: str) -> Pending:
    scheduled = _condition(status, "PodScheduled")
    if scheduled.get("status") != "False":
        return Pending(PendingReason.SCHEDULING, f"pod {place} waits for the scheduler")
    reason = scheduled.get("reason") or "Unschedulable"
    words = scheduled.get("message") or "the scheduler gives no reason"
    text = f"no node takes pod {place}: {words}"
    if any(part in words for part in _ABOUT_CLAIMS):
        return Pending(PendingReason.CLAIM_UNBOUND, text)
    if _ABOUT_AFFINITY in words and (asked := describe_nodes(pod)):
        text += f" (it asks for a node with {asked})"
    return Pending(reason, text, blocked=True)


def _waiting_state(status: JsonDict) -> JsonDict:
    """Return the state of the first container that waits; empty where none says so."""
    for container in [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]:
        waiting: JsonDict | None = (container.get("state") or {}).get("waiting")
        if waiting:
            return waiting
    return {}


def _condition(status: JsonDict, name: str) -> JsonDict:
    for condition in status.get("conditions") or []:
        if condition.get("type") == name and (name == "PodScheduled" or condition.get("status") == "True"):
            found: JsonDict = condition
            return found
    return {}


def _told(reason: str, words: str) -> str:
    return f"{reason}: {words}" if words else reason


def _place(pod: JsonDict) -> str:
    meta = pod.get("metadata") or {}
    return f"{meta.get('namespace', '')}/{meta.get('name', '?')}"

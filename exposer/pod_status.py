"""The status of a mover pod: why it is pending, and how it terminated. Pure.

Source: Kubernetes v1.34, pkg/kubelet/images/types.go, pkg/kubelet/container/sync_result.go and
pkg/kubelet/kuberuntime/kuberuntime_container.go (reasons of a waiting container), pkg/apis/core/types.go (conditions
PodScheduled and DisruptionTarget), pkg/scheduler/framework/plugins/{volumebinding,nodeaffinity} (messages about PVCs
and nodes).
"""

import signal
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, TypeVar

from core.errors import ExposeError
from core.kube.types import (
    Condition,
    Container,
    ContainerStatus,
    NodeRequirement,
    Object,
    Pod,
    PodStatus,
    Terminated,
    Waiting,
)
from core.models.names import ATTEMPT_LABEL, MAINTENANCE_CONTAINER, OWNER_UID_LABEL
from core.models.reasons import PendingReason
from exposer.model import NOT_WINDOWS, Pending

LOST_CONTAINER: Final = frozenset({"ContainerStatusUnknown", "Unknown"})
"""The kubelet, or the container runtime, restarted and did not find the container.

Source: Kubernetes v1.34, pkg/kubelet/kubelet_pods.go; containerd v2, internal/cri/server/restart.go.
"""

_PERMANENT: Final = frozenset({"ErrImageNeverPull", "InvalidImageName"})
"""Reasons of a waiting container that only a different pod manifest can fix."""

_PULLING: Final = PendingReason.IMAGE_PULL_BACK_OFF
"""The kubelet alternates between this reason and ErrImagePull with every attempt: they count as one."""

_IMAGE: Final = frozenset(
    {"ErrImagePull", _PULLING, "ImageInspectError", "RegistryUnavailable", "SignatureValidationFailed"}
)
_IMAGE_TIMEOUT: Final = timedelta(minutes=5)
"""A registry is often back after a minute. Velero fails a transfer at the first ImagePullBackOff."""

STARTING: Final = frozenset({"", PendingReason.CONTAINER_CREATING, "PodInitializing"})
"""The kubelet's reasons for a container that waits for its turn: every other is of one that it cannot start."""

_PLAIN: Final = frozenset({"", "Error"})
"""The kubelet's reasons for a container that failed by itself."""

_SIGNALS: Final = 128
"""A container's exit code is this plus the number of the signal that terminated it."""

_AFFINITY_MESSAGE: Final = "didn't match Pod's node affinity"
_PVC_MESSAGES: Final = ("unbound immediate PersistentVolumeClaims", "binding volumes", 'persistentvolumeclaim "')

_T = TypeVar("_T", Container, ContainerStatus)


@dataclass(frozen=True)
class PodEnd:
    """How a mover pod terminated.

    `exit_code` is None where no container terminated; `message` is the termination message, or the pod's own where
    there is none, or how an init container failed; `reason` is, for example, `OOMKilled` or `Evicted`. `memory_limit`
    is the container's, a quantity; None where it has none, or the pod was being deleted.
    """

    exit_code: int | None
    message: str
    reason: str
    memory_limit: str | None = None

    @property
    def plain(self) -> bool:
        """Whether neither kubelet nor control plane gave a reason."""
        return self.reason in _PLAIN


def diagnose_pod(pod: Pod) -> Pending | None:
    """Return why `pod` (a v1 Pod as JSON dict) is pending; None where it is not. ExposeError: it can never run."""
    status = pod.get("status") or {}
    if status.get("phase", "Pending") != "Pending":
        return None
    place = pod_place(pod)
    node = (pod.get("spec") or {}).get("nodeName", "")
    if not node:
        return _diagnose_placement(pod, status, place)
    waiting = _waiting_state(status)
    reason, message = waiting.get("reason", ""), waiting.get("message", "")
    if reason in _PERMANENT:
        raise ExposeError(f"Pod {place} cannot start on node {node}: {join_text(reason, message)}")
    if reason in _IMAGE:
        text = f"image of Pod {place} is not available on node {node}: {join_text(reason, message)}"
        operation = f"image of Pod {pod['metadata']['uid']}"
        reason = _PULLING if reason == "ErrImagePull" else reason
        return Pending(reason, text, blocked=True, operation=operation, timeout=_IMAGE_TIMEOUT)
    if reason in STARTING:
        return Pending(PendingReason.CONTAINER_CREATING, f"Pod {place} is starting on node {node}")
    return Pending(reason, f"Pod {place} cannot start on node {node} yet: {join_text(reason, message)}", blocked=True)


def parse_pod_end(pod: Pod) -> PodEnd | None:
    """Return how the mover of `pod` (a v1 Pod as JSON dict) terminated; None while it has not."""
    status = pod.get("status") or {}
    disruption = find_condition(status, "DisruptionTarget")
    # The reason for terminating the whole pod is more specific than its killed container's.
    pod_reason = status.get("reason") or disruption.get("reason") or ""
    pod_message = status.get("message") or disruption.get("message") or ""
    terminated = mover_end(pod)
    if terminated:
        exit_code = int(terminated.get("exitCode", 0))
        if exit_code == 0:
            return PodEnd(0, terminated.get("message", ""), terminated.get("reason", ""))
        message = "; ".join(part for part in (pod_message, terminated.get("message", "")) if part)
        deleting = (pod.get("metadata") or {}).get("deletionTimestamp")
        limit = None if deleting else memory_limit(pod)
        return PodEnd(exit_code, message, pod_reason or terminated.get("reason", ""), limit)
    if status.get("phase") in {"Failed", "Succeeded"}:
        # Its container has not run: rejected by the kubelet, evicted before, or an init container has failed.
        return PodEnd(None, pod_message or _explain_init(status), pod_reason or str(status["phase"]))
    return None


def _explain_init(status: PodStatus) -> str:
    """Return how an init container, which a webhook has added, failed; empty: none did."""
    # The last one that ran: sidecars before it were only stopped with the pod.
    for container in reversed(status.get("initContainerStatuses") or []):
        ended = (container.get("state") or {}).get("terminated") or {}
        if code := ended.get("exitCode"):
            failed = explain_exit(PodEnd(code, "", ended.get("reason", "")))
            return join_text(f"init container {container['name']} failed: {failed}", ended.get("message", ""))
    return ""


def is_ready(pod: Pod) -> bool:
    """Return whether the kubelet reports the pod (a v1 Pod as JSON dict) as ready."""
    return bool(find_condition(pod.get("status") or {}, "Ready"))


def attempt_of(pod: Object) -> int:
    """Return the number of the attempt that a mover pod was created for; one without a valid label is of the first."""
    text = (pod["metadata"].get("labels") or {}).get(ATTEMPT_LABEL, "")
    return int(text) if text.isdecimal() else 1


def mover_container(pod: Pod) -> Container | None:
    """Return the mover's container in the pod's spec, whatever others a webhook has added."""
    return _mover_of(pod, (pod.get("spec") or {}).get("containers") or [])


def memory_limit(pod: Pod) -> str | None:
    """Return the memory limit of the mover's container, a quantity; None where it has none."""
    container = mover_container(pod)
    resources = (container.get("resources") or {}) if container else {}
    limit = (resources.get("limits") or {}).get("memory")
    return None if limit is None else str(limit)


def mover_status(pod: Pod) -> ContainerStatus | None:
    """Return the status of the mover's container, whatever others a webhook has added."""
    return _mover_of(pod, (pod.get("status") or {}).get("containerStatuses") or [])


def mover_end(pod: Pod) -> Terminated | None:
    """Return how the mover's container terminated; None while it has not."""
    status = mover_status(pod)
    return (status.get("state") or {}).get("terminated") if status else None


def signal_of(end: PodEnd) -> int:
    """Return the signal that terminated the container, 0 where none did."""
    return max(0, (end.exit_code or 0) - _SIGNALS)


def explain_exit(end: PodEnd) -> str:
    """Return how the container terminated: the kubelet's reason, or the signal where there is no reason.

    A runtime may not report that the kernel killed a container for lack of memory: it can learn of
    the exit before it learns of that. Source: https://github.com/containerd/containerd/issues/12372
    """
    number = signal_of(end) if end.plain else 0
    text = f"killed by signal {number}" if number else end.reason or "Error"
    if end.exit_code is not None:
        text += f" (exit code {end.exit_code})"
    if number == signal.SIGKILL and end.memory_limit:
        text += f", probably out of memory (limit {end.memory_limit})"
    return text


def _mover_of(pod: Pod, containers: list[_T]) -> _T | None:
    """Return the container that has the UID of the pod's owner as its name, as with Velero, or the only one.

    A maintenance Job's has a name of its own.
    """
    meta = pod.get("metadata") or {}
    owners = {reference["uid"] for reference in meta.get("ownerReferences") or []}
    names = owners | {(meta.get("labels") or {}).get(OWNER_UID_LABEL), MAINTENANCE_CONTAINER}
    # A trimmed pod has a container without a name.
    found = [each for each in containers if each.get("name") in names - {None}] or containers
    return found[0] if len(found) == 1 else None


def _diagnose_placement(pod: Pod, status: PodStatus, place: str) -> Pending:
    if (scheduled := find_condition(status, "PodScheduled")).get("status") != "False":
        return Pending(PendingReason.SCHEDULING, f"Pod {place} is not scheduled yet")
    reason = scheduled.get("reason") or "Unschedulable"
    message = scheduled.get("message") or "the scheduler gives no reason"
    text = f"Pod {place} cannot be scheduled: {message}"
    if any(part in message for part in _PVC_MESSAGES):
        return Pending(PendingReason.CLAIM_UNBOUND, text)
    if _AFFINITY_MESSAGE in message and (required := describe_nodes(pod)):
        text += f" (required nodes: {required})"
    return Pending(reason, text, blocked=True)


def _waiting_state(status: PodStatus) -> Waiting:
    """Return the state of the first waiting container; an empty one where none is waiting."""
    every = (*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or []))
    waiting = ((container.get("state") or {}).get("waiting") for container in every)
    return next(filter(None, waiting), Waiting())


def find_condition(status: PodStatus, name: str) -> Condition:
    """Return a condition that is true, or PodScheduled in any state; empty if there is none."""
    named = (one for one in status.get("conditions") or [] if one.get("type") == name)
    return next((one for one in named if name == "PodScheduled" or one.get("status") == "True"), Condition())


def join_text(reason: str, message: str) -> str:
    """Return a reason, and its message if there is one."""
    return f"{reason}: {message}" if message else reason


def pod_place(pod: Pod) -> str:
    """Return namespace and name of a pod for a message."""
    meta = pod.get("metadata") or {}
    return f"{meta.get('namespace', '')}/{meta.get('name', '?')}"


def describe_nodes(pod: Pod) -> str | None:
    """Return the nodes that `pod` (a v1 Pod as JSON dict) requires, as text; None: any Linux node."""
    affinity = ((pod.get("spec") or {}).get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    terms = []
    for term in required.get("nodeSelectorTerms") or []:
        requirements = [*(term.get("matchExpressions") or []), *(term.get("matchFields") or [])]
        # Every pod of ours excludes Windows nodes.
        terms.append(", ".join(_describe(one) for one in requirements if one != NOT_WINDOWS))
    return "; or ".join(filter(None, terms)) or None


def _describe(requirement: NodeRequirement) -> str:
    values = "|".join(requirement.get("values") or [])
    forms = {"In": f"={values}", "NotIn": f"!={values}", "Exists": " is set", "DoesNotExist": " is not set"}
    operator = requirement["operator"]
    return f"{requirement['key']}{forms.get(operator, f' {operator} {values}')}"

"""The status of a mover pod: why it is pending, and how it terminated.

Knows the reasons and messages of scheduler and kubelet. Where the status of a pending pod has no cause, its PVCs and
Events are read; the last answer is kept for each pod, and the API server is queried only so often.
Source: Kubernetes v1.34, pkg/kubelet/images/types.go, pkg/kubelet/container/sync_result.go and
pkg/kubelet/kuberuntime/kuberuntime_container.go (reasons of a waiting container), pkg/apis/core/types.go (conditions
PodScheduled and DisruptionTarget), pkg/scheduler/framework/plugins/{volumebinding,nodeaffinity} (messages about PVCs
and nodes), pkg/kubelet/events/event.go, pkg/controller/volume/events/event.go; external-provisioner v5, pkg/controller.
"""

import logging
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Final, TypeVar

from core.clock import Clock
from core.errors import ExposeError
from core.kube.client import KubeClient, Selection
from core.kube.errors import KubeError
from core.kube.resources import EVENTS, PERSISTENT_VOLUME_CLAIMS
from core.kube.types import (
    Condition,
    Container,
    ContainerStatus,
    Event,
    Object,
    Pod,
    PodStatus,
    Terminated,
    Waiting,
)
from core.logs import fields
from core.models.base import parse_time
from core.models.names import ATTEMPT_LABEL, BLOCK_DATA_MOVER, MAINTENANCE_CONTAINER, OWNER_UID_LABEL
from core.models.reasons import PendingReason
from exposer.model import Exposed, NoDeviceError, Pending
from exposer.ownership import mark_refused
from exposer.pod_manifest import describe_nodes

_log = logging.getLogger(__name__)

_PERMANENT: Final = frozenset({"ErrImageNeverPull", "InvalidImageName"})
"""Reasons of a waiting container that only a different pod manifest can fix."""

_PULLING: Final = PendingReason.IMAGE_PULL_BACK_OFF
"""The kubelet alternates between this reason and ErrImagePull with every attempt: they count as one."""

_IMAGE: Final = frozenset(
    {"ErrImagePull", _PULLING, "ImageInspectError", "RegistryUnavailable", "SignatureValidationFailed"}
)
_IMAGE_TIMEOUT: Final = timedelta(minutes=5)
"""A registry is often back after a minute. Velero fails a transfer at the first ImagePullBackOff."""

_STARTING: Final = frozenset({"", PendingReason.CONTAINER_CREATING, "PodInitializing"})
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

    `exit_code` is None where no container terminated; `message` is the termination message, or the
    pod's own where there is none; `reason` is, for example, `OOMKilled` or `Evicted`. `memory_limit`
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
    """Return why `pod` (a v1 Pod as JSON dict) is pending; None where it is not.

    Raises:
        ExposeError: it can never run.
    """
    status = pod.get("status") or {}
    if status.get("phase", "Pending") != "Pending":
        return None
    place = _place(pod)
    node = (pod.get("spec") or {}).get("nodeName", "")
    if not node:
        return _diagnose_placement(pod, status, place)
    waiting = _waiting_state(status)
    reason, message = waiting.get("reason", ""), waiting.get("message", "")
    if reason in _PERMANENT:
        raise ExposeError(f"Pod {place} cannot start on node {node}: {_join(reason, message)}")
    if reason in _IMAGE:
        text = f"image of Pod {place} is not available on node {node}: {_join(reason, message)}"
        operation = f"image of Pod {pod['metadata']['uid']}"
        reason = _PULLING if reason == "ErrImagePull" else reason
        return Pending(reason, text, blocked=True, operation=operation, timeout=_IMAGE_TIMEOUT)
    if reason in _STARTING:
        return Pending(PendingReason.CONTAINER_CREATING, f"Pod {place} is starting on node {node}")
    return Pending(reason, f"Pod {place} cannot start on node {node} yet: {_join(reason, message)}", blocked=True)


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
        # No status of its container: rejected by the kubelet, or evicted before its container started.
        return PodEnd(None, pod_message, pod_reason or str(status["phase"]))
    return None


def is_ready(pod: Pod) -> bool:
    """Return whether the kubelet reports the pod (a v1 Pod as JSON dict) as ready."""
    return bool(find_condition(pod.get("status") or {}, "Ready"))


def attempt_of(pod: Object) -> int:
    """Return the number of the attempt that a mover pod was created for; one without a valid label is of the first."""
    text = (pod["metadata"].get("labels") or {}).get(ATTEMPT_LABEL, "")
    return int(text) if text.isdecimal() else 1


def memory_limit(pod: Pod) -> str | None:
    """Return the memory limit of the mover's container, a quantity; None where it has none."""
    container = _mover_of(pod, (pod.get("spec") or {}).get("containers") or [])
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
    for container in [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]:
        if waiting := (container.get("state") or {}).get("waiting"):
            return waiting
    return {}


def find_condition(status: PodStatus, name: str) -> Condition:
    """Return a condition that is true, or PodScheduled in any state; empty if there is none."""
    for condition in status.get("conditions") or []:
        if condition.get("type") == name and (name == "PodScheduled" or condition.get("status") == "True"):
            return condition
    return {}


def _join(reason: str, message: str) -> str:
    return f"{reason}: {message}" if message else reason


def _place(pod: Pod) -> str:
    meta = pod.get("metadata") or {}
    return f"{meta.get('namespace', '')}/{meta.get('name', '?')}"


_PROGRESS: Final = frozenset(
    {"Scheduled", "SuccessfulAttachVolume", "SuccessfulMountVolume", "Pulling", "Pulled", "Created", "Started"}
)
"""Reasons of completed steps of a pod's start: warnings before them no longer apply."""

_PULL_STARTED: Final = "Pulling"
_PROVISIONING: Final = "Provisioning"
_FAILED: Final = "ProvisioningFailed"

_NO_DEVICE: Final = re.compile(
    r"does not support block volume|code = (?:InvalidArgument|Unimplemented) desc = .*(?:block|capabilit)",
    re.IGNORECASE,
)
"""In the Event of a provisioner whose volumes are file systems only, such as of NFS or CephFS.

Source: sig-storage-lib-external-provisioner v11, controller/controller.go (canProvision); csi-driver-nfs,
csi-driver-smb (isValidVolumeCapabilities) and ceph-csi (validateCreateVolumeRequest); CSI 1.12, spec.md (CreateVolume).
"""

_EARLIEST: Final = datetime.min.replace(tzinfo=UTC)


def find_pod_cause(events: Sequence[Event]) -> Pending | None:
    """Return why a scheduled pod does not start, from its Events; None where they have no cause.

    `events` are sorted by name, which is the order in which they were first recorded.
    """
    last = _latest([event for event in events if _is_warning(event) or event.get("reason") in _PROGRESS])
    if last is None or not (_is_warning(last) or last.get("reason") == _PULL_STARTED):
        return None
    return _parse_cause(last)


def find_pvc_cause(events: Sequence[Event]) -> Pending | None:
    """Return why a PVC is not bound, from its Events; None where it has none.

    `events` are sorted by name, which is the order in which they were first recorded.
    """
    warning = _latest([event for event in events if _is_warning(event)])
    if warning is not None:
        # Another component has started to provision: what the warning reported as missing exists by now.
        begun = [e for e in events if e.get("reason") == _PROVISIONING and _reporter(e) != _reporter(warning)]
        events = [warning, *begun]
    last = _latest(events)
    return None if last is None else _parse_cause(last)


def _parse_cause(event: Event) -> Pending:
    """Return the cause that an Event reports, as text on one line; a Warning is blocked."""
    text = " ".join(str(event.get("message") or "").split())
    return Pending(str(event.get("reason") or "Unknown"), text, blocked=_is_warning(event))


def _is_warning(event: Event) -> bool:
    return event.get("type") == "Warning"


def _latest(events: Sequence[Event]) -> Event | None:
    """Return the Event that was seen last; within one second, the one that was first recorded last."""
    order = sorted(range(len(events)), key=lambda index: (_time(events[index]), index))
    return events[order[-1]] if order else None


def _time(event: Event) -> int:
    """Return when the Event was last seen, by the API server's clock, in whole seconds: most have no finer time.

    The reporter's own times are only used for the time since its first record: each reporter has a
    clock of its own, and one may be wrong.
    """
    created = (event.get("metadata") or {}).get("creationTimestamp")
    first = event.get("eventTime") or event.get("firstTimestamp")
    stamps = [(event.get("series") or {}).get("lastObservedTime"), event.get("lastTimestamp"), first]
    times = [parse_time(stamp) for stamp in stamps if stamp]
    if not created:
        return (max(times, default=_EARLIEST) - _EARLIEST) // timedelta(seconds=1)
    lasted = max(times) - parse_time(first) if first else timedelta()
    # Not `created + lasted`: both may be as long as a time can express.
    return (parse_time(created) - _EARLIEST + lasted) // timedelta(seconds=1)


def _reporter(event: Event) -> str:
    return str(event.get("reportingComponent") or (event.get("source") or {}).get("component") or "")


_UNEXPLAINED: Final = frozenset(
    {PendingReason.SCHEDULING, PendingReason.CONTAINER_CREATING, PendingReason.CLAIM_UNBOUND}
)
"""Pending reasons for which the pod's status does not have the cause."""

_SILENCE_SECONDS: Final = 3.0
"""A healthy pod may be pending for this long; a successful transfer causes no query for Events."""

_PAUSE_SECONDS: Final = 4.0
"""Between two queries for one pod: less than the 5 s between two checks of its transfer."""

_QUERIES_PER_SECOND: Final = 5.0
"""For all pods together: with many pending pods, each is queried less often."""

_FORGET_SECONDS: Final = 300.0
"""A pod that was not checked for this long is dropped."""


@dataclass
class _Query:
    """One unexplained pod: its reason and since when, the last query and its answer."""

    reason: str
    since_seconds: float
    checked_at_seconds: float
    sent_at_seconds: float | None = None
    answer: Pending | None = None


class CauseFinder:
    """Finds the causes of pending pods, for one agent."""

    def __init__(self, client: KubeClient, clock: Clock) -> None:
        """Query through `client`, limited by `clock`."""
        self.clock: Final = clock
        self._client = client
        self._queries: dict[str, _Query] = {}

    async def inspect(self, pod: Pod | Pending, *, by_block: bool = False) -> Exposed | Pending:
        """Return the running or terminated `pod` as exposed, or why it is pending.

        `by_block`: the PVC of its own name must become a device.

        Raises:
            ExposeError: it can never run.
            NoDeviceError: the PVC can never be provisioned, and is marked so.
        """
        if isinstance(pod, Pending):
            return pod
        pending = await self.explain(pod)
        if by_block and pending is not None and pending.reason == _FAILED and _NO_DEVICE.search(pending.message):
            meta = pod["metadata"]
            claim = await self._client.read(PERSISTENT_VOLUME_CLAIMS, meta["namespace"], meta["name"])
            if claim is not None:
                await mark_refused(self._client, claim)
            raise NoDeviceError(
                f"data mover {BLOCK_DATA_MOVER} needs a volume of volumeMode Block, which is refused: {pending.message}"
            )
        return pending or Exposed(pod)

    async def explain(self, pod: Pod) -> Pending | None:
        """Return why `pod` (a v1 Pod as JSON dict, just read) is pending; None where it is not.

        Raises:
            ExposeError: it can never run.
        """
        pending, uid = diagnose_pod(pod), pod["metadata"]["uid"]
        if pending is None or not (pending.operation or pending.reason in _UNEXPLAINED):
            self._queries.pop(uid, None)
            return pending
        query = self._observe(uid, pending)
        if self._is_due(query):
            query.sent_at_seconds = self.clock.monotonic()
            query.answer = await self._find_cause(pod, pending)
        return query.answer or pending

    def _observe(self, uid: str, pending: Pending) -> _Query:
        """Return the state of that pod; drop those that are no longer checked."""
        now = self.clock.monotonic()
        for key in [key for key, one in self._queries.items() if now - one.checked_at_seconds >= _FORGET_SECONDS]:
            del self._queries[key]
        found = self._queries.setdefault(uid, _Query(pending.reason, now, now))
        if found.reason != pending.reason:
            # The pod has made progress: the previous cause no longer applies.
            found.reason, found.answer = pending.reason, None
        found.checked_at_seconds = now
        return found

    def _is_due(self, query: _Query) -> bool:
        now = self.clock.monotonic()
        if now - query.since_seconds < _SILENCE_SECONDS:
            return False
        pause = max(_PAUSE_SECONDS, len(self._queries) / _QUERIES_PER_SECOND)
        return query.sent_at_seconds is None or now - query.sent_at_seconds >= pause

    async def _find_cause(self, pod: Pod, pending: Pending) -> Pending | None:
        """Return the cause that PVCs and Events report; None where there is none, or a read fails."""
        try:
            if pending.operation:
                # Until the kubelet's next attempt to pull the image ends, the status has the error of the one before.
                cause = find_pod_cause(await self._events_of(pod))
                return replace(pending, operation=None) if cause is not None and cause.reason == _PULL_STARTED else None
            # A pod that was bound to its node without the scheduler may have unbound PVCs, too.
            unbound = await self._find_claim_cause(pod)
            if unbound is not None or pending.reason != PendingReason.CONTAINER_CREATING:
                return unbound
            cause = find_pod_cause(await self._events_of(pod))
            if cause is None:
                return None
            stuck = f"Pod {_place(pod)} cannot start on node {pod['spec']['nodeName']} yet"
            return _add_cause(pending, cause, stuck if cause.blocked else pending.message)
        except KubeError as e:
            meta = pod["metadata"]
            extra = fields(kind="Pod", namespace=meta["namespace"], name=meta["name"], reason=str(e))
            _log.debug("failed to read why the pod is pending, will retry", extra=extra)
            return None

    async def _find_claim_cause(self, pod: Pod) -> Pending | None:
        """Return why the first unbound PVC of `pod` is pending; None where all are bound."""
        namespace = pod["metadata"]["namespace"]
        mounted = (volume.get("persistentVolumeClaim") for volume in pod["spec"].get("volumes") or [])
        for name in [claim["claimName"] for claim in mounted if claim]:
            shown = f"PersistentVolumeClaim {namespace}/{name} of Pod {namespace}/{pod['metadata']['name']}"
            claim = await self._client.read(PERSISTENT_VOLUME_CLAIMS, namespace, name)
            if claim is None:
                return Pending(PendingReason.CLAIM_MISSING, f"{shown} does not exist", blocked=True)
            if claim["spec"].get("volumeName"):
                continue
            unbound = Pending(PendingReason.CLAIM_UNBOUND, f"{shown} is not bound")
            cause = find_pvc_cause(await self._events_of(claim))
            return unbound if cause is None else _add_cause(unbound, cause, unbound.message)
        return None

    async def _events_of(self, obj: Object) -> list[Event]:
        meta = obj["metadata"]
        selector = f"involvedObject.uid={meta['uid']}"
        return await self._client.list(Selection(EVENTS, meta["namespace"], field_selector=selector))


def _add_cause(pending: Pending, cause: Pending, what: str) -> Pending:
    """Return `pending` with the cause appended; only a Warning changes the reason."""
    reason = cause.reason if cause.blocked else pending.reason
    return Pending(reason, f"{what}: {_join(cause.reason, cause.message)}", blocked=cause.blocked)

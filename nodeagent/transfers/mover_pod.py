"""Mover pods: their owner, their state, their logs; why one was lost, and what the custom resource keeps of that."""

import asyncio
import logging
import re
import signal
from datetime import datetime, timedelta
from enum import Enum, auto
from typing import Annotated, ClassVar, Final, cast

from msgspec import Meta

from core.contract import CANCELED_ENDING
from core.kube.client import KubeClient
from core.kube.errors import KubeError
from core.kube.resources import PODS
from core.kube.types import Pod
from core.logs import fields
from core.models import names
from core.models.base import Time, WireModel
from core.models.transfers import Transfer
from exposer import pod_status
from exposer.ownership import belongs

_log = logging.getLogger(__name__)


class PodState(Enum):
    """The state of a transfer's mover pod on this node."""

    ABSENT = auto()
    """Not on this node; after Accepted: the API server has none on any node."""
    PENDING = auto()
    RUNNING = auto()
    TERMINATING = auto()
    """It is being deleted, and has not ended yet."""
    ENDED = auto()
    """Its process ended by itself."""
    LOST = auto()
    """It was ended: evicted, preempted, rejected by the kubelet, deleted, stopped, or its node was lost."""
    TAKEN = auto()
    """Another agent, one of Velero's, has taken the transfer over: the pod is on its node."""


_MOVER_LABELS: Final = frozenset(
    {names.DATA_UPLOAD_LABEL, names.DATA_DOWNLOAD_LABEL, names.POD_VOLUME_BACKUP_LABEL, names.POD_VOLUME_RESTORE_LABEL}
)

_NOT_STARTED: Final = "StartError"

_START_INTERRUPTED: Final = ("signal: killed", "context canceled", "context deadline exceeded")
"""A kubelet that is killed while it starts a container interrupts the start; other errors are the image's.

Source: containerd v2, internal/cri/server/container_start.go, and a kubelet that got SIGKILL.
"""

_OUT_OF_MEMORY: Final = "OOMKilled"
"""Another pod would end in the same way; a kill for any other reason came from outside."""


def pod_state(pod: Pod | None) -> PodState:
    """Return the state of a mover pod."""
    if pod is None:
        return PodState.ABSENT
    terminating = bool(pod["metadata"].get("deletionTimestamp"))
    end = pod_status.parse_pod_end(pod)
    if end is not None:
        return PodState.LOST if terminating or _is_lost(pod, end) else PodState.ENDED
    if terminating:
        return PodState.TERMINATING
    phase = (pod.get("status") or {}).get("phase", "")
    return PodState.RUNNING if phase == "Running" else PodState.PENDING


def has_ended(pod: Pod) -> bool:
    """Return whether `pod` has ended, for whatever reason."""
    return pod_state(pod) in {PodState.ENDED, PodState.LOST}


def is_current(pod: Pod, cr: Transfer) -> bool:
    """Return whether `pod` was created for `cr`, and for the attempt that gets a mover or has one.

    Between two attempts any pod of `cr` is: it must be gone before the next one.
    """
    return belongs(pod, cr) and (cr.between_attempts or pod_status.attempt_of(pod) == cr.attempts.number)


async def read_mover(client: KubeClient, cr: Transfer) -> Pod | None:
    """Return the mover pod of `cr`; None if there is none, or the pod of that name belongs to another transfer."""
    pod = await client.read(PODS, cr.metadata.namespace, cr.name)
    return pod if pod is not None and belongs(pod, cr) else None


def is_own(pod: Pod) -> bool:
    """Return whether an agent of this project created `pod`, and not Velero's."""
    return names.OWNER_UID_LABEL in (pod["metadata"].get("labels") or {})


def may_take_over(pod: Pod) -> bool:
    """Return whether `pod`, of another agent's transfer, may make it the transfer of the agent on its node.

    As with Velero, whichever agent created it.
    Source: Velero v1.18.2, findDataUploadForPod in pkg/controller/data_upload_controller.go.
    """
    is_mover = not _MOVER_LABELS.isdisjoint(pod["metadata"].get("labels") or {})
    return is_mover and pod_state(pod) in {PodState.RUNNING, PodState.ENDED}


def pod_node(pod: Pod) -> str | None:
    """Return the node of `pod`; None before it is scheduled."""
    return (pod.get("spec") or {}).get("nodeName") or None


def explain_loss(pod: Pod) -> str | None:
    """Return why `pod` was lost, as far as its status shows; None if it does not."""
    status = pod.get("status") or {}
    disruption = pod_status.find_condition(status, "DisruptionTarget")
    reason = status.get("reason") or disruption.get("reason") or ""
    message = status.get("message") or disruption.get("message") or ""
    end = pod_status.parse_pod_end(pod)
    if not reason and not message and end is not None:
        return (stop_words(end) or pod_status.explain_exit(end)) if end.exit_code is not None else end.message or None
    return ": ".join(part for part in (reason, message) if part) or None


def stop_words(end: pod_status.PodEnd) -> str | None:
    """Return what a mover that was stopped said, also if it was killed before it had exited; None: it was not."""
    said = end.message.strip()
    return said.removesuffix(CANCELED_ENDING).rstrip(": ") if said.endswith(CANCELED_ENDING) else None


def was_stopped(end: pod_status.PodEnd) -> bool:
    """Return whether the mover ended because of SIGTERM: a node that shuts down sends it without the kubelet."""
    return stop_words(end) is not None or pod_status.signal_of(end) == signal.SIGTERM


def rejection_reason(pod: Pod) -> str | None:
    """Return the kubelet's reason for not admitting `pod`, such as `OutOfcpu`; None if it was lost in another way.

    Source: Kubernetes v1.34, pkg/kubelet/lifecycle/predicate.go and rejectPod in pkg/kubelet/kubelet.go; a pod
    that was admitted before has a condition if it is evicted, preempted or garbage-collected.
    """
    status, end = pod.get("status") or {}, pod_status.parse_pod_end(pod)
    admitted = end is None or end.exit_code is not None or status.get("phase") != "Failed"
    return None if admitted or pod_status.find_condition(status, "DisruptionTarget") else status.get("reason") or None


def was_killed(pod: Pod) -> bool:
    """Return whether `pod` got SIGKILL for an unknown reason, which may kill the next one as well."""
    end = pod_status.parse_pod_end(pod)
    terminating = bool(pod["metadata"].get("deletionTimestamp"))
    return end is not None and pod_status.signal_of(end) == signal.SIGKILL and end.plain and not terminating


_IDENTITY: Final = ("name", "namespace", "uid", "labels", "ownerReferences", "deletionTimestamp", "resourceVersion")
_STATE: Final = ("phase", "reason", "message", "conditions", "containerStatuses", "initContainerStatuses")


def trim_pod(pod: Pod) -> Pod:
    """Return the part of a pod that the life cycle reads: its owner and its state."""
    meta, status = pod["metadata"], pod.get("status") or {}
    limit = pod_status.memory_limit(pod)
    containers = {"containers": [{"resources": {"limits": {"memory": limit}}}]} if limit else {}
    trimmed = PODS.build(
        {key: meta[key] for key in _IDENTITY if key in meta},
        spec={"nodeName": pod_node(pod) or "", **containers},
        status={key: status[key] for key in _STATE if key in status},
    )
    return cast("Pod", trimmed)


def _is_lost(pod: Pod, end: pod_status.PodEnd) -> bool:
    status = pod.get("status") or {}
    rejected = end.exit_code is None and status.get("phase") == "Failed"
    killed = pod_status.signal_of(end) == signal.SIGKILL and end.reason != _OUT_OF_MEMORY
    disrupted = bool(status.get("reason")) or bool(pod_status.find_condition(status, "DisruptionTarget"))
    not_started = end.reason == _NOT_STARTED and any(text in end.message for text in _START_INTERRUPTED)
    lost = was_stopped(end) or end.reason in pod_status.LOST_CONTAINER
    return rejected or killed or disrupted or not_started or lost


_LIMIT_BYTES: Final = 4 * 1024 * 1024
"""The end of one mover's log that is copied."""

_TIMEOUT_SECONDS: Final = 30.0
"""A kubelet that does not answer delays the final status for no longer than this."""

_READS: Final = 2
"""Logs that are read at a time: kubelets that do not answer must not hold all requests of the agent."""

_LINES_PER_BATCH: Final = 500
"""After these lines other tasks may run."""

_TAIL_LINES: Final = 5

_TAIL_LIMIT_CHARACTERS: Final = 1024
"""The end of the log that is part of the message of a Failed transfer."""

_LEAST_CHARACTERS: Final = 12
"""A shorter part of a message does not prove which line of the log it repeats."""

_PARTS: Final = re.compile(r"\n|; ")


def add_log_end(message: str, tail: str) -> str:
    """Return `message` with those lines of `tail`, the end of a log, that it does not contain."""
    known = [part.strip() for part in _PARTS.split(message) if len(part.strip()) >= _LEAST_CHARACTERS]
    lines = [line.strip() for line in tail.splitlines() if line.strip()]
    new = [line for line in lines if line not in message and not any(part in line for part in known)]
    return f"{message}; its log ends: " + "\n".join(new) if new else message


class MoverLogs:
    """Copies the log of each mover pod into the agent's log, once; a few at a time."""

    def __init__(self, client: KubeClient) -> None:
        self._client = client
        self._copied: dict[str, tuple[str, str]] = {}
        self._reads = asyncio.Semaphore(_READS)

    async def copy(self, cr: Transfer, pod: Pod | None) -> str:
        """Copy the log of `pod`, the mover pod of `cr`, into the agent's log, once, and return its last lines.

        Nothing is returned if there is no pod, if it never ran, or if its log cannot be read, which is not retried: the
        final status is more important.
        """
        phase = (pod.get("status") or {}).get("phase", "Pending") if pod is not None else ""
        # A pod that was rejected by the kubelet, or evicted before it started, has failed without a container.
        if pod is None or phase == "Pending" or (phase == "Failed" and not pod_status.mover_end(pod)):
            return ""
        meta = pod["metadata"]
        copied_from, tail = self._copied.get(cr.uid, ("", ""))
        if copied_from == meta["uid"]:
            return tail
        extra = fields(**cr.identity, pod=meta["name"])
        try:
            async with asyncio.timeout(_TIMEOUT_SECONDS), self._reads:
                text = await self._client.pod_log(
                    meta["namespace"],
                    meta["name"],
                    container=mover.get("name", "") if (mover := pod_status.mover_status(pod)) else "",
                    limit_bytes=_LIMIT_BYTES,
                )
        except (KubeError, TimeoutError) as e:
            _log.warning("cannot copy the log of the data mover: %s", str(e) or "timed out", extra=extra)
            self._copied[cr.uid] = (meta["uid"], "")
            return ""
        lines = text.splitlines()
        tail = "\n".join(lines[-_TAIL_LINES:])[-_TAIL_LIMIT_CHARACTERS:]
        self._copied[cr.uid] = (meta["uid"], tail)
        for number, line in enumerate(lines, 1):
            _log.info("mover: %s", line, extra=extra)
            if number % _LINES_PER_BATCH == 0:
                await asyncio.sleep(0)
        return tail

    def forget(self, uid: str) -> None:
        """Drop what is remembered about a transfer."""
        self._copied.pop(uid, None)


_FIRST_PAUSE: Final = timedelta(seconds=5)
_LONGEST_PAUSE: Final = timedelta(minutes=5)
"""A kubelet that rejects every pod must not get one after the other."""

_DOUBLINGS: Final = 10
"""After this number of losses the longest pause applies in any case."""

_MOST_KILLS: Final = 3
"""If every pod is killed by the same signal without a reason, the next one is as well: probably out of memory."""

_MOST_LOSSES: Final = 20
"""Limits endless evictions. A kubelet that rejects pods is tried until the prepare timeout."""

_Number = Annotated[int, Meta(ge=0, le=2**31)]


class MoverLoss(WireModel):
    """The losses of one transfer: the first since a pod existed, the last, and their number.

    `killed` counts those by a signal without a known reason, `rejected` those that the kubelet did not admit,
    for as long as the node may be full. `replaced`: another pod started after
    the last loss. `pod` is the UID of the last lost pod, None if it no longer existed; `why` is
    the cause in its status. Both times are for people: timeouts are measured without them.
    """

    annotation: ClassVar[str] = names.MOVER_LOST_ANNOTATION

    since: Time
    last: Time
    times: _Number = 1
    killed: _Number = 0
    rejected: _Number = 0
    replaced: bool = False
    pod: str = ""
    why: str = ""

    @property
    def pause(self) -> timedelta:
        """How long the last lost pod stays before another one may be created."""
        return min(_FIRST_PAUSE * (1 << min(max(self.times - 1, 0), _DOUBLINGS)), _LONGEST_PAUSE)

    @property
    def failure(self) -> str | None:
        """Why no other pod is to be created; None while one may be."""
        why, lost = f": {self.why}" if self.why else "", self.times - self.rejected
        if self.killed >= _MOST_KILLS:
            return f"was killed {self.killed} times before its data path started{why}"
        return f"was lost {lost} times before its data path started{why}" if lost >= _MOST_LOSSES else None


def find_unreplaced(cr: Transfer) -> MoverLoss | None:
    """Return the losses of mover pods of `cr`; None if the last one was replaced, and that is recorded."""
    loss = MoverLoss.from_annotations(cr.metadata.annotations)
    return None if loss is None or loss.replaced else loss


def count_loss(before: MoverLoss | None, pod: Pod | None, now: datetime) -> MoverLoss:
    """Return `before` with the loss of that pod, if it still exists; unchanged if it was counted before."""
    uid = pod["metadata"]["uid"] if pod is not None else ""
    if before is None:
        before = MoverLoss(since=now, last=now, times=0)
    elif before.pod == uid if uid else not before.replaced:
        return before
    return MoverLoss(
        since=now if before.replaced else before.since,
        last=now,
        times=before.times + 1,
        killed=before.killed + (pod is not None and was_killed(pod)),
        rejected=before.rejected + (pod is not None and rejection_reason(pod) is not None),
        pod=uid,
        why=(explain_loss(pod) if pod is not None else None) or "",
    )

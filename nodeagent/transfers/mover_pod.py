"""What the life cycle reads of a mover pod: whose it is, how it is, and who took it away.

Knows a v1 Pod as JSON dict, and where to read it. Does not know the rules (`nodeagent.node.lifecycle`).

A mover's log, taken over into the agent's own before the pod goes.

Knows how much is taken and how each line is marked. Does not know when a pod is deleted.
"""

import asyncio
import logging
import re
import signal
from enum import Enum, auto
from typing import Final

from core.kube.client import KubeClient
from core.kube.errors import KubeError
from core.kube.resources import PODS
from core.logs import bind
from core.models.base import JsonDict
from core.models.names import OWNER_UID_LABEL
from core.models.transfers import Transfer
from exposer.pod_status import PodEnd, explain_exit, memory_limit, parse_pod_end, signal_of

__all__ = [
    "MoverLogs",
    "PodState",
    "add_log_end",
    "belongs_to",
    "explain_loss",
    "has_ended",
    "may_take_over",
    "pod_node",
    "pod_state",
    "read_mover",
    "trim_pod",
    "was_killed",
]


_log = logging.getLogger(__name__)


class PodState(Enum):
    """The load's mover pod on this node."""

    ABSENT = auto()
    """Not on this node; for a load beyond Accepted: read from the API, there is none at all."""
    PENDING = auto()
    RUNNING = auto()
    LEAVING = auto()
    """Somebody deletes it, and it has not ended yet."""
    ENDED = auto()
    """By its own doing."""
    DISPLACED = auto()
    """Ended by the cluster: evicted, preempted, refused by the kubelet, deleted, its node lost."""


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


def belongs_to(pod: JsonDict, cr: Transfer) -> bool:
    """Whether `pod` was made for `cr`; a peer's mover has no label of ours, but an owner."""
    meta = pod["metadata"]
    owners = {reference["uid"] for reference in meta.get("ownerReferences") or []}
    return cr.uid in owners or (meta.get("labels") or {}).get(OWNER_UID_LABEL) == cr.uid


async def read_mover(client: KubeClient, cr: Transfer) -> JsonDict | None:
    """Return the mover pod of `cr`; None where there is none, or the pod of that name is another's."""
    pod = await client.read(PODS, cr.metadata.namespace, cr.name)
    return pod if pod is not None and belongs_to(pod, cr) else None


def may_take_over(pod: JsonDict) -> bool:
    """Return whether `pod`, of another agent's transfer, may make it the transfer of the agent on its node.

    Velero's agents take over the movers that they created themselves.
    """
    created_by_us = OWNER_UID_LABEL in (pod["metadata"].get("labels") or {})
    return created_by_us and pod_state(pod) in {PodState.RUNNING, PodState.ENDED}


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


_LIMIT_BYTES: Final = 4 * 1024 * 1024
"""What is taken over of one mover's log: its end."""


_TIMEOUT_SECONDS: Final = 30.0
"""A kubelet that does not answer holds up the load's end for no longer than this."""


_LINES_AT_A_TIME: Final = 500
"""After so many lines everything else gets its turn."""


_TAIL_LINES: Final = 5


_TAIL_LIMIT_CHARACTERS: Final = 1024
"""What of the log reaches the message of a load that failed."""


_TELLING_CHARACTERS: Final = 12
"""A shorter part of a message says nothing about which line of a log it repeats."""


_PARTS: Final = re.compile(r"\n|; ")


def add_log_end(message: str, tail: str) -> str:
    """Return `message` with those lines of `tail`, a log's end, that tell more than it does."""
    told = [part.strip() for part in _PARTS.split(message) if len(part.strip()) >= _TELLING_CHARACTERS]
    lines = [line.strip() for line in tail.splitlines() if line.strip()]
    news = [line for line in lines if line not in message and not any(part in line for part in told)]
    return f"{message}; its log ends: " + "\n".join(news) if news else message


class MoverLogs:
    """Takes over each mover's log once."""

    def __init__(self, client: KubeClient) -> None:
        """Read logs through `client`."""
        self._client = client
        self._taken: dict[str, tuple[str, str]] = {}

    async def take_over(self, cr: Transfer, pod: JsonDict | None) -> str:
        """Write the log of `pod`, the mover of `cr`, into the agent's log.

        Writes nothing where there is no pod, where it never ran, or where its log was taken before. A log that
        cannot be had is told and given up: the load's end is worth more.

        Returns:
            the log's last lines, empty where there are none or they cannot be had.
        """
        if pod is None or not _has_run(pod):
            return ""
        meta = pod["metadata"]
        taken_of, tail = self._taken.get(cr.uid, ("", ""))
        if taken_of == meta["uid"]:
            return tail
        log = bind(
            _log,
            kind=cr.kind_name,
            namespace=cr.metadata.namespace,
            name=cr.name,
            uid=cr.uid,
            pod=meta["name"],
        )
        try:
            async with asyncio.timeout(_TIMEOUT_SECONDS):
                text = await self._client.pod_log(meta["namespace"], meta["name"], limit_bytes=_LIMIT_BYTES)
        except (KubeError, TimeoutError) as e:
            log.warning("the mover's log could not be taken over: %s", e)
            return ""
        lines = text.splitlines()
        tail = "\n".join(lines[-_TAIL_LINES:])[-_TAIL_LIMIT_CHARACTERS:]
        self._taken[cr.uid] = (meta["uid"], tail)
        for number, line in enumerate(lines, 1):
            log.info("mover: %s", line)
            if number % _LINES_AT_A_TIME == 0:
                await asyncio.sleep(0)
        return tail

    def forget(self, uid: str) -> None:
        """Drop what is remembered about the load of that uid."""
        self._taken.pop(uid, None)


def _has_run(pod: JsonDict) -> bool:
    """Whether a container of `pod` was ever started, so that there is a log."""
    status = pod.get("status") or {}
    phase = status.get("phase", "Pending")
    ended = any((each.get("state") or {}).get("terminated") for each in status.get("containerStatuses") or [])
    # A pod that the kubelet refused, or that was evicted before it began, has failed without a container.
    return phase != "Pending" and (phase != "Failed" or ended)

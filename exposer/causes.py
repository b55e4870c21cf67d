"""The causes of a pending mover pod whose own status has none (`exposer.pod_status`), from PVCs and Events.

Source: Kubernetes v1.34, pkg/kubelet/events/event.go, pkg/controller/volume/events/event.go;
kubernetes-csi/external-provisioner v5, pkg/controller.
"""

import logging
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Final

from core.clock import Clock
from core.kube.client import KubeClient
from core.kube.errors import KubeError
from core.kube.resources import PERSISTENT_VOLUME_CLAIMS
from core.kube.types import Event, Pod
from core.logs import fields
from core.models.base import parse_time
from core.models.names import BLOCK_DATA_MOVER
from core.models.reasons import PendingReason
from exposer.model import Exposed, NoDeviceError, Pending
from exposer.ownership import mark_refused, read_events
from exposer.pod_status import diagnose_pod, join_text, pod_place

_log = logging.getLogger(__name__)

_PROGRESS: Final = frozenset(
    {"Scheduled", "SuccessfulAttachVolume", "SuccessfulMountVolume", "Pulling", "Pulled", "Created", "Started"}
)
"""Reasons of completed steps of a pod's start: warnings before them no longer apply."""

_VOLUME: Final = re.compile(r'for volume "([^"]+)"')
"""Source: Kubernetes v1.34, pkg/volume/util/operationexecutor/operation_generator.go."""

_PULL_STARTED: Final = "Pulling"
_PROVISIONING: Final = "Provisioning"
_FAILED: Final = "ProvisioningFailed"

_NO_DEVICE: Final = re.compile(
    r"does not support block volume|code = (?:InvalidArgument|Unimplemented) desc = "
    r".*(?:(?<![\w-])block[ -](?:volume|access|mode|device)|volume ?mode|capabilit)",
    re.IGNORECASE,
)
"""In the Event of a provisioner whose volumes are file systems only, such as of NFS or CephFS.

Source: sig-storage-lib-external-provisioner v11, controller/controller.go (canProvision); csi-driver-nfs,
csi-driver-smb (isValidVolumeCapabilities) and ceph-csi (validateCreateVolumeRequest); CSI 1.12, spec.md (CreateVolume).
"""

_EARLIEST: Final = datetime.min.replace(tzinfo=UTC)


def find_pod_cause(events: Sequence[Event]) -> Pending | None:
    """Return why a scheduled pod does not start, from its Events, sorted by name; None where they have no cause."""
    left = [event for event in events if _is_warning(event) or event.get("reason") in _PROGRESS]
    while last := _latest(left):
        if _is_warning(last) or last.get("reason") == _PULL_STARTED:
            return _parse_cause(last)
        # The progress of one volume says nothing about the others; any other progress follows all of them.
        done = _volume_of(last)
        left = [event for event in left if done and _volume_of(event) not in {None, done}]
    return None


def find_pvc_cause(events: Sequence[Event]) -> Pending | None:
    """Return why a PVC is not bound, from its Events, sorted by name; None where it has none."""
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


def _volume_of(event: Event) -> str | None:
    """Return the volume that an Event names, as kubelet and attach-detach controller do; None: none."""
    found = _VOLUME.search(str(event.get("message") or ""))
    return found[1] if found else None


def _is_warning(event: Event) -> bool:
    return event.get("type") == "Warning"


def _latest(events: Sequence[Event]) -> Event | None:
    """Return the Event that was seen last; within one second, the one that was first recorded last, by its name."""
    return max(reversed(events), key=_time, default=None)


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
    sent_at_seconds: float = -math.inf
    answer: Pending | None = None


class CauseFinder:
    """Finds the causes of pending pods, for one agent."""

    def __init__(self, client: KubeClient, clock: Clock) -> None:
        self.clock: Final = clock
        self._client = client
        self._queries: dict[str, _Query] = {}

    async def inspect(self, pod: Pod, *, by_block: bool = False) -> Exposed | Pending:
        """Return the running or terminated `pod` as exposed, or why it is pending.

        `by_block`: the PVC of its own name must become a device.

        Raises:
            ExposeError: it can never run.
            NoDeviceError: the PVC can never be provisioned, and is marked so.
        """
        pending = await self.explain(pod)
        if by_block and pending is not None and pending.reason == _FAILED and _NO_DEVICE.search(pending.message):
            meta = pod["metadata"]
            claim = await self._client.read(PERSISTENT_VOLUME_CLAIMS, meta["namespace"], meta["name"])
            # With a volume, it is the PVC of the cache that is refused.
            if claim is not None and not claim["spec"].get("volumeName"):
                await mark_refused(self._client, claim)
                raise NoDeviceError(
                    f"data mover {BLOCK_DATA_MOVER} needs a volume of volumeMode Block, which is refused: "
                    f"{pending.message}"
                )
        return pending or Exposed(pod)

    async def explain(self, pod: Pod) -> Pending | None:
        """Return why a pod that was just read is pending; None where it is not. ExposeError: it can never run."""
        pending, uid = diagnose_pod(pod), pod["metadata"]["uid"]
        if pending is None or not (pending.operation or pending.reason in _UNEXPLAINED):
            self._queries.pop(uid, None)
            return pending
        query, now = self._observe(uid, pending), self.clock.monotonic()
        pause = max(_PAUSE_SECONDS, len(self._queries) / _QUERIES_PER_SECOND)
        if now - query.since_seconds >= _SILENCE_SECONDS and now - query.sent_at_seconds >= pause:
            query.sent_at_seconds = now
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

    async def _find_cause(self, pod: Pod, pending: Pending) -> Pending | None:
        """Return the cause that PVCs and Events report; None where there is none, or a read fails."""
        try:
            if pending.operation:
                # Until the kubelet's next attempt to pull the image ends, the status has the error of the one before.
                cause = find_pod_cause(await read_events(self._client, pod))
                return replace(pending, operation=None) if cause is not None and cause.reason == _PULL_STARTED else None
            # A pod that was bound to its node without the scheduler may have unbound PVCs, too.
            unbound = await self._find_claim_cause(pod)
            if unbound is not None or pending.reason != PendingReason.CONTAINER_CREATING:
                return unbound
            cause = find_pod_cause(await read_events(self._client, pod))
            if cause is None:
                return None
            stuck = f"Pod {pod_place(pod)} cannot start on node {pod['spec']['nodeName']} yet"
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
            cause = find_pvc_cause(await read_events(self._client, claim))
            return unbound if cause is None else _add_cause(unbound, cause, unbound.message)
        return None


def _add_cause(pending: Pending, cause: Pending, what: str) -> Pending:
    """Return `pending` with the cause appended; only a Warning changes the reason."""
    reason = cause.reason if cause.blocked else pending.reason
    return Pending(reason, f"{what}: {join_text(cause.reason, cause.message)}", blocked=cause.blocked)

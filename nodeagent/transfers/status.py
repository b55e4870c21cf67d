"""The only writer of phases, and of everything else, on a transfer's custom resource; and what is said about it.

Every write is one merge patch with uid and resourceVersion. An interruption is announced by the owning agent, or by the
leader for an agent that is unavailable. An Event that cannot be recorded never delays the work.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any, Final

from core.kube.client import KubeClient, is_patched
from core.kube.errors import ConflictError, ForbiddenError, KubeError
from core.kube.events import EventRecorder, ObjectRef
from core.kube.resources import BACKUPS
from core.kube.types import Manifest, Object
from core.logs import fields
from core.models import names
from core.models.backups import Shrinkage
from core.models.base import CustomResource, JsonDict, format_time
from core.models.phases import HOLDING_PHASES, TRANSITIONS, IllegalMoveError, Interruption, Phase, RetryRules, Uptime
from core.models.reasons import PendingReason
from core.models.transfers import PodVolumeBackup, Transfer
from core.models.units import format_duration
from core.redact import redact
from exposer.model import Pending
from nodeagent.metrics import TRANSFERS_FINISHED, VELERO_ENDS, Metrics
from nodeagent.runtime.preflight import DROPPED_STATUS_FIELDS
from nodeagent.runtime.workqueue import Requeue
from nodeagent.transfers.kinds.base import Kind
from nodeagent.transfers.retries import Ending, PendingRecords, backoff_seconds, fence_seconds

_log = logging.getLogger(__name__)


class EventLog:
    """Records what the agent does with a transfer, as Events about it and in the log."""

    def __init__(self, recorder: EventRecorder) -> None:
        self._recorder = recorder

    async def record(self, cr: CustomResource, reason: str, message: str, *, warning: bool = False) -> None:
        """Record one Event about `cr`."""
        identity = fields(**cr.identity, reason=reason)
        _log.log(logging.WARNING if warning else logging.INFO, "%s", message, extra=identity)
        await self._send(ObjectRef.of(cr), reason, message, warning=warning)

    async def record_warning(self, raw: Object, reason: str, message: str) -> None:
        """Record a Warning about `raw`, which may be an invalid object."""
        await self._send(ObjectRef.of(raw), reason, message, warning=True)

    async def _send(self, about: ObjectRef, reason: str, message: str, *, warning: bool) -> None:
        try:
            await self._recorder.record(about, reason, message, warning=warning)
        except KubeError as e:
            _log.warning("cannot record Event: %s", e, extra={"uid": about.uid})


def cancel_cause(cr: Transfer) -> str:
    """Return why the transfer is to be canceled."""
    return "spec.cancel is set" if cr.spec.cancel else "the custom resource is being deleted"


async def record_end(kind: Kind[Any], stored: Transfer, *, metrics: Metrics, events: EventLog) -> None:
    """Count and record the final phase of a transfer; `stored` is what the final write returned."""
    phase = stored.phase
    metrics.inc(TRANSFERS_FINISHED, kind.spec.name, str(phase))
    if counter := VELERO_ENDS.get((kind.spec.name, phase)):
        metrics.inc(counter)
    kind.count(stored, metrics)
    message = stored.status.message or "transfer completed"
    await events.record(stored, str(phase), message, warning=phase is Phase.FAILED)
    if (shrinkage := Shrinkage.from_annotations(stored.metadata.annotations)) is not None:
        await events.record(stored, "Shrunk", shrinkage.text, warning=True)


_MARKS: Final = (
    names.OUTCOME_ANNOTATION,
    names.ACCEPT_FENCE_ANNOTATION,
    names.ATTEMPTS_ANNOTATION,
    names.BANDWIDTH_ANNOTATION,
    names.BLOCK_PREFERRED_ANNOTATION,
    names.COPIES_ANNOTATION,
    names.MOVER_LOST_ANNOTATION,
    names.NOT_PREPARED_ANNOTATION,
    names.PENDING_REASON_ANNOTATION,
)
"""This agent's annotations on a transfer that is not finished."""


def without_marks(cr: Transfer) -> dict[str, str | None]:
    """Return the change that removes this agent's annotations from `cr`."""
    return {mark: None for mark in _MARKS if mark in cr.metadata.annotations}


@dataclass(frozen=True)
class Change:
    """What is written in addition to a phase, in API field names; None removes.

    `finalizers` replaces the whole list if it is given. `reason` is the pending reason that goes
    with a `message` in `status`; a message without one removes the existing reason. `spec` is what this agent decides
    of a transfer that leaves it open.
    """

    status: Mapping[str, object] = field(default_factory=dict)
    labels: Mapping[str, str | None] = field(default_factory=dict)
    annotations: Mapping[str, str | None] = field(default_factory=dict)
    finalizers: list[str] | None = None
    reason: str | None = None
    spec: Mapping[str, object] = field(default_factory=dict)


class StatusWriter:
    """Writes to the custom resources of transfers, one patch at a time."""

    def __init__(
        self, client: KubeClient, now: Callable[[], datetime], *, on_stored: Sequence[Callable[[Transfer], None]] = ()
    ) -> None:
        """Write through `client`; `now` returns the API server's time, for timestamps: agents have their own clocks.

        Each of `on_stored` is called with the custom resource as stored, before the write returns; it must not block.
        """
        self._client = client
        self._urgent_client = client.urgently()
        self._now = now
        self._on_stored = tuple(on_stored)

    async def move(
        self, kind: Kind[Any], cr: Transfer, to: Phase, change: Change | None = None, *, again: bool = True
    ) -> Transfer:
        """Move `cr` to the phase `to`, with `change` in the same patch, and return it as stored.

        `cr` is as read: its uid and resourceVersion are preconditions. A move without a `message` removes an existing
        one. `again=False` never repeats a patch whose answer was lost.

        Raises:
            IllegalMoveError: the table has no such move, or Failed comes without a message,
                which Velero would take for a success; nothing was written.
            ConflictError: another writer was first: read again, decide again.
            NotFoundError: the transfer no longer exists.
        """
        change = change or Change()
        if to in {Phase.FAILED, Phase.CANCELED} and cr.unfinished and (message := change.status.get("message")):
            change = replace(change, status={**change.status, "message": f"{message}; {cr.unfinished}"})
        if to not in TRANSITIONS[cr.phase]:
            message = f"{kind.spec.name} {cr.name} cannot move from {cr.phase} to {to}"
            raise IllegalMoveError(message)
        if to is Phase.FAILED and not change.status.get("message"):
            message = f"{kind.spec.name} {cr.name} cannot move to Failed without a message"
            raise IllegalMoveError(message)
        status = {"phase": str(to)} | self._timestamps(cr, to) | dict(change.status)
        if to is Phase.ACCEPTED and kind.spec.bound_to_node and "acceptedByNode" in status:
            # The accepting agent is the owning agent, and Velero writes the node at once as well.
            # Source: tests/recordings/velero-1.18.2/podvolumerestore.json.
            status.setdefault("node", status["acceptedByNode"])
        if cr.status.message or names.PENDING_REASON_ANNOTATION in cr.metadata.annotations:
            status.setdefault("message", None)
        labels = _expose_label(cr, to) | dict(change.labels)
        whole = replace(change, status=status, labels=labels)
        return await self._write(kind, cr, whole, again=again)

    async def annotate(self, kind: Kind[Any], cr: Transfer, change: Change) -> Transfer:
        """Write `change`, which has no phase, without moving `cr`; return it as stored. Errors are as for `move`."""
        if "phase" in change.status:
            message = f"{kind.spec.name} {cr.name}: only a move writes a phase"
            raise IllegalMoveError(message)
        return await self._write(kind, cr, change, again=True)

    async def release(self, kind: Kind[Any], cr: Transfer) -> Transfer:
        """Remove all marks of this agent from a final transfer without expose objects, in one patch.

        Its attempts stay, for people, if there were several. Errors are as for `move`.
        """
        kept = {names.ATTEMPTS_ANNOTATION} if cr.attempts.number > 1 else set()
        change = Change(
            labels={names.NODE_LABEL: None},
            annotations={mark: None for mark in without_marks(cr) if mark not in kept},
            finalizers=[entry for entry in cr.metadata.finalizers if entry != kind.spec.finalizer],
        )
        return await self._write(kind, cr, change, again=True)

    async def report(self, kind: Kind[Any], cr: Transfer, *, message: str, reason: str | None = None) -> Transfer:
        """Write why `cr` is pending, and return it as stored; an empty `message` removes the existing one."""
        return await self._write(kind, cr, Change({"message": message or None}, reason=reason), again=True)

    def _timestamps(self, cr: Transfer, to: Phase) -> JsonDict:
        now, unstarted = format_time(self._now()), cr.status.start_timestamp is None
        stamps = {
            "acceptedTimestamp": to is Phase.ACCEPTED,
            "startTimestamp": to is Phase.IN_PROGRESS or (to.final and unstarted),
            "completionTimestamp": to.final,
        }
        return {name: now for name, is_due in stamps.items() if is_due}

    async def _write(self, kind: Kind[Any], cr: Transfer, change: Change, *, again: bool) -> Transfer:
        metadata: JsonDict = {"uid": cr.uid, "resourceVersion": cr.metadata.resource_version}
        if change.labels:
            metadata["labels"] = dict(change.labels)
        annotations = dict(change.annotations) | _reason_annotation(cr, change)
        if annotations:
            metadata["annotations"] = annotations
        if change.finalizers is not None:
            metadata["finalizers"] = change.finalizers
        patch: Manifest = {"metadata": metadata}
        # Velero's CRDs prune unknown fields; such a field is never written.
        status = {key: value for key, value in change.status.items() if key in kind.spec.status_fields}
        if status.get("message"):
            status["message"] = redact(str(status["message"]))
        patch |= {key: part for key, part in (("status", status), ("spec", dict(change.spec))) if part}
        # The outcome of a transfer must not be queued behind reports of pending ones.
        client = self._urgent_client if _ends(change) else self._client
        try:
            raw = await client.patch(kind.spec.resource, cr.metadata.namespace, cr.name, patch, again=again)
        except ConflictError as e:
            if not e.may_be_own:
                raise
            # If it is, no other writer records that move, or that attempt, and counts it.
            found = await client.read(kind.spec.resource, cr.metadata.namespace, cr.name)
            del metadata["resourceVersion"]
            kept = {key: value for key, value in status.items() if key not in DROPPED_STATUS_FIELDS}
            if found is None or not is_patched(found, patch | {"status": kept}):
                raise
            raw = found
        stored: Transfer = kind.parse(raw)
        for notify in self._on_stored:
            notify(stored)
        return stored


def _ends(change: Change) -> bool:
    phase = change.status.get("phase")
    return names.OUTCOME_ANNOTATION in change.annotations or (phase is not None and Phase(str(phase)).final)


def _reason_annotation(cr: Transfer, change: Change) -> dict[str, str | None]:
    """Return the annotation that goes with the message that `change` writes or removes."""
    if "message" not in change.status:
        return {}
    if change.reason:
        return {names.PENDING_REASON_ANNOTATION: change.reason}
    return {names.PENDING_REASON_ANNOTATION: None} if names.PENDING_REASON_ANNOTATION in cr.metadata.annotations else {}


def _expose_label(cr: Transfer, to: Phase) -> dict[str, str | None]:
    """Return the label that marks a transfer while it uses the admission quota."""
    if to in HOLDING_PHASES:
        return {names.EXPOSE_ON_GOING_LABEL: "true"}
    return {names.EXPOSE_ON_GOING_LABEL: None} if names.EXPOSE_ON_GOING_LABEL in cr.metadata.labels else {}


def announce_next(
    cr: Transfer, interruption: Interruption, rules: RetryRules, *, restores: bool, label: str | None = None
) -> tuple[Change, str]:
    """Return what announces that an attempt of `cr` was interrupted, and when the next one begins; and its message.

    `restores`: it writes to its volume. `label` is the node label of the agent that continues with it; None: the one
    that it has.
    """
    attempts = cr.attempts.interrupt(interruption)
    seconds = max(backoff_seconds(rules, attempts), fence_seconds(attempts, restores))
    number, delay = attempts.number, format_duration(timedelta(seconds=round(seconds)))
    message = f"{attempts.explain_last(interruption.message)}; attempt {number} begins in {delay}"
    lost = {names.MOVER_LOST_ANNOTATION: None} if names.MOVER_LOST_ANNOTATION in cr.metadata.annotations else {}
    change = Change(
        {"message": message},
        labels={names.NODE_LABEL: label} if label else {},
        annotations={names.ATTEMPTS_ANNOTATION: attempts.to_json(), **lost},
        reason=PendingReason.INTERRUPTED,
    )
    return change, message


def build_interruption(ending: Ending, *, node: str, at: datetime, uptime: Uptime | None = None) -> Interruption:
    """Return `ending`, of an attempt on that node, as it is recorded."""
    message = redact(ending.message)
    return Interruption(
        at=at, cause=ending.cause, message=message, node=node, terminated=ending.terminated, uptime=uptime
    )


_BLOCKED_PAUSE_SECONDS: Final = 60.0
"""Between two attempts at a blocked cleanup."""


@dataclass(frozen=True)
class CleanUp:
    """Cleans up finished transfers, one step per call; `timeout` is how long that may take before it is reported."""

    status: StatusWriter
    events: EventLog
    records: PendingRecords
    timeout: timedelta

    async def step(self, kind: Kind[Any], cr: Transfer) -> Requeue | None:
        """Take the next step for `cr`; None means that its expose objects and this agent's marks are removed.

        A blocked cleanup is reported as an Event, once for each cause, and retried without limit.
        """
        identity = fields(**cr.identity)
        pending = await kind.clean_up(cr)
        if pending is None:
            await self.status.release(kind, cr)
            self.records.forget(cr.uid)
            _log.info("cleaned up", extra=identity)
            return None
        _log.debug("cleanup pending: %s", pending.message, extra=identity)
        self.records.observe(cr.uid, pending)
        if pending.reason == PendingReason.SNAPSHOT_IN_GROUP:
            await self.events.record(cr, pending.reason, pending.message, warning=True)
            return Requeue(self.records.count_check(cr.uid))
        if self.records.operation_seconds(cr.uid, pending.operation or "cleanup") < self.timeout.total_seconds():
            return Requeue(self.records.count_check(cr.uid))
        if self.records.get(cr.uid).reported.message != pending.message:
            message = f"not cleaned up within {format_duration(self.timeout)}, will retry: {pending.message}"
            await self.events.record(cr, PendingReason.CLEANUP_BLOCKED, message, warning=True)
            self.records.mark_reported(cr.uid, Pending(PendingReason.CLEANUP_BLOCKED, pending.message))
        return Requeue(_BLOCKED_PAUSE_SECONDS)


_FINAL: Final = frozenset({"Completed", "Deleting", "Failed", "FailedValidation", "PartiallyFailed"})
"""The phases of a Backup that no transfer can change any more.

Source: Velero v1.18, pkg/apis/velero/v1/backup_types.go.
"""


async def read_owner_refusal(client: KubeClient, cr: Transfer) -> str | None:
    """Return why `cr` gets no other attempt because of its owner; None: there may be one.

    That is a PodVolumeBackup whose owning Backup is gone or final: Velero's server no longer waits for it, and does not
    use its result. The data of any other transfer is of use also then, or the server sets `spec.cancel`.
    """
    if not isinstance(cr, PodVolumeBackup):
        return None
    namespace, group = cr.metadata.namespace, f"{BACKUPS.group}/"
    for owner in cr.metadata.owner_references:
        if owner.kind != BACKUPS.kind or not owner.api_version.startswith(group):
            continue
        try:
            raw = await client.read(BACKUPS, namespace, owner.name)
        except ForbiddenError as e:
            _log.warning("transfer is retried whatever has become of its Backup: %s", e, extra=fields(uid=cr.uid))
            return None
        if raw is None or raw["metadata"]["uid"] != owner.uid:
            return f"Backup {namespace}/{owner.name} no longer exists"
        status = raw.get("status")
        if (phase := str(status.get("phase")) if isinstance(status, dict) else "") in _FINAL:
            return f"Backup {namespace}/{owner.name} is {phase}"
    return None

"""The only writer of phases, and of anything else, on a load's custom resource.

Knows the table of moves, the timestamps and labels that go with a phase, and that every
write is one merge patch with uid and resourceVersion. Does not know why a load moves
(`nodeagent.node.lifecycle` decides) and tells nobody about it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from core.clock import Clock
from core.kube.client import KubeClient
from core.models.base import JsonDict, format_time
from core.models.names import (
    ACCEPT_FENCE_ANNOTATION,
    CANCEL_REQUESTED_ANNOTATION,
    EXPOSE_ON_GOING_LABEL,
    MOVER_LOST_ANNOTATION,
    NODE_LABEL,
    OUTCOME_ANNOTATION,
    PENDING_REASON_ANNOTATION,
)
from core.models.phases import HOLDING_PHASES, TRANSITIONS, IllegalMoveError, Phase
from core.models.transfers import Progress, Transfer
from nodeagent.transfers.kinds.base import Kind

__all__ = ["Change", "StatusWriter", "without_marks"]

_MARKS: Final = (
    OUTCOME_ANNOTATION,
    ACCEPT_FENCE_ANNOTATION,
    CANCEL_REQUESTED_ANNOTATION,
    MOVER_LOST_ANNOTATION,
    PENDING_REASON_ANNOTATION,
)
"""The annotations that a load has of ours on its way."""


def without_marks(cr: Transfer) -> dict[str, str | None]:
    """Return the change of annotations that takes all of ours off `cr`."""
    return {mark: None for mark in _MARKS if mark in cr.metadata.annotations}


@dataclass(frozen=True)
class Change:
    """What is written beside a phase, in API field names; None removes.

    `finalizers` replaces the whole list where it is given. `reason` is the pending reason that goes
    with a `message` in `status`; a message without one removes the reason that is there.
    """

    status: Mapping[str, object] = field(default_factory=dict)
    labels: Mapping[str, str | None] = field(default_factory=dict)
    annotations: Mapping[str, str | None] = field(default_factory=dict)
    finalizers: list[str] | None = None
    reason: str = ""


class StatusWriter:
    """Writes to loads, one patch at a time."""

    def __init__(
        self, client: KubeClient, clock: Clock, *, on_stored: Sequence[Callable[[Transfer], None]] = ()
    ) -> None:
        """Write through `client`, with timestamps of `clock`.

        Each of `on_stored` is called after every successful write, with the custom resource as
        the API server stored it and before the write returns; it must not block.
        """
        self._client = client
        self._urgent_client = client.urgently()
        self._clock = clock
        self._on_stored = tuple(on_stored)

    async def move(
        self, kind: Kind, cr: Transfer, to: Phase, change: Change | None = None, *, again: bool = True
    ) -> Transfer:
        """Move `cr` to the phase `to` and return it as stored.

        Args:
            kind: the adapter of the load's kind.
            cr: the load as read; its uid and resourceVersion are the write's preconditions.
            to: the phase to move to.
            change: what is written in the same patch. A move without a `message` removes
                the one that is there.
            again: False never repeats a patch whose answer was lost.

        Raises:
            IllegalMoveError: the table has no such move, or Failed comes without a message,
                which the server would take for a success; nothing was written.
            ConflictError: somebody else wrote first: read again, decide again.
            NotFoundError: the load is gone.
        """
        change = change or Change()
        if to not in TRANSITIONS[cr.phase]:
            message = f"{kind.name} {cr.name} cannot move from {cr.phase} to {to}"
            raise IllegalMoveError(message)
        if to is Phase.FAILED and not change.status.get("message"):
            message = f"{kind.name} {cr.name} cannot move to Failed without a message"
            raise IllegalMoveError(message)
        status = {"phase": str(to)} | self._timestamps(cr, to) | dict(change.status)
        if to is Phase.ACCEPTED and kind.bound_to_node and "acceptedByNode" in status:
            # Who accepts such a load is who carries it out; the peer writes that down at once too.
            # Source: tests/recordings/velero-1.18.2/podvolumerestore.json.
            status.setdefault("node", status["acceptedByNode"])
        if cr.status.message or PENDING_REASON_ANNOTATION in cr.metadata.annotations:
            status.setdefault("message", None)
        labels = _expose_label(cr, to) | dict(change.labels)
        whole = replace(change, status=status, labels=labels)
        return await self._write(kind, cr, whole, again=again)

    async def annotate(self, kind: Kind, cr: Transfer, change: Change) -> Transfer:
        """Write `change` without moving `cr`, and return it as stored.

        Raises:
            IllegalMoveError: `change` holds a phase.
            ConflictError: somebody else wrote first.
            NotFoundError: the load is gone.
        """
        if "phase" in change.status:
            message = f"{kind.name} {cr.name}: a phase is written by a move only"
            raise IllegalMoveError(message)
        return await self._write(kind, cr, change, again=True)

    async def release(self, kind: Kind, cr: Transfer) -> Transfer:
        """Take all our marks off a final load for which nothing is left, in one patch.

        Raises:
            ConflictError: somebody else wrote first.
            NotFoundError: the load is gone; it went with its finalizer.
        """
        change = Change(
            labels={NODE_LABEL: None},
            annotations=without_marks(cr),
            finalizers=[entry for entry in cr.metadata.finalizers if entry != kind.finalizer],
        )
        return await self._write(kind, cr, change, again=True)

    async def report(
        self,
        kind: Kind,
        cr: Transfer,
        *,
        message: str | None = None,
        reason: str = "",
        progress: Progress | None = None,
    ) -> Transfer:
        """Write why `cr` is pending, or its progress, and return it as stored.

        An empty `message` removes the one that is there, and its `reason`.

        Raises:
            ConflictError: somebody else wrote first.
            NotFoundError: the load is gone.
        """
        status: JsonDict = {}
        if message is not None:
            status["message"] = message or None
        if progress is not None:
            status["progress"] = progress.to_wire()
        return await self._write(kind, cr, Change(status, reason=reason), again=True)

    def _timestamps(self, cr: Transfer, to: Phase) -> JsonDict:
        """Return the timestamps that the phase `to` sets."""
        now = format_time(self._clock.now())
        stamps: JsonDict = {}
        if to is Phase.ACCEPTED:
            stamps["acceptedTimestamp"] = now
        if to is Phase.IN_PROGRESS or (to.final and cr.status.start_timestamp is None):
            stamps["startTimestamp"] = now
        if to.final:
            stamps["completionTimestamp"] = now
        return stamps

    async def _write(self, kind: Kind, cr: Transfer, change: Change, *, again: bool) -> Transfer:
        """Send one merge patch with uid and resourceVersion of `cr`."""
        metadata: JsonDict = {
            "uid": cr.uid,
            "resourceVersion": cr.metadata.resource_version,
        }
        if change.labels:
            metadata["labels"] = dict(change.labels)
        annotations = dict(change.annotations) | _reason_annotation(cr, change)
        if annotations:
            metadata["annotations"] = annotations
        if change.finalizers is not None:
            metadata["finalizers"] = change.finalizers
        patch: JsonDict = {"metadata": metadata}
        # The peer's CRDs prune what they do not name; such a field is never written.
        status = {key: value for key, value in change.status.items() if key in kind.status_fields}
        if status:
            patch["status"] = status
        # How a load ended must not wait behind what waits itself.
        client = self._urgent_client if _ends(change) else self._client
        stored = kind.parse(await client.patch(kind.resource, cr.metadata.namespace, cr.name, patch, again=again))
        for notify in self._on_stored:
            notify(stored)
        return stored


def _ends(change: Change) -> bool:
    """Whether `change` says how a load ended: its outcome, or its last phase."""
    phase = change.status.get("phase")
    return OUTCOME_ANNOTATION in change.annotations or (phase is not None and Phase(str(phase)).final)


def _reason_annotation(cr: Transfer, change: Change) -> dict[str, str | None]:
    """Return the annotation that goes with the message that `change` writes or removes."""
    if "message" not in change.status:
        return {}
    if change.reason:
        return {PENDING_REASON_ANNOTATION: change.reason}
    return {PENDING_REASON_ANNOTATION: None} if PENDING_REASON_ANNOTATION in cr.metadata.annotations else {}


def _expose_label(cr: Transfer, to: Phase) -> dict[str, str | None]:
    """Return the label that marks a load while it holds a place of the queue."""
    if to in HOLDING_PHASES:
        return {EXPOSE_ON_GOING_LABEL: "true"}
    return {EXPOSE_ON_GOING_LABEL: None} if EXPOSE_ON_GOING_LABEL in cr.metadata.labels else {}

"""Losses of a transfer's mover pods before the data path started, recorded on the custom resource.

Knows the form of the annotation `nodeagent.io/mover-lost`, what counts as another loss, how long
the next pod has to wait, and when there is to be none. Does not know why a pod was lost, nor
what is done about it.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Annotated, Final, Self

from msgspec import Meta
from msgspec.structs import replace

from core.models.base import Time, WireModel
from core.models.names import MOVER_LOST_ANNOTATION
from core.models.transfers import Transfer

__all__ = ["LostPod", "MoverLoss", "count_loss", "read_loss"]

_FIRST_PAUSE: Final = timedelta(seconds=5)
_LONGEST_PAUSE: Final = timedelta(minutes=5)
"""A kubelet that rejects every pod must not get one after the other."""

_DOUBLINGS: Final = 10
"""After this number of losses the longest pause applies in any case."""

_MOST_KILLS: Final = 3
"""If every pod is killed by the same signal without a reason, the next one is as well: probably out of memory."""

_MOST_LOSSES: Final = 20
"""Limits endless evictions. A kubelet that rejects pods is tried until the prepare timeout."""


@dataclass(frozen=True)
class LostPod:
    """A pod that was lost: its UID and the known cause.

    `killed`: by a signal, without a known reason. `rejected` is the reason for which the kubelet of its
    node did not admit it; empty if it did.
    """

    uid: str = ""
    why: str = ""
    killed: bool = False
    rejected: str = ""


_Number = Annotated[int, Meta(ge=0, le=2**31)]


class MoverLoss(WireModel):
    """The losses of one transfer: the first since a pod existed, the last, and their number.

    `killed` counts those by a signal without a known reason, `rejected` those that the kubelet did not admit,
    for as long as the node may be full. `replaced`: another pod started after
    the last loss. `pod` is the UID of the last lost pod, empty if it no longer existed; `why` is
    the cause in its status. Both times are for people: timeouts are measured without them.
    """

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
    def failure(self) -> str:
        """Why no other pod is to be created; empty while one may be."""
        if self.killed >= _MOST_KILLS:
            return f"was killed {self.killed} times before its data path started: {self.why}"
        lost = self.times - self.rejected
        if lost >= _MOST_LOSSES:
            return f"was lost {lost} times before its data path started" + (f": {self.why}" if self.why else "")
        return ""

    def with_replacement(self) -> Self:
        """Return the same losses with the last pod replaced."""
        return replace(self, replaced=True)


def read_loss(cr: Transfer) -> MoverLoss | None:
    """Return the losses that are recorded on `cr`; None if there are none, or they are invalid."""
    return MoverLoss.read_annotation(cr.metadata.annotations, MOVER_LOST_ANNOTATION)


def count_loss(before: MoverLoss | None, pod: LostPod, now: datetime) -> MoverLoss:
    """Return `before` with the loss of that pod; unchanged if it was counted before."""
    if before is None:
        killed, rejected = int(pod.killed), int(bool(pod.rejected))
        return MoverLoss(since=now, last=now, killed=killed, rejected=rejected, pod=pod.uid, why=pod.why)
    counted = before.pod == pod.uid if pod.uid else not before.replaced
    if counted:
        return before
    return MoverLoss(
        since=now if before.replaced else before.since,
        last=now,
        times=before.times + 1,
        killed=before.killed + int(pod.killed),
        rejected=before.rejected + int(bool(pod.rejected)),
        pod=pod.uid,
        why=pod.why,
    )

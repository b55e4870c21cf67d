"""How often a load's mover pod was taken away before it began, kept on the custom resource.

Knows the form of the annotation `nodeagent.io/mover-lost`, what counts as one more loss, how
long the next pod has to wait, and when there is to be none. Does not know why a pod went, nor
what is done about it.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final, Self

from msgspec.structs import replace

from core.errors import ContractError
from core.models.base import WireModel
from core.models.names import MOVER_LOST_ANNOTATION
from core.models.transfers import Transfer

__all__ = ["LostPod", "MoverLoss", "count_loss", "read_loss"]

_FIRST_PAUSE: Final = timedelta(seconds=5)
_LONGEST_PAUSE: Final = timedelta(minutes=5)
"""A kubelet that refuses every pod must not be sent one after the other."""

_DOUBLINGS: Final = 10
"""Beyond so many the longest pause holds in any case."""

_MOST_KILLS: Final = 3
"""What kills every pod by the same signal, without a word, kills the next one too: most likely too little memory."""

_MOST_LOSSES: Final = 20
"""More than the pauses allow within the usual prepare timeout; the end of the longest one, and of endless evictions."""


@dataclass(frozen=True)
class LostPod:
    """A pod that was lost: its UID and why, as far as it was seen; `killed`: by a signal, nobody says why."""

    uid: str = ""
    why: str = ""
    killed: bool = False


class MoverLoss(WireModel):
    """The losses of one load: the first since a pod was there, the last, and how many there were in all.

    `killed` counts those by a signal that nobody explains. `replaced`: a pod came up after the
    last one. `pod` is the UID of the pod that was lost last, empty where it was not there any
    more; `why` is what its status said about that.
    """

    since: datetime
    last: datetime
    times: int = 1
    killed: int = 0
    replaced: bool = False
    pod: str = ""
    why: str = ""

    @property
    def remake_at(self) -> datetime:
        """When another pod may be made."""
        pause = _FIRST_PAUSE * (1 << min(self.times - 1, _DOUBLINGS))
        return self.last + min(pause, _LONGEST_PAUSE)

    @property
    def verdict(self) -> str:
        """Why there is to be no other pod, in words; empty while there may be one."""
        if self.killed >= _MOST_KILLS:
            return f"was killed {self.killed} times before it began: {self.why}"
        if self.times >= _MOST_LOSSES:
            return f"was lost {self.times} times before it began" + (f": {self.why}" if self.why else "")
        return ""

    def made_up_for(self) -> Self:
        """Return the same losses with a pod in the place of the last one."""
        return replace(self, replaced=True)


def read_loss(cr: Transfer) -> MoverLoss | None:
    """Return the losses that are kept on `cr`, None where there are none or nobody can read them."""
    try:
        return MoverLoss.from_json(cr.metadata.annotations.get(MOVER_LOST_ANNOTATION, ""))
    except ContractError:
        return None


def count_loss(before: MoverLoss | None, pod: LostPod, now: datetime) -> MoverLoss:
    """Return `before` with the loss of that pod counted; unchanged where it was counted already."""
    if before is None:
        return MoverLoss(since=now, last=now, killed=int(pod.killed), pod=pod.uid, why=pod.why)
    counted = before.pod == pod.uid if pod.uid else not before.replaced
    if counted:
        return before
    return MoverLoss(
        since=now if before.replaced else before.since,
        last=now,
        times=before.times + 1,
        killed=before.killed + int(pod.killed),
        pod=pod.uid,
        why=pod.why,
    )

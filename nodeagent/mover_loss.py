"""How often a load's mover pod was taken away before it began, kept on the custom resource.

Knows the form of the annotation `nodeagent.io/mover-lost`, what counts as one more loss, and
how long the next pod has to wait. Does not know why a pod went, nor what is done about it.
"""

from datetime import datetime, timedelta
from typing import Final

from pydantic import ValidationError

from core.models.base import Timestamp, WireModel
from core.models.loads import Load
from core.models.names import MOVER_LOST_ANNOTATION

__all__ = ["MoverLoss", "count_loss", "read_loss"]

_FIRST_PAUSE: Final = timedelta(seconds=5)
_LONGEST_PAUSE: Final = timedelta(minutes=5)
"""A kubelet that refuses every pod must not be sent one after the other."""

_DOUBLINGS: Final = 10
"""Beyond so many the longest pause holds in any case."""


class MoverLoss(WireModel):
    """The losses of one load: the first, the last, and how many.

    `pod` is the UID of the pod that was lost last, empty where it was not there any more; `why`
    is what its status said about that.
    """

    since: Timestamp
    last: Timestamp
    times: int = 1
    pod: str = ""
    why: str = ""

    @property
    def remake_at(self) -> datetime:
        """When another pod may be made."""
        pause = _FIRST_PAUSE * (1 << min(self.times - 1, _DOUBLINGS))
        return self.last + min(pause, _LONGEST_PAUSE)

    def to_annotation(self) -> str:
        """Return the annotation's text."""
        return self.model_dump_json(by_alias=True)


def read_loss(cr: Load) -> MoverLoss | None:
    """Return the losses that are kept on `cr`, None where there are none or nobody can read them."""
    try:
        return MoverLoss.model_validate_json(cr.metadata.annotations.get(MOVER_LOST_ANNOTATION, ""))
    except ValidationError:
        return None


def count_loss(before: MoverLoss | None, pod_uid: str, *, why: str, now: datetime) -> MoverLoss:
    """Return `before` with the loss of that pod counted; unchanged where it was counted already."""
    if before is None:
        return MoverLoss(since=now, last=now, pod=pod_uid, why=why)
    if before.pod == pod_uid:
        return before
    return MoverLoss(since=before.since, last=now, times=before.times + 1, pod=pod_uid, why=why)

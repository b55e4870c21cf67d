"""The phases of a transfer and the legal moves between them, as one table.

`nodeagent.node.lifecycle` decides on a move, `nodeagent.transfers.status` writes it.
"""

from enum import StrEnum
from typing import Final

from core.errors import AgentError

__all__ = ["FINAL_PHASES", "HOLDING_PHASES", "RUNNING_PHASES", "TRANSITIONS", "IllegalMoveError", "Phase"]


class Phase(StrEnum):
    """`status.phase` of DataUpload, DataDownload, PodVolumeBackup and PodVolumeRestore.

    Source: Velero v1.18, pkg/apis/velero/v2alpha1/data_upload_types.go. An absent or empty
    phase reads as NEW.
    """

    NEW = "New"
    ACCEPTED = "Accepted"
    PREPARED = "Prepared"
    IN_PROGRESS = "InProgress"
    CANCELING = "Canceling"
    CANCELED = "Canceled"
    COMPLETED = "Completed"
    FAILED = "Failed"

    @property
    def final(self) -> bool:
        """Whether this phase is final."""
        return self in FINAL_PHASES


FINAL_PHASES: Final = frozenset({Phase.CANCELED, Phase.COMPLETED, Phase.FAILED})

HOLDING_PHASES: Final = frozenset({Phase.ACCEPTED, Phase.PREPARED})
"""The phases that count toward `prepareQueueLength`."""

RUNNING_PHASES: Final = frozenset({Phase.IN_PROGRESS, Phase.CANCELING})
"""The phases in which a data mover may move data."""

_BROKEN = {Phase.CANCELED, Phase.FAILED}
TRANSITIONS: Final = {
    Phase.NEW: frozenset({Phase.ACCEPTED} | _BROKEN),
    Phase.ACCEPTED: frozenset({Phase.PREPARED} | _BROKEN),
    Phase.PREPARED: frozenset({Phase.IN_PROGRESS} | _BROKEN),
    Phase.IN_PROGRESS: frozenset({Phase.CANCELING, Phase.COMPLETED} | _BROKEN),
    Phase.CANCELING: frozenset({Phase.COMPLETED} | _BROKEN),
    Phase.CANCELED: frozenset[Phase](),
    Phase.COMPLETED: frozenset[Phase](),
    Phase.FAILED: frozenset[Phase](),
}
"""The legal moves from each phase."""


class IllegalMoveError(AgentError):
    """A move that is not in the table; nothing was written."""

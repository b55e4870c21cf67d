"""The phases of a load and the moves between them, as one table.

Knows which move is legal. Does not know who makes it or why: `nodeagent.node.lifecycle` decides,
`nodeagent.transfers.status` writes.
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
        """Whether nothing may leave this phase."""
        return self in FINAL_PHASES


FINAL_PHASES: Final = frozenset({Phase.CANCELED, Phase.COMPLETED, Phase.FAILED})

HOLDING_PHASES: Final = frozenset({Phase.ACCEPTED, Phase.PREPARED})
"""The phases that take a place of `prepareQueueLength`."""

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
"""From each phase to those it may move to."""


class IllegalMoveError(AgentError):
    """A move between phases that the table does not have; nothing was written."""

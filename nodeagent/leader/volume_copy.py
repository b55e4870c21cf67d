"""What a backup that has ended saved, according to its custom resource."""

import re
import sys
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from core.models.names import SCHEDULE_LABEL
from core.models.phases import Phase
from core.models.shrinkage import is_shrunk
from core.models.transfers import DataUpload, PodVolumeBackup, Transfer
from core.models.verification import Verification, read_verification

__all__ = ["VolumeCopy", "read_copy"]

_SCHEDULED: Final = re.compile(r"(?P<schedule>.+)-[0-9]{14}")
"""The name of a Backup that a Schedule created. Source: Velero v1.18, TimestampedName in pkg/apis/velero/v1."""


@dataclass(frozen=True, slots=True)
class VolumeCopy:
    """One backup that has ended; it saved nothing unless it is `complete`.

    `claim` is the PVC, empty for a volume of a pod that has none. `created` is when its transfer was created, by the
    API server's clock: the data is not newer. `schedule` is the name of the Schedule or CronJob that asked for it;
    empty: none is known. `shrunk`: it is Shrunk, and nobody has acknowledged it. `completed` is when it ended,
    `new_bytes` what the repository did not have; None: not known. `seconds` is from its start to its end.
    """

    claim: str
    created: datetime
    bytes: int
    schedule: str
    verification: Verification | None
    complete: bool = True
    shrunk: bool = False
    completed: datetime | None = None
    new_bytes: int | None = None
    seconds: float = 0.0


def read_copy(cr: Transfer) -> VolumeCopy | None:
    """Return what `cr` saved; None: it has not ended, or is no backup."""
    created, status = cr.metadata.creation_timestamp, cr.status
    if not cr.phase.final or not isinstance(cr, DataUpload | PodVolumeBackup) or created is None:
        return None
    began, completed = status.start_timestamp, status.completion_timestamp
    return VolumeCopy(
        claim=sys.intern(cr.source_claim),
        created=created,
        bytes=status.progress.total_bytes,
        schedule=sys.intern(_schedule_of(cr)),
        verification=read_verification(cr.metadata.annotations),
        complete=cr.phase is Phase.COMPLETED,
        shrunk=is_shrunk(cr.metadata.annotations),
        completed=completed,
        new_bytes=status.incremental_bytes,
        seconds=(completed - began).total_seconds() if completed and began else 0.0,
    )


def _schedule_of(cr: Transfer) -> str:
    if label := cr.metadata.labels.get(SCHEDULE_LABEL):
        return label
    names = (owner.name for owner in cr.metadata.owner_references if owner.kind == "Backup")
    match = _SCHEDULED.fullmatch(next(names, ""))
    return match["schedule"] if match else ""

"""What a verification of a backup found: a data mover writes a line for each snapshot; an annotation has the result."""

from datetime import datetime
from enum import StrEnum
from typing import Annotated, ClassVar, Final

from msgspec import Meta, field

from core.models.base import Int64, Time, WireModel
from core.models.job_output import OutputLine
from core.models.names import VERIFICATION_ANNOTATION

WHOLE_PERCENT: Final = 100.0
"""All files."""

Percent = Annotated[float, Meta(gt=0, le=WHOLE_PERCENT)]
"""A share of files."""

SHARES: Final = 16
"""The fixed shares of a repository: by the first hexadecimal digit of the hash that is the ID of each content."""


class VerificationOutcome(StrEnum):
    """Whether the data could be read back, and was the same."""

    PASSED = "passed"
    FAILED = "failed"


class Verification(WireModel):
    """One verification: when it ended, what it found, and the share of the files that it read."""

    annotation: ClassVar[str] = VERIFICATION_ANNOTATION

    at: Time
    outcome: VerificationOutcome
    percent: Percent = WHOLE_PERCENT

    @property
    def passed(self) -> bool:
        """Whether all that was read was right."""
        return self.outcome is VerificationOutcome.PASSED

    @property
    def whole(self) -> bool:
        """Whether all was read, and right."""
        return self.passed and self.percent == WHOLE_PERCENT

    @property
    def rank(self) -> tuple[datetime, bool]:
        """Orders verifications, the last one last: of several at the same time, one that failed."""
        return self.at, not self.passed


def is_damaged(last: Verification | None) -> bool:
    """Return whether a copy whose last verification this was is damaged; without one, it is not known to be."""
    return last is not None and not last.passed


class VerifiedSnapshot(WireModel, omit_defaults=True):
    """What reading one kopia snapshot has shown.

    `outcome` is None if it could not be verified: no storage, no access, no memory; `faults` say why. If it failed,
    they are the first of its `fault_count` faults, with file and blob; a tenant chooses the names of files. So many
    `files` and `bytes` were read: symbolic links count, as in kopia. `percent` is the share of the files to read.
    """

    id: str
    outcome: VerificationOutcome | None = None
    percent: Percent = WHOLE_PERCENT
    files: Int64 = 0
    bytes: Int64 = 0
    faults: list[str] = field(default_factory=list)
    fault_count: Int64 = 0


VERIFIED_LINE: Final = OutputLine("nodeagent.io/verified-snapshot", VerifiedSnapshot)


class VerifiedShare(WireModel):
    """A share of a repository that was read: nothing in it that a snapshot needs is missing or damaged.

    The first one, 0, also has the directories of all snapshots. It had so many `contents`; None: the share is right
    because all snapshots were read.
    """

    share: Int64
    contents: Int64 | None = None


SHARE_LINE: Final = OutputLine("nodeagent.io/verified-share", VerifiedShare)


class SnapshotVerification(WireModel):
    """The termination message of `verify-snapshots` that came to its end: how many snapshots it verified."""

    snapshots: Int64

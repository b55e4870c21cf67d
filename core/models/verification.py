"""What a verification of a backup found.

A data mover writes one line for each snapshot; the annotation `nodeagent.io/verification` of a transfer has the last
result.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Final

from msgspec import Meta, field

from core.models.base import Int64, Time, WireModel
from core.models.job_output import OutputLine
from core.models.names import VERIFICATION_ANNOTATION

__all__ = [
    "VERIFIED_LINE",
    "WHOLE_PERCENT",
    "Percent",
    "SnapshotVerification",
    "Verification",
    "VerificationOutcome",
    "VerifiedSnapshot",
    "read_verification",
]

WHOLE_PERCENT: Final = 100.0
"""All files."""

Percent = Annotated[float, Meta(gt=0, le=WHOLE_PERCENT)]
"""A share of files."""


class VerificationOutcome(StrEnum):
    """Whether the data could be read back, and was the same."""

    PASSED = "passed"
    FAILED = "failed"


class Verification(WireModel):
    """One verification: when it ended, what it found, and the share of the files that it read."""

    at: Time
    outcome: VerificationOutcome
    percent: Percent = WHOLE_PERCENT

    @property
    def passed(self) -> bool:
        """Whether all that was read was right."""
        return self.outcome is VerificationOutcome.PASSED


def read_verification(annotations: Mapping[str, str]) -> Verification | None:
    """Return the last verification of the transfer with these annotations; None: there is none, or it is invalid."""
    return Verification.read_annotation(annotations, VERIFICATION_ANNOTATION)


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


class SnapshotVerification(WireModel):
    """The termination message of `verify-snapshots` that came to its end: how many lines it wrote."""

    snapshots: Int64

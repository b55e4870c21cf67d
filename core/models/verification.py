"""What a verification of a backup found, as its transfer's annotation `nodeagent.io/verification` has it."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from core.errors import ContractError
from core.models.base import Time, WireModel
from core.models.names import VERIFICATION_ANNOTATION

__all__ = ["Verification", "VerificationOutcome", "read_verification"]


class VerificationOutcome(StrEnum):
    """Whether the data could be read back."""

    PASSED = "passed"
    FAILED = "failed"


class Verification(WireModel):
    """One verification: when it ended, what it found, and the share of the files that it read."""

    at: Time
    outcome: VerificationOutcome
    percent: Annotated[float, Meta(gt=0, le=100)] = 100.0

    @property
    def passed(self) -> bool:
        """Whether all that was read was right."""
        return self.outcome is VerificationOutcome.PASSED


def read_verification(annotations: Mapping[str, str]) -> Verification | None:
    """Return the last verification of the transfer with these annotations; None: there is none, or it is invalid."""
    text = annotations.get(VERIFICATION_ANNOTATION)
    if not text:
        return None
    try:
        return Verification.from_json(text)
    except ContractError:
        return None

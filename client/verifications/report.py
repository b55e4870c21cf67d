"""What is verified of a backup, and what came of it, as people and programs see it. Pure."""

from collections.abc import Sequence
from datetime import datetime
from enum import StrEnum

from msgspec import field

from client.backups.manifests import Method
from client.backups.plan import ClaimName
from client.collections.models import Backup, BackupVolume
from core.errors import AgentError
from core.models.base import WireModel
from core.models.verification import VerifiedSnapshot
from core.text import hinted


class VerificationError(AgentError):
    """A volume did not pass its verification, or could not be verified."""


class VolumeOutcome(StrEnum):
    """What is known of a volume after its verification."""

    PASSED = "passed"
    FAILED = "failed"
    """Data is missing, damaged or not the same."""
    UNVERIFIED = "unverified"
    """It could not be read: nothing is known, and nothing is recorded."""


class VerifiedVolume(WireModel):
    """One volume of a backup and its verification; `bytes` were read of its data.

    `claim` is the name of the PVC; of a volume of a pod without one, `<pod>:<volume>`. `percent` is the share of the
    files that was to be read. `restored`: it was restored into a volume of its own, and compared with that. `at` is
    when the result was recorded on its transfer; None: it was not. `message` says what is wrong, or why it is
    unverified.
    """

    namespace: str
    claim: str
    method: Method
    kind: str
    transfer: str
    location: str
    snapshot_id: str
    outcome: VolumeOutcome
    percent: float
    restored: bool
    files: int = 0
    bytes: int = 0
    message: str = ""
    at: datetime | None = None


class VerificationReport(WireModel):
    """The volumes of a backup that were verified, and notes about those that were not."""

    backup: str
    volumes: list[VerifiedVolume]
    notes: list[str] = field(default_factory=list)


def choose_volumes(backup: Backup, claims: Sequence[ClaimName]) -> tuple[list[BackupVolume], list[str]]:
    """Return the completed volumes that a restore would take, or only of these PVCs, and notes about the others.

    Raises:
        VerificationError: there are none, or a PVC has none; the message names it.
    """
    known = {ClaimName(one.namespace, one.claim): one for one in backup.newest}
    for name in claims:
        if name not in known:
            raise VerificationError(hinted(f"backup {backup.name} has no PVC {name}", str(name), map(str, known)))
        if not known[name].stored:
            raise VerificationError(f"backup {backup.name}: {known[name].state}")
    wanted = [known[name] for name in dict.fromkeys(claims or known)]
    chosen = [one for one in wanted if one.stored]
    notes = [f"not verified: {one.state}" for one in wanted if not one.stored]
    if backup.missing and not claims:
        notes.append(f"not verified: {backup.missing} volumes that have no transfer")
    if backup.unreadable and not claims:
        notes.append(f"not verified: {backup.unreadable} transfers that cannot be read")
    if not chosen:
        raise VerificationError(f"backup {backup.name} has no completed volume: {'; '.join(notes) or 'it has none'}")
    return chosen, notes


def describe_faults(found: VerifiedSnapshot) -> str:
    """Return the faults of a snapshot as one text."""
    more = found.fault_count - len(found.faults)
    return "; ".join(found.faults) + (f"; and at least {more} more" if more > 0 else "")


def describe_volume(
    volume: BackupVolume, found: VerifiedSnapshot, *, restored: bool, at: datetime | None
) -> VerifiedVolume:
    """Return what came of the verification of a volume."""
    return VerifiedVolume.like(
        volume,
        outcome=VolumeOutcome(found.outcome or VolumeOutcome.UNVERIFIED),
        percent=found.percent,
        restored=restored,
        files=found.files,
        bytes=found.bytes,
        message=describe_faults(found),
        at=at,
    )


def explain_report(report: VerificationReport) -> str | None:
    """Return which volume did not pass, and why, or is not recorded; None: all are right."""
    order = (VolumeOutcome.FAILED, VolumeOutcome.UNVERIFIED)
    bad = sorted((one for one in report.volumes if one.outcome in order), key=lambda one: order.index(one.outcome))
    if bad:
        more = f", and {len(bad) - 1} more" if len(bad) > 1 else ""
        return f"PVC {bad[0].namespace}/{bad[0].claim} is {bad[0].outcome}: {bad[0].message or 'no cause'}{more}"
    lost = [one for one in report.volumes if one.at is None]
    return f"the result of PVC {lost[0].namespace}/{lost[0].claim} could not be recorded" if lost else None

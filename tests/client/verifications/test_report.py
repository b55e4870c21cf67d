"""What of a backup is verified, and what a report says as a whole."""

import pytest
from msgspec.structs import replace

from client.backups.plan import ClaimName
from client.verifications.report import (
    VerificationError,
    VerificationReport,
    choose_volumes,
    describe_volume,
    explain_report,
)
from core.models.phases import Phase
from core.models.verification import VerifiedSnapshot
from tests.client.support.backups import DATA_VOLUME, build_backup
from tests.client.support.verification_scene import failed, passed
from tests.support.clock import NOON

_WEB = replace(DATA_VOLUME, claim="web", transfer="night-2", phase=Phase.FAILED, message="no room", snapshot_id="")


def test_completed_volumes_are_chosen_and_the_others_noted() -> None:
    backup = build_backup(DATA_VOLUME, _WEB, missing=2, unreadable=1)
    notes = [
        "not verified: DataUpload night-2 of PVC app/web is Failed: no room",
        "not verified: 2 volumes that have no transfer",
        "not verified: 1 transfers that cannot be read",
    ]
    assert choose_volumes(backup, ()) == ([DATA_VOLUME], notes)
    # A PVC is chosen once, and no note is about others.
    claim = ClaimName("app", "data")
    assert choose_volumes(backup, [claim, claim]) == ([DATA_VOLUME], [])


@pytest.mark.parametrize(
    ("claim", "message"),
    [
        ("dat", r"backup night has no PVC app/dat \(did you mean app/data\?\)"),
        ("web", "backup night: DataUpload night-2 of PVC app/web is Failed: no room"),
    ],
)
def test_a_pvc_without_a_completed_volume_is_an_error(claim: str, message: str) -> None:
    with pytest.raises(VerificationError, match=message):
        choose_volumes(build_backup(DATA_VOLUME, _WEB), [ClaimName("app", claim)])


def test_a_backup_without_a_completed_volume_is_an_error() -> None:
    with pytest.raises(VerificationError, match="backup night has no completed volume: not verified: DataUpload"):
        choose_volumes(build_backup(_WEB), ())


def test_a_report_is_explained_by_its_worst_volume() -> None:
    unread = VerifiedSnapshot(id="s1", faults=["no storage"], fault_count=1)
    volumes = [
        describe_volume(DATA_VOLUME, found, restored=False, at=NOON if found.outcome else None)
        for found in (passed("s1"), unread, failed("s1"))
    ]
    report = VerificationReport(backup="night", volumes=volumes)
    explained = explain_report(report) or ""
    assert explained.startswith("PVC app/data is failed: sub/first: object 1 is backed by missing blob p1")
    assert explained.endswith(", and 1 more")
    report = VerificationReport(backup="night", volumes=volumes[:2])
    assert explain_report(report) == "PVC app/data is unverified: no storage"
    report = VerificationReport(backup="night", volumes=volumes[:1])
    assert explain_report(report) is None
    report = VerificationReport(backup="night", volumes=[replace(volumes[0], at=None)])
    assert explain_report(report) == "the result of PVC app/data could not be recorded"

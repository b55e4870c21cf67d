"""The annotation with what a verification found."""

from datetime import UTC, datetime

import pytest

from core.models.names import VERIFICATION_ANNOTATION
from core.models.verification import Verification, VerificationOutcome

AT = datetime(2026, 11, 22, tzinfo=UTC)


@pytest.mark.parametrize("outcome", list(VerificationOutcome))
def test_what_is_written_is_read(outcome: VerificationOutcome) -> None:
    written = Verification(at=AT, outcome=outcome, percent=10)
    assert Verification.from_annotations({VERIFICATION_ANNOTATION: written.to_json()}) == written
    assert written.passed is (outcome is VerificationOutcome.PASSED)
    everything = f'{{"at":"2026-11-22T00:00:00Z","outcome":"{outcome}"}}'
    found = Verification.from_annotations({VERIFICATION_ANNOTATION: everything})
    assert found == Verification(at=AT, outcome=outcome, percent=100)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="empty"),
        pytest.param("{", id="no JSON"),
        pytest.param("{}", id="nothing"),
        pytest.param('{"at":"2026-11-22T00:00:00","outcome":"passed"}', id="a time without a zone"),
        pytest.param('{"at":"2026-11-22T00:00:00Z","outcome":"maybe"}', id="an unknown outcome"),
        pytest.param('{"at":"2026-11-22T00:00:00Z","outcome":"passed","percent":0}', id="no share"),
    ],
)
def test_an_invalid_annotation_counts_as_none(text: str) -> None:
    assert Verification.from_annotations({VERIFICATION_ANNOTATION: text}) is None
    assert Verification.from_annotations({}) is None

"""What to do next: each piece of advice leads to a section that exists and is about it."""

import re
from pathlib import Path

import pytest

from client.status.health import FAILURES, SECTIONS, advise
from client.status.parse import transfer_record
from client.status.records import TRANSFER_KINDS
from core.models.reasons import PendingReason
from tests.client.support.status_scene import transfer

_PAGE = (Path(__file__).parents[3] / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
_ANCHORS = {
    re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in re.findall(r"(?m)^#+ (.*)", _PAGE)
}
_SHORT = set(re.findall(r"(?m)^\| `(\w+)` \|", _PAGE.partition("## Short-lived reasons")[2].partition("\n## ")[0]))


def _advice(phase: str = "New", **more: str) -> str:
    return advise(transfer_record(TRANSFER_KINDS[0], transfer("DataUpload", "x", phase, **more)))


def _section(name: str) -> str:
    return _PAGE.partition(f"### {name}\n")[2].partition("\n#")[0]


@pytest.mark.parametrize("reason", SECTIONS, ids=str)
def test_a_pending_reason_leads_to_a_section(reason: str) -> None:
    assert SECTIONS[reason] in _ANCHORS
    assert f"docs/troubleshooting.md#{SECTIONS[reason]}" in _advice(reason=str(reason))


def test_each_reason_without_a_section_is_a_short_lived_one() -> None:
    assert set(map(str, PendingReason)) - set(map(str, SECTIONS)) <= _SHORT
    assert "short-lived-reasons" in _ANCHORS


@pytest.mark.parametrize(("words", "section"), FAILURES, ids=lambda value: value)
def test_the_section_about_a_failure_quotes_its_words(words: str, section: str) -> None:
    assert words in _section(section)
    assert _advice("Failed", message=f"x: {words} y").startswith("fix the cause, and create a new transfer")


@pytest.mark.parametrize(
    ("phase", "more", "advice"),
    [
        ("Completed", {}, "nothing: it is complete"),
        ("Canceled", {}, "create a new transfer: a canceled one does not continue"),
        ("Failed", {"message": "odd"}, "fix the cause, and create a new transfer: see docs/troubleshooting.md"),
        ("New", {}, "wait: the leader has not checked it yet"),
        ("InProgress", {}, "wait: it is under way"),
        ("Odd", {}, "correct the field that is named, or delete the transfer: see docs/troubleshooting.md#unreadable"),
    ],
)
def test_each_phase_has_advice(phase: str, more: dict[str, str], advice: str) -> None:
    assert _advice(phase, **more) == advice

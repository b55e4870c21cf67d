"""Pending reasons; no text of a message decides anything."""

import re
from pathlib import Path

from core.models.reasons import PendingReason

PRODUCT = [Path(__file__).parents[3] / package for package in ("core", "exposer", "nodeagent", "client")]
ABOUT_TEXT = re.compile(
    r"message\.(startswith|endswith|removeprefix|removesuffix|find|index)\b|\bin \w+\.status\.message"
)


def test_every_reason_is_one_camel_case_word() -> None:
    assert all(re.fullmatch(r"([A-Z][a-z]+)+", reason) for reason in PendingReason)


def test_no_decision_depends_on_the_text_of_a_message() -> None:
    """The ending of a termination message is the exception: it is the contract with Velero."""
    found = [
        f"{path}: {line.strip()}"
        for package in PRODUCT
        for path in package.rglob("*.py")
        for line in path.read_text().splitlines()
        if ABOUT_TEXT.search(line) and "CANCELED_ENDING" not in line
    ]
    assert found == []

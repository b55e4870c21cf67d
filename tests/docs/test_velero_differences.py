"""The page of differences from Velero: its rows are complete, and the pages for people who switch lead to it."""

import re
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_PAGE = _ROOT / "docs" / "velero-differences.md"
_HEAD = ["difference", "with Velero", "here", "what to do"]
_LINK = re.compile(r"\[[^\]]+\]\(([^)#\s]+)(?:#[^)\s]+)?\)")

_ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in _PAGE.read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and not line.startswith("| ---")
]
_DIFFERENCES = [row for row in _ROWS if row != _HEAD]


def test_every_row_says_what_differs_and_only_an_action_is_optional() -> None:
    assert len(_DIFFERENCES) >= 50
    assert [row for row in _DIFFERENCES if len(row) != len(_HEAD) or not all(row[:3])] == []


def test_every_difference_has_one_row() -> None:
    names = [row[0] for row in _DIFFERENCES]
    assert sorted(set(names)) == sorted(names)


@pytest.mark.parametrize("page", ["README.md", "docs/limits.md", "docs/configuration.md"])
def test_the_pages_for_people_who_switch_link_to_it(page: str) -> None:
    path = _ROOT / page
    targets = {(path.parent / target).resolve() for target in _LINK.findall(path.read_text(encoding="utf-8"))}
    assert _PAGE in targets


def test_its_links_lead_to_pages_of_the_documentation() -> None:
    """`test_pages.py` checks the headings; a link that leaves docs/ would be broken in a copy of the page."""
    targets = _LINK.findall(_PAGE.read_text(encoding="utf-8"))
    assert len(targets) >= 8
    assert [target for target in targets if (_PAGE.parent / target).resolve().parent != _PAGE.parent] == []

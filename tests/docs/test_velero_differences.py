"""The page of differences from Velero: its table is complete, and the pages for people who switch lead to it."""

import re
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_PAGE = _ROOT / "docs" / "velero-differences.md"
_HEADER = ["what", "with Velero", "here", "why", "what to do"]
_LINK = re.compile(r"\[[^\]]+\]\(([^)#\s]+)(?:#[^)\s]+)?\)")


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


_TABLE = [_cells(line) for line in _PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("|")]


def test_the_table_has_its_columns_and_every_cell_says_something() -> None:
    header, rule, *rows = _TABLE
    assert header == _HEADER
    assert set(rule) == {"---"}
    assert len(rows) >= 14
    assert [row for row in rows if len(row) != len(_HEADER) or not all(row)] == []


def test_every_difference_has_one_row() -> None:
    names = [row[0] for row in _TABLE]
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

"""The page of differences from Velero: its sections are complete, and the pages for people who switch lead to it."""

import re
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_PAGE = _ROOT / "docs" / "velero-differences.md"
_FIELDS = ["With Velero", "Here", "Why"]
_SECTION = re.compile(r"(?m)^### (?P<difference>.+)\n(?P<body>(?:- .*\n)*)")
_FIELD = re.compile(r"(?m)^- \*\*([^*:]+):\*\* (.+)$")
_LINK = re.compile(r"\[[^\]]+\]\(([^)#\s]+)(?:#[^)\s]+)?\)")


_SECTIONS = [
    (one["difference"], _FIELD.findall(one["body"])) for one in _SECTION.finditer(_PAGE.read_text(encoding="utf-8"))
]


def test_every_section_has_its_fields_and_only_an_action_is_optional() -> None:
    assert len(_SECTIONS) >= 14
    names = {difference: [name for name, _ in fields] for difference, fields in _SECTIONS}
    assert {
        difference: found for difference, found in names.items() if [*found, "Action"][:4] != [*_FIELDS, "Action"]
    } == {}


def test_every_difference_has_one_section() -> None:
    names = [difference for difference, _ in _SECTIONS]
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

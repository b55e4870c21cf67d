"""The page of causes against the tests that bring them about, and against the product's messages and reasons."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from core.models.reasons import PendingReason
from tests.cluster.cause_cases import CASES
from tests.support.causes import produced_causes

pytestmark = pytest.mark.processes

_ROOT = Path(__file__).parents[2]
_PAGE = _ROOT / "docs" / "troubleshooting.md"
_PRODUCT = ("core", "exposer", "nodeagent", "client", "datamover")
_SECTION = re.compile(r"(?m)^### (?P<cause>.+)\n(?P<body>(?:- .*\n)*)")
_FIELD = re.compile(r"(?m)^- \*\*(\w+):\*\* (.+)$")
_FIELDS = ("Message", "Event", "Meaning", "Pending", "Action")
# The page says so at its head: such a transfer fails within 30 seconds.
_WITHOUT = {"Event": "`Failed`", "Pending": "no"}
_CODE = re.compile(r"`([^`]+)`")
_PENDING = re.compile(r"no|until the (prepare|stall) timeout|indefinitely|for [25] minutes")
_VALUE = "…"


def _page() -> list[tuple[str, dict[str, str]]]:
    """Return the causes with the fields of their sections, also Event and Pending of one that has neither."""
    found = []
    for section in _SECTION.finditer(_PAGE.read_text(encoding="utf-8")):
        fields = dict(_FIELD.findall(section["body"]))
        if not _WITHOUT.keys() & fields:
            fields = {name: (fields | _WITHOUT)[name] for name in _FIELDS if name in fields or name in _WITHOUT}
        found.append((section["cause"], fields))
    return found


_CAUSES = dict(_page())


def test_every_cause_of_the_page_is_brought_about_by_a_test_and_every_test_has_its_one_section() -> None:
    assert sorted(name for name, _ in _page()) == sorted(produced_causes())


@pytest.mark.parametrize("cause", _CAUSES)
def test_a_section_has_all_fields_in_order_and_the_words_of_the_product(cause: str) -> None:
    fields, templates = _CAUSES[cause], _templates()
    assert tuple(fields) == _FIELDS
    assert _PENDING.fullmatch(fields["Pending"])
    fragments = [words for message in _CODE.findall(fields["Message"]) for words in _fragments(message)]
    assert [words for words in fragments if not any(words in template for template in templates)] == []


def test_every_pending_reason_is_on_the_page() -> None:
    page = set(_CODE.findall(_PAGE.read_text(encoding="utf-8")))
    assert {str(reason) for reason in PendingReason} - page == set()


@pytest.mark.parametrize("name", CASES)
def test_event_and_message_of_a_cause_are_the_ones_that_the_cluster_tests_expect(name: str) -> None:
    assert CASES[name].reason in _CODE.findall(_CAUSES[name]["Event"])
    messages = _CODE.findall(_CAUSES[name]["Message"])
    pattern = CASES[name].message.replace("\\", "")
    assert not messages or any(all(words in pattern for words in _fragments(message)) for message in messages)


def _fragments(message: str) -> list[str]:
    """Return the words of a message between its values."""
    return [part.strip(" .,:;()") for part in message.split(_VALUE)]


@cache
def _templates() -> frozenset[str]:
    """Return every text of the product, with `…` for the values of an f-string."""
    files = (path for package in _PRODUCT for path in (_ROOT / package).rglob("*.py"))
    return frozenset(text for path in files for text in _texts_of(ast.parse(path.read_text(encoding="utf-8"))))


def _texts_of(tree: ast.Module) -> list[str]:
    texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else _VALUE for part in node.values)
            texts.append("".join(str(part) for part in parts))
    return texts

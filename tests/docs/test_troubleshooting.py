"""The table of causes and the tests that bring them about name the same ones."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from tests.support.causes import produced_causes

_PAGE = Path(__file__).parents[2] / "docs" / "troubleshooting.md"
_ROW = re.compile(r"^\| `([a-z-]+)` \|", re.MULTILINE)
_COLUMNS = 5


def test_every_cause_of_the_table_is_brought_about_by_a_test_and_every_test_has_its_row() -> None:
    assert set(_ROW.findall(_PAGE.read_text())) == produced_causes().keys()


def test_every_cause_has_one_row_and_every_row_all_columns() -> None:
    rows = [line for line in _PAGE.read_text().splitlines() if _ROW.match(line)]
    assert [name for name, times in Counter(_ROW.findall("\n".join(rows))).items() if times > 1] == []
    for row in rows:
        cells = [cell.strip() for cell in row.strip("|").split(" | ")]
        assert len(cells) == _COLUMNS, row
        assert all(cells), row


def test_how_long_each_is_waited_for_is_one_of_the_spans_that_the_page_explains() -> None:
    explained = re.compile(r"at once|prepare|patient|2 minutes(?:, then at once| at most.*)")
    rows = [line for line in _PAGE.read_text().splitlines() if _ROW.match(line)]
    assert [row for row in rows if not explained.fullmatch(row.split(" | ")[3])] == []

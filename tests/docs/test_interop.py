"""The page of what was tried: each row has a test that the suite runs, or says that it was tried by hand."""

import ast
import re
from collections.abc import Iterator
from datetime import date
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_PAGE = _ROOT / "docs" / "interop.md"
_HEADER = ["version", "direction", "kinds", "storage", "date", "how"]
_KINDS = {"all four", "DataUpload, DataDownload", "PodVolumeBackup, PodVolumeRestore"}
_HOW = re.compile(r"`(tests/\S+\.py)`: `(test_\w+)`")
_BY_HAND = "by hand: "

_Row = tuple[str, ...]


def _rows() -> list[_Row]:
    lines = [line for line in _PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    return [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines]


_FIRST, _RULE, *_TABLE = _rows()


def _marked() -> Iterator[_Row]:
    """Yield the arguments of each marker `interop`, the file and the test."""
    for path in sorted((_ROOT / "tests").rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        if "mark.interop(" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                for decorator in node.decorator_list:
                    if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.interop":
                        arguments = [ast.literal_eval(argument) for argument in decorator.args]
                        yield (*arguments, path.relative_to(_ROOT).as_posix(), node.name)


def test_the_table_has_its_columns_and_every_cell_says_something() -> None:
    assert list(_FIRST) == _HEADER
    assert [row for row in _TABLE if len(row) != len(_HEADER) or not all(row)] == []
    assert {row[2] for row in _TABLE} <= _KINDS
    assert len(set(_TABLE)) == len(_TABLE)
    assert all(date.fromisoformat(row[4]) for row in _TABLE)


def test_each_row_has_a_test_that_the_suite_runs_or_says_that_it_was_tried_by_hand() -> None:
    listed = []
    for *tried, _, how in _TABLE:
        if how.startswith(_BY_HAND):
            continue
        found = _HOW.fullmatch(how)
        assert found, f"neither a test nor {_BY_HAND!r}: {how}"
        listed.append((*tried, *found.groups()))
    assert sorted(listed) == sorted(_marked())


def test_no_test_that_has_a_row_is_left_out_of_the_suite() -> None:
    """A test that is slow or skipped proves nothing with each change."""
    for *_, file, name in _marked():
        text = (_ROOT / file).read_text(encoding="utf-8")
        head = text.partition(f"def {name}(")[0].rpartition("\n\n\n")[2]
        module = re.search(r"^pytestmark = .*$", text, re.MULTILINE)
        marks = head + (module.group() if module else "")
        assert not re.search(r"mark\.(slow|skip|skipif|xfail)\b", marks), f"{file}: {name}"

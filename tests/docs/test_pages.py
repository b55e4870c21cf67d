"""What pages refer to, the rows of the differences from Velero and of what was tried: each has a test."""

import ast
import re
from collections.abc import Iterator
from datetime import date
from functools import cache
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_PAGES = sorted([*_ROOT.glob("*.md"), *(_ROOT / "docs").glob("*.md"), *(_ROOT / "examples").glob("*.md")])
_FOLDERS = frozenset(path.name for path in _ROOT.iterdir() if path.is_dir() and not path.name.startswith((".", "_")))
_LINK = re.compile(r"\[[^\]]*\]\((?!https?:)([^)\s#]*)(?:#([^)\s]+))?\)")
_CODE = re.compile(r"`([^`\n]+)`")
_PATTERN = re.compile(r"[<>*{}…$]")
_MAKE = re.compile(r"(?m)(?:`|^    )make ([a-z][a-z-]*)")
_TARGET = re.compile(r"(?m)^([a-z][a-z-]*):")

_each_page = pytest.mark.parametrize("page", _PAGES, ids=lambda page: str(page.relative_to(_ROOT)))


@_each_page
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    assert list(_broken_links(page)) == []


@_each_page
def test_every_file_that_is_named_exists(page: Path) -> None:
    words = (code.split()[-1].rstrip("/") for code in _CODE.findall(page.read_text(encoding="utf-8")))
    paths = [word for word in words if word.partition("/")[0] in _FOLDERS and "/" in word and not _PATTERN.search(word)]
    assert [path for path in paths if not (_ROOT / path).exists()] == []


@_each_page
def test_every_make_target_that_is_named_exists(page: Path) -> None:
    targets = set(_TARGET.findall((_ROOT / "Makefile").read_text(encoding="utf-8")))
    assert set(_MAKE.findall(page.read_text(encoding="utf-8"))) - targets == set()


def test_the_readme_lists_every_page() -> None:
    text = (_ROOT / "README.md").read_text(encoding="utf-8")
    listed = {path for path, _ in _LINK.findall(text[text.index("\n## Documentation") :])}
    assert {f"docs/{page.name}" for page in (_ROOT / "docs").glob("*.md")} - listed == set()


_DIFFERENCES = _ROOT / "docs" / "velero-differences.md"


def test_every_row_says_what_differs_from_velero_and_only_an_action_is_optional() -> None:
    lines = _DIFFERENCES.read_text(encoding="utf-8").splitlines()
    lines = [line for line in lines if re.match(r"\| (?!---)", line)]
    head, rows = "| difference | with Velero | here | what to do |", [line for line in lines if line != lines[0]]
    assert lines[0] == head
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert [row for row in cells if len(row) != 4 or not all(row[:3])] == []
    assert len({row[0] for row in cells}) == len(cells) >= 50


@pytest.mark.parametrize("page", ["README.md", "docs/limits.md", "docs/configuration.md"])
def test_the_pages_for_people_who_switch_link_to_the_differences(page: str) -> None:
    path = _ROOT / page
    targets = {(path.parent / target).resolve() for target, _ in _LINK.findall(path.read_text(encoding="utf-8"))}
    assert _DIFFERENCES in targets


def test_the_links_of_the_differences_lead_to_pages_of_the_documentation() -> None:
    """A link that leaves docs/ would be broken in a copy of the page."""
    targets = [target for target, _ in _LINK.findall(_DIFFERENCES.read_text(encoding="utf-8")) if target]
    assert len(targets) >= 8
    assert [
        target for target in targets if (_DIFFERENCES.parent / target).resolve().parent != _DIFFERENCES.parent
    ] == []


def _broken_links(page: Path) -> Iterator[str]:
    for path, heading in _LINK.findall(page.read_text(encoding="utf-8")):
        target = page.parent / path if path else page
        if not target.exists() or (heading and heading not in _anchors(target)):
            yield f"{path}#{heading}" if heading else path


@cache
def _anchors(page: Path) -> frozenset[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"(?ms)^```.*?^```", "", page.read_text(encoding="utf-8"))
    headings = re.findall(r"(?m)^#+ (.*)", text)
    return frozenset(re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings)


_INTEROP = _ROOT / "docs" / "interop.md"
_HEADER = ["version", "direction", "kinds", "storage", "date", "how"]
_KINDS = {"all four", "DataUpload, DataDownload", "PodVolumeBackup, PodVolumeRestore"}
_HOW = re.compile(r"`(tests/\S+\.py)`: `(test_\w+)`")
_BY_HAND = "by hand: "

_Row = tuple[str, ...]


def _rows() -> list[_Row]:
    lines = [line for line in _INTEROP.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    return [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines]


_FIRST, _, *_TABLE = _rows()


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

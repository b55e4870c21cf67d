"""What the pages of the documentation refer to: links, headings, files and make targets."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

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

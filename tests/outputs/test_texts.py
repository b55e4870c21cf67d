"""The texts in the product: errors, Events, status messages, log lines and pages, with `{}` for each value."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.golden import assert_golden_text

if TYPE_CHECKING:
    from collections.abc import Iterator

_ROOT = Path(__file__).parents[2]
_OTHERS = ("tests", "benchmarks", "tools")
_PROSE = re.compile(r"[a-z}][,:;]? [a-z({\"]")


def _product() -> Iterator[Path]:
    for init in sorted(_ROOT.glob("*/__init__.py")):
        if init.parent.name not in _OTHERS:
            yield from init.parent.rglob("*.py")


def _texts(tree: ast.Module) -> Iterator[str]:
    """Yield all strings except docstrings."""
    nodes = list(ast.walk(tree))
    skipped = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    skipped |= {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes:
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)


def test_no_text_is_lost_or_changed_unseen() -> None:
    """Where a text stands does not matter."""
    found = {text for path in _product() for text in _texts(ast.parse(path.read_text(encoding="utf-8")))}
    # What has more lines is help, or a program.
    shown = sorted(repr(text)[1:-1] for text in found if _PROSE.search(text) and text.count("\n") < 3)
    assert_golden_text("texts", "".join(f"{text}\n" for text in shown))

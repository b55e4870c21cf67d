"""Causes of pending and failed transfers that the tests produce, by their names in `docs/troubleshooting.md`.

Reads the marker `cause` of all tests. Runs nothing.
"""

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

_TESTS = Path(__file__).parents[1]
_MARK = "cause"


def produced_causes() -> dict[str, set[str]]:
    """Return every cause that a test is marked with, and the files of its tests."""
    found: dict[str, set[str]] = {}
    for path in sorted(_TESTS.rglob("test_*.py")):
        if f".{_MARK}(" not in path.read_text():
            continue
        name = ".".join(path.relative_to(_TESTS.parent).with_suffix("").parts)
        for cause in _causes_of(import_module(name)):
            found.setdefault(cause, set()).add(path.relative_to(_TESTS.parent).as_posix())
    return found


def _causes_of(module: ModuleType) -> Iterator[str]:
    for member in vars(module).values():
        for mark in getattr(member, "pytestmark", []) if callable(member) else []:
            yield from _causes_in(mark)


def _causes_in(mark: pytest.Mark) -> Iterator[str]:
    if mark.name == _MARK:
        yield from mark.args
    elif mark.name == "parametrize":
        values = [value for value in mark.args[1] if isinstance(value, type(pytest.param()))]
        for each in values:
            for inner in each.marks:
                yield from _causes_in(inner.mark if isinstance(inner, pytest.MarkDecorator) else inner)

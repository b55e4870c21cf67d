"""The page that keeps a run's figures: everything around them stays as it was written.

Knows the two marks in the page. Does not know figures.
"""

from collections.abc import Iterable
from pathlib import Path

from benchmarks.processes import BenchmarkError

__all__ = ["check_page", "record"]


def _marks(name: str) -> tuple[str, str]:
    return f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->\n"


def check_page(page: Path, name: str) -> None:
    """Check that the page has the marks for the figures called `name`.

    Raises:
        BenchmarkError: it has none, or cannot be read.
    """
    try:
        text = page.read_text()
    except OSError as e:
        raise BenchmarkError(f"{page} cannot be read: {e.strerror}") from e
    if [text.count(mark) for mark in _marks(name)] != [1, 1]:
        raise BenchmarkError(f"{page} has no marks for the figures: the lines {' and '.join(_marks(name))}")


def record(page: Path, name: str, lines: Iterable[str]) -> None:
    """Replace what is between the marks of `name` in the page with the lines."""
    begin, end = _marks(name)
    head, _, rest = page.read_text().partition(begin)
    _, _, tail = rest.partition(end)
    page.write_text("".join([head, begin, *(f"{line}\n" for line in lines), end, tail]))

"""Hints for a misspelled name: which of the known ones may be meant."""

import difflib
from collections.abc import Iterable

__all__ = ["ask", "close_name", "guess", "hinted"]


def ask(meant: str) -> str:
    """Return the hint that `meant` may be meant; empty if it is empty."""
    return f"did you mean {meant}?" if meant else ""


def guess(name: str, candidates: Iterable[str]) -> str:
    """Return the hint which of the candidates may be meant by `name`."""
    return ask(close_name(name, candidates))


def hinted(text: str, name: str, candidates: Iterable[str]) -> str:
    """Return `text`, which says that there is no `name`, with the hint which of the candidates may be meant."""
    hint = guess(name, candidates)
    return f"{text} ({hint})" if hint else text


def close_name(name: str, candidates: Iterable[str]) -> str:
    """Return the candidate whose spelling is close to `name`; empty if there is none."""
    by_lower = {candidate.lower(): candidate for candidate in candidates}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1)
    return by_lower[close[0]] if close else ""

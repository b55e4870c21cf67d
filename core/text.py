"""Text for people: ages and lists in short, hints for misspelled names, control characters harmless for a terminal."""

import difflib
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Final

from core.redact import redact


def printable(text: str) -> str:
    r"""Return `text` with each character that is not printable escaped, such as `\x1b` or `\u202e`.

    Names, messages and Events of tenants' objects could otherwise move the cursor, change what was printed before, or
    reverse the direction of what follows.
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def one_line(text: str) -> str:
    """Return a message as one printable line without secrets."""
    return printable(redact(" ".join(text.split())))


def some_of(texts: Sequence[str], most: int, separator: str = ", ") -> str:
    """Return the first texts, at most so many, and how many more there are."""
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return separator.join(texts[:most]) + more


_AGE_UNITS: Final = ((86_400, "d", 2), (3600, "h", 2), (60, "m", 2))
"""Seconds of a unit, its letter, and from how many on it is used."""


def format_age(age: timedelta) -> str:
    """Return a duration in whole units, the largest that it has two of: `90s`, `45m`, `3h` or `12d`."""
    seconds = max(0, int(age.total_seconds()))
    for unit, letter, limit in _AGE_UNITS:
        if seconds >= limit * unit:
            return f"{seconds // unit}{letter}"
    return f"{seconds}s"


def ask(meant: str | None) -> str | None:
    """Return the hint that `meant` may be meant; or None if nothing is."""
    return f"did you mean {meant}?" if meant else None


def guess(name: str, candidates: Iterable[str]) -> str | None:
    """Return the hint which of the candidates may be meant by `name`."""
    return ask(close_name(name, candidates))


def hinted(text: str, name: str, candidates: Iterable[str]) -> str:
    """Return `text`, which says that there is no `name`, with the hint which of the candidates may be meant."""
    hint = guess(name, candidates)
    return f"{text} ({hint})" if hint else text


def close_name(name: str, candidates: Iterable[str]) -> str | None:
    """Return the candidate whose spelling is close to `name`; None if there is none."""
    by_lower = {candidate.lower(): candidate for candidate in candidates}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1)
    return by_lower[close[0]] if close else None

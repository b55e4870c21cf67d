"""Text for people: ages in short, and what users of the cluster control made harmless for a terminal."""

from datetime import timedelta
from typing import Final

from core.redact import redact

__all__ = ["format_age", "one_line", "printable"]


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


_AGE_UNITS: Final = ((86_400, "d", 2), (3600, "h", 2), (60, "m", 2))
"""Seconds of a unit, its letter, and from how many on it is used."""


def format_age(age: timedelta) -> str:
    """Return a duration in whole units, the largest that it has two of: `90s`, `45m`, `3h` or `12d`."""
    seconds = max(0, int(age.total_seconds()))
    for unit, letter, limit in _AGE_UNITS:
        if seconds >= limit * unit:
            return f"{seconds // unit}{letter}"
    return f"{seconds}s"

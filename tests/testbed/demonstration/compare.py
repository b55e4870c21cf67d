"""Compares two surveys of a volume, and names the differences. Pure."""

import stat
from collections import Counter
from dataclasses import dataclass

Survey = dict[str, dict[str, object]]
"""Path → what `survey.describe` returns for it."""


@dataclass(frozen=True)
class Comparison:
    """What two surveys have in common, and what not.

    Attributes:
        size_bytes: Of all regular files.
        differences: One line for each, in the order of paths.
    """

    files: int
    folders: int
    links: int
    size_bytes: int
    differences: tuple[str, ...]


def compare(before: Survey, after: Survey) -> Comparison:
    """Compare every property of every path."""
    differences = []
    for path in sorted(before.keys() | after.keys()):
        old, new = before.get(path), after.get(path)
        if old is None or new is None:
            differences.append(f"{path!r} {'was not there before' if old is None else 'is missing'}")
            continue
        keys = [key for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)]
        differences += [f"{path!r}: {key} was {old.get(key)}, is {new.get(key)}" for key in keys]
    kinds = Counter(each["type"] for each in before.values())
    sizes = [each.get("size", 0) for each in before.values()]
    return Comparison(
        files=kinds[stat.S_IFREG],
        folders=kinds[stat.S_IFDIR],
        links=kinds[stat.S_IFLNK],
        size_bytes=sum(size for size in sizes if isinstance(size, int)),
        differences=tuple(differences),
    )

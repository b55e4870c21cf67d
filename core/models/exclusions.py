"""What backups of file systems leave out by rules of an operator, and whether a path is left out. Pure.

The patterns are kopia's ignore rules, which are gitignore's, without exceptions (`!`) and without classes such
as `[:alpha:]`. A data mover gives them to kopia, counts what they leave out, and puts them into a tag of the snapshot,
where a restore finds what is not its own.
Source: kopia 0.23.1, internal/wcmatch/wcmatch.go, fs/ignorefs/ignorefs.go, snapshot/policy/files_policy.go.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Final, Self

from msgspec.structs import replace

from core.errors import ConfigError, ContractError
from core.models.base import Int64, WireModel, cut_text
from core.models.names import LEFT_OUT_ANNOTATION

__all__ = ["READY_SETS", "Exclusions", "LeftOut", "check_pattern", "read_left_out", "read_patterns"]

READY_SETS: Final[Mapping[str, tuple[str, ...]]] = {
    "lost+found": ("/lost+found/",),
    "caches": (".cache/", "__pycache__/", "**/.npm/_cacache/", "**/.gradle/caches/"),
    "snapshots": ("/.snapshot/", "/~snapshot/", "/.snapshots/", "/.zfs/", "/.snap/"),
}
"""Patterns by the name of a set. `snapshots` are the directories in which storage systems show older states.

Source: their names with ONTAP (.snapshot, ~snapshot), snapper (.snapshots), ZFS (.zfs) and CephFS (.snap).
"""

_MOST_PATTERNS: Final = 400
"""All of them are one argument of a data mover, which has at most 128 KiB."""

_MOST_ANNOTATED: Final = 100
_MOST_CHARACTERS: Final = 200
_LEAST_BYTES: Final = 4096
"""A smaller limit would leave symbolic links out: a link is as large as its text."""

_MOST_BYTES: Final = 2**63 - 1
"""The largest number that kopia takes."""

_NAMES: Final = 5
_NAME_BYTES: Final = 120
_DIGEST_DIGITS: Final = 12
_NEVER: Final = re.compile(r"(?!)")


class Exclusions(WireModel, omit_defaults=True):
    """The rules for one volume: patterns, files larger than `max_bytes`, other file systems mounted in it."""

    patterns: tuple[str, ...] = ()
    max_bytes: Int64 | None = None
    one_file_system: bool = False

    def __post_init__(self) -> None:
        """Reject what kopia would not take as it stands; msgspec converts the ValueError to a validation error."""
        for pattern in self.patterns:
            check_pattern(pattern)
        if len(self.patterns) > _MOST_PATTERNS:
            text = f"more than {_MOST_PATTERNS} patterns"
            raise ValueError(text)
        if self.max_bytes is not None and self.max_bytes < _LEAST_BYTES:
            text = f"the largest size must be at least {_LEAST_BYTES} bytes"
            raise ValueError(text)
        if self.max_bytes is not None and self.max_bytes > _MOST_BYTES:
            text = f"the largest size must be at most {_MOST_BYTES} bytes"
            raise ValueError(text)

    def __bool__(self) -> bool:
        """Return whether there is a rule."""
        return bool(self.patterns) or self.max_bytes is not None or self.one_file_system

    def __or__(self, other: "Exclusions") -> "Exclusions":
        """Return the rules of both; the smaller size counts."""
        sizes = [one.max_bytes for one in (self, other) if one.max_bytes is not None]
        return Exclusions(
            patterns=tuple(sorted({*self.patterns, *other.patterns})),
            max_bytes=min(sizes, default=None),
            one_file_system=self.one_file_system or other.one_file_system,
        )

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the rules in JSON, of a command line or a tag.

        Raises:
            ConfigError: they are invalid.
        """
        try:
            return cls.from_json(text)
        except ContractError as e:
            raise ConfigError(f"invalid exclusions: {e}") from e

    @property
    def digest(self) -> str:
        """What tells whether two backups left out by the same rules; empty: there are none."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:_DIGEST_DIGITS] if self else ""

    def excludes_name(self, path: str, *, is_dir: bool) -> bool:
        """Return whether a pattern names this entry itself: `path` is relative to the root of the volume.

        What is in a directory that is left out is left out too: see `excludes_path`.
        """
        entries, directories = _compile(self.patterns)
        return bool(entries.fullmatch(f"/{path}") or (is_dir and directories.fullmatch(f"/{path}")))

    def excludes_path(self, path: str, *, is_dir: bool) -> bool:
        """Return whether a pattern names the entry, or a directory that it is in."""
        parts = path.split("/")
        above = any(self.excludes_name("/".join(parts[:count]), is_dir=True) for count in range(1, len(parts)))
        return above or self.excludes_name(path, is_dir=is_dir)

    def excludes_size(self, size: int) -> bool:
        """Return whether a file, or the text of a link, is too large."""
        return self.max_bytes is not None and size > self.max_bytes


class LeftOut(WireModel, omit_defaults=True):
    """What the rules with this digest left out of a backup: files and their bytes, directories, the first names.

    What is in a directory counts too, except on other file systems and in snapshots of the storage. A tenant chooses
    the names.
    """

    rules: str
    files: Int64 = 0
    bytes: Int64 = 0
    directories: Int64 = 0
    names: tuple[str, ...] = ()

    @property
    def cut(self) -> "LeftOut":
        """The same with names for which the termination message has room."""
        return replace(self, names=tuple(cut_text(name, _NAME_BYTES) for name in self.names[:_NAMES]))

    def add(self, path: str, size: int | None) -> "LeftOut":
        """Return it with one more entry; a `size` of None: a directory."""
        is_dir = size is None
        return LeftOut(
            rules=self.rules,
            files=self.files + (not is_dir),
            bytes=self.bytes + (size or 0),
            directories=self.directories + is_dir,
            names=self.names if len(self.names) == _NAMES else (*self.names, path),
        )

    @property
    def text(self) -> str:
        """What to tell about it."""
        names = f": {', '.join(self.names)}" if self.names else ""
        found = f"{self.files} files with {self.bytes} bytes and {self.directories} directories"
        return f"left out {found} by exclusions (rules {self.rules}){names}"


def read_left_out(annotations: Mapping[str, str]) -> LeftOut | None:
    """Return what was left out of the backup with these annotations; None: there was no rule, or it is invalid."""
    return LeftOut.read_annotation(annotations, LEFT_OUT_ANNOTATION)


def read_patterns(lines: str) -> tuple[str, ...]:
    """Return the patterns in a text with one on each line, without those that are invalid; `@caches` is a ready set."""
    found = list[str]()
    for line in map(str.strip, lines.splitlines()):
        if line.startswith("@"):
            found += READY_SETS.get(line[1:], ())
        elif line:
            with suppress(ValueError):
                found.append(check_pattern(line))
    return tuple(dict.fromkeys(found))[:_MOST_ANNOTATED]


def check_pattern(pattern: str) -> str:
    """Return the pattern.

    Raises:
        ValueError: kopia would take it otherwise than this module, or not at all.
    """
    shown = cut_text(pattern, _MOST_CHARACTERS)
    if not pattern.strip("/*") or "//" in pattern:
        fault = "it is empty, has //, or leaves everything out"
    elif len(pattern) > _MOST_CHARACTERS:
        fault = f"it has more than {_MOST_CHARACTERS} characters"
    elif pattern != pattern.strip() or not pattern.isprintable():
        fault = "spaces at its ends and control characters are not allowed"
    elif pattern.startswith("!"):
        fault = "exceptions are not supported"
    else:
        try:
            re.compile(_translate(pattern))
        except (ValueError, re.error) as e:
            fault = str(e)
        else:
            return pattern
    text = f'pattern "{shown}": {fault}'
    raise ValueError(text)


@lru_cache(maxsize=8)
def _compile(patterns: tuple[str, ...]) -> tuple["re.Pattern[str]", "re.Pattern[str]"]:
    """Return what all patterns match, and what those match that are for directories only."""
    every = [_translate(one) for one in patterns if not one.endswith("/")]
    directories = [_translate(one) for one in patterns if one.endswith("/")]
    return _join(every), _join(directories)


def _join(expressions: Iterable[str]) -> "re.Pattern[str]":
    whole = "|".join(f"(?:{one})" for one in expressions)
    return re.compile(whole, re.DOTALL) if whole else _NEVER


_TOKEN: Final = re.compile(r"\\(?P<escaped>.)|\[(?P<set>(?:\\.|[^\]\\])*)\]|(?P<stars>\*+)|(?P<one>.)", re.DOTALL)
_ANYTHING: Final = ".*"
_ANY_DIRECTORIES: Final = "(?:.*/)?"
_CROSSING: Final = "(?:[^/]*?|[^/]+/)"
"""A star inside a component: kopia lets it also go over one slash, if what follows the star is right there."""


def _translate(pattern: str) -> str:
    """Return a pattern as a regular expression for a whole path that begins with a slash.

    kopia takes the first place where what is between two stars matches, and tries no other one: an atomic group.

    Raises:
        ValueError: kopia would reject it, or take it otherwise.
    """
    body = pattern.removesuffix("/")
    found, position, group = [] if body.startswith("/") else ["/"] if "/" in body else [_ANY_DIRECTORIES], 0, None
    while position < len(body):
        token = _TOKEN.match(body, position)
        if token is None or token["one"] in {"\\", "["}:
            text = "a \\ or [ without its end"
            raise ValueError(text)
        expression, position = _translate_token(body, token)
        if expression in {_CROSSING, _ANY_DIRECTORIES, _ANYTHING} and group is not None:
            found[group:] = ["(?>", *found[group:], ")"]
            group = None
        if expression == _CROSSING:
            group = len(found)
        found.append(expression)
    return "".join(found)


def _translate_token(body: str, token: "re.Match[str]") -> tuple[str, int]:
    """Return the expression for a token, and where the next one begins."""
    end = token.end()
    if token["escaped"] is not None:
        return re.escape(token["escaped"]), end
    if token["set"] is not None:
        return _translate_set(token["set"]), end
    if (stars := token["stars"]) is None:
        return "[^/]" if token["one"] == "?" else re.escape(token["one"]), end
    after = body[end : end + 1]
    if len(stars) > 1 and (token.start() == 0 or (body[token.start() - 1] == "/" and after in {"", "/"})):
        return (_ANY_DIRECTORIES, end + 1) if after == "/" else (_ANYTHING, end)
    return "[^/]*" if after in {"", "/"} else _CROSSING, end


def _translate_set(inside: str) -> str:
    """Return a set of characters, without classes: Unicode's would not be the same here."""
    negated = inside.startswith("!")
    found = re.findall(r"\\?.", inside[negated:], re.DOTALL)
    if not found or "[" in found:
        text = "an empty [], or a [ in it, is not supported"
        raise ValueError(text)
    # A `-` that nothing escapes stands for a range, unless it is at an end.
    parts = [
        "-" if one == "-" and 0 < number < len(found) - 1 else re.escape(one[-1]) for number, one in enumerate(found)
    ]
    return f"[{'^' * negated}{''.join(parts)}]"

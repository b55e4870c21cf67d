"""Settings that a transfer carries: exclusions, compression, bandwidth, and what a restore in place does. Pure.

The patterns are kopia's ignore rules, which are gitignore's, without exceptions (`!`) and without classes such
as `[:alpha:]`. A data mover gives them to kopia, counts what they leave out, and puts them into a tag of the snapshot,
where a restore finds what is not its own.
Source: kopia 0.23.1, internal/wcmatch/wcmatch.go, fs/ignorefs/ignorefs.go, snapshot/policy/files_policy.go.

The algorithms are in kopia 0.16.0, the version of Velero 1.17 and 1.18, and in all later ones up to 0.23.1, which have
two more: `zstd-best-compression`, deprecated in all of them, and `lz4`, deprecated first, and unreadable in 0.23.1.
Source: kopia 0.16.0, 0.17.0, 0.19.0, 0.21.1, 0.22.3 and 0.23.1, and its fork by Velero at 3ea24d208777 and
d946b1e75197, repo/compression/compressor_*.go.

Source: Velero main at 4a7db86f17d3, pkg/restore/actions/csi/pvc_action.go: `spec.restoreType` is set on every restore,
also where the claim did not exist.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Annotated, ClassVar, Final, Self

from msgspec import Meta, field
from msgspec.structs import replace

from core.errors import ConfigError, ContractError, Translated
from core.models.base import Int64, WireModel, cut_text
from core.models.job_output import OutputLine
from core.models.names import BANDWIDTH_ANNOTATION, LEFT_OUT_ANNOTATION
from core.models.units import parse_boolean
from core.text import hinted

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
_MOST_LINES: Final = 400
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
            raise ValueError(f"more than {_MOST_PATTERNS} patterns")
        if self.max_bytes is not None and self.max_bytes < _LEAST_BYTES:
            raise ValueError(f"the largest size must be at least {_LEAST_BYTES} bytes")
        if self.max_bytes is not None and self.max_bytes > _MOST_BYTES:
            raise ValueError(f"the largest size must be at most {_MOST_BYTES} bytes")

    def __bool__(self) -> bool:
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
        """Return the rules in JSON, of a command line or a tag; raise ConfigError if they are invalid."""
        with Translated(ContractError, ConfigError, "invalid exclusions"):
            return cls.from_json(text)

    @property
    def digest(self) -> str | None:
        """The same for two backups that left out by the same rules; None without any."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:_DIGEST_DIGITS] if self else None

    def excludes_name(self, path: str, *, is_dir: bool) -> bool:
        """Return whether a pattern names this entry itself: `path` is relative to the root of the volume."""
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
    the names, which are escaped.
    """

    annotation: ClassVar[str] = LEFT_OUT_ANNOTATION

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
        names = f": {', '.join(self.cut.names)}" if self.names else ""
        found = f"{self.files} files with {self.bytes} bytes and {self.directories} directories"
        return f"left out {found} by exclusions (rules {self.rules}){names}"


def read_patterns(lines: str) -> tuple[str, ...]:
    """Return the patterns in a text with one on each line, without those that are invalid; `@caches` is a ready set."""
    found = list[str]()
    # An annotation has room for thousands, and each takes a tenth of a millisecond.
    for line in map(str.strip, lines.splitlines()[:_MOST_LINES]):
        if line.startswith("@"):
            found += READY_SETS.get(line[1:], ())
        elif line:
            with suppress(ValueError):
                found.append(check_pattern(line))
    return tuple(dict.fromkeys(found))[:_MOST_ANNOTATED]


def check_pattern(pattern: str) -> str:
    """Return the pattern; raise ValueError if kopia would take it otherwise than this module, or not at all."""
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
    raise ValueError(f'pattern "{shown}": {fault}')


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
    """Return a pattern as a regular expression for a whole path that begins with a slash, or raise ValueError.

    kopia takes the first place where what is between two stars matches, and tries no other one: an atomic group.
    """
    body = pattern.removesuffix("/")
    found, position, group = [] if body.startswith("/") else ["/"] if "/" in body else [_ANY_DIRECTORIES], 0, None
    while position < len(body):
        token = _TOKEN.match(body, position)
        if token is None or token["one"] in {"\\", "["}:
            raise ValueError("a \\ or [ without its end")
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
        raise ValueError("an empty [], or a [ in it, is not supported")
    # A `-` that nothing escapes stands for a range, unless it is at an end.
    parts = [
        "-" if one == "-" and 0 < number < len(found) - 1 else re.escape(one[-1]) for number, one in enumerate(found)
    ]
    return f"[{'^' * negated}{''.join(parts)}]"


class Compression(StrEnum):
    """An algorithm, by kopia's name."""

    NONE = "none"
    ZSTD_FASTEST = "zstd-fastest"
    ZSTD = "zstd"
    ZSTD_BETTER = "zstd-better-compression"
    S2 = "s2-default"
    S2_BETTER = "s2-better"
    S2_PARALLEL_4 = "s2-parallel-4"
    S2_PARALLEL_8 = "s2-parallel-8"
    GZIP_FASTEST = "gzip-best-speed"
    GZIP = "gzip"
    GZIP_BEST = "gzip-best-compression"
    PGZIP_FASTEST = "pgzip-best-speed"
    PGZIP = "pgzip"
    PGZIP_BEST = "pgzip-best-compression"
    DEFLATE_FASTEST = "deflate-best-speed"
    DEFLATE = "deflate-default"
    DEFLATE_BEST = "deflate-best-compression"


def parse_compression(text: str) -> Compression:
    """Return the algorithm with that name; raise ConfigError if there is none, or kopia has deprecated it."""
    try:
        return Compression(text)
    except ValueError:
        allowed = ", ".join(Compression)
        raise ConfigError(hinted(f'must be one of {allowed}: "{text}"', text, Compression)) from None


_BytesPerSecond = Annotated[int, Meta(ge=0, le=2**53)]


class BandwidthLimits(WireModel, omit_defaults=True):
    """Bytes per second in each direction, as seen from the node; 0: no limit."""

    # The owning agent writes them when the data path may start, and on each change. A mover that finds none then has no
    # limits for its whole life.
    annotation: ClassVar[str] = BANDWIDTH_ANNOTATION

    upload_bytes_per_second: _BytesPerSecond = 0
    download_bytes_per_second: _BytesPerSecond = 0


FULL: Final = "full"
INCREMENTAL: Final = "incremental"
_PLAIN: Final = frozenset({"", "none"})

DELETE_EXTRA_FILES: Final = "DeleteExtraFiles"
"""An uploader setting of Velero 1.19: a restore into an existing volume deletes what the snapshot does not have."""

COMPARE_CONTENT: Final = "CompareContent"
"""One of ours, which Velero ignores: an incremental restore also reads files of equal size and time, and compares."""


@dataclass(frozen=True)
class InPlace:
    """How a restore goes into a volume that may have data; without it, as into a new one.

    `incremental`: what is equal is not written. `delete_extra_files`: what the snapshot does not have is deleted.
    `compare_content`: files are equal if their content is, whatever size and time say.
    """

    incremental: bool = False
    delete_extra_files: bool = False
    compare_content: bool = False

    @property
    def distrusting(self) -> "InPlace":
        """The same where size and time of a file do not say that it is equal."""
        return InPlace(
            incremental=self.incremental and self.compare_content,
            delete_extra_files=self.delete_extra_files,
            compare_content=self.compare_content,
        )

    @classmethod
    def of(cls, restore_type: str, settings: Mapping[str, str]) -> Self | None:
        """Return what `spec.restoreType`, in any case of letters, and the uploader settings ask for; None: plain.

        Raises:
            ConfigError: the type is unknown, or a setting is neither true nor false.
        """
        wanted = restore_type.lower()
        if wanted not in {*_PLAIN, FULL, INCREMENTAL}:
            raise ConfigError(f'unknown restore type "{restore_type}": use none, full or incremental')
        if wanted in _PLAIN:
            return None
        return cls(
            incremental=wanted == INCREMENTAL,
            delete_extra_files=read_switch(settings, DELETE_EXTRA_FILES),
            compare_content=read_switch(settings, COMPARE_CONTENT),
        )

    @property
    def restore_type(self) -> str:
        """The type, as `spec.restoreType` has it."""
        return INCREMENTAL if self.incremental else FULL


def read_switch(settings: Mapping[str, str], name: str) -> bool:
    """Return a setting that is true or false; absent and empty are false. Raise ConfigError if it is neither."""
    with Translated(ValueError, ConfigError, f"setting {name}"):
        return parse_boolean(settings.get(name, ""))


class PlannedEntries(WireModel, omit_defaults=True):
    """Entries with which a restore would do the same: files and links, their bytes, directories.

    `names` are the first paths, cut and escaped: a tenant chooses them.
    """

    files: Int64 = 0
    bytes: Int64 = 0
    directories: Int64 = 0
    names: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.files or self.directories)


class InPlacePlan(WireModel):
    """What a restore into a volume with data would do.

    `to_set` gets another owner, mode or time alone. `equal` stays as it is. `to_delete` is not in the snapshot, or has
    another type there. `kept` is not in the snapshot, and stays whatever is deleted: only what was looked at counts.
    `blocked` could not be restored. `refusal` is why the restore would fail before it writes anything; empty: it would
    not.
    """

    to_write: PlannedEntries = field(default_factory=PlannedEntries)
    to_set: PlannedEntries = field(default_factory=PlannedEntries)
    equal: PlannedEntries = field(default_factory=PlannedEntries)
    to_delete: PlannedEntries = field(default_factory=PlannedEntries)
    kept: PlannedEntries = field(default_factory=PlannedEntries)
    blocked: PlannedEntries = field(default_factory=PlannedEntries)
    refusal: str = ""


PLAN_LINE: Final = OutputLine("nodeagent.io/restore-plan", InPlacePlan)


class EndedPlan(WireModel):
    """The termination message of `plan-restore` that came to its end: how many entries it compared."""

    entries: Int64

"""Types of flags: each converts what was typed, or says in one line which flag is wrong, and what is allowed.

Source of the spelling of maps and booleans: Velero v1.18, pkg/cmd/util/flag/map.go; pflag v1, bool.go.
"""

import csv
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import click
from click.shell_completion import CompletionItem

from core.errors import ConfigError
from core.kube.types import PodToleration
from core.models.names import OBJECT_NAME, SUBDOMAIN
from core.models.units import parse_positive_duration, parse_quantity
from core.spelling import guess

__all__ = [
    "DURATION",
    "FILE",
    "NAME",
    "NAMES",
    "NAMESPACE",
    "QUANTITY",
    "SWITCH",
    "TAINTS",
    "FlagType",
    "PathType",
    "TextFile",
    "matching",
    "not_allowed",
    "one_of",
    "parse_annotations",
    "parse_labels",
    "parse_pairs",
    "read_file",
]

_T = TypeVar("_T")

_SWITCHES: Final = dict.fromkeys(("1", "t", "T", "TRUE", "true", "True"), True) | dict.fromkeys(
    ("0", "f", "F", "FALSE", "false", "False"), False
)
"""Source: Go, strconv.ParseBool."""

_LABEL: Final = r"[A-Za-z0-9](?:[-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_LABEL_KEY: Final = rf"(?:{SUBDOMAIN}/)?{_LABEL}"
_LABEL_VALUE: Final = rf"(?:{_LABEL})?"
_LONGEST_PREFIX: Final = 253
"""Of a key, before `/`."""
_NAMESPACE: Final = r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?"
"""Source: Kubernetes v1.34, apimachinery pkg/util/validation."""

_TAINT: Final = re.compile(rf"(?P<key>(?:{_LABEL_KEY})?)(?:=(?P<value>{_LABEL_VALUE}))?(?::(?P<effect>\w+))?")
_EFFECTS: Final = ("NoSchedule", "PreferNoSchedule", "NoExecute")

_LARGEST_QUANTITY: Final = 2.0**63
"""Source: Kubernetes v1.34, apimachinery pkg/api/resource/quantity.go."""


class FlagType(click.ParamType[_T]):
    """What `parse` returns; the message of its ValueError or ConfigError follows the name of the flag."""

    name = "value"

    def __init__(self, parse: Callable[[str], _T]) -> None:
        """Convert by `parse`."""
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, _: click.Context | None) -> _T:  # noqa: ANN401 - click's
        """Return the converted value; a default may be converted already."""
        flag = max(param.opts, key=len) if param is not None else "value"
        converted: _T = self.read(flag, value) if isinstance(value, str) else value
        return converted

    def read(self, flag: str, value: str) -> _T:
        """Convert a value of this flag.

        Raises:
            ConfigError: it is not allowed.
        """
        try:
            return self._parse(value)
        except (ValueError, ConfigError) as e:
            raise ConfigError(f"{flag}: {e}") from e


class PathType(FlagType[_T]):
    """The same of a path, which a shell completes."""

    def shell_complete(self, _ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Let the shell propose files."""
        return [CompletionItem(incomplete, type="file")]


def not_allowed(value: str, expected: str) -> ValueError:
    """Return the error about a value, or a part of one."""
    return ValueError(f'"{value}" is not allowed: expected {expected}')


def matching(pattern: str, expected: str) -> Callable[[str], str]:
    """Return what parses a text that matches a regular expression; an empty text is as if the flag was not given."""

    def parse(text: str) -> str:
        if text and not re.fullmatch(pattern, text):
            raise not_allowed(text, expected)
        return text

    return parse


def one_of(*allowed: str) -> FlagType[str]:
    """Return the type of a flag with these values."""

    def parse(text: str) -> str:
        if text not in allowed:
            hint = guess(text, allowed)
            raise not_allowed(text, f"one of {', '.join(allowed)}" + (f" ({hint})" if hint else ""))
        return text

    return FlagType(parse)


def _parse_switch(text: str) -> bool:
    if text not in _SWITCHES:
        raise not_allowed(text, "true or false")
    return _SWITCHES[text]


def _parse_names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if "" in names:
        raise not_allowed("", _NAME_RULE)
    return tuple(map(_parse_name, names))


def _parse_quantity(text: str) -> str:
    """Return a Kubernetes quantity that is not negative; `0` is none."""
    try:
        number = float(parse_quantity(text))
    except ValueError:
        number = -1.0
    if not 0 <= number < _LARGEST_QUANTITY:
        raise not_allowed(text, "a quantity such as 500m, 1, 128Mi or 1Gi; 0 is none")
    return text if number else "0"


def parse_pairs(text: str) -> dict[str, str]:
    """Return pairs such as `a=1,b=2`; quotes enclose a pair with a comma, as in CSV.

    Raises:
        ValueError: a part is no pair.
    """
    try:
        parts = next(csv.reader([text]), []) if text else []
    except csv.Error as e:
        raise ValueError(f"the value is not allowed: {e}") from e
    found = {}
    for part in parts:
        key, sign, value = part.partition("=")
        if not sign or not key:
            raise not_allowed(part, "key1=value1,key2=value2")
        found[key] = value
    return found


def parse_labels(text: str) -> dict[str, str]:
    """Return labels.

    Raises:
        ValueError: a part is none.
    """
    found = parse_pairs(text)
    for key, value in found.items():
        if not _is_key(key) or not re.fullmatch(_LABEL_VALUE, value):
            raise not_allowed(f"{key}={value}", "key=value, both valid in a label")
    return found


def parse_annotations(text: str) -> dict[str, str]:
    """Return annotations.

    Raises:
        ValueError: a part is none.
    """
    found = parse_pairs(text)
    for key, value in found.items():
        if not _is_key(key):
            raise not_allowed(f"{key}={value}", "key=value, with a key that is valid in an annotation")
    return found


def _is_key(key: str) -> bool:
    return bool(re.fullmatch(_LABEL_KEY, key)) and len(key.rpartition("/")[0]) <= _LONGEST_PREFIX


def _parse_taint(text: str) -> PodToleration:
    """Return a v1 Toleration of a taint as kubectl writes it: `key=value:Effect`, `key:Effect`, or `*`."""
    if text == "*":
        return {"operator": "Exists"}
    found = _TAINT.fullmatch(text)
    effect = found["effect"] if found else None
    if found is None or not (found["key"] or effect) or (effect is not None and effect not in _EFFECTS):
        raise not_allowed(text, f"key=value:EFFECT, key:EFFECT, key or *; EFFECT is one of {', '.join(_EFFECTS)}")
    toleration: PodToleration = {"key": found["key"]} if found["key"] else {}
    value = found["value"]
    if value is not None and not found["key"]:
        raise not_allowed(text, "a key before =")
    toleration["operator"] = "Exists" if value is None else "Equal"
    if value is not None:
        toleration["value"] = value
    return toleration | ({"effect": effect} if effect else {})


class TextFile(NamedTuple):
    """A file that was read."""

    path: str
    content: str


def read_file(path: str) -> TextFile | None:
    """Return a text file that is not empty; None without a path.

    Raises:
        ValueError: it cannot be read, or is empty.
    """
    if not path:
        return None
    try:
        content = Path(path).read_text(encoding="utf-8")
    except OSError as e:
        raise ValueError(f"{path} cannot be read: {e.strerror}") from e
    except UnicodeError as e:
        raise ValueError(f"{path} is not a text file in UTF-8") from e
    if not content.strip():
        raise ValueError(f"{path} is empty")
    return TextFile(path, content)


_NAME_RULE: Final = "the name of an object: a-z, 0-9, - and ., a letter or digit first and last"
_parse_name: Final = matching(OBJECT_NAME.pattern, _NAME_RULE)

SWITCH: Final = FlagType(_parse_switch)
"""Written as in Go: `--wait`, `--wait=true`, `--wait=false`."""
NAME: Final = FlagType(_parse_name)
"""Of an object."""
NAMES: Final = FlagType(_parse_names)
"""With commas between them."""
NAMESPACE: Final = FlagType(matching(_NAMESPACE, "at most 63 of a-z, 0-9 and -, a letter or digit first and last"))
QUANTITY: Final = FlagType(_parse_quantity)
DURATION: Final = FlagType(parse_positive_duration)
TAINTS: Final = FlagType(lambda text: tuple(map(_parse_taint, text.split(","))))
FILE: Final = PathType(read_file)

"""The values of a command's flags as they were typed, and what is allowed as one.

A wrong value is one line that names the flag, the value and what is allowed.
Source of the spelling of maps and booleans: Velero v1.18, pkg/cmd/util/flag/map.go; pflag v1, bool.go.
"""

import csv
import re
from collections.abc import Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Final

from core.errors import ConfigError
from core.models.base import JsonDict
from core.models.names import OBJECT_NAME, SUBDOMAIN
from core.models.units import parse_duration, parse_quantity
from core.spelling import guess

__all__ = ["GivenFlags", "destination"]

_SWITCHES: Final = dict.fromkeys(("1", "t", "T", "TRUE", "true", "True"), True) | dict.fromkeys(
    ("0", "f", "F", "FALSE", "false", "False"), False
)
"""Source: Go, strconv.ParseBool."""

_LABEL: Final = r"[A-Za-z0-9](?:[-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_KEY: Final = re.compile(rf"(?:{SUBDOMAIN}/)?{_LABEL}")
_LABEL_VALUE: Final = re.compile(rf"(?:{_LABEL})?")
_NAMESPACE: Final = re.compile(r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?")
"""Source: Kubernetes v1.34, apimachinery pkg/util/validation."""

_LARGEST_QUANTITY: Final = 2.0**63
"""Source: Kubernetes v1.34, apimachinery pkg/api/resource/quantity.go."""

_TAINT: Final = re.compile(rf"(?P<key>(?:{_KEY.pattern})?)(?:=(?P<value>{_LABEL_VALUE.pattern}))?(?::(?P<effect>\w+))?")
_EFFECTS: Final = ("NoSchedule", "PreferNoSchedule", "NoExecute")


def destination(flag: str) -> str:
    """Return the name of the parameter that has the value of a flag, such as `no_secret` for `--no-secret`."""
    return flag.lstrip("-").replace("-", "_")


class GivenFlags:
    """What was typed: texts by the names of their parameters, None where a flag was not given.

    All methods raise ConfigError for a value that is not allowed.
    """

    def __init__(self, values: Mapping[str, str | tuple[str, ...] | None]) -> None:
        """Read `values`; a flag that may be repeated has a tuple."""
        self._values = values

    def has(self, flag: str) -> bool:
        """Return whether the flag was given."""
        return self._values.get(destination(flag)) not in {None, ()}

    def text(self, flag: str, default: str = "") -> str:
        """Return any text."""
        value = self._values.get(destination(flag))
        return value if isinstance(value, str) else default

    def texts(self, flag: str) -> tuple[str, ...]:
        """Return the values of a flag that may be repeated."""
        value = self._values.get(destination(flag))
        return value if isinstance(value, tuple) else ()

    def switch(self, flag: str, *, default: bool = False) -> bool:
        """Return a boolean."""
        if not self.has(flag):
            return default
        value = self.text(flag)
        if value not in _SWITCHES:
            raise _wrong(flag, value, "true or false")
        return _SWITCHES[value]

    def choice(self, flag: str, allowed: Iterable[str], default: str = "") -> str:
        """Return one of the allowed values."""
        value, allowed = self.text(flag, default), tuple(allowed)
        if value not in allowed:
            hint = guess(value, allowed)
            raise _wrong(flag, value, f"one of {', '.join(allowed)}" + (f" ({hint})" if hint else ""))
        return value

    def name(self, flag: str, default: str = "") -> str:
        """Return the name of an object, or the default."""
        value = self.text(flag) or default
        if value:
            _check_name(flag, value)
        return value

    def names(self, flag: str) -> tuple[str, ...]:
        """Return names of objects, from repeated flags and lists with commas."""
        names = tuple(name for text in self.texts(flag) for name in text.split(","))
        for name in names:
            _check_name(flag, name)
        return names

    def namespace(self, flag: str, default: str = "") -> str:
        """Return the name of a namespace, or the default, which is checked too."""
        value = self.text(flag) or default
        if value and not _NAMESPACE.fullmatch(value):
            raise _wrong(flag, value, "at most 63 of a-z, 0-9 and -, a letter or digit first and last")
        return value

    def quantity(self, flag: str, default: str) -> str:
        """Return a Kubernetes quantity that is not negative; `0` is none."""
        value = self.text(flag, default)
        try:
            number = float(parse_quantity(value))
        except ValueError:
            number = -1.0
        if not 0 <= number < _LARGEST_QUANTITY:
            raise _wrong(flag, value, "a quantity such as 500m, 1, 128Mi or 1Gi; 0 is none")
        return value if number else "0"

    def duration(self, flag: str, default: timedelta) -> timedelta:
        """Return a duration that is longer than nothing."""
        if not self.has(flag):
            return default
        value = self.text(flag)
        try:
            duration = parse_duration(value)
        except ValueError:
            duration = timedelta()
        if duration <= timedelta():
            raise _wrong(flag, value, "a duration such as 30s, 10m or 1h30m")
        return duration

    def pairs(self, flag: str) -> dict[str, str]:
        """Return pairs such as `a=1,b=2`; quotes enclose a pair with a comma, as in CSV."""
        found: dict[str, str] = {}
        for text in self.texts(flag):
            try:
                parts = next(csv.reader([text]), []) if text else []
            except csv.Error as e:
                raise ConfigError(f"{flag}: the value is not allowed: {e}") from e
            for part in parts:
                key, sign, value = part.partition("=")
                if not sign or not key:
                    raise _wrong(flag, part, "key1=value1,key2=value2")
                found[key] = value
        return found

    def labels(self, flag: str, *, reserved: Iterable[str] = ()) -> dict[str, str]:
        """Return labels."""
        found = self.pairs(flag)
        for key, value in found.items():
            if not _is_key(key) or not _LABEL_VALUE.fullmatch(value):
                raise _wrong(flag, f"{key}={value}", "key=value, both valid in a label")
            if key in reserved:
                raise _wrong(flag, f"{key}={value}", f"other keys than {', '.join(reserved)}, which select the agents")
        return found

    def annotations(self, flag: str) -> dict[str, str]:
        """Return annotations."""
        found = self.pairs(flag)
        for key, value in found.items():
            if not _is_key(key):
                raise _wrong(flag, f"{key}={value}", "key=value, with a key that is valid in an annotation")
        return found

    def tolerations(self, flag: str) -> tuple[JsonDict, ...]:
        """Return v1 Tolerations, each from a taint as kubectl writes it: `key=value:Effect`, `key:Effect`, or `*`."""
        return tuple(_parse_taint(flag, part) for text in self.texts(flag) for part in text.split(","))

    def file(self, flag: str) -> str:
        """Return the content of a text file that is not empty."""
        path = self.text(flag)
        try:
            content = Path(path).read_text(encoding="utf-8")
        except OSError as e:
            raise ConfigError(f"{flag}: {path} cannot be read: {e.strerror}") from e
        except ValueError as e:
            raise ConfigError(f"{flag}: {path} is not a text file in UTF-8") from e
        if not content.strip():
            raise ConfigError(f"{flag}: {path} is empty")
        return content

    def directory(self, flag: str, default: str) -> str:
        """Return an absolute path."""
        value = self.text(flag, default)
        if not value.strip("/") or not value.startswith("/") or ".." in value.split("/"):
            raise _wrong(flag, value, f"an absolute path such as {default}")
        return value


def _wrong(flag: str, value: str, allowed: str) -> ConfigError:
    return ConfigError(f'{flag}: "{value}" is not allowed: expected {allowed}')


def _is_key(key: str) -> bool:
    return bool(_KEY.fullmatch(key)) and len(key.rpartition("/")[0]) <= 253  # noqa: PLR2004 - as in OBJECT_NAME


def _check_name(flag: str, value: str) -> None:
    if not OBJECT_NAME.fullmatch(value):
        raise _wrong(flag, value, "the name of an object: a-z, 0-9, - and ., a letter or digit first and last")


def _parse_taint(flag: str, text: str) -> JsonDict:
    if text == "*":
        return {"operator": "Exists"}
    found = _TAINT.fullmatch(text)
    effect = found["effect"] if found else None
    if found is None or not (found["key"] or effect) or (effect is not None and effect not in _EFFECTS):
        raise _wrong(flag, text, f"key=value:EFFECT, key:EFFECT, key or *; EFFECT is one of {', '.join(_EFFECTS)}")
    toleration: JsonDict = {"key": found["key"]} if found["key"] else {}
    value = found["value"]
    if value is not None and not found["key"]:
        raise _wrong(flag, text, "a key before =")
    toleration["operator"] = "Exists" if value is None else "Equal"
    if value is not None:
        toleration["value"] = value
    return toleration | ({"effect": effect} if effect else {})

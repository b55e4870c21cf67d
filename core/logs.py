"""Log formats (text and json), levels and fields of every process; only the fields that are named here are printed."""

import json
import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final, TextIO, TypedDict, Unpack

from core.errors import ConfigError
from core.redact import Redactor

LOG_FORMATS: Final = ("text", "json")

LEVELS: Final[Mapping[str, int]] = {
    "trace": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "fatal": logging.CRITICAL,
    "panic": logging.CRITICAL,
}
"""The values of `--log-level`: Velero's levels, mapped to Python's.

Source: Velero v1.18, `--log-level` of `velero node-agent server`.
"""

_LEVEL_NAMES: Final = {level: name for name, level in LEVELS.items() if name not in {"trace", "warn", "panic"}}

_CHATTY: Final = ("aiohttp", "asyncio", "kubernetes_asyncio")
"""Libraries that log requests and responses, including Secrets, below WARNING."""

_ATTRIBUTE: Final = "fields"


class Fields(TypedDict, total=False):
    """The fields of a record; one key has the same meaning everywhere."""

    kind: str
    namespace: str
    name: str
    uid: str
    phase: str
    node: str
    pod: str
    reason: str
    seconds: float
    bytes: int


_NAMES: Final = tuple(Fields.__annotations__)


def fields(**values: Unpack[Fields]) -> dict[str, Any]:
    """Return `values` as `extra=` of a logging call.

    They become one attribute of the record, since logging rejects `name` in a plain `extra`; the other keys work there.
    """
    return {_ATTRIBUTE: values}


def set_up_logging(
    level: str, log_format: str, stream: TextIO | None = None, *, redactor: Redactor | None = None
) -> None:
    """Make the root logger write to `stream` only (default: standard error), without secrets.

    `redactor` replaces known values too. Raise ConfigError if level or format is unknown.
    """
    if level.lower() not in LEVELS:
        raise ConfigError(f'log level: must be one of {", ".join(LEVELS)}: "{level}"')
    if log_format not in LOG_FORMATS:
        raise ConfigError(f'log format: must be one of {", ".join(LOG_FORMATS)}: "{log_format}"')
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_Formatter(redactor or Redactor(), as_json=log_format == "json"))
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(LEVELS[level.lower()])
    for library in _CHATTY:
        logging.getLogger(library).setLevel(max(logging.WARNING, LEVELS[level.lower()]))


class _Formatter(logging.Formatter):
    """The formats, without secrets: one JSON object a line, or `key=value` pairs, in Velero's order.

    That is time, level, message, fields; a traceback is one of them.
    """

    def __init__(self, redactor: Redactor, *, as_json: bool) -> None:
        super().__init__()
        self._redactor = redactor
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        """Return the record's line."""
        redact = self._redactor.redact
        pairs = {key: redact(value) if isinstance(value, str) else value for key, value in _pairs(record).items()}
        if self._as_json:
            return json.dumps(pairs, ensure_ascii=False, default=str)
        return " ".join(f"{key}={_quoted(value)}" for key, value in pairs.items())


def _pairs(record: logging.LogRecord) -> dict[str, Any]:
    moment = datetime.fromtimestamp(record.created, UTC)
    pairs: dict[str, Any] = {
        "time": moment.strftime("%Y-%m-%dT%H:%M:%S.") + f"{moment.microsecond // 1000:03d}Z",
        "level": _LEVEL_NAMES.get(record.levelno, record.levelname.lower()),
        "msg": record.getMessage(),
        "logger": record.name,
    }
    values = vars(record) | {"name": None} | getattr(record, _ATTRIBUTE, {})
    shown = ((key, values[key]) for key in _NAMES if values.get(key) not in {None, ""})
    pairs |= {key: round(value, 3) if isinstance(value, float) else value for key, value in shown}
    if record.exc_info:
        pairs["traceback"] = logging.Formatter().formatException(record.exc_info)
    return pairs


def _quoted(value: object) -> str:
    text = str(value)
    plain = text.isprintable() and not any(mark in text for mark in ' "=')
    return text if plain and text else json.dumps(text, ensure_ascii=False)

"""How every process of the project logs.

Knows the two formats (text and json), the levels, and the fields a record may carry. Does not
know what anybody logs. Only the fields named here are printed: whatever else hangs on a record
stays out of the log.
"""

import json
import logging
import sys
from collections.abc import Mapping, MutableMapping
from datetime import UTC, datetime
from typing import Any, Final, TextIO, TypedDict, Unpack

from core.errors import ConfigError

__all__ = ["LEVELS", "LOG_FORMATS", "BoundLogger", "Fields", "bind", "fields", "set_up_logging"]

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
"""The levels that `--log-level` takes: those of the peer, on the levels there are here.

Source: Velero v1.18, `--log-level` of `velero node-agent server`.
"""

_LEVEL_NAMES: Final = {
    logging.DEBUG: "debug",
    logging.INFO: "info",
    logging.WARNING: "warning",
    logging.ERROR: "error",
    logging.CRITICAL: "fatal",
}

_CHATTY: Final = ("aiohttp", "asyncio", "kubernetes_asyncio")
"""Libraries that log requests and answers, Secrets among them, below WARNING."""

_ATTRIBUTE: Final = "fields"


class Fields(TypedDict, total=False):
    """What a record may tell beside its message; one key a thing, everywhere."""

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
    """Return `values` in the form that `extra=` of a logging call takes.

    They travel as one attribute of the record: `name` in a plain `extra` would be refused,
    since a record's `name` is its logger's. The other keys work in a plain `extra` too.
    """
    return {_ATTRIBUTE: values}


class BoundLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger that adds the fields it is bound to; those of a call win."""

    def process(self, msg: object, kwargs: MutableMapping[str, Any]) -> tuple[object, MutableMapping[str, Any]]:
        """Merge the bound fields with those of this call."""
        extra = dict(kwargs.get("extra") or {})
        extra[_ATTRIBUTE] = {**(self.extra or {}), **extra.get(_ATTRIBUTE, {})}
        return msg, {**kwargs, "extra": extra}


def bind(logger: logging.Logger | BoundLogger, **values: Unpack[Fields]) -> BoundLogger:
    """Return a logger that adds `values`, and what `logger` is bound to, to each record."""
    if isinstance(logger, BoundLogger):
        return BoundLogger(logger.logger, {**(logger.extra or {}), **values})
    return BoundLogger(logger, dict(values))


def set_up_logging(level: str, log_format: str, stream: TextIO | None = None) -> None:
    """Make the root logger write to `stream` (standard error by default), and to nothing else.

    Raises:
        ConfigError: the level or the format is none that there is.
    """
    if level.lower() not in LEVELS:
        message = f"log level {level!r} is none of {', '.join(LEVELS)}"
        raise ConfigError(message)
    if log_format not in LOG_FORMATS:
        message = f"log format {log_format!r} is none of {', '.join(LOG_FORMATS)}"
        raise ConfigError(message)
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_JsonFormatter() if log_format == "json" else _TextFormatter())
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(LEVELS[level.lower()])
    for library in _CHATTY:
        logging.getLogger(library).setLevel(max(logging.WARNING, LEVELS[level.lower()]))


class _TextFormatter(logging.Formatter):
    """One line of `key=value` pairs, in the peer's order: time, level, message, fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record's line, a traceback quoted into it."""
        return " ".join(f"{key}={_quoted(value)}" for key, value in _pairs(record).items())


class _JsonFormatter(logging.Formatter):
    """One JSON object a line, with the keys of the text format."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record's line."""
        return json.dumps(_pairs(record), ensure_ascii=False, default=str)


def _pairs(record: logging.LogRecord) -> dict[str, Any]:
    moment = datetime.fromtimestamp(record.created, UTC)
    pairs: dict[str, Any] = {
        "time": moment.strftime("%Y-%m-%dT%H:%M:%S.") + f"{moment.microsecond // 1000:03d}Z",
        "level": _LEVEL_NAMES.get(record.levelno, record.levelname.lower()),
        "msg": record.getMessage(),
        "logger": record.name,
    }
    told = vars(record) | {"name": None} | getattr(record, _ATTRIBUTE, {})
    pairs |= {key: _shown(told[key]) for key in _NAMES if told.get(key) not in {None, ""}}
    if record.exc_info:
        pairs["traceback"] = logging.Formatter().formatException(record.exc_info)
    return pairs


def _shown(value: object) -> object:
    return round(value, 3) if isinstance(value, float) else value


def _quoted(value: object) -> str:
    text = str(value)
    plain = text.isprintable() and not any(mark in text for mark in ' "=')
    return text if plain and text else json.dumps(text, ensure_ascii=False)

"""The value types of the configuration, and the error for each invalid value.

Knows Kubernetes' rules for the names and quantities that become part of a pod or a PVC: a value
that the API server would reject is invalid here, or every transfer would fail for one typing error.
Does not know the configuration's keys (`nodeagent.config.keys`).
Source: Kubernetes v1.34, apimachinery pkg/util/validation and pkg/apis/core/validation.
"""

import re
from datetime import timedelta
from typing import Annotated, Final

from pydantic import AfterValidator, BeforeValidator, StrictStr, WithJsonSchema
from pydantic_core import PydanticCustomError

from core.models.exclusions import check_pattern
from core.models.names import SUBDOMAIN
from core.models.units import parse_duration, parse_quantity

__all__ = [
    "AbsolutePath",
    "AnnotationMap",
    "Duration",
    "DurationText",
    "HostName",
    "KeyPrefix",
    "LabelKey",
    "LabelMap",
    "LabelValue",
    "MountPath",
    "ObjectName",
    "OptionalDurationText",
    "OptionalLabelKey",
    "Pattern",
    "QuantityText",
    "expected",
    "is_at_most",
    "is_zero",
]

_NAME_LIMIT: Final = 253
_LABEL_LIMIT: Final = 63
_ANNOTATIONS_LIMIT_BYTES: Final = 256 * 1024
"""All annotations of an object together. Source: apimachinery pkg/api/validation."""

_LABEL_NAME: Final = re.compile(r"[A-Za-z0-9](?:[-A-Za-z0-9_.]*[A-Za-z0-9])?")
_DOMAIN: Final = re.compile(SUBDOMAIN)
_KEY_PREFIX: Final = re.compile(r"[A-Za-z0-9][-A-Za-z0-9_.]*(?:/[-A-Za-z0-9_.]*)?")
_HOST: Final = re.compile(r"[A-Za-z0-9](?:[-A-Za-z0-9_.:]*[A-Za-z0-9])?")
_PATH: Final = re.compile(r"(?:/[A-Za-z0-9_@+-][A-Za-z0-9_.@+-]*)+")
"""Without hidden directories, so without `.` and `..`."""

_IMAGE_DIRECTORIES: Final = frozenset(
    {"bin", "credentials", "dev", "etc", "lib", "lib64", "opt", "proc", "run", "sbin", "scratch", "sys", "usr", "var"}
)
"""Directories at the top of a mover pod that have a content of their own."""

_QUANTITY_PATTERN: Final = r"(?:[+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+|[numkMGTPE]|[KMGTPE]i)?)?"
"""For readers of the schema; `core.models.units` decides."""

_DURATION_PATTERN: Final = r"[+]?(?:(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:ns|us|µs|μs|ms|s|m|h))+"
"""As above."""


def expected(what: str) -> PydanticCustomError:
    """Return the error for an invalid value where `what` was expected."""
    return PydanticCustomError("expected", "expected {expected}", {"expected": what})


def is_at_most(request: str, limit: str) -> bool:
    """Return whether the quantity `request` is at most `limit`; a limit of 0 is no limit."""
    bound = parse_quantity(limit)
    return not bound or parse_quantity(request) <= bound


def is_zero(quantity: str) -> bool:
    """Return whether the quantity is 0, in any notation."""
    return not parse_quantity(quantity)


def _check_object_name(name: str) -> str:
    if name and (len(name) > _NAME_LIMIT or not _DOMAIN.fullmatch(name)):
        raise expected("a name of lower-case letters, digits, '-' and '.'")
    return name


def _is_label_key(key: str) -> bool:
    prefix, slash, name = key.rpartition("/")
    if len(name) > _LABEL_LIMIT or not _LABEL_NAME.fullmatch(name):
        return False
    return not slash or (len(prefix) <= _NAME_LIMIT and _DOMAIN.fullmatch(prefix) is not None)


def _check_label_key(key: str) -> str:
    if not _is_label_key(key):
        raise expected("a key such as example.com/name: an optional domain, and a name of at most 63 characters")
    return key


def _check_optional_label_key(key: str) -> str:
    return key and _check_label_key(key)


def _check_label_value(value: str) -> str:
    if value and (len(value) > _LABEL_LIMIT or not _LABEL_NAME.fullmatch(value)):
        raise expected(
            "a label value: at most 63 letters, digits, '-', '_' and '.', with a letter or digit at each end"
        )
    return value


def _check_annotation_key(key: str) -> str:
    # Source: Kubernetes takes capital letters in the domain of an annotation's key.
    _check_label_key(key.lower())
    return key


def _check_pattern(pattern: str) -> str:
    try:
        return check_pattern(pattern)
    except ValueError as e:
        raise expected(f"a pattern that kopia takes: {e}") from e


def _check_key_prefix(prefix: str) -> str:
    if not _KEY_PREFIX.fullmatch(prefix):
        raise expected('the beginning of a key such as "example.com/" or "example.com/team"')
    return prefix


def _check_host(name: str) -> str:
    if name and (len(name) > _NAME_LIMIT or not _HOST.fullmatch(name)):
        raise expected("a host name or an IP address")
    return name


def _check_path(path: str) -> str:
    if path and not _PATH.fullmatch(path):
        raise expected('an absolute path such as "/export/backups"')
    return path


def _check_mount_path(path: str) -> str:
    if not path or _check_path(path).split("/")[1] in _IMAGE_DIRECTORIES:
        raise expected('a path outside of the directories that a mover pod has, such as "/backups"')
    return path


def _check_text(text: str) -> str:
    # JSON can express half of a surrogate pair, which cannot be encoded.
    if text.encode(errors="ignore").decode() != text:
        raise expected("text")
    return text


def _check_annotations(annotations: dict[str, str]) -> dict[str, str]:
    size = sum(len(key.encode()) + len(value.encode()) for key, value in annotations.items())
    if size > _ANNOTATIONS_LIMIT_BYTES:
        raise expected(f"annotations of at most {_ANNOTATIONS_LIMIT_BYTES // 1024} KiB in total")
    return annotations


def _check_quantity(text: str) -> str:
    if not text:
        return text
    try:
        number = parse_quantity(text)
    except (ValueError, ArithmeticError):
        number = None
    # Also "-0", which no number of things is.
    if number is None or text.startswith("-"):
        raise expected('a quantity such as "500m", "2" or "4Gi"')
    return text


def _parse_duration(value: object) -> timedelta:
    if isinstance(value, timedelta):
        return value
    try:
        duration = parse_duration(value) if isinstance(value, str) else timedelta()
    except ValueError:
        duration = timedelta()
    if duration <= timedelta():
        raise expected('a positive duration such as "30m" or "6h"')
    return duration


def _check_duration(text: str) -> str:
    _parse_duration(text)
    return text


def _check_optional_duration(text: str) -> str:
    try:
        parse_duration(text or "0")
    except ValueError:
        valid = False
    else:
        valid = not text.startswith("-")
    if not valid:
        raise expected('a duration such as "30m" or "6h", or "0"')
    return text


def _schema(pattern: str, **more: object) -> WithJsonSchema:
    """Return the schema of a string: `pattern` as JSON Schema has it, anchored at both ends."""
    return WithJsonSchema({"type": "string", "pattern": f"^(?:{pattern})$", **more})


_LABEL_KEY_PATTERN: Final = rf"(?:{_DOMAIN.pattern}/)?{_LABEL_NAME.pattern}"

ObjectName = Annotated[
    StrictStr, AfterValidator(_check_object_name), _schema(f"(?:{_DOMAIN.pattern})?", maxLength=_NAME_LIMIT)
]
"""The name of an object, such as a storage class; empty: none."""

HostName = Annotated[StrictStr, AfterValidator(_check_host), _schema(f"(?:{_HOST.pattern})?", maxLength=_NAME_LIMIT)]

AbsolutePath = Annotated[StrictStr, AfterValidator(_check_path), _schema(f"(?:{_PATH.pattern})?")]
"""A path on a server; empty: none."""

MountPath = Annotated[StrictStr, AfterValidator(_check_mount_path), _schema(_PATH.pattern)]
"""Where a pod mounts a volume: a directory of its own."""

KeyPrefix = Annotated[StrictStr, AfterValidator(_check_key_prefix), _schema(_KEY_PREFIX.pattern)]
"""How the key of an annotation or label begins; never empty, which would be every key."""

Pattern = Annotated[StrictStr, AfterValidator(_check_pattern), _schema(r"[^!\s].*")]
"""A pattern of what backups leave out (`core.models.exclusions`)."""

Duration = Annotated[timedelta, BeforeValidator(_parse_duration)]
"""A positive duration, written as Go does."""

LabelKey = Annotated[StrictStr, AfterValidator(_check_label_key), _schema(_LABEL_KEY_PATTERN)]
OptionalLabelKey = Annotated[
    StrictStr, AfterValidator(_check_optional_label_key), _schema(f"(?:{_LABEL_KEY_PATTERN})?")
]
LabelValue = Annotated[
    StrictStr, AfterValidator(_check_label_value), _schema(f"(?:{_LABEL_NAME.pattern})?", maxLength=_LABEL_LIMIT)
]
LabelMap = dict[LabelKey, LabelValue]
"""Labels of an object, or labels that a node must have."""

AnnotationMap = Annotated[
    dict[
        Annotated[StrictStr, AfterValidator(_check_annotation_key)], Annotated[StrictStr, AfterValidator(_check_text)]
    ],
    AfterValidator(_check_annotations),
]
"""Annotations of an object."""

QuantityText = Annotated[StrictStr, AfterValidator(_check_quantity), _schema(_QUANTITY_PATTERN)]
"""A Kubernetes quantity as it is written; empty: none."""

DurationText = Annotated[StrictStr, AfterValidator(_check_duration), _schema(_DURATION_PATTERN)]
"""A positive duration as it is written."""

OptionalDurationText = Annotated[
    StrictStr, AfterValidator(_check_optional_duration), _schema(f"(?:{_DURATION_PATTERN}|[+]?0)?")
]
"""A duration as it is written, also 0; empty: none."""

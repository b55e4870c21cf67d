"""The value types of the configuration, Kubernetes' selectors and tolerations among them, and the errors of values.

A value that the API server would reject in a pod or a PVC is invalid here, or every transfer would fail for one typing
error.
Source: Kubernetes v1.34, apimachinery pkg/util/validation and pkg/apis/meta/v1, pkg/apis/core/validation.
"""

import re
from collections.abc import Callable, Container, Mapping
from datetime import timedelta
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Final, Literal, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictInt,
    StrictStr,
    WithJsonSchema,
    field_validator,
)
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError
from pydantic_core.core_schema import ValidationInfo

from core.kube.types import PodToleration
from core.models.names import SUBDOMAIN
from core.models.transfer_settings import check_pattern
from core.models.units import parse_duration, parse_positive_duration, parse_quantity

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
    {"bin", "credentials", "dev", "etc", "lib", "lib64", "mover-events", "opt", "proc", "run", "sbin", "scratch"}
    | {"sys", "usr", "var"}
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


def _matching(
    pattern: re.Pattern[str], what: str, *, longest: int | None = None, may_be_empty: bool = True
) -> AfterValidator:
    """Return the validator of a text that the whole of `pattern` matches, and that `what` describes."""

    def check(text: str) -> str:
        too_long = longest is not None and len(text) > longest
        if (text or not may_be_empty) and (too_long or not pattern.fullmatch(text)):
            raise expected(what)
        return text

    return AfterValidator(check)


def checked_by(parse: Callable[[str], object], what: str) -> AfterValidator:
    """Return the validator of a text that `parse` takes, and that `what` describes; an error says why it does not."""

    def check(text: str) -> str:
        try:
            parse(text)
        except ValueError as e:
            raise expected(f"{what} ({e})") from e
        return text

    return AfterValidator(check)


def _not_negative(parse: Callable[[str], object], what: str) -> AfterValidator:
    """Return the validator of a text that is empty, or that `parse` takes, and that `what` describes."""

    def check(text: str) -> str:
        try:
            parse(text or "0")
            # Also "-0", which no number of things is.
            valid = not text.startswith("-")
        except ValueError:
            valid = False
        if not valid:
            raise expected(what)
        return text

    return AfterValidator(check)


def _check_label_key(key: str) -> str:
    prefix, slash, name = key.rpartition("/")
    named = len(name) <= _LABEL_LIMIT and _LABEL_NAME.fullmatch(name)
    if not named or (slash and (len(prefix) > _NAME_LIMIT or not _DOMAIN.fullmatch(prefix))):
        raise expected("a key such as example.com/name: an optional domain, and a name of at most 63 characters")
    return key


def _check_annotation_key(key: str) -> str:
    # Source: Kubernetes takes capital letters in the domain of an annotation's key.
    _check_label_key(key.lower())
    return key


def _check_mount_path(path: str) -> str:
    if not path or path.split("/")[1] in _IMAGE_DIRECTORIES:
        raise expected('a path outside of the directories that a mover pod has, such as "/backups"')
    return path


def _check_annotations(annotations: dict[str, str]) -> dict[str, str]:
    size = sum(len(key.encode()) + len(value.encode()) for key, value in annotations.items())
    if size > _ANNOTATIONS_LIMIT_BYTES:
        raise expected(f"annotations of at most {_ANNOTATIONS_LIMIT_BYTES // 1024} KiB in total")
    return annotations


def _parse_duration(value: object) -> timedelta:
    if isinstance(value, timedelta):
        return value
    try:
        return parse_positive_duration(value if isinstance(value, str) else "")
    except ValueError as e:
        raise expected('a positive duration such as "30m" or "6h"') from e


def _schema(pattern: str, **more: object) -> WithJsonSchema:
    """Return the schema of a string: `pattern` as JSON Schema has it, anchored at both ends."""
    return WithJsonSchema({"type": "string", "pattern": f"^(?:{pattern})$", **more})


_LABEL_KEY_PATTERN: Final = rf"(?:{_DOMAIN.pattern}/)?{_LABEL_NAME.pattern}"

ObjectName = Annotated[
    StrictStr,
    _matching(_DOMAIN, "a name of lower-case letters, digits, '-' and '.'", longest=_NAME_LIMIT),
    _schema(f"(?:{_DOMAIN.pattern})?", maxLength=_NAME_LIMIT),
]
"""The name of an object, such as a storage class; empty: none."""

HostName = Annotated[
    StrictStr,
    _matching(_HOST, "a host name or an IP address", longest=_NAME_LIMIT),
    _schema(f"(?:{_HOST.pattern})?", maxLength=_NAME_LIMIT),
]

_ABSOLUTE: Final = 'an absolute path such as "/export/backups"'
_EXPORT: Final = re.compile(rf"/|{_PATH.pattern}")

AbsolutePath = Annotated[StrictStr, _matching(_EXPORT, _ABSOLUTE), _schema(f"(?:{_EXPORT.pattern})?")]
"""A path on a server, also its root, which is what some services export; empty: none."""

MountPath = Annotated[StrictStr, _matching(_PATH, _ABSOLUTE), AfterValidator(_check_mount_path), _schema(_PATH.pattern)]
"""Where a pod mounts a volume: a directory of its own."""

KeyPrefix = Annotated[
    StrictStr,
    _matching(_KEY_PREFIX, 'the beginning of a key such as "example.com/" or "example.com/team"', may_be_empty=False),
    _schema(_KEY_PREFIX.pattern),
]
"""How the key of an annotation or label begins; never empty, which would be every key."""

Pattern = Annotated[StrictStr, checked_by(check_pattern, "a pattern that kopia takes"), _schema(r"[^!\s].*")]
"""A pattern of what backups leave out (`core.models.transfer_settings`)."""

Duration = Annotated[timedelta, BeforeValidator(_parse_duration)]
"""A positive duration, written as Go does."""

LabelKey = Annotated[StrictStr, AfterValidator(_check_label_key), _schema(_LABEL_KEY_PATTERN)]
OptionalLabelKey = Annotated[
    StrictStr, AfterValidator(lambda key: key and _check_label_key(key)), _schema(f"(?:{_LABEL_KEY_PATTERN})?")
]
LabelValue = Annotated[
    StrictStr,
    _matching(
        _LABEL_NAME,
        "a label value: at most 63 letters, digits, '-', '_' and '.', with a letter or digit at each end",
        longest=_LABEL_LIMIT,
    ),
    _schema(f"(?:{_LABEL_NAME.pattern})?", maxLength=_LABEL_LIMIT),
]
LabelMap = dict[LabelKey, LabelValue]
"""Labels of an object, or labels that a node must have."""

AnnotationMap = Annotated[
    dict[Annotated[StrictStr, AfterValidator(_check_annotation_key)], StrictStr], AfterValidator(_check_annotations)
]
"""Annotations of an object."""

QuantityText = Annotated[
    StrictStr, _not_negative(parse_quantity, 'a quantity such as "500m", "2" or "4Gi"'), _schema(_QUANTITY_PATTERN)
]
"""A Kubernetes quantity as it is written; empty: none."""

DurationText = Annotated[
    StrictStr, AfterValidator(lambda text: _parse_duration(text) and text), _schema(_DURATION_PATTERN)
]
"""A positive duration as it is written."""

OptionalDurationText = Annotated[
    StrictStr,
    _not_negative(parse_duration, 'a duration such as "30m" or "6h", or "0"'),
    _schema(f"(?:{_DURATION_PATTERN}|[+]?0)?"),
]
"""A duration as it is written, also 0; empty: none."""


def setting(default: object, description: str, example: object, **more: Any) -> Any:  # noqa: ANN401 - pydantic's own
    """Return the field of a key; `default` is a value, a function that builds it, or `...`: the key is required."""
    kept = {"default_factory": default} if callable(default) else {"default": default}
    return Field(description=description, examples=[example], **kept, **more)


def toggle(description: str, *, default: bool = False) -> Any:  # noqa: ANN401 - pydantic's own
    """Return the field of a key that is true or false."""
    return setting(default, description, not default)


class Section(BaseModel):
    """A JSON object of the document; unknown keys are ignored. `other_names` maps an alternative name to a key."""

    other_names: ClassVar[Mapping[str, str]] = {}

    model_config = ConfigDict(
        frozen=True, extra="ignore", alias_generator=to_camel, populate_by_name=True, defer_build=True
    )


class Operator(StrEnum):
    """The comparison of a requirement."""

    IN = "In"
    NOT_IN = "NotIn"
    EXISTS = "Exists"
    DOES_NOT_EXIST = "DoesNotExist"
    GREATER = "Gt"
    LESS = "Lt"


_OF_SETS: Final = frozenset({Operator.IN, Operator.NOT_IN})
NUMBER_OPERATORS: Final = frozenset({Operator.GREATER, Operator.LESS})


def is_met(operator: str, value: str | None, values: Container[str]) -> bool:
    """Return whether a label meets a requirement with an operator of label selectors; a `value` of None: it is absent.

    Source: Kubernetes v1.34, apimachinery pkg/labels/selector.go (Matches): an absent label meets NotIn.
    """
    match operator:
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
    return operator == "DoesNotExist" and value is None


class Requirement(Section):
    """One of `matchExpressions`."""

    key: LabelKey = setting(..., "label of the node", "pool")
    operator: Operator = setting(..., "comparison of the label's value; no Gt and Lt in perNodeConfig", "NotIn")
    values: tuple[LabelValue, ...] = setting(
        (),
        "values to compare with: at least one for In and NotIn, one whole number for Gt and Lt, none for "
        "Exists and DoesNotExist",
        ["db", "web"],
        validate_default=True,
    )

    @field_validator("values")
    @classmethod
    def _fit_operator(cls, values: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        operator = info.data.get("operator")
        if operator in _OF_SETS and not values:
            raise expected(f"at least one value, as {operator} requires")
        if operator in NUMBER_OPERATORS and (len(values) != 1 or not values[0].lstrip("-").isdecimal()):
            raise expected(f"one whole number in quotes, as {operator} requires")
        if operator in {Operator.EXISTS, Operator.DOES_NOT_EXIST} and values:
            raise expected(f"no values, as {operator} requires")
        return values

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Return whether an object with `labels` meets the requirement."""
        value = labels.get(self.key)
        if self.operator not in NUMBER_OPERATORS:
            return is_met(self.operator, value, self.values)
        try:
            number, bound = int(value or ""), int(self.values[0])
        except ValueError:
            return False
        return number > bound if self.operator is Operator.GREATER else number < bound


class LabelSelector(Section):
    """A node selector: all parts must match; empty: every node."""

    match_labels: LabelMap = setting(dict, "labels that a node must have", {"disk": "ssd"})
    match_expressions: tuple[Requirement, ...] = setting(
        (), "further conditions on a node's labels", [{"key": "pool", "operator": "NotIn", "values": ["db", "web"]}]
    )

    @property
    def empty(self) -> bool:
        """Whether it matches every object."""
        return not self.match_labels and not self.match_expressions

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Return whether an object with `labels` is selected."""
        return all(labels.get(key) == value for key, value in self.match_labels.items()) and all(
            requirement.matches(labels) for requirement in self.match_expressions
        )


class Toleration(Section):
    """A toleration of a pod."""

    operator: Literal["Equal", "Exists", ""] = setting("", "Equal (the default) or Exists", "Exists")
    key: OptionalLabelKey = setting(
        "", "key of the tolerated taint; empty, with Exists: every taint", "dedicated", validate_default=True
    )
    value: LabelValue = setting("", "value of the taint; none with Exists", "backup")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute", ""] = setting(
        "", "effect of the taint; empty: every effect", "NoSchedule"
    )
    toleration_seconds: Annotated[StrictInt, Field(le=2**63 - 1)] | None = setting(
        None, "how long a NoExecute taint is tolerated, in seconds", 600
    )

    @field_validator("key")
    @classmethod
    def _has_key(cls, key: str, info: ValidationInfo) -> str:
        if not key and info.data.get("operator") != "Exists":
            raise expected("a key; only the operator Exists needs none")
        return key

    @field_validator("value")
    @classmethod
    def _exists_has_no_value(cls, value: str, info: ValidationInfo) -> str:
        if value and info.data.get("operator") == "Exists":
            raise expected("no value, as Exists requires")
        return value

    @field_validator("toleration_seconds")
    @classmethod
    def _needs_no_execute(cls, seconds: int | None, info: ValidationInfo) -> int | None:
        if seconds is not None and info.data.get("effect") != "NoExecute":
            raise expected("none, which only the effect NoExecute allows")
        return seconds

    def to_wire(self) -> PodToleration:
        """Return it as an entry of a pod's `tolerations`."""
        wire = {key: value for key, value in self.model_dump(by_alias=True).items() if value not in ("", None)}
        return cast("PodToleration", wire)

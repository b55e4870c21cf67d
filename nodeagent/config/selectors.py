"""The Kubernetes types within the configuration document: node selectors and tolerations.

Knows their keys, and which values the API server would reject. Does not know where they are in the
document (`nodeagent.config.keys`).
Source: Kubernetes v1.34, pkg/apis/core/validation; apimachinery pkg/apis/meta/v1.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import ClassVar, Final, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, StrictInt, field_validator
from pydantic.alias_generators import to_camel
from pydantic_core.core_schema import ValidationInfo

from core.kube.types import PodToleration
from nodeagent.config.value_types import LabelKey, LabelMap, LabelValue, OptionalLabelKey, expected

__all__ = ["NUMBER_OPERATORS", "LabelSelector", "Operator", "Requirement", "Section", "Toleration"]


class Section(BaseModel):
    """A JSON object of the document; unknown keys are ignored.

    `other_names` maps an alternative name of a key to the key.
    """

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


class Requirement(Section):
    """One of `matchExpressions`."""

    key: LabelKey = Field(description="label of the node", examples=["pool"])
    operator: Operator = Field(
        description="comparison of the label's value; no Gt and Lt in perNodeConfig", examples=["NotIn"]
    )
    values: tuple[LabelValue, ...] = Field(
        default=(),
        validate_default=True,
        description="values to compare with: at least one for In and NotIn, one whole number for Gt and Lt, none for "
        "Exists and DoesNotExist",
        examples=[["db", "web"]],
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
        match self.operator:
            case Operator.IN:
                return value in self.values
            case Operator.NOT_IN:
                return value not in self.values
            case Operator.EXISTS:
                return value is not None
            case Operator.DOES_NOT_EXIST:
                return value is None
        try:
            number, bound = int(value or ""), int(self.values[0])
        except ValueError:
            return False
        return number > bound if self.operator is Operator.GREATER else number < bound


class LabelSelector(Section):
    """A node selector: all parts must match; empty: every node."""

    match_labels: LabelMap = Field(
        default_factory=dict, description="labels that a node must have", examples=[{"disk": "ssd"}]
    )
    match_expressions: tuple[Requirement, ...] = Field(
        default=(),
        description="further conditions on a node's labels",
        examples=[[{"key": "pool", "operator": "NotIn", "values": ["db", "web"]}]],
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

    operator: Literal["Equal", "Exists", ""] = Field(
        default="", description="Equal (the default) or Exists", examples=["Exists"]
    )
    key: OptionalLabelKey = Field(
        default="",
        validate_default=True,
        description="key of the tolerated taint; empty, with Exists: every taint",
        examples=["dedicated"],
    )
    value: LabelValue = Field(default="", description="value of the taint; none with Exists", examples=["backup"])
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute", ""] = Field(
        default="", description="effect of the taint; empty: every effect", examples=["NoSchedule"]
    )
    toleration_seconds: StrictInt | None = Field(
        default=None, description="how long a NoExecute taint is tolerated, in seconds", examples=[600]
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

"""Which objects a backup selects: label selectors, and lists of names to include and exclude with wildcards. Pure."""

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Final

from msgspec import field

from core.models.base import WireModel

__all__ = ["Selector", "includes", "parse_selector"]


class LabelRequirement(WireModel):
    """One of `matchExpressions`."""

    key: str
    operator: str
    values: list[str] = field(default_factory=list)

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Return whether the labels meet it; an object without the key meets NotIn."""
        value = labels.get(self.key)
        match self.operator:
            case "In":
                return value in self.values
            case "NotIn":
                return value not in self.values
            case "Exists":
                return value is not None
            case "DoesNotExist":
                return value is None
        return False


class Selector(WireModel):
    """A label selector: all parts must match; empty: every object.

    Source: Kubernetes v1.34, apimachinery pkg/apis/meta/v1, LabelSelectorAsSelector.
    """

    match_labels: dict[str, str] = field(default_factory=dict)
    match_expressions: list[LabelRequirement] = field(default_factory=list)

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Return whether an object with these labels is selected."""
        return self.match_labels.items() <= labels.items() and all(
            one.matches(labels) for one in self.match_expressions
        )


_TERM: Final = re.compile(
    r"\s*(?:(?P<absent>!)\s*(?P<no>[^\s!=,()]+)"
    r"|(?P<key>[^\s!=,()]+)\s*(?:(?P<sign>==|=|!=)\s*(?P<value>[^\s!=,()]*)|(?P<set>in|notin)\s*\((?P<values>[^()]*)\))?"
    r")\s*(?:,|$)"
)


def parse_selector(text: str) -> Selector:
    """Return the selector in a text such as `tier=web,env in (a,b),!old`; empty: every object.

    Source: Kubernetes v1.34, apimachinery pkg/labels/selector.go.

    Raises:
        ValueError: it is none.
    """
    requirements, position = [], 0
    while position < len(text):
        term = _TERM.match(text, position)
        if term is None or term.end() == position:
            raise ValueError(f'not a label selector: "{text}"')
        requirements.append(_requirement(term))
        position = term.end()
    return Selector(match_expressions=requirements)


def _requirement(term: re.Match[str]) -> LabelRequirement:
    if term["absent"]:
        return LabelRequirement(key=term["no"], operator="DoesNotExist")
    if term["set"]:
        values = [value.strip() for value in term["values"].split(",")]
        return LabelRequirement(key=term["key"], operator="In" if term["set"] == "in" else "NotIn", values=values)
    if term["sign"]:
        return LabelRequirement(
            key=term["key"], operator="NotIn" if term["sign"] == "!=" else "In", values=[term["value"]]
        )
    return LabelRequirement(key=term["key"], operator="Exists")


def includes(name: str, included: Sequence[str], excluded: Sequence[str]) -> bool:
    """Return whether a name is included: `*`, `?` and `[a-z]` are wildcards, and an empty list includes every name.

    Source: Velero v1.18, ShouldInclude in pkg/util/collections/includes_excludes.go; its globs are from
    gobwas/glob, in which these wildcards mean the same as in fnmatch.
    """
    if any(fnmatchcase(name, pattern) for pattern in excluded):
        return False
    return not included or any(pattern == "*" or fnmatchcase(name, pattern) for pattern in included)

"""The rules that an API server applies to single objects: selectors, merge patches, pruning.

Source: Kubernetes v1.34, "Labels and Selectors", "Field Selectors", structural schemas; RFC 7396.
"""

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final

import yaml

from tests.support.objects import JsonDict

Filter = Callable[[JsonDict], bool]

_CRDS: Final = Path(__file__).parents[2] / "deploy" / "crds"
_EVERY_KIND: Final = frozenset({"metadata.name", "metadata.namespace"})
_FIELDS: Final = {
    "Pod": _EVERY_KIND | {"spec.nodeName", "status.phase", "spec.restartPolicy", "spec.serviceAccountName"},
    "Event": _EVERY_KIND
    | {f"involvedObject.{key}" for key in ("kind", "namespace", "name", "uid", "resourceVersion")}
    | {"reason", "type", "source", "reportingComponent"},
    "Secret": _EVERY_KIND | {"type"},
}
_SET_FORM: Final = re.compile(r"\s*(\S+)\s+(in|notin)\s*\(([^)]*)\)\s*")
_EQUALITY_FORM: Final = re.compile(r"\s*([^\s!=]+)\s*(==|!=|=)\s*([^\s=!]*)\s*")
_EXISTENCE_FORM: Final = re.compile(r"\s*(!?)\s*([^\s!=(),]+)\s*")


class Rejection(Exception):  # noqa: N818 - it becomes a response
    """A response that rejects the request; without a reason it is a page and no Status."""

    def __init__(self, status: int, reason: str, message: str, *, field: str = "") -> None:
        super().__init__(message)
        self.field = field
        self.status = status
        self.reason = reason


def build_filter(kind: str, label_selector: str, field_selector: str) -> Filter:
    """Return the predicate for objects of `kind`."""
    rules = [_label_rule(part) for part in _split(label_selector)]
    rules += [_field_rule(kind, part) for part in field_selector.split(",") if part]
    return lambda obj: all(rule(obj) for rule in rules)


def read_field(obj: JsonDict, path: str) -> str:
    """Return the text at a dotted path, empty where there is none."""
    found: Any = obj
    for key in path.split("."):
        found = found.get(key) if isinstance(found, dict) else None
    return "" if found is None else str(found)


def merge_patch(target: Any, patch: Any) -> Any:
    """Return `target` with the JSON merge patch applied; neither is changed."""
    if not isinstance(patch, dict):
        return patch
    merged = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = merge_patch(merged.get(key), value)
    return merged


def prune(obj: JsonDict) -> JsonDict:
    """Return `obj` without the fields that its CRD does not name; other kinds as they are."""
    schema = _schemas().get((obj["apiVersion"], obj["kind"]))
    if schema is None:
        return obj
    own = {key: value for key, value in obj.items() if key not in {"apiVersion", "kind", "metadata"}}
    kept = {key: obj[key] for key in ("apiVersion", "kind", "metadata")}
    return kept | {key: value for key, value in prune_by(own, schema).items() if key not in kept}


def prune_by(value: Any, schema: JsonDict) -> Any:
    """Return the part of `value` that a structural schema names."""
    if schema.get("x-kubernetes-preserve-unknown-fields"):
        return value
    if isinstance(value, list) and "items" in schema:
        return [prune_by(item, schema["items"]) for item in value]
    if not isinstance(value, dict) or schema.get("type") != "object":
        return value
    named, others = schema.get("properties", {}), schema.get("additionalProperties")
    if others:
        return {key: prune_by(item, others if isinstance(others, dict) else {}) for key, item in value.items()}
    return {key: prune_by(item, named[key]) for key, item in value.items() if key in named}


@cache
def _schemas() -> dict[tuple[str, str], JsonDict]:
    found = {}
    for file in sorted(_CRDS.glob("*.velero.io.yaml")):
        spec = yaml.load(file.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))["spec"]
        for version in spec["versions"]:
            key = (f"{spec['group']}/{version['name']}", spec["names"]["kind"])
            found[key] = version["schema"]["openAPIV3Schema"]
    return found


def _split(selector: str) -> list[str]:
    """Return the parts between commas that stand outside of parentheses."""
    return [part for part in re.split(r",(?![^(]*\))", selector) if part.strip()]


def _label_rule(text: str) -> Filter:
    if found := _SET_FORM.fullmatch(text):
        key, verb, values = found[1], found[2], {value.strip() for value in found[3].split(",")}
        if verb == "in":
            return lambda obj: _labels(obj).get(key) in values
        return lambda obj: _labels(obj).get(key) not in values
    if found := _EQUALITY_FORM.fullmatch(text):
        key, value = found[1], found[3]
        if found[2] == "!=":
            return lambda obj: _labels(obj).get(key) != value
        return lambda obj: _labels(obj).get(key) == value
    if found := _EXISTENCE_FORM.fullmatch(text):
        wanted, key = not found[1], found[2]
        return lambda obj: (key in _labels(obj)) is wanted
    raise Rejection(400, "BadRequest", f"unable to parse requirement: {text}")


def _labels(obj: JsonDict) -> dict[str, str]:
    return obj["metadata"].get("labels") or {}


def _field_rule(kind: str, text: str) -> Filter:
    found = _EQUALITY_FORM.fullmatch(text)
    if found is None or found[1] not in _FIELDS.get(kind, _EVERY_KIND):
        raise Rejection(400, "BadRequest", f"field label not supported: {text}")
    path, value, wanted = found[1], found[3], found[2] != "!="
    return lambda obj: (read_field(obj, path) == value) is wanted

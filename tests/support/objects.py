"""JSON objects in tests of code that reads API objects: their type, and builders."""

from typing import Any

from core.kube.resources import Resource

JsonDict = Any
"""A JSON object that fits every type of `core.kube.types`: a test writes only the fields that count."""


def build_object(resource: Resource, name: str, namespace: str = "", /, **fields: Any) -> dict[str, Any]:
    """Return an object of a kind with these fields; `metadata` adds to its name and namespace."""
    meta = {"name": name} | ({"namespace": namespace} if namespace else {}) | fields.pop("metadata", {})
    return {"apiVersion": resource.api_version, "kind": resource.kind, "metadata": meta, **fields}


def only(**fields: object) -> JsonDict:
    """Return an object with these fields only."""
    return fields

"""What all objects of an installation have in common."""

from typing import Final

from core.models.base import JsonDict

__all__ = ["PART_OF_LABELS", "build_object"]

PART_OF_LABELS: Final = {"app.kubernetes.io/part-of": "node-agent"}
"""On every object that an installation creates; Velero's objects do not have it."""


def build_object(api_version: str, kind: str, name: str, namespace: str = "") -> JsonDict:
    """Return an object without content; without `namespace` it is cluster-scoped."""
    metadata: JsonDict = {"name": name}
    if namespace:
        metadata["namespace"] = namespace
    return {"apiVersion": api_version, "kind": kind, "metadata": {**metadata, "labels": dict(PART_OF_LABELS)}}

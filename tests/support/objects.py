"""The type of JSON objects in tests of code that reads API objects."""

from typing import Any

JsonDict = Any
"""A JSON object that fits every type of `core.kube.types`: a test writes only the fields that count."""


def only(**fields: object) -> JsonDict:
    """Return an object with these fields only."""
    return fields

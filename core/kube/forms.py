"""The check that an object has the form that the code reads: the type of its resource (`core.kube.types`).

The API server validates its own kinds, and custom resources by their definitions, but those may be of
another version. So each object is checked where it enters.
"""

from typing import Any, Final

import msgspec

from core.kube.errors import MalformedObjectError
from core.kube.resources import Resource
from core.kube.types import Object
from core.models.base import JsonDict, explain_invalid

__all__ = ["check_form", "check_identity"]

_LONGEST_NAME: Final = 253
"""Source: Kubernetes, the maximum length of an object's name."""


def check_form(resource: Resource, obj: JsonDict) -> None:
    """Check that `obj` has the form of its kind; resources that are not stored, such as reviews, have none.

    Raises:
        MalformedObjectError: it does not; the message names the object and the field.
    """
    if resource.form is not None:
        _check(resource, obj, resource.form)


def check_identity(resource: Resource, obj: JsonDict) -> None:
    """Check that the metadata of `obj` has the right form.

    Raises:
        MalformedObjectError: it does not.
    """
    _check(resource, obj, Object)


def _check(resource: Resource, obj: JsonDict, form: Any) -> None:  # noqa: ANN401 - what msgspec takes
    fault = _find_fault(obj, form)
    if not fault and resource.namespaced and not obj["metadata"].get("namespace"):
        fault = "metadata: Object missing required field `namespace`"
    if fault:
        meta = obj.get("metadata")
        known = meta if isinstance(meta, dict) else {}
        place = "/".join(str(known[key])[:_LONGEST_NAME] for key in ("namespace", "name") if key in known)
        raise MalformedObjectError(f"malformed {resource.kind} {place or 'without a name'}: {fault}")


def _find_fault(obj: JsonDict, form: Any) -> str:  # noqa: ANN401 - what msgspec takes
    try:
        msgspec.convert(obj, form)
    except (ValueError, RecursionError) as e:
        return explain_invalid(e)
    return ""

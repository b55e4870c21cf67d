"""The answers of the API server: an object, a list of objects, the end of an object.

Knows what an answer must hold to be the API server's own.
"""

from enum import Enum, auto
from typing import Final, Required, TypedDict

import msgspec

from core.kube.decode import parse_json
from core.kube.errors import UnreachableError
from core.kube.transport import Response
from core.models.base import JsonDict, explain_invalid

__all__ = ["Deletion", "RawList", "parse_body", "parse_deletion", "parse_list", "parse_object", "parse_raw_list"]

_SHOWN_BYTES: Final = 100
"""The beginning of an answer that is shown if it is not JSON."""


class Deletion(Enum):
    """Result of a delete request."""

    NOT_FOUND = auto()
    CONFLICT = auto()
    """An object with another UID has the name, or this one was just changed; nothing was deleted."""
    STARTED = auto()
    """The object still exists: it has a finalizer, or is a pod within its grace period."""
    DONE = auto()


_ListMeta = TypedDict("_ListMeta", {"resourceVersion": str, "continue": str}, total=False)


class _List(TypedDict, total=False):
    metadata: Required[_ListMeta]
    items: list[object]


class _RawMeta(msgspec.Struct):
    token: str = msgspec.field(default="", name="continue")


class RawList(msgspec.Struct):
    """One page of a list whose objects are still JSON text."""

    metadata: _RawMeta
    items: list[msgspec.Raw] = []


def parse_deletion(response: JsonDict) -> Deletion:
    """Return the result of a DELETE that answered with an object: the remaining one or, for pods, the old one.

    Nothing else of that object is read, so its form is not checked: a pod that is deleted without a grace
    period may come without a resourceVersion.
    Source: Kubernetes v1.34, apiserver/pkg/registry/generic/registry/store.go (Delete, finalizeDelete) and
    pkg/registry/core/pod (ReturnDeletedObject, CheckGracefulDelete).
    """
    meta = response.get("metadata")
    if not isinstance(meta, dict):
        return Deletion.STARTED
    remains = meta.get("finalizers") or meta.get("deletionGracePeriodSeconds")
    return Deletion.STARTED if remains else Deletion.DONE


def parse_body(response: Response, _: str) -> bytes:
    """Return the response as it is."""
    return response.body


def parse_object(response: Response, attempted: str) -> JsonDict:
    """Return the JSON object in `response`.

    A proxy, or a server that is starting, may answer with a page of its own and status 200: that is no
    answer of the API server, and the request is retried as if there were none.

    Raises:
        UnreachableError: it holds no JSON object.
    """
    body = response.body
    try:
        parsed = parse_json(body)
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        # What begins like an object may be part of a Secret.
        shown = f"{len(body)} bytes" if body.lstrip()[:1] == b"{" else repr(body[:_SHOWN_BYTES])
        raise UnreachableError(f"{attempted}: {response.status}: the answer is not a JSON object: {shown}")
    return parsed


def parse_list(response: Response, attempted: str) -> JsonDict:
    """Return the list in `response`, as JSON dict.

    Raises:
        UnreachableError: it holds no list of objects.
    """
    body = parse_object(response, attempted)
    try:
        msgspec.convert(body, _List)
    except (ValueError, RecursionError) as e:
        raise UnreachableError(f"{attempted}: the answer is not a list: {explain_invalid(e)}") from e
    return body


def parse_raw_list(response: Response, attempted: str) -> RawList:
    """Return the list in `response` without reading its objects: thousands take milliseconds.

    Raises:
        UnreachableError: it holds no list of objects.
    """
    try:
        return msgspec.json.decode(response.body, type=RawList)
    except (ValueError, RecursionError):
        # Something in it is null, not UTF-8, or nested too deeply: rare, and no reason to lose the other objects.
        body = parse_list(response, attempted)
    items = [msgspec.Raw(msgspec.json.encode(item)) for item in body.get("items", [])]
    return RawList(_RawMeta(body["metadata"].get("continue", "")), items)

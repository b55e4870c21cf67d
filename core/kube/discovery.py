"""Discovery: whether the API server serves a resource."""

from typing import TypeVar

import msgspec

from core.kube.decode import parse_json
from core.kube.errors import KubeError, raise_for_status
from core.kube.resources import Resource
from core.kube.transport import Request, Transport

__all__ = ["is_unserved"]

_T = TypeVar("_T")


class _Named(msgspec.Struct):
    name: str


class _Version(msgspec.Struct, rename="camel"):
    group_version: str


class _Group(msgspec.Struct):
    versions: list[_Version]


class _Groups(msgspec.Struct, tag="APIGroupList", tag_field="kind"):
    groups: list[_Group]


class _Resources(msgspec.Struct, tag="APIResourceList", tag_field="kind"):
    resources: list[_Named]


async def is_unserved(transport: Transport, resource: Resource) -> bool:
    """Return whether the API server lists its resources, and `resource` is not one of them.

    False where it does not answer, or rejects the request, which the ClusterRole `system:discovery` permits to
    every authenticated user.
    Source: Kubernetes v1.34, API concepts, "Discovery API" (unaggregated).
    """
    if not resource.group:
        return False
    try:
        groups = await _read(transport, "/apis", _Groups)
        if resource.api_version not in {each.group_version for group in groups.groups for each in group.versions}:
            return True
        served = await _read(transport, f"/apis/{resource.api_version}", _Resources)
        return resource.plural not in {each.name for each in served.resources}
    except (KubeError, ValueError, RecursionError):
        return False


async def _read(transport: Transport, path: str, form: type[_T]) -> _T:
    """Return the answer to a GET of `path`.

    Raises:
        KubeError: it was rejected.
        ValueError: it does not have the form.
    """
    answer = await transport.request(Request("GET", path))
    raise_for_status(answer.status, answer.body, attempted=f"get {path}")
    return msgspec.convert(parse_json(answer.body), form)

"""What a request to the API server needs to be allowed, and whether `deploy/` allows it."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from core.kube.transport import Request
from nodeagent.runtime.permissions import PERMISSIONS, Scope

__all__ = ["Access", "access_of", "access_of_event", "refused"]

_PATH = re.compile(
    r"/(?:api|apis/(?P<group>[^/]+))/v[^/]+"
    r"(?:/namespaces/(?P<namespace>[^/]+)(?=/))?"
    r"/(?P<resource>[^/]+)(?:/(?P<name>[^/]+))?(?:/(?P<subresource>[^/]+))?"
)
_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
_EVERYBODY = {"selfsubjectaccessreviews"}
"""Source: Kubernetes, ClusterRole system:basic-user."""


@dataclass(frozen=True, order=True)
class Access:
    """One question to an authorizer, in RBAC's words."""

    verb: str
    group: str
    path: str
    namespace: str
    name: str


def access_of(request: Request) -> Access:
    """Return what the API server asks its authorizer about `request`.

    Source: Kubernetes, apiserver pkg/endpoints/request/requestinfo.go; a field selector on
    metadata.name makes a list or watch one of that single object.
    """
    parts = _PATH.fullmatch(request.path)
    if parts is None:
        raise ValueError(f"{request.path} is no path of a resource")
    name = parts["name"] or ""
    verb = _VERBS.get(request.method, "get" if name else "list")
    if verb == "list":
        selected = re.fullmatch(r"metadata\.name=([^,]+)", request.query.get("fieldSelector", ""))
        name = selected[1] if selected else ""
        verb = "watch" if request.query.get("watch") in {"1", "true"} else "list"
    path = "/".join(filter(None, (parts["resource"], parts["subresource"])))
    return Access(verb, parts["group"] or "", path, parts["namespace"] or "", name)


def refused(accesses: Iterable[Access], own_namespace: str) -> list[Access]:
    """Return those that the agent's roles do not allow."""
    return sorted({access for access in accesses if not _allowed(access, own_namespace)})


def _allowed(access: Access, own_namespace: str) -> bool:
    if access.path in _EVERYBODY:
        return True
    return any(
        (right.resource.group, right.path) == (access.group, access.path)
        and access.verb in right.verbs
        and (right.scope is Scope.CLUSTER or access.namespace == own_namespace)
        and (not right.names or access.name in right.names)
        for right in PERMISSIONS
    )


def access_of_event(event: dict[str, Any]) -> Access:
    """Return what the authorizer was asked for an event of the API server's audit log."""
    about = event["objectRef"]
    path = "/".join(filter(None, (about["resource"], about.get("subresource"))))
    return Access(event["verb"], about.get("apiGroup", ""), path, about.get("namespace", ""), about.get("name", ""))

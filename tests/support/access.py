"""The permissions that a request to the API server requires, compared with those in `deploy/`."""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from core.kube.transport import Request
from nodeagent.runtime.permissions import Permission, Scope

_PATH = re.compile(
    r"/(?:api|apis/(?P<group>[^/]+))/v[^/]+"
    r"(?:/namespaces/(?P<namespace>[^/]+)(?=/))?"
    r"/(?P<resource>[^/]+)(?:/(?P<name>[^/]+))?(?:/(?P<subresource>[^/]+))?(?:(?<=/proxy)/.*)?"
)
_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
_EVERYBODY = {"selfsubjectaccessreviews", "selfsubjectrulesreviews"}
"""Source: Kubernetes, ClusterRole system:basic-user."""


@dataclass(frozen=True, order=True)
class Access:
    """One access of a request, in RBAC terms."""

    verb: str
    group: str
    path: str
    namespace: str
    name: str


def access_of(request: Request) -> Access:
    """Return the access that the API server authorizes for `request`.

    Source: Kubernetes, apiserver pkg/endpoints/request/requestinfo.go; a field selector on
    metadata.name makes a list or watch one of that single object.
    """
    parts = _PATH.fullmatch(request.path)
    if parts is None:
        raise ValueError(f"{request.path} is not the path of a resource")
    name = parts["name"] or ""
    verb = _VERBS.get(request.method, "get" if name else "list")
    if verb == "list":
        selected = re.fullmatch(r"metadata\.name=([^,]+)", request.query.get("fieldSelector", ""))
        name = selected[1] if selected else ""
        verb = "watch" if request.query.get("watch") in {"1", "true"} else "list"
    path = "/".join(filter(None, (parts["resource"], parts["subresource"])))
    return Access(verb, parts["group"] or "", path, parts["namespace"] or "", name)


def not_permitted(accesses: Iterable[Access], permissions: Collection[Permission], own_namespace: str) -> list[Access]:
    """Return the accesses that `permissions` of an account in `own_namespace` do not cover."""
    return sorted({access for access in accesses if not _allowed(access, permissions, own_namespace)})


def _allowed(access: Access, permissions: Collection[Permission], own_namespace: str) -> bool:
    if access.path in _EVERYBODY:
        return True
    return any(
        (permission.resource.group, permission.path) == (access.group, access.path)
        and access.verb in permission.verbs
        and (permission.scope is Scope.CLUSTER or access.namespace == own_namespace)
        and (not permission.names or access.name in permission.names)
        for permission in permissions
    )


def access_of_event(event: dict[str, Any]) -> Access:
    """Return the access of an event in the API server's audit log."""
    about = event["objectRef"]
    path = "/".join(filter(None, (about["resource"], about.get("subresource"))))
    return Access(event["verb"], about.get("apiGroup", ""), path, about.get("namespace", ""), about.get("name", ""))

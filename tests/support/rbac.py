"""Permissions of a service account of a test, as the product lists them, and the wait until they hold."""

import time
from collections.abc import Iterable, Iterator, Sequence

from client.install.manifests import build_rule, in_scope
from core.kube.resources import CLUSTER_ROLE_BINDINGS, CLUSTER_ROLES, ROLE_BINDINGS, ROLES, Resource
from nodeagent.runtime.permissions import Permission, Scope
from tests.support.objects import JsonDict
from tests.testbed.api import Api

_REVIEWS = Resource("SubjectAccessReview", "subjectaccessreviews", "authorization.k8s.io", namespaced=False)
_KINDS = ((Scope.OWN_NAMESPACE, ROLES, ROLE_BINDINGS), (Scope.CLUSTER, CLUSTER_ROLES, CLUSTER_ROLE_BINDINGS))
_SECONDS = 30
_POLL_SECONDS = 0.05


def grant(api: Api, namespace: str, account: str, permissions: Sequence[Permission]) -> None:
    """Give an account of the namespace these permissions; return once the API server knows that.

    It reads roles by a watch of its own, so a request that follows at once may be refused.
    """
    for scope, roles, bindings in _KINDS:
        rules = [build_rule(one) for one in in_scope(permissions, scope)]
        if not rules:
            continue
        name = f"{account}-{namespace}-{len(rules)}"
        where = namespace if roles.namespaced else ""
        meta = {"metadata": {"name": name} | ({"namespace": where} if where else {})}
        _create(api, roles, where, meta | {"rules": rules})
        subject = {"kind": "ServiceAccount", "name": account, "namespace": namespace}
        reference = {"apiGroup": roles.group, "kind": roles.kind, "name": name}
        _create(api, bindings, where, meta | {"roleRef": reference, "subjects": [subject]})
    deadline = time.monotonic() + _SECONDS
    for one, verb, name in _each(permissions):
        while not allows(api, namespace, account, (verb, one, name)):
            assert time.monotonic() < deadline, f"{account} may still not {verb} {one.path}"
            time.sleep(_POLL_SECONDS)


def allows(
    api: Api, namespace: str, account: str, what: tuple[str, Permission, str], *, where: str | None = None
) -> bool:
    """Return whether an account of the namespace may do `what`: verb, permission, object's name; `where`: elsewhere."""
    verb, permission, name = what
    place = namespace if where is None else where
    attributes = {
        "verb": verb,
        "group": permission.resource.group,
        "resource": permission.resource.plural,
        "subresource": permission.subresource,
        # A role's rule about Namespaces is about its own.
        "namespace": place if permission.resource.namespaced or permission.scope is Scope.OWN_NAMESPACE else "",
        "name": name,
    }
    groups = ["system:serviceaccounts", f"system:serviceaccounts:{namespace}", "system:authenticated"]
    body = {
        "apiVersion": _REVIEWS.api_version,
        "kind": _REVIEWS.kind,
        "spec": {
            "user": f"system:serviceaccount:{namespace}:{account}",
            "groups": groups,
            "resourceAttributes": attributes,
        },
    }
    return bool(api.request("POST", _REVIEWS.path(""), body=body)["status"]["allowed"])


def _create(api: Api, resource: Resource, namespace: str, manifest: JsonDict) -> None:
    typed = {"apiVersion": resource.api_version, "kind": resource.kind}
    api.request("POST", resource.path(namespace), body=typed | manifest)


def _each(permissions: Iterable[Permission]) -> Iterator[tuple[Permission, str, str]]:
    for one in permissions:
        yield one, one.verbs[-1], one.names[0] if one.names else ""

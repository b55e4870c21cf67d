"""Permissions of a service account of a test, as the product lists them, and the wait until they hold."""

import time
from collections.abc import Iterable, Iterator, Sequence

from client.install.manifests import build_rule, in_scope
from core.kube.resources import CLUSTER_ROLE_BINDINGS, CLUSTER_ROLES, ROLE_BINDINGS, ROLES, Resource
from nodeagent.runtime.permissions import Permission, Scope
from tests.support.objects import build_object
from tests.testbed.api import Api

_REVIEWS = Resource("SubjectAccessReview", "subjectaccessreviews", "authorization.k8s.io", namespaced=False)
_KINDS = ((Scope.OWN_NAMESPACE, ROLES, ROLE_BINDINGS), (Scope.CLUSTER, CLUSTER_ROLES, CLUSTER_ROLE_BINDINGS))
_SECONDS = 300
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
        api.create(roles, build_object(roles, name, where, rules=rules))
        subject = {"kind": "ServiceAccount", "name": account, "namespace": namespace}
        reference = {"apiGroup": roles.group, "kind": roles.kind, "name": name}
        api.create(bindings, build_object(bindings, name, where, roleRef=reference, subjects=[subject]))
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
    user = {"user": f"system:serviceaccount:{namespace}:{account}", "groups": groups}
    review = api.create(_REVIEWS, {"metadata": {}, "spec": user | {"resourceAttributes": attributes}})
    return bool(review["status"]["allowed"])


def _each(permissions: Iterable[Permission]) -> Iterator[tuple[Permission, str, str]]:
    for one in permissions:
        yield one, one.verbs[-1], one.names[0] if one.names else ""

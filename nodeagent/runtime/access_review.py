"""Which permissions the caller lacks: the API server is asked about each verb (SelfSubjectAccessReview).

Thousands of agents that start at the same time ask for all of their rules first (SelfSubjectRulesReview), and only
about what these do not show: not every authorizer can list its rules. Nor do rules show what an authorizer before
RBAC denies, so commands that must not stop halfway ask about each verb.
"""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Self

from core.kube.client import KubeClient
from core.kube.errors import ForbiddenError, InvalidError, NotFoundError
from core.kube.resources import Resource
from core.kube.types import Manifest, UncheckedObject
from core.models.base import JsonDict
from nodeagent.runtime.permissions import Permission, Scope

__all__ = ["missing_permissions"]

_GROUP: Final = "authorization.k8s.io"
_ACCESS_REVIEWS: Final[Resource[UncheckedObject]] = Resource(
    "SelfSubjectAccessReview", "selfsubjectaccessreviews", _GROUP, namespaced=False
)
_RULES_REVIEWS: Final[Resource[UncheckedObject]] = Resource(
    "SelfSubjectRulesReview", "selfsubjectrulesreviews", _GROUP, namespaced=False
)
"""Every authenticated user may create both. Source: Kubernetes, ClusterRole system:basic-user."""

_NO_NAMESPACE: Final = "no.namespace"
"""No namespace can have a name with a dot, so no RoleBinding adds rules: what is allowed in it is allowed in each."""

_AT_A_TIME: Final = 8
"""Access reviews in parallel, of a few milliseconds each; without any rules there are about ninety."""


@dataclass(frozen=True)
class _Rule:
    """What one rule allows; `names` is empty if it holds for all objects."""

    verbs: frozenset[str]
    groups: frozenset[str]
    resources: frozenset[str]
    names: frozenset[str]

    @classmethod
    def parse(cls, raw: JsonDict) -> Self:
        """Parse a rule of a SelfSubjectRulesReview. Source: Kubernetes v1.34, authorization.k8s.io/v1 ResourceRule."""
        keys = ("verbs", "apiGroups", "resources", "resourceNames")
        return cls(*(frozenset(raw.get(key) or ()) for key in keys))

    def allows(self, permission: Permission, verb: str, name: str) -> bool:
        """Return whether the rule allows it; `name` is empty for all objects.

        Source: Kubernetes v1.34, pkg/apis/rbac/v1/evaluation_helpers.go.
        """
        whole = {permission.path, "*"} | ({f"*/{permission.subresource}"} if permission.subresource else set())
        return (
            not self.verbs.isdisjoint({verb, "*"})
            and not self.groups.isdisjoint({permission.resource.group, "*"})
            and not self.resources.isdisjoint(whole)
            and (not self.names or name in self.names)
        )


async def missing_permissions(
    client: KubeClient, namespace: str, permissions: Iterable[Permission], *, by_rules: bool = False
) -> dict[Permission, str]:
    """Return the missing ones of `permissions`, each as text; `by_rules`: what the caller's rules show is not asked.

    Raises:
        KubeError: the API server does not answer.
    """
    places = {Scope.OWN_NAMESPACE: namespace, Scope.CLUSTER: _NO_NAMESPACE} if by_rules else {}
    rules = {scope: await _read_rules(client, place) for scope, place in places.items()}
    gate = asyncio.Semaphore(_AT_A_TIME)

    async def lacks(permission: Permission, verb: str, name: str) -> str:
        if any(rule.allows(permission, verb, name) for rule in rules.get(permission.scope, ())):
            return ""
        async with gate:
            return "" if await _allowed(client, namespace, permission, verb=verb, name=name) else verb

    reviews: dict[Permission, list[asyncio.Task[str]]] = {}
    try:
        async with asyncio.TaskGroup() as group:
            for permission in permissions:
                reviews[permission] = [
                    group.create_task(lacks(permission, verb, name), name=f"review {verb} {permission.path}")
                    for verb in permission.verbs
                    for name in permission.names or ("",)
                ]
    except ExceptionGroup as e:
        # Not except*: Python before 3.11.4, such as Debian 12's, wraps what is raised there in a group.
        raise e.exceptions[0] from None
    return {
        permission: f"{','.join(verbs)} {permission.path}{permission.only} {permission.where}"
        for permission, tasks in reviews.items()
        if (verbs := dict.fromkeys(verb for task in tasks if (verb := task.result())))
    }


async def _read_rules(client: KubeClient, namespace: str) -> Sequence[_Rule]:
    """Return the caller's rules in `namespace` as far as the API server lists them."""
    try:
        answer = await client.create(_RULES_REVIEWS, _build_review(_RULES_REVIEWS, {"namespace": namespace}))
    except (ForbiddenError, InvalidError, NotFoundError):
        return ()
    return [_Rule.parse(raw) for raw in answer["status"].get("resourceRules") or []]


async def _allowed(client: KubeClient, namespace: str, permission: Permission, *, verb: str, name: str) -> bool:
    attributes = {
        "namespace": namespace if permission.scope is Scope.OWN_NAMESPACE else "",
        "verb": verb,
        "group": permission.resource.group,
        "resource": permission.resource.plural,
        "subresource": permission.subresource,
        "name": name,
    }
    answer = await client.create(_ACCESS_REVIEWS, _build_review(_ACCESS_REVIEWS, {"resourceAttributes": attributes}))
    return bool(answer["status"].get("allowed"))


def _build_review(kind: Resource, spec: Manifest) -> Manifest:
    return {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": {}, "spec": spec}

"""Which permissions the caller lacks: the API server is asked about each verb (SelfSubjectAccessReview)."""

import asyncio
from collections.abc import Iterable
from typing import Final

from core.kube.client import KubeClient
from core.kube.resources import Resource
from nodeagent.runtime.permissions import Permission, Scope

__all__ = ["missing_permissions"]

_ACCESS_REVIEWS: Final = Resource(
    "SelfSubjectAccessReview", "selfsubjectaccessreviews", "authorization.k8s.io", namespaced=False
)
"""Every authenticated user may create one. Source: Kubernetes, ClusterRole system:basic-user."""

_AT_A_TIME: Final = 8
"""Access reviews in parallel; there are about seventy, of a few milliseconds each."""


async def missing_permissions(
    client: KubeClient, namespace: str, permissions: Iterable[Permission]
) -> dict[Permission, str]:
    """Return the missing ones of `permissions`, each as text.

    Raises:
        KubeError: the API server does not answer.
    """
    gate = asyncio.Semaphore(_AT_A_TIME)

    async def lacks(permission: Permission, verb: str, name: str) -> str:
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


async def _allowed(client: KubeClient, namespace: str, permission: Permission, *, verb: str, name: str) -> bool:
    attributes = {
        "namespace": namespace if permission.scope is Scope.OWN_NAMESPACE else "",
        "verb": verb,
        "group": permission.resource.group,
        "resource": permission.resource.plural,
        "subresource": permission.subresource,
        "name": name,
    }
    review = {
        "apiVersion": _ACCESS_REVIEWS.api_version,
        "kind": _ACCESS_REVIEWS.kind,
        "metadata": {},
        "spec": {"resourceAttributes": attributes},
    }
    answer = await client.create(_ACCESS_REVIEWS, review)
    return bool(answer["status"].get("allowed"))

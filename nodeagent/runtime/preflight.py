"""What must hold before the agent starts: the API server answers, rights, kinds.

Knows how to ask for each and how to say in one line what is missing. Does not know what the
rights are for (`nodeagent.runtime.permissions`).
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

from core.errors import ConfigError
from core.kube.client import KubeClient
from core.kube.errors import KubeError, NotFoundError, raise_for_status
from core.kube.resources import (
    BACKUP_REPOSITORIES,
    BACKUP_STORAGE_LOCATIONS,
    DATA_DOWNLOADS,
    DATA_UPLOADS,
    POD_VOLUME_BACKUPS,
    POD_VOLUME_RESTORES,
    VOLUME_SNAPSHOT_CONTENTS,
    VOLUME_SNAPSHOTS,
    Resource,
)
from core.kube.transport import Request
from nodeagent.runtime.permissions import PERMISSIONS, Permission, Scope

__all__ = ["check_cluster"]

_log = logging.getLogger(__name__)

_KINDS: Final = (
    DATA_UPLOADS,
    DATA_DOWNLOADS,
    POD_VOLUME_BACKUPS,
    POD_VOLUME_RESTORES,
    BACKUP_REPOSITORIES,
    BACKUP_STORAGE_LOCATIONS,
)
_SNAPSHOT_KINDS: Final = (VOLUME_SNAPSHOTS, VOLUME_SNAPSHOT_CONTENTS)

_ACCESS_REVIEWS: Final = Resource(
    "SelfSubjectAccessReview", "selfsubjectaccessreviews", "authorization.k8s.io", namespaced=False
)
"""Every authenticated user may create one. Source: Kubernetes, ClusterRole system:basic-user."""

_AT_A_TIME: Final = 8
"""Questions on their way together; there are some seventy of them, of a few milliseconds each."""

_SHOWN: Final = 6
"""Missing rights that fit into a line; where more are missing, the whole role is."""


async def check_cluster(client: KubeClient, namespace: str) -> None:
    """Return if the agent can work in `namespace`; warn where only a part of it cannot.

    Raises:
        ConfigError: the API server does not answer, a right or a kind is missing; the message
            names all that is missing.
    """
    try:
        await _check_rights(client, namespace)
        missing = await _missing_kinds(client, namespace, _KINDS)
        without = await _missing_kinds(client, namespace, _SNAPSHOT_KINDS)
    except KubeError as e:
        raise ConfigError(f"the cluster cannot be checked: {e}") from e
    if missing:
        raise ConfigError(
            f"custom resource definitions are missing: {', '.join(missing)}: run kubectl apply -f deploy/crds"
        )
    if without:
        _log.warning("there is no snapshot API in this cluster (%s): every DataUpload will fail", ", ".join(without))


async def _missing_kinds(client: KubeClient, namespace: str, kinds: Sequence[Resource]) -> list[str]:
    """Return the names of the definitions of `kinds` that the API server does not serve."""
    missing = []
    for kind in kinds:
        attempted = f"list {kind.kind} {namespace if kind.namespaced else ''}".rstrip()
        answer = await client.transport.request(Request("GET", kind.path(namespace), {"limit": "1"}))
        try:
            raise_for_status(answer.status, answer.body, attempted=attempted)
        except NotFoundError:
            missing.append(f"{kind.plural}.{kind.group}/{kind.version}")
    return missing


async def _check_rights(client: KubeClient, namespace: str) -> None:
    gate = asyncio.Semaphore(_AT_A_TIME)

    async def lacks(right: Permission, verb: str, name: str) -> str:
        async with gate:
            return "" if await _allowed(client, namespace, right, verb=verb, name=name) else verb

    questions: dict[Permission, list[asyncio.Task[str]]] = {}
    try:
        async with asyncio.TaskGroup() as group:
            for right in PERMISSIONS:
                questions[right] = [
                    group.create_task(lacks(right, verb, name), name=f"ask for {verb} {right.path}")
                    for verb in right.verbs
                    for name in right.names or ("",)
                ]
    except* KubeError as e:
        raise e.exceptions[0] from None
    answers = {right: [verb for task in tasks if (verb := task.result())] for right, tasks in questions.items()}
    told = {right: f"{','.join(verbs)} {right.path} {right.where}" for right, verbs in answers.items() if verbs}
    lacking = [words for right, words in told.items() if right.needed]
    if lacking:
        more = f" and {len(lacking) - _SHOWN} more" if len(lacking) > _SHOWN else ""
        raise ConfigError(
            f"rights are missing: {'; '.join(lacking[:_SHOWN])}{more}: "
            "compare what the ServiceAccount is bound to with deploy/agent/rbac.yaml"
        )
    for right, words in told.items():
        if not right.needed:
            _log.warning("without the right to %s it cannot be told %s", words, right.reason)


async def _allowed(client: KubeClient, namespace: str, right: Permission, *, verb: str, name: str) -> bool:
    attributes = {
        "namespace": namespace if right.scope is Scope.OWN_NAMESPACE else "",
        "verb": verb,
        "group": right.resource.group,
        "resource": right.resource.plural,
        "subresource": right.subresource,
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

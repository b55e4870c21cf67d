"""Copies of Secrets and ConfigMaps that a driver reads in the namespace of the PVC, such as keys of encrypted volumes.

Each is copied from the volume's namespace before the PVC is created, and deleted after it. Only one copy of
a name can exist at a time: other transfers that need it wait until its transfer is cleaned up.
Source: Velero main at d2241adba, pkg/util/kube/secrets.go, where they fail instead.
"""

from collections.abc import Awaitable, Iterable, Iterator
from typing import Final, TypeVar

from core.errors import ExposeError
from core.kube.client import KubeClient
from core.kube.errors import ForbiddenError
from core.kube.resources import CONFIG_MAPS, SECRETS, Resource
from core.kube.types import ConfigObject, Manifest
from core.models.names import COPY_LABEL
from core.models.reasons import PendingReason
from exposer.expose_run import ExposeRun
from exposer.model import CopyPlan, Owner, Pending, Reader
from exposer.ownership import check_copy, delete_object, is_copy_for

__all__ = ["Copies"]

_KINDS: Final = {resource.kind: resource for resource in (SECRETS, CONFIG_MAPS)}
_CONTENT: Final = ("type", "data", "binaryData")

_T = TypeVar("_T")


class Copies:
    """Creates and deletes the copies of exposes."""

    def __init__(self, client: KubeClient) -> None:
        self._client = client

    async def check(self, plan: CopyPlan, reader: Reader) -> Pending | None:
        """Return why the objects cannot be copied yet; reads only.

        Raises:
            ExposeError: they never can: the permission is missing, or an object of another origin has the name.
        """
        for resource, name in _objects(plan.needed):
            source = await _read_source(reader, resource, plan.namespace, name)
            if isinstance(source, Pending):
                return source
            found = await _permitted(reader.read(resource, plan.owner.namespace, name), resource, plan.owner.namespace)
            if found is not None and not is_copy_for(found, plan.owner):
                return check_copy(resource, found)
        return None

    async def ensure(self, run: ExposeRun, plan: CopyPlan) -> Pending | None:
        """Create the copies that do not exist yet; None once all of them do.

        Raises:
            ExposeError: as for `check`.
            NotOwnerError: the owner is no longer this agent's.
        """
        for resource, name in _objects(plan.allowed):
            copy = await _permitted(run.read(resource, name), resource, plan.owner.namespace)
            if copy is None:
                source = await _read_source(self._client, resource, plan.namespace, name)
                if isinstance(source, Pending):
                    return source
                copy = await run.ensure(resource, _build_copy(plan.owner, resource, source))
            if isinstance(copy, Pending):
                return copy
        return None

    async def delete(self, plan: CopyPlan) -> Pending | None:
        """Delete the copies of the owner; None once there are none.

        Raises:
            KubeError: the API server rejected a request.
        """
        for resource, name in _objects(plan.possible):
            try:
                found = await self._client.read(resource, plan.owner.namespace, name)
            except ForbiddenError:
                if plan.recorded:
                    raise
                # Without the permission nothing was accepted, hence nothing copied.
                continue
            if found is None or not is_copy_for(found, plan.owner):
                continue
            if pending := await delete_object(self._client, resource, found):
                return pending
        return None


def _objects(words: Iterable[str]) -> Iterator[tuple[Resource[ConfigObject], str]]:
    """Return resource and name of each of `words`; an annotation may hold anything, so others are ignored."""
    for word in words:
        kind, _, name = word.partition("/")
        if kind in _KINDS and name:
            yield _KINDS[kind], name


async def _permitted(read: Awaitable[_T], resource: Resource, namespace: str) -> _T:
    """Return what `read` returns.

    Raises:
        ExposeError: the agent lacks the permission.
    """
    try:
        return await read
    except ForbiddenError as e:
        raise ExposeError(
            f"no permission to get {resource.plural} in namespace {namespace}, to copy what the volume needs: "
            f"apply deploy/volume-secrets: {e}"
        ) from e


async def _read_source(
    reader: Reader, resource: Resource[ConfigObject], namespace: str, name: str
) -> ConfigObject | Pending:
    source = await _permitted(reader.read(resource, namespace, name), resource, namespace)
    if source is None:
        text = f"{resource.kind} {namespace}/{name} does not exist, and is to be copied for the volume"
        return Pending(PendingReason.COPY_SOURCE_MISSING, text, blocked=True)
    return source


def _build_copy(owner: Owner, resource: Resource, source: ConfigObject) -> Manifest:
    """Return the copy: only the content, so that no label or annotation of a user gives it another meaning."""
    meta = {
        "name": source["metadata"]["name"],
        "namespace": owner.namespace,
        "labels": owner.labels | {COPY_LABEL: owner.uid},
        "ownerReferences": [owner.reference],
    }
    content: Manifest = {key: source[key] for key in _CONTENT if key in source}
    return {"apiVersion": resource.api_version, "kind": resource.kind, "metadata": meta} | content

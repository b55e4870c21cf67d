"""Creation and deletion of the objects that belong to one custom resource, and of no others.

Objects are identified by the owner's UID; creation is idempotent, deletion is by UID. A pod is
created without its PriorityClass where that no longer exists: a class can be deleted at any time,
and no transfer fails because of it.
"""

import logging
from dataclasses import replace
from datetime import datetime
from types import TracebackType
from typing import Self

from core.errors import ExposeError
from core.kube.client import Deletion, KubeClient
from core.kube.errors import AlreadyExistsError, ForbiddenError, KubeError, NotFoundError
from core.kube.resources import PODS, VOLUME_SNAPSHOT_CONTENTS, VOLUME_SNAPSHOTS, Resource
from core.logs import fields
from core.models.base import JsonDict
from core.models.names import OWNER_UID_LABEL
from core.models.reasons import PendingReason
from exposer.model import Guard, NotOwnerError, Owner, Pending

__all__ = [
    "ExposeRun",
    "belongs",
    "create_pod",
    "created_by_velero",
    "delete_object",
    "delete_owned",
    "describe_object",
    "patch_if_there",
]


_log = logging.getLogger(__name__)


_NO_PRIORITY_CLASS = "no PriorityClass with name"
"""Source: Kubernetes v1.34, plugin/pkg/admission/priority/admission.go."""


async def create_pod(client: KubeClient, manifest: JsonDict) -> JsonDict:
    """Create the pod and return it as stored; without its priority class if that does not exist.

    Raises:
        AlreadyExistsError: one of that name exists.
        KubeError: the API server rejected the pod for another reason.
    """
    meta, spec = manifest["metadata"], manifest["spec"]
    priority_class = spec.get("priorityClassName", "")
    extra = fields(kind=PODS.kind, namespace=meta["namespace"], name=meta["name"])
    try:
        created = await client.create(PODS, manifest)
    except ForbiddenError as e:
        if not priority_class or _NO_PRIORITY_CLASS not in str(e):
            raise
        _log.warning("PriorityClass %s does not exist, creating the pod without it: %s", priority_class, e, extra=extra)
        spec_without = {key: value for key, value in spec.items() if key != "priorityClassName"}
        return await client.create(PODS, manifest | {"spec": spec_without})
    if priority_class:
        _log.debug("created pod with PriorityClass %s", priority_class, extra=extra)
    return created


def describe_object(resource: Resource, obj: JsonDict) -> str:
    """Return the object as messages name it: kind, namespace, name."""
    meta = obj["metadata"]
    namespace = meta.get("namespace", "")
    return f"{resource.kind} {namespace}/{meta['name']}" if namespace else f"{resource.kind} {meta['name']}"


def belongs(obj: JsonDict, owner: Owner) -> bool:
    """Return whether `obj` was created for `owner`, by its UID and never by a name."""
    meta = obj["metadata"]
    if (meta.get("labels") or {}).get(OWNER_UID_LABEL) == owner.uid:
        return True
    return any(reference.get("uid") == owner.uid for reference in meta.get("ownerReferences") or [])


def created_by_velero(obj: JsonDict, owner: Owner) -> bool:
    """Return whether `obj` is the snapshot, or its content, that Velero's node-agent created for `owner`.

    Velero labels neither; but both are named after the owner, refer to each other, and have no
    owner label or reference.
    Source: Velero v1.18, pkg/exposer/csi_snapshot.go; tests/recordings/velero-1.18.2/volumesnapshot*.json.
    """
    meta, spec = obj["metadata"], obj.get("spec") or {}
    marked = OWNER_UID_LABEL in (meta.get("labels") or {}) or meta.get("ownerReferences")
    if marked or meta["name"] != owner.name:
        return False
    source = spec.get("source") or {}
    if obj.get("kind") == VOLUME_SNAPSHOTS.kind:
        refers_to = (meta.get("namespace"), source.get("volumeSnapshotContentName"))
        return refers_to == (owner.namespace, owner.name)
    reference = spec.get("volumeSnapshotRef") or {}
    named = (reference.get("namespace"), reference.get("name")) == (owner.namespace, meta["name"])
    return obj.get("kind") == VOLUME_SNAPSHOT_CONTENTS.kind and named and bool(source.get("snapshotHandle"))


def _exposed_for(obj: JsonDict, owner: Owner) -> bool:
    """Return whether an expose created `obj` for `owner`, also one of Velero that can be continued.

    Snapshots and their contents have no owner reference; an object with a reference to another
    UID never qualifies, whatever its label.
    """
    meta = obj["metadata"]
    labeled = (meta.get("labels") or {}).get(OWNER_UID_LABEL) == owner.uid
    references = [reference.get("uid") for reference in meta.get("ownerReferences") or []]
    return owner.uid in references or (labeled and not references)


def _controller_of(obj: JsonDict) -> tuple[str, str] | None:
    """Return kind and name of the owner of `obj`; None where it has none."""
    references = obj["metadata"].get("ownerReferences") or []
    found = next((each for each in references if each.get("controller")), references[0] if references else None)
    return (str(found.get("kind", "")), str(found.get("name", ""))) if found is not None else None


async def patch_if_there(client: KubeClient, resource: Resource, obj: JsonDict, patch: JsonDict) -> None:
    """Apply `patch` to `obj`, as it was just read, unless it was deleted or recreated."""
    meta = obj["metadata"]
    guarded = patch | {"metadata": patch.get("metadata", {}) | {"uid": meta["uid"]}}
    try:
        await client.patch(resource, meta.get("namespace", ""), meta["name"], guarded)
    except NotFoundError:
        _log.debug("object was deleted before it was patched", extra=fields(kind=resource.kind, name=meta["name"]))


async def delete_object(client: KubeClient, resource: Resource, obj: JsonDict) -> Pending | None:
    """Delete `obj`, as it was just read, by its UID; None once it is deleted.

    Never by force: a pod may still run and write on a node that is unreachable. Its deletion ends when
    its kubelet reports that it terminated, or when the Node is deleted or tainted as out of service.
    Source: Kubernetes v1.34, pkg/controller/podgc/gc_controller.go.
    """
    meta = obj["metadata"]
    namespace, name, uid = meta.get("namespace", ""), meta["name"], meta["uid"]
    node = (obj.get("spec") or {}).get("nodeName", "") if resource == PODS else ""
    on_node = f" on node {node}" if node else ""
    pending = Pending(PendingReason.CLEANING_UP, f"{describe_object(resource, obj)} is being deleted{on_node}")
    if deleted_at := meta.get("deletionTimestamp"):
        finalizers = ", ".join(meta.get("finalizers") or [])
        message = f"{pending.message} (finalizers: {finalizers})" if finalizers else pending.message
        return replace(pending, message=message, since=datetime.fromisoformat(deleted_at))
    deletion = await client.delete(resource, namespace, name, uid=uid)
    if deletion is Deletion.CONFLICT:
        left = await client.read(resource, namespace, name)
        return pending if left is not None and left["metadata"]["uid"] == uid else None
    if deletion is not Deletion.NOT_FOUND:
        extra = fields(kind=resource.kind, namespace=namespace, name=name, uid=uid)
        _log.info("deleting object", extra=extra)
    return pending if deletion is Deletion.STARTED else None


async def delete_owned(client: KubeClient, owner: Owner, resource: Resource, name: str) -> Pending | None:
    """Delete the owner's object of that name, also one of Velero; None once there is none."""
    namespace = owner.namespace if resource.namespaced else ""
    obj = await client.read(resource, namespace, name)
    if obj is None or not (belongs(obj, owner) or created_by_velero(obj, owner)):
        return None
    return await delete_object(client, resource, obj)


class ExposeRun:
    """One run of an expose: every object is the owner's, created by this run or an earlier one."""

    def __init__(self, client: KubeClient, owner: Owner, guard: Guard) -> None:
        self._client = client
        self._owner = owner
        self._guard = guard
        self._seen: list[tuple[Resource, JsonDict]] = []
        self._absent: set[tuple[Resource, str]] = set()
        self._created = False

    async def __aenter__(self) -> Self:
        """Start; no request is sent yet."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Delete the objects of this run where no agent continues with the owner.

        Raises:
            NotOwnerError: the owner was no longer this agent's when the last object was created.
        """
        if isinstance(error, NotOwnerError):
            await self._undo(error)
        elif error is None and self._created:
            try:
                await self._guard(sure=True)
            except NotOwnerError as e:
                await self._undo(e)
                raise

    async def read(self, resource: Resource, name: str) -> JsonDict | Pending | None:
        """Return the owner's object of that name; Pending while an object to be deleted has the name.

        Raises:
            ExposeError: another object has the name.
        """
        obj = await self._client.read(resource, self._namespace(resource), name)
        if obj is None:
            self._absent.add((resource, name))
            return None
        place = describe_object(resource, obj)
        if obj["metadata"].get("deletionTimestamp"):
            return Pending(PendingReason.NAME_TAKEN, f"{place} of an earlier attempt is still being deleted")
        if _exposed_for(obj, self._owner):
            self._seen.append((resource, obj))
            return obj
        if created_by_velero(obj, self._owner):
            raise ExposeError(f"{place} was created by Velero's node-agent for an expose that it did not complete")
        return self._name_taken(obj, place)

    async def ensure(self, resource: Resource, manifest: JsonDict) -> JsonDict | Pending:
        """Return the owner's object, created from `manifest` where it does not exist yet.

        Raises:
            ExposeError: another object has the name.
            NotOwnerError: from the guard; nothing was created.
        """
        name = manifest["metadata"]["name"]
        found = None if (resource, name) in self._absent else await self.read(resource, name)
        if found is not None:
            return found
        await self._guard(sure=False)
        self._created = True
        try:
            if resource == PODS:
                created = await create_pod(self._client, manifest)
            else:
                created = await self._client.create(resource, manifest)
        except AlreadyExistsError:
            # An attempt whose response was lost has created it, or another client was faster.
            found = await self.read(resource, name)
            if found is None:
                return Pending(PendingReason.NAME_TAKEN, f"{resource.kind} {name} was deleted just now")
            return found
        self._seen.append((resource, created))
        extra = fields(
            kind=resource.kind, namespace=self._namespace(resource), name=name, uid=created["metadata"]["uid"]
        )
        _log.info("created object", extra=extra)
        return created

    async def _undo(self, cause: NotOwnerError) -> None:
        """Delete by UID what this run read or created for the owner, if no agent continues with it.

        What cannot be deleted is left to garbage collection, which finds it by the owner's label.
        """
        if not cause.ended:
            return
        for resource, obj in reversed(self._seen):
            meta = obj["metadata"]
            extra = fields(kind=resource.kind, namespace=self._namespace(resource), name=meta["name"], uid=meta["uid"])
            try:
                await self._client.delete(resource, self._namespace(resource), meta["name"], uid=meta["uid"])
            except KubeError:
                _log.warning(
                    "failed to delete object of a finished transfer, garbage collection will retry",
                    extra=extra,
                    exc_info=True,
                )
            else:
                _log.info("deleting object of a finished transfer", extra=extra)

    def _name_taken(self, obj: JsonDict, place: str) -> Pending:
        """Return why the expose is pending where the object of another transfer has the name.

        Raises:
            ExposeError: it belongs to no transfer, or Velero created it: no agent will delete it.
        """
        owner, other = self._owner, _controller_of(obj)
        if (obj["metadata"].get("labels") or {}).get(OWNER_UID_LABEL, owner.uid) == owner.uid:
            whose = f" but to {other[0]} {other[1]}" if other else ""
            raise ExposeError(
                f"{place} already exists and does not belong to {owner.kind} {owner.name}{whose}: "
                f"delete it if it is not needed, or recreate the {owner.kind} under another name"
            )
        if other is None or other == (owner.kind, owner.name):
            return Pending(PendingReason.NAME_TAKEN, f"{place} of an earlier {owner.kind} must be deleted first")
        text = f"{place} belongs to {other[0]} {other[1]}, which has the same name and is not finished"
        return Pending(PendingReason.NAME_TAKEN, text, blocked=True)

    def _namespace(self, resource: Resource) -> str:
        return self._owner.namespace if resource.namespaced else ""

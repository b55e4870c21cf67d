"""Makes and removes objects that belong to one custom resource, and touches no others.

Knows how belonging is told, creation that may run twice, and deletion by UID. Does not know
what the objects are for.

Creates pods, with the priority class they were given or, where that is gone, without.

Knows what the API server says of a class that does not exist. Does not know who chose it: a
class can be deleted between the choice and the creation, and no load may fail for that.
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
    "made_by_velero",
    "patch_if_there",
    "place_of",
    "remove",
    "remove_owned",
]


_log = logging.getLogger(__name__)


_CLASS_IS_GONE = "no PriorityClass with name"
"""Source: Kubernetes v1.34, plugin/pkg/admission/priority/admission.go."""


async def create_pod(client: KubeClient, manifest: JsonDict) -> JsonDict:
    """Create the pod and return it as stored; without its priority class if that does not exist.

    Raises:
        AlreadyExistsError: one of that name exists.
        KubeError: any other refusal.
    """
    meta, spec = manifest["metadata"], manifest["spec"]
    priority_class = spec.get("priorityClassName", "")
    extra = fields(kind=PODS.kind, namespace=meta["namespace"], name=meta["name"])
    try:
        made = await client.create(PODS, manifest)
    except ForbiddenError as e:
        if not priority_class or _CLASS_IS_GONE not in str(e):
            raise
        _log.warning("priority class %s is gone, the pod is made without: %s", priority_class, e, extra=extra)
        left = {key: value for key, value in spec.items() if key != "priorityClassName"}
        return await client.create(PODS, manifest | {"spec": left})
    if priority_class:
        _log.debug("the pod has priority class %s", priority_class, extra=extra)
    return made


"""The reason of every wait for something to be gone."""


def place_of(resource: Resource, obj: JsonDict) -> str:
    """Return how messages name an object: kind, namespace, name."""
    meta = obj["metadata"]
    namespace = meta.get("namespace", "")
    return f"{resource.kind} {namespace}/{meta['name']}" if namespace else f"{resource.kind} {meta['name']}"


def belongs(obj: JsonDict, owner: Owner) -> bool:
    """Whether `obj` was made for `owner`, told by its UID and never by a name."""
    meta = obj["metadata"]
    if (meta.get("labels") or {}).get(OWNER_UID_LABEL) == owner.uid:
        return True
    return any(reference.get("uid") == owner.uid for reference in meta.get("ownerReferences") or [])


def made_by_velero(obj: JsonDict, owner: Owner) -> bool:
    """Whether `obj` is the snapshot, or its content, that a peer's agent made for `owner`.

    The peer marks neither; but both are named after the owner, point at each other, and bear
    nobody's mark.
    Source: Velero v1.18, pkg/exposer/csi_snapshot.go; tests/recordings/velero-1.18.2/volumesnapshot*.json.
    """
    meta, spec = obj["metadata"], obj.get("spec") or {}
    marked = OWNER_UID_LABEL in (meta.get("labels") or {}) or meta.get("ownerReferences")
    if marked or meta["name"] != owner.name:
        return False
    source = spec.get("source") or {}
    if obj.get("kind") == VOLUME_SNAPSHOTS.kind:
        made_from = (meta.get("namespace"), source.get("volumeSnapshotContentName"))
        return made_from == (owner.namespace, owner.name)
    reference = spec.get("volumeSnapshotRef") or {}
    named = (reference.get("namespace"), reference.get("name")) == (owner.namespace, meta["name"])
    return obj.get("kind") == VOLUME_SNAPSHOT_CONTENTS.kind and named and bool(source.get("snapshotHandle"))


def _made_for(obj: JsonDict, owner: Owner) -> bool:
    """Whether `obj` is one that an expose made for `owner`: ours, or a peer's that we go on with.

    Snapshots and their contents have no owner reference; a reference to another UID is never
    ours, whatever a label says.
    """
    meta = obj["metadata"]
    labelled = (meta.get("labels") or {}).get(OWNER_UID_LABEL) == owner.uid
    references = [reference.get("uid") for reference in meta.get("ownerReferences") or []]
    return owner.uid in references or (labelled and not references)


def _controller_of(obj: JsonDict) -> tuple[str, str] | None:
    """Return kind and name of what owns `obj`, None where nobody does."""
    references = obj["metadata"].get("ownerReferences") or []
    found = next((each for each in references if each.get("controller")), references[0] if references else None)
    return (str(found.get("kind", "")), str(found.get("name", ""))) if found is not None else None


async def patch_if_there(client: KubeClient, resource: Resource, obj: JsonDict, patch: JsonDict) -> None:
    """Apply `patch` to `obj`, as it was just read, unless it went away or was replaced."""
    meta = obj["metadata"]
    held = patch | {"metadata": patch.get("metadata", {}) | {"uid": meta["uid"]}}
    try:
        await client.patch(resource, meta.get("namespace", ""), meta["name"], held)
    except NotFoundError:
        _log.debug("object went away before it was changed", extra=fields(kind=resource.kind, name=meta["name"]))


async def remove(client: KubeClient, resource: Resource, obj: JsonDict) -> Pending | None:
    """Have `obj`, as it was just read, deleted by its UID; None once it is gone.

    Never by force: a pod may still run and write on a node that is only out of reach. It goes when
    its kubelet says that it ended, when the Node is deleted, or is tainted as out of service.
    Source: Kubernetes v1.34, pkg/controller/podgc/gc_controller.go.
    """
    meta = obj["metadata"]
    namespace, name, uid = meta.get("namespace", ""), meta["name"], meta["uid"]
    node = (obj.get("spec") or {}).get("nodeName", "") if resource == PODS else ""
    on_node = f" on node {node}" if node else ""
    waiting = Pending(PendingReason.CLEANING_UP, f"{place_of(resource, obj)} is being deleted{on_node}")
    if asked := meta.get("deletionTimestamp"):
        held = ", ".join(meta.get("finalizers") or [])
        words = f"{waiting.message}, held by {held}" if held else waiting.message
        return replace(waiting, message=words, since=datetime.fromisoformat(asked))
    deletion = await client.delete(resource, namespace, name, uid=uid)
    if deletion is Deletion.REFUSED:
        left = await client.read(resource, namespace, name)
        return waiting if left is not None and left["metadata"]["uid"] == uid else None
    if deletion is not Deletion.GONE_BEFORE:
        extra = fields(kind=resource.kind, namespace=namespace, name=name, uid=uid)
        _log.info("object is being removed", extra=extra)
    return waiting if deletion is Deletion.BEGUN else None


async def remove_owned(client: KubeClient, owner: Owner, resource: Resource, name: str) -> Pending | None:
    """Have the owner's object of that name deleted, a peer's too; None once it is gone or never was."""
    namespace = owner.namespace if resource.namespaced else ""
    obj = await client.read(resource, namespace, name)
    if obj is None or not (belongs(obj, owner) or made_by_velero(obj, owner)):
        return None
    return await remove(client, resource, obj)


class ExposeRun:
    """One run of an expose: every object is the owner's, made by this run or an earlier one."""

    def __init__(self, client: KubeClient, owner: Owner, guard: Guard) -> None:
        self._client = client
        self._owner = owner
        self._guard = guard
        self._seen: list[tuple[Resource, JsonDict]] = []
        self._absent: set[tuple[Resource, str]] = set()
        self._made = False

    async def __aenter__(self) -> Self:
        """Begin; nothing is done yet."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take back what the run met of an owner that nobody goes on with.

        Raises:
            NotOwnerError: the owner was in other hands when the last object was made.
        """
        if isinstance(error, NotOwnerError):
            await self._undo(error)
        elif error is None and self._made:
            try:
                await self._guard(sure=True)
            except NotOwnerError as e:
                await self._undo(e)
                raise

    async def read(self, resource: Resource, name: str) -> JsonDict | Pending | None:
        """Return the owner's object of that name; Pending while a leftover is in its place.

        Raises:
            ExposeError: the name is taken by somebody else's object.
        """
        obj = await self._client.read(resource, self._namespace(resource), name)
        if obj is None:
            self._absent.add((resource, name))
            return None
        place = place_of(resource, obj)
        if obj["metadata"].get("deletionTimestamp"):
            return Pending(PendingReason.NAME_TAKEN, f"{place} of an earlier attempt is still being deleted")
        if _made_for(obj, self._owner):
            self._seen.append((resource, obj))
            return obj
        if made_by_velero(obj, self._owner):
            raise ExposeError(f"{place} is of an expose that a peer's agent began and did not finish")
        return self._name_taken(obj, place)

    async def ensure(self, resource: Resource, manifest: JsonDict) -> JsonDict | Pending:
        """Return the owner's object, made from `manifest` where it does not exist yet.

        Raises:
            ExposeError: the name is taken by somebody else's object.
            NotOwnerError: from the guard; nothing was made.
        """
        name = manifest["metadata"]["name"]
        found = None if (resource, name) in self._absent else await self.read(resource, name)
        if found is not None:
            return found
        await self._guard(sure=False)
        self._made = True
        try:
            if resource == PODS:
                made = await create_pod(self._client, manifest)
            else:
                made = await self._client.create(resource, manifest)
        except AlreadyExistsError:
            # A try whose answer was lost has made it, or somebody was faster.
            found = await self.read(resource, name)
            if found is None:
                return Pending(PendingReason.NAME_TAKEN, f"{resource.kind} {name} has just been deleted")
            return found
        self._seen.append((resource, made))
        extra = fields(kind=resource.kind, namespace=self._namespace(resource), name=name, uid=made["metadata"]["uid"])
        _log.info("object was made", extra=extra)
        return made

    async def _undo(self, cause: NotOwnerError) -> None:
        """Delete by UID what this run met of the owner, if nobody goes on with it.

        What cannot be deleted is left to the sweeper, which finds it by the owner's label.
        """
        if not cause.ended:
            return
        for resource, obj in reversed(self._seen):
            meta = obj["metadata"]
            extra = fields(kind=resource.kind, namespace=self._namespace(resource), name=meta["name"], uid=meta["uid"])
            try:
                await self._client.delete(resource, self._namespace(resource), meta["name"], uid=meta["uid"])
            except KubeError:
                _log.warning("object of an ended load could not be removed", extra=extra, exc_info=True)
            else:
                _log.info("object of an ended load is being removed", extra=extra)

    def _name_taken(self, obj: JsonDict, place: str) -> Pending:
        """Return what is waited for where another load's object has the name.

        Raises:
            ExposeError: it is no load's, or a peer made it: nobody here can tell when it goes.
        """
        owner, other = self._owner, _controller_of(obj)
        if (obj["metadata"].get("labels") or {}).get(OWNER_UID_LABEL, owner.uid) == owner.uid:
            whose = f"; it belongs to {other[0]} {other[1]}" if other else ""
            raise ExposeError(
                f"{place} exists already and does not belong to {owner.kind} {owner.name}{whose}. "
                "Delete it if nobody needs it, or make this load anew under another name"
            )
        if other is None or other == (owner.kind, owner.name):
            return Pending(
                PendingReason.NAME_TAKEN, f"{place} is left from an earlier {owner.kind} and has to go first"
            )
        text = f"{place} belongs to {other[0]} {other[1]}, whose objects have the same name: waiting until it is done"
        return Pending(PendingReason.NAME_TAKEN, f"{text}. Give loads of different kinds different names", blocked=True)

    def _namespace(self, resource: Resource) -> str:
        return self._owner.namespace if resource.namespaced else ""

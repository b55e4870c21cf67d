"""One run of an expose: creates the objects of one custom resource, and undoes that where it has ended.

Creation is idempotent: objects of an earlier run are found by the owner's UID.
"""

import logging
from types import TracebackType
from typing import Self, cast

from core.errors import ExposeError
from core.kube.client import Deletion, KubeClient
from core.kube.errors import AlreadyExistsError, KubeError
from core.kube.resources import (
    CONFIG_MAPS,
    PERSISTENT_VOLUME_CLAIMS,
    PODS,
    SECRETS,
    VOLUME_SNAPSHOT_CONTENTS,
    Resource,
)
from core.kube.types import Manifest, Object, ObjectT, VolumeSnapshotContent
from core.logs import fields
from core.models.names import OWNER_KIND_ANNOTATION, OWNER_UID_LABEL
from core.models.reasons import PendingReason
from exposer.handover import settle_source
from exposer.model import Guard, NotOwnerError, Owner, Pending
from exposer.ownership import (
    check_copy,
    create_pod,
    created_by_velero,
    delete_object,
    describe_object,
    is_copy_for,
)
from exposer.pod_status import attempt_of
from exposer.volumes import is_being_provisioned

__all__ = ["ExposeRun"]

_log = logging.getLogger(__name__)


class ExposeRun:
    """One run of an expose: every object is the owner's, created by this run or an earlier one."""

    def __init__(self, client: KubeClient, owner: Owner, guard: Guard) -> None:
        self._client = client
        self._owner = owner
        self._guard = guard
        self._seen: list[tuple[Resource, Object]] = []
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
                await self.confirm()
            except NotOwnerError as e:
                await self._undo(e)
                raise

    async def read(self, resource: Resource[ObjectT], name: str) -> ObjectT | Pending | None:
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
        copied = resource in {SECRETS, CONFIG_MAPS}
        if is_copy_for(obj, self._owner) if copied else _exposed_for(obj, self._owner):
            if resource == PODS and attempt_of(obj) != self._owner.attempt:
                return await delete_object(self._client, resource, obj)
            self._seen.append((resource, obj))
            return obj
        if copied:
            return check_copy(resource, obj)
        if created_by_velero(obj, self._owner):
            raise ExposeError(f"{place} was created by Velero's node-agent for an expose that it did not complete")
        return self._name_taken(obj, place)

    async def ensure(self, resource: Resource[ObjectT], manifest: Manifest) -> ObjectT | Pending:
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
                created = cast("ObjectT", await create_pod(self._client, manifest))
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

    async def confirm(self) -> None:
        """Check with a read that the owner is still this agent's: before what cannot be undone.

        Raises:
            NotOwnerError: from the guard.
        """
        await self._guard(sure=True)
        self._created = False

    async def _undo(self, cause: NotOwnerError) -> None:
        """Delete by UID what this run read or created for the owner, if no agent continues with it.

        What cannot be deleted is left to garbage collection, which finds it by the owner's label. So are a PVC
        that may have a volume, and its snapshot, which some storages delete after the volume only.
        """
        if not cause.ended:
            return
        for resource, obj in reversed(self._seen):
            meta = obj["metadata"]
            extra = fields(kind=resource.kind, namespace=self._namespace(resource), name=meta["name"], uid=meta["uid"])
            try:
                if not await self._delete(resource, obj):
                    _log.info("object may have a volume, garbage collection will delete both", extra=extra)
                    return
            except KubeError:
                _log.warning(
                    "failed to delete object of a finished transfer, garbage collection will retry",
                    extra=extra,
                    exc_info=True,
                )
            else:
                _log.info("deleting object of a finished transfer", extra=extra)

    async def _delete(self, resource: Resource, obj: Object) -> bool:
        """Delete one object; return whether that was done, so that what it was created from may be deleted too."""
        meta, namespace, version = obj["metadata"], self._namespace(resource), ""
        if resource == PERSISTENT_VOLUME_CLAIMS:
            # It may have got its volume since it was seen.
            claim = await self._client.read(PERSISTENT_VOLUME_CLAIMS, namespace, meta["name"])
            if claim is None or claim["metadata"]["uid"] != meta["uid"]:
                return True
            if claim["spec"].get("volumeName") or await is_being_provisioned(self._client, claim):
                return False
            version = claim["metadata"]["resourceVersion"]
        if resource == VOLUME_SNAPSHOT_CONTENTS:
            await settle_source(self._client, cast("VolumeSnapshotContent", obj))
        deletion = await self._client.delete(
            resource, namespace, meta["name"], uid=meta["uid"], resource_version=version
        )
        return not version or deletion is not Deletion.CONFLICT

    def _name_taken(self, obj: Object, place: str) -> Pending:
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


def _exposed_for(obj: Object, owner: Owner) -> bool:
    """Return whether an expose created `obj` for `owner`, also one of Velero that can be continued.

    Snapshots and their contents have no owner reference; an object with a reference to another
    UID never qualifies, whatever its label.
    """
    meta = obj["metadata"]
    labeled = (meta.get("labels") or {}).get(OWNER_UID_LABEL) == owner.uid
    references = [reference.get("uid") for reference in meta.get("ownerReferences") or []]
    return owner.uid in references or (labeled and not references)


def _controller_of(obj: Object) -> tuple[str, str] | None:
    """Return kind and name of the owner of `obj`; None where neither references nor annotations name one."""
    meta = obj["metadata"]
    if kind := (meta.get("annotations") or {}).get(OWNER_KIND_ANNOTATION):
        return str(kind), str(meta["name"])
    references = meta.get("ownerReferences") or []
    found = next((each for each in references if each.get("controller")), references[0] if references else None)
    return (str(found.get("kind", "")), str(found.get("name", ""))) if found is not None else None

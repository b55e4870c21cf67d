"""One run of an expose: creates the objects of one custom resource, and undoes that where it has ended.

Creation is idempotent: objects of an earlier run are found by the owner's UID.

Secrets and ConfigMaps that a driver reads in the namespace of the PVC are copied before the PVC is created, and deleted
after it. Only one copy of a name can exist at a time: other transfers that need it wait.
Source: Velero main at d2241adba, pkg/util/kube/secrets.go, where they fail instead.

A cache volume only saves time and space on the node, and no restore fails for lack of one.
Source: Velero v1.18, pkg/exposer/cache_volume.go and validateCachePVCConfig in pkg/cmd/cli/nodeagent/server.go.
"""

import logging
from collections.abc import Awaitable, Iterable, Iterator
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, Self, TypeVar, cast

from core.errors import ContractError, ExposeError
from core.kube import resources as kube
from core.kube.client import Deletion, KubeClient
from core.kube.errors import AlreadyExistsError, ForbiddenError, InvalidError, KubeError
from core.kube.types import ConfigObject, Manifest, Object, ObjectT, VolumeSnapshotContent
from core.logs import fields
from core.models.names import BASE_SNAPSHOT_LABEL, COPY_LABEL, OWNER_KIND_ANNOTATION, OWNER_UID_LABEL
from core.models.phases import Interruption
from core.models.reasons import PendingReason
from core.models.storage import BackupStorageLocation
from core.models.units import parse_quantity
from exposer import ownership
from exposer.causes import CauseFinder
from exposer.manifests import build_cache_claim, cache_claim_name
from exposer.model import CopyPlan, Guard, NotOwnerError, Owner, Pending, PendingError, Reader
from exposer.pod_status import attempt_of
from exposer.settings import CacheVolume, StorageAccess
from exposer.sources import settle_source

_log = logging.getLogger(__name__)


class MoverExposer:
    """The common part of all exposers."""

    def __init__(self, client: KubeClient, causes: CauseFinder) -> None:
        self._client, self._causes = client, causes

    async def withdraw(self, request: Any, last: Interruption, guard: Guard) -> Pending | None:  # noqa: ANN401 - its own
        """Delete an interrupted attempt's mover pod and, unless only the mover ended, its cache; None: both are gone.

        The pod's node may be the only one that reaches the volume of the cache.
        """
        pending = await ownership.delete_owned(self._client, request.owner, kube.PODS, guard=guard)
        if pending or last.in_place:
            return pending
        return await ownership.delete_claim(self._client, request.owner, cache_claim_name(request.owner), guard=guard)


class ExposeRun:
    """One run of an expose: every object is the owner's, created by this run or an earlier one."""

    def __init__(self, client: KubeClient, owner: Owner, guard: Guard) -> None:
        self.client = client
        self.owner = owner
        self._guard = guard
        self._seen: list[tuple[kube.Resource, Object]] = []
        self._absent: set[tuple[kube.Resource, str]] = set()
        self._created = False

    async def __aenter__(self) -> Self:
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
        elif self._created and (error is None or isinstance(error, PendingError)):
            try:
                await self.confirm()
            except NotOwnerError as e:
                await self._undo(e)
                raise

    async def read(self, resource: kube.Resource[ObjectT], name: str) -> ObjectT | None:
        """Return the owner's object of that name; PendingError: one to be deleted has it, ExposeError: another has."""
        obj = await self.client.read(resource, self._namespace(resource), name)
        if obj is None:
            self._absent.add((resource, name))
            return None
        place = ownership.describe_object(resource, obj)
        if obj["metadata"].get("deletionTimestamp"):
            raise PendingError(
                Pending(PendingReason.NAME_TAKEN, f"{place} of an earlier attempt is still being deleted")
            )
        copied = resource in {kube.SECRETS, kube.CONFIG_MAPS}
        if ownership.is_copy_for(obj, self.owner) if copied else _exposed_for(obj, self.owner):
            if resource == kube.PODS and attempt_of(obj) != self.owner.attempt:
                # It may be a later one, which another agent has begun.
                await self.confirm()
                if pending := await ownership.delete_object(self.client, resource, obj):
                    raise PendingError(pending)
                return None
            self._seen.append((resource, obj))
            return obj
        if copied:
            raise PendingError(ownership.check_copy(resource, obj))
        if ownership.created_by_velero(obj, self.owner):
            raise ExposeError(f"{place} was created by Velero's node-agent for an expose that it did not complete")
        raise PendingError(self._name_taken(obj, place))

    async def ensure(self, resource: kube.Resource[ObjectT], manifest: Manifest) -> ObjectT:
        """Return the owner's object, created from `manifest` where it does not exist yet.

        Raises:
            ExposeError: another object has the name.
            PendingError: that is to be deleted.
            NotOwnerError: from the guard; nothing was created.
        """
        name = manifest["metadata"]["name"]
        found = None if (resource, name) in self._absent else await self.read(resource, name)
        if found is not None:
            return found
        await self._guard(sure=False)
        self._created = True
        try:
            if resource == kube.PODS:
                created = cast("ObjectT", await ownership.create_pod(self.client, manifest))
            else:
                created = await self.client.create(resource, manifest)
        except AlreadyExistsError:
            # An attempt whose response was lost has created it, or another client was faster.
            found = await self.read(resource, name)
            if found is None:
                text = f"{resource.kind} {name} was deleted just now"
                raise PendingError(Pending(PendingReason.NAME_TAKEN, text)) from None
            return found
        self._seen.append((resource, created))
        extra = fields(
            kind=resource.kind, namespace=self._namespace(resource), name=name, uid=created["metadata"]["uid"]
        )
        _log.info("created object", extra=extra)
        return created

    async def read_storage_access(self, location: str) -> StorageAccess:
        """Return what the movers of that location need; nothing, if it is missing or invalid: they will fail."""
        raw = await self.client.read(kube.BACKUP_STORAGE_LOCATIONS, self.owner.namespace, location)
        with suppress(ContractError):
            return StorageAccess.of(BackupStorageLocation.parse(raw)) if raw is not None else StorageAccess()
        return StorageAccess()

    async def confirm(self) -> None:
        """Raise NotOwnerError, by a read, unless the owner is still this agent's: before what cannot be undone."""
        await self._guard(sure=True)
        self._created = False

    async def _undo(self, cause: NotOwnerError) -> None:
        """Delete by UID what this run read or created for the owner, if no agent continues with it.

        What cannot be deleted is left to garbage collection. So are a PVC that may have a volume, and its snapshot,
        which some storages delete after the volume only.
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

    async def _delete(self, resource: kube.Resource, obj: Object) -> bool:
        """Delete one object; return whether that was done, so that what it was created from may be deleted too."""
        meta, namespace, version = obj["metadata"], self._namespace(resource), ""
        if resource == kube.PERSISTENT_VOLUME_CLAIMS:
            # It may have got its volume since it was seen.
            claim = await self.client.read(kube.PERSISTENT_VOLUME_CLAIMS, namespace, meta["name"])
            if claim is None or claim["metadata"]["uid"] != meta["uid"]:
                return True
            if claim["spec"].get("volumeName") or await ownership.is_being_provisioned(self.client, claim):
                return False
            version = claim["metadata"]["resourceVersion"]
        if resource in {kube.VOLUME_SNAPSHOTS, kube.VOLUME_SNAPSHOT_CONTENTS}:
            # The snapshot controller deletes the content with its VolumeSnapshot.
            for content in [seen for kind, seen in self._seen if kind == kube.VOLUME_SNAPSHOT_CONTENTS]:
                await settle_source(self.client, cast("VolumeSnapshotContent", content))
        deletion = await self.client.delete(
            resource, namespace, meta["name"], uid=meta["uid"], resource_version=version
        )
        return not version or deletion is not Deletion.CONFLICT

    def _name_taken(self, obj: Object, place: str) -> Pending:
        """Return what the expose is pending for where another transfer's object has the name.

        Raises:
            ExposeError: it belongs to no transfer, or Velero created it: no agent will delete it.
        """
        owner, other = self.owner, _controller_of(obj, self.owner.name)
        labels = obj["metadata"].get("labels") or {}
        # A base snapshot is deleted soon after its transfer.
        if BASE_SNAPSHOT_LABEL not in labels and labels.get(OWNER_UID_LABEL, owner.uid) == owner.uid:
            whose = f" but to {other[0]} {other[1]}" if other else ""
            raise ExposeError(
                f"{place} already exists and does not belong to {owner.kind} {owner.name}{whose}: "
                f"delete it if it is not needed, or recreate the {owner.kind} under another name"
            )
        if other is None or other == (owner.kind, owner.name):
            return Pending(PendingReason.NAME_TAKEN, f"{place} of an earlier {owner.kind} must be deleted first")
        text = f"{place} belongs to {other[0]} {other[1]}, which has the same name and is not finished"
        return Pending(PendingReason.NAME_TAKEN, text, blocked=True)

    def _namespace(self, resource: kube.Resource) -> str:
        return self.owner.namespace if resource.namespaced else ""


def _exposed_for(obj: Object, owner: Owner) -> bool:
    """Return whether an expose created `obj` for `owner`, also one of Velero that can be continued.

    Snapshots and their contents have no owner reference; an object with a reference to another
    UID never qualifies, whatever its label.
    """
    meta = obj["metadata"]
    labeled = (meta.get("labels") or {}).get(OWNER_UID_LABEL) == owner.uid
    references = [reference.get("uid") for reference in meta.get("ownerReferences") or []]
    return owner.uid in references or (labeled and not references)


def _controller_of(obj: Object, name: str) -> tuple[str, str] | None:
    """Return kind and name of the owner of `obj`; None where neither references nor annotations name one.

    The PVCs of a transfer, also the one of its cache, get their names from its `name`.
    """
    meta = obj["metadata"]
    if kind := (meta.get("annotations") or {}).get(OWNER_KIND_ANNOTATION):
        return str(kind), name
    references = meta.get("ownerReferences") or []
    found = next((each for each in references if each.get("controller")), references[0] if references else None)
    return (str(found.get("kind", "")), str(found.get("name", ""))) if found is not None else None


_KINDS: Final = {resource.kind: resource for resource in (kube.SECRETS, kube.CONFIG_MAPS)}
_CONTENT: Final = ("type", "data", "binaryData")

_T = TypeVar("_T")


async def check_copies(reader: Reader, plan: CopyPlan) -> None:
    """Check whether the objects can be copied; reads only.

    Raises:
        ExposeError: they never can: the permission is missing, or an object of another origin has the name.
        PendingError: they cannot yet.
    """
    for resource, name in _objects(plan.needed):
        await _read_source(reader, resource, plan.namespace, name)
        found = await _permitted(reader.read(resource, plan.owner.namespace, name), resource, plan.owner.namespace)
        if found is not None and not ownership.is_copy_for(found, plan.owner):
            raise PendingError(ownership.check_copy(resource, found))


async def ensure_copies(run: ExposeRun, plan: CopyPlan) -> None:
    """Create the copies that do not exist yet. Errors are as for `check_copies` and `run`."""
    for resource, name in _objects(plan.allowed):
        if await _permitted(run.read(resource, name), resource, plan.owner.namespace) is None:
            source = await _read_source(run.client, resource, plan.namespace, name)
            await run.ensure(resource, _build_copy(plan.owner, resource, source))


async def delete_copies(client: KubeClient, plan: CopyPlan) -> Pending | None:
    """Delete the copies of the owner; None once there are none."""
    for resource, name in _objects(plan.possible):
        try:
            found = await client.read(resource, plan.owner.namespace, name)
        except ForbiddenError:
            if plan.recorded:
                raise
            # Without the permission nothing was accepted, hence nothing copied.
            continue
        if found is None or not ownership.is_copy_for(found, plan.owner):
            continue
        if pending := await ownership.delete_object(client, resource, found):
            return pending
    return None


def _objects(words: Iterable[str]) -> Iterator[tuple[kube.Resource[ConfigObject], str]]:
    """Return resource and name of each of `words`; an annotation may hold anything, so others are ignored."""
    parts = (word.partition("/") for word in words)
    return ((_KINDS[kind], name) for kind, _, name in parts if kind in _KINDS and name)


async def _permitted(read: Awaitable[_T], resource: kube.Resource, namespace: str) -> _T:
    """Return what `read` returns; raise ExposeError if the agent lacks the permission."""
    try:
        return await read
    except ForbiddenError as e:
        raise ExposeError(
            f"no permission to get {resource.plural} in namespace {namespace}, to copy what the volume needs: "
            f"apply deploy/volume-secrets: {e}"
        ) from e


async def _read_source(
    reader: Reader, resource: kube.Resource[ConfigObject], namespace: str, name: str
) -> ConfigObject:
    source = await _permitted(reader.read(resource, namespace, name), resource, namespace)
    if source is None:
        text = f"{resource.kind} {namespace}/{name} does not exist, and is to be copied for the volume"
        raise PendingError(Pending(PendingReason.COPY_SOURCE_MISSING, text, blocked=True))
    return source


def _build_copy(owner: Owner, resource: kube.Resource, source: ConfigObject) -> Manifest:
    """Return the copy: only the content, so that no label or annotation of a user gives it another meaning."""
    meta = {
        "name": source["metadata"]["name"],
        "namespace": owner.namespace,
        "labels": owner.labels | {COPY_LABEL: owner.uid},
        "ownerReferences": [owner.reference],
    }
    return resource.build(meta, **{key: source[key] for key in _CONTENT if key in source})


async def ensure_cache(run: ExposeRun, cache: CacheVolume | None, *, node: str | None) -> CacheVolume | None:
    """Return the cache that the owner's PVC holds, created where needed; None where there is none.

    A PVC that was created before an edit of the configuration holds what it was created for. `node`: where the cache
    must be reachable; None: anywhere. Errors are as for `ExposeRun.ensure`.
    """
    if cache is None:
        return None
    owner = run.owner
    try:
        problem, manifest = await _problem_of(run.client, cache), build_cache_claim(owner, cache, node=node)
        claim = await run.ensure(kube.PERSISTENT_VOLUME_CLAIMS, manifest) if problem is None else None
    except (ForbiddenError, InvalidError) as e:
        # By a quota, a LimitRange or a webhook.
        problem, claim = str(e), None
    if claim is None:
        extra = fields(kind=owner.kind, namespace=owner.namespace, name=owner.name, reason=problem or "")
        _log.warning("cannot create a cache volume, using the node's disk for the cache", extra=extra)
        return None
    return cache.within(int(parse_quantity(claim["spec"]["resources"]["requests"]["storage"])) >> 30)


async def _problem_of(client: KubeClient, cache: CacheVolume) -> str | None:
    """Return why the class cannot be used for a cache volume; None where it can."""
    if not cache.storage_class:
        return "cachePVC has no storageClass"
    found = await client.read(kube.STORAGE_CLASSES, "", cache.storage_class)
    if found is None:
        return f"StorageClass {cache.storage_class} does not exist"
    policy = found.get("reclaimPolicy") or ownership.DELETE
    if policy != ownership.DELETE:
        return f"StorageClass {cache.storage_class} has reclaimPolicy {policy}: cache volumes would not be deleted"
    return None

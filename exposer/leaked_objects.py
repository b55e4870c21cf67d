"""Objects that outlive a transfer: leaked objects, deleted in order, and base snapshots, which stay on purpose.

A leaked object is one whose custom resource no longer exists. It is found by the owner label alone; an object without
it is never touched. Which owners no longer exist is determined by `nodeagent.leader.recovery.garbage_collector`.

A base snapshot is the storage's snapshot of the last backup by block: some drivers can tell what has changed only while
it exists. After a backup is complete, its content is kept without a VolumeSnapshot, with the policy Retain, so that
nothing else deletes it: one for each PVC. The next complete backup replaces it. It is deleted with its DataUpload: then
no backup has it as parent. Beside a Velero server, as there, the deletion policy of the snapshot decides whether it
stays at all.
Source: Velero, pull request 10307 (the policy of the snapshot's class); external-snapshotter v8.6.0,
pkg/common-controller and pkg/sidecar-controller, snapshot_controller.go (a content whose VolumeSnapshot was deleted).
"""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, cast

from core.kube import resources as kube
from core.kube.client import KubeClient, Selection, select_labels
from core.kube.errors import ForbiddenError, NotFoundError
from core.kube.types import Manifest, Object, ObjectT, PersistentVolume, UncheckedObject, VolumeSnapshotContent
from core.kube.velero_server import has_velero_server
from core.models import names as wire
from core.models.base import parse_time
from core.models.reasons import PendingReason
from exposer import ownership
from exposer.in_place import delete_shown, existing_name, give_back, is_given_away, read_claim_of
from exposer.manifests import GROUP_ANNOTATION, SnapshotSource, recorded_volumes
from exposer.model import Pending, SnapshotRequest
from exposer.sources import settle_source


async def keep_base_snapshot(
    client: KubeClient, request: SnapshotRequest, content: VolumeSnapshotContent, source: SnapshotSource
) -> Pending | None:
    """Keep the snapshot of a complete backup, whose `content` is still the transfer's, unless the policy forbids it.

    Pending: the VolumeSnapshot must not be deleted at once. A snapshot controller that has not yet seen the new policy
    would delete the content then, and the snapshot would stay on the storage without a name.
    Source: external-snapshotter v8.6.0, pkg/common-controller, processSnapshotWithDeletionTimestamp.
    """
    # A driver may refuse to delete a member of a group, and the next backup would wait for it.
    in_group = source.group or GROUP_ANNOTATION in (content["metadata"].get("annotations") or {})
    if in_group or not source.volume_handle or content["metadata"].get("deletionTimestamp"):
        return None
    if source.deletion_policy != ownership.RETAIN and await has_velero_server(client, request.owner.namespace):
        return None
    labels = {
        wire.OWNER_UID_LABEL: None,
        wire.BASE_SNAPSHOT_LABEL: request.owner.uid,
        wire.BASE_CLAIM_LABEL: _claim_value(request),
    }
    kept: Manifest = {"metadata": {"labels": labels}, "spec": {"deletionPolicy": ownership.RETAIN}}
    await ownership.patch_if_there(client, kube.VOLUME_SNAPSHOT_CONTENTS, content, kept)
    name = content["metadata"]["name"]
    return Pending(PendingReason.CLEANING_UP, f"VolumeSnapshotContent {name} is kept for the next backup by block")


async def replace_base_snapshots(client: KubeClient, request: SnapshotRequest) -> Pending | None:
    """Delete all base snapshots of the volume but the newest; that too if it is older than a backup that has none."""
    selector = select_labels({wire.BASE_CLAIM_LABEL: _claim_value(request)})
    found = await client.list(Selection(kube.VOLUME_SNAPSHOT_CONTENTS, label_selector=selector))
    own = sorted((one for one in found if is_in_namespace(one, request.owner.namespace)), key=_created)
    kept = own[-1:]
    if kept and request.requested_at is not None and parse_time(_created(kept[0])[0]) < request.requested_at:
        kept = []
    pending = [await delete_base_snapshot(client, one) for one in own if one not in kept]
    return next(filter(None, pending), None)


async def delete_base_snapshot(client: KubeClient, content: VolumeSnapshotContent) -> Pending | None:
    """Delete a base snapshot and its content; None once there is none."""
    if not content["metadata"].get("deletionTimestamp"):
        await ownership.patch_if_there(
            client, kube.VOLUME_SNAPSHOT_CONTENTS, content, {"spec": {"deletionPolicy": ownership.DELETE}}
        )
    return await ownership.delete_object(client, kube.VOLUME_SNAPSHOT_CONTENTS, content)


def is_in_namespace(content: VolumeSnapshotContent, namespace: str) -> bool:
    """Return whether the agents of that namespace keep a base snapshot."""
    return (content["spec"].get("volumeSnapshotRef") or {}).get("namespace") == namespace


def _claim_value(request: SnapshotRequest) -> str:
    # A namespace has no dot.
    return wire.label_value(f"{request.source_namespace}.{request.source_claim}")


def _created(obj: Mapping[str, Any]) -> tuple[str, str]:
    return obj["metadata"]["creationTimestamp"], obj["metadata"]["name"]


_COPIED: Final = (kube.SECRETS, kube.CONFIG_MAPS)
_NAMESPACED: Final = (kube.PODS, kube.PERSISTENT_VOLUME_CLAIMS, kube.VOLUME_SNAPSHOTS)
_COPY_LABELS: Final = f"{wire.OWNER_UID_LABEL},{wire.COPY_LABEL}"


@dataclass(frozen=True)
class LeakedObjects:
    """The objects of one owner, as JSON dicts by resource; `taken` are volumes that are given to their PVCs.

    `shown` are those besides that showed the device of one.
    `bases` are base snapshots, which stay as long as their owner exists, also after its cleanup.
    """

    uid: str
    objects: dict[kube.Resource, list[Object]] = field(default_factory=dict)
    taken: list[PersistentVolume] = field(default_factory=list)
    shown: list[PersistentVolume] = field(default_factory=list)
    bases: list[VolumeSnapshotContent] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.objects or self.taken or self.shown or self.bases)

    def of(self, resource: kube.Resource[ObjectT]) -> list[ObjectT]:
        """Return the objects of one resource."""
        return cast("list[ObjectT]", self.objects.get(resource, []))


async def list_leaked_objects(client: KubeClient, namespace: str, *, copies: bool = False) -> dict[str, LeakedObjects]:
    """Return all objects with an owner label, by the owner's UID; Secrets and ConfigMaps only if `copies` is set.

    A VolumeSnapshotContent is included where it refers to a snapshot of `namespace`; a volume, which has the label only
    during its rebind, where it refers to a PVC of `namespace`, or a target PVC, that was deleted: once bound to one it
    is never deleted, and gets its reclaim policy back, as existing volumes that were restored into do.
    """
    found: dict[str, LeakedObjects] = {}
    selections = [
        *(Selection(resource, namespace, label_selector=wire.OWNER_UID_LABEL) for resource in _NAMESPACED),
        *(Selection(resource, namespace, label_selector=_COPY_LABELS) for resource in _COPIED if copies),
        Selection(kube.VOLUME_SNAPSHOT_CONTENTS, label_selector=wire.OWNER_UID_LABEL),
    ]
    for selection in selections:
        for obj in await _list(client, selection):
            spec = cast("UncheckedObject", obj).get("spec") or {}
            if (spec.get("volumeSnapshotRef") or {"namespace": namespace}).get("namespace") == namespace:
                _add(found, selection.resource, obj)
    for volume in await _list(client, Selection(kube.PERSISTENT_VOLUMES, label_selector=wire.OWNER_UID_LABEL)):
        if await _refers_to_deleted_claim(client, volume, namespace):
            _add(found, kube.PERSISTENT_VOLUMES, volume)
        elif (volume.get("status") or {}).get("phase") == "Bound" and not _is_lent(volume):
            # A provisioner deletes a volume that is still Released once it has the policy Delete.
            _add_existing(found, volume, namespace)
    for volume in await _list(client, Selection(kube.PERSISTENT_VOLUMES, label_selector=wire.IN_PLACE_LABEL)):
        _add_existing(found, volume, namespace)
    for content in await _list(
        client, Selection(kube.VOLUME_SNAPSHOT_CONTENTS, label_selector=wire.BASE_SNAPSHOT_LABEL)
    ):
        uid = (content["metadata"].get("labels") or {}).get(wire.BASE_SNAPSHOT_LABEL)
        if uid and is_in_namespace(content, namespace):
            found.setdefault(uid, LeakedObjects(uid)).bases.append(content)
    return found


def _add(found: dict[str, LeakedObjects], resource: kube.Resource, obj: Object) -> None:
    """Add an object to its owner's; a malformed answer may have one without an owner."""
    if uid := (obj["metadata"].get("labels") or {}).get(wire.OWNER_UID_LABEL):
        found.setdefault(uid, LeakedObjects(uid)).objects.setdefault(resource, []).append(obj)


def _add_existing(found: dict[str, LeakedObjects], volume: PersistentVolume, namespace: str) -> None:
    labels, claim = volume["metadata"].get("labels") or {}, read_claim_of(volume)
    uid = labels.get(wire.IN_PLACE_LABEL) or labels.get(wire.OWNER_UID_LABEL)
    name, reference = volume["metadata"]["name"], volume["spec"].get("claimRef") or {}
    if uid and claim is not None and claim[0] == namespace:
        found.setdefault(uid, LeakedObjects(uid)).taken.append(volume)
    elif uid and claim is None and existing_name(name) != name and reference.get("namespace") == namespace:
        found.setdefault(uid, LeakedObjects(uid)).shown.append(volume)


async def delete_leaked_objects(client: KubeClient, leaked: LeakedObjects) -> str | None:
    """Take the next step; return what is being deleted, as text; None: nothing is left.

    Pods are deleted before the PVCs they use, volumes before the snapshot they were created from.
    """
    steps = (
        partial(_delete_all, resources=(kube.PODS,)),
        _delete_claims,
        _delete_shown,
        _give_back_volumes,
        _delete_volumes,
        partial(_delete_all, resources=_COPIED),
        _delete_snapshots,
        partial(_delete_all, resources=(kube.VOLUME_SNAPSHOT_CONTENTS,)),
        _delete_bases,
    )
    for step in steps:
        if pending := [one.message for one in await step(client, leaked) if one is not None]:
            return "; ".join(pending)
    return None


async def _list(client: KubeClient, selection: Selection[ObjectT]) -> list[ObjectT]:
    try:
        return await client.list(selection)
    except NotFoundError:
        # A cluster without CSI snapshots does not have their kinds.
        return []
    except ForbiddenError:
        if selection.resource not in {kube.PERSISTENT_VOLUMES, *_COPIED}:
            raise
        # The ClusterRole of an earlier version, or one without deploy/volume-secrets: all other objects can be deleted.
        return []


async def _refers_to_deleted_claim(client: KubeClient, volume: PersistentVolume, namespace: str) -> bool:
    """Return whether `volume` refers to a PVC that no longer exists: one of `namespace`, or its target PVC.

    A volume without a reference was released by a user to be bound again. One that is retained by its class might have
    been bound to its target PVC.
    """
    reference, target = volume["spec"].get("claimRef") or {}, read_claim_of(volume)
    place = reference.get("namespace", "")
    given = target is not None and not _is_lent(volume) and ownership.original_policy(volume) == ownership.DELETE
    agents = target.agents if target is not None and given else place
    if not (reference.get("uid") and reference.get("name")) or agents != namespace:
        return False
    claim = await client.read(kube.PERSISTENT_VOLUME_CLAIMS, place, reference["name"])
    return claim is None or claim["metadata"]["uid"] != reference["uid"]


_Pending = list[Pending | None]


async def _delete_all(client: KubeClient, leaked: LeakedObjects, resources: Iterable[kube.Resource]) -> _Pending:
    return [await ownership.delete_object(client, each, obj) for each in resources for obj in leaked.of(each)]


async def _delete_claims(client: KubeClient, leaked: LeakedObjects) -> _Pending:
    claims, contents = leaked.of(kube.PERSISTENT_VOLUME_CLAIMS), leaked.of(kube.VOLUME_SNAPSHOT_CONTENTS)
    return [await ownership.delete_with_volume(client, claim, *contents) for claim in claims]


async def _delete_shown(client: KubeClient, leaked: LeakedObjects) -> _Pending:
    """Delete the PersistentVolumes that showed the devices of existing volumes, once they are detached."""
    names = [volume["metadata"]["name"] for volume in leaked.shown]
    return [
        await ownership.find_detaching(client, name) or await delete_shown(client, leaked.uid, existing_name(name))
        for name in names
    ]


def _is_lent(volume: PersistentVolume) -> bool:
    """Return whether `volume` does not refer to the PVC that it is given to, or records none."""
    reference, claim = volume["spec"].get("claimRef") or {}, read_claim_of(volume)
    return claim is None or (reference.get("namespace"), reference.get("name")) != claim[1:]


async def _give_back_volumes(client: KubeClient, leaked: LeakedObjects) -> _Pending:
    """Give existing volumes back to their PVCs, once they are detached: no pod and no PVC of the restore is left."""
    pending: _Pending = []
    for volume in leaked.taken:
        if (claim := read_claim_of(volume)) is None:
            continue
        lent = _is_lent(volume) and not is_given_away(volume, claim)
        if lent and (detaching := await ownership.find_detaching(client, volume["metadata"]["name"])):
            pending.append(detaching)
            continue
        with suppress(NotFoundError):
            await give_back(client, volume, claim)
    return pending


async def _delete_volumes(client: KubeClient, leaked: LeakedObjects) -> _Pending:
    """Return the volumes that still exist; their PVCs are deleted, so their provisioner deletes them."""
    volumes, contents = leaked.of(kube.PERSISTENT_VOLUMES), leaked.of(kube.VOLUME_SNAPSHOT_CONTENTS)
    for volume in volumes:
        with suppress(NotFoundError):
            await ownership.set_reclaim_policy(client, volume, ownership.DELETE)
    if volumes or not contents:
        return [ownership.describe_reclaim(one) for one in volumes]
    bound = {claim["spec"].get("volumeName") for claim in leaked.of(kube.PERSISTENT_VOLUME_CLAIMS)}
    names = {*filter(None, bound), *(name for content in contents for name in recorded_volumes(content))}
    return [await ownership.find_snapshot_volume(client, names)]


async def _delete_snapshots(client: KubeClient, leaked: LeakedObjects) -> _Pending:
    for content in leaked.of(kube.VOLUME_SNAPSHOT_CONTENTS):
        await settle_source(client, content)
    return [await ownership.delete_backup_snapshot(client, snapshot) for snapshot in leaked.of(kube.VOLUME_SNAPSHOTS)]


async def _delete_bases(client: KubeClient, leaked: LeakedObjects) -> _Pending:
    return [await delete_base_snapshot(client, content) for content in leaked.bases]

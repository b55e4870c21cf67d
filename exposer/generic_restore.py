"""Exposer of restores: a new or an existing volume for the data of a DataDownload, bound to the target PVC at the end.

The steps of the binding, each of which checks whether it is still to be done: set reclaim policy Retain (with our owner
label, so that garbage collection finds a provisioned volume if its transfer is deleted before it is
bound), delete the pod, wait until the volume is detached, delete its PVC, point the volume at the
target PVC (with those labels that the target PVC selects by and the volume lacks), point the target
PVC at the volume, wait until they are bound, restore the reclaim policy and remove the label.

A device is restored through a restore PVC of volumeMode Block. For a target with a file system, the volume gets another
PersistentVolume once its PVC is deleted, which replaces the first one: both are retained, refer to the deleted PVC and
have our label meanwhile, so that neither is bound or reclaimed, and one of them always names the storage.
Source: Velero v1.18, pkg/exposer/generic_restore.go (the order, and the labels of the target's
selector), and main at d2241adba (the detachment); Kubernetes v1.34,
pkg/controller/volume/persistentvolume/pv_controller.go (when a volume and a PVC are bound).
"""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Final

from core.contract import VolumeMode
from core.errors import ExposeError, Translated
from core.kube.client import Selection
from core.kube.errors import NotFoundError
from core.kube.resources import NODES, PERSISTENT_VOLUME_CLAIMS, PERSISTENT_VOLUMES, PODS, STORAGE_CLASSES
from core.kube.types import Manifest, PersistentVolume, PersistentVolumeClaim, Pod
from core.models.base import parse_time
from core.models.names import SELECTED_NODE_ANNOTATION
from core.models.reasons import PendingReason
from exposer import in_place, manifests, ownership
from exposer.expose_run import ExposeRun, MoverExposer, check_copies, delete_copies, ensure_cache, ensure_copies
from exposer.model import Exposed, Guard, KeptVolume, Owner, Pending, PendingError, Reader, RestoreRequest, or_pending
from exposer.pod_manifest import Placement
from exposer.pods import build_restore_pod
from exposer.sources import WINDOWS_ONLY, delete_base, leave_to_velero
from exposer.workload import TO_CORDONED_NODE, tolerations_of_consumers

_TARGET_TIMEOUT: Final = timedelta(minutes=2)
"""How long the target PVC may be missing: Velero creates it after the DataDownload.

Source: Velero v1.18, the CSI restore action of PersistentVolumeClaims.
"""


class GenericRestoreExposer(MoverExposer):
    """Exposes the volumes of DataDownloads, and binds them to their target PVCs."""

    @or_pending
    async def check(self, request: RestoreRequest, reader: Reader) -> None:
        """Return why the expose cannot start yet; reads only.

        Raises:
            ExposeError: the target PVC is already bound, or it requires a Windows node, and Velero has no agent there.
        """
        if request.for_windows:
            leave_to_velero(request.settings.template)
        target = await self._read_target(request, reader)
        await self._place(request, target, reader)
        await in_place.check_existing(request, target=target, reader=reader)
        await check_copies(reader, request.copies)

    @or_pending
    async def ensure(self, request: RestoreRequest, guard: Guard) -> Exposed | Pending:
        """Take the next steps and return the pod, or why it is pending.

        ExposeError: it can never succeed. NotOwnerError: the DataDownload is no longer this agent's.
        """
        async with ExposeRun(self._client, request.owner, guard) as run:
            # The pod is created last: where it exists, all other objects were created before it.
            pod = await run.read(PODS, request.owner.name) or await self._ensure_all(request, run)
            return await self._causes.inspect(pod, by_block=request.by_block)

    async def confirm(self, request: RestoreRequest) -> None:
        """Raise ExposeError if anything else uses the existing volume, or a new one cannot get the target's mode."""
        if request.volume:
            volume = await self._client.read(PERSISTENT_VOLUMES, "", request.volume)
            if volume is not None and (users := await in_place.find_users(self._client, volume)):
                raise ExposeError(f"PersistentVolume {request.volume} is in use: {users}")
        elif request.by_block:
            kept = await self.read_volume(request)
            with suppress(PendingError):
                target = await self._read_target(request, self._client)
                if not kept.provisioned and manifests.volume_mode(target) is VolumeMode.FILESYSTEM:
                    raise ExposeError(
                        f"PersistentVolumeClaim {request.owner.namespace}/{request.owner.name} was bound to the "
                        f"existing PersistentVolume {kept.pv_name}, whose volumeMode cannot become the target PVC's"
                    )

    async def read_volume(self, request: RestoreRequest) -> KeptVolume:
        """Return the restored volume, before its rebind starts; raise ExposeError if PVC or volume no longer exist."""
        owner = request.owner
        await in_place.take_over_lent(self._client, request)
        place = f"PersistentVolumeClaim {owner.namespace}/{owner.name} with the restored data"
        claim = await ownership.read_owned(self._client, owner, PERSISTENT_VOLUME_CLAIMS)
        if claim is None:
            raise ExposeError(f"{place} no longer exists")
        name = claim["spec"].get("volumeName", "")
        if request.volume and name == in_place.device_name(request.volume):
            name = request.volume
        volume = await self._client.read(PERSISTENT_VOLUMES, "", name) if name else None
        if volume is None:
            stays = await self._explain_device(request)
            raise ExposeError(f"PersistentVolume of {place} no longer exists{stays}")
        return KeptVolume(name, ownership.original_policy(volume), provisioned=ownership.is_provisioned(volume))

    async def clean_up(self, request: RestoreRequest) -> Pending | None:
        """Delete the expose objects; None once nothing is left. A rebound volume stays."""
        owner = request.owner
        # With copies: the driver may need them to delete the volume.
        marks: Manifest | None = {"labels": owner.labels} if request.copies.possible else None
        pending = await ownership.delete_owned(self._client, owner, PODS)
        pending = pending or await ownership.delete_claim(self._client, owner, owner.name, marks=marks)
        pending = pending or await ownership.delete_claim(self._client, owner, manifests.cache_claim_name(owner))
        if pending is None and request.by_block and request.volume:
            pending = await in_place.delete_shown(self._client, owner.uid, request.volume)
        if pending is None and marks:
            pending = await ownership.find_marked_volume(self._client, owner)
        pending = pending or await delete_copies(self._client, request.copies)
        return pending or await delete_base(self._client, request)

    async def _ensure_all(self, request: RestoreRequest, run: ExposeRun) -> Pod:
        target = await self._read_target(request, self._client)
        placement = await self._place(request, target, self._client)
        first, late = request.owner.attempt == 1, placement.node is not None
        if first and placement.node and await self._is_gone(placement.node):
            raise PendingError(await self._select_again(target, placement.node))
        await ensure_copies(run, request.copies)
        claim = await self._ensure_claim(request, run, target, node=placement.node)
        if not first and claim["spec"].get("volumeName"):
            # The volume is there: the scheduler knows which nodes can reach it, if the consumer's node is lost.
            placement = replace(placement, node=None)
        elif placement.node:
            # The consumer's node may have changed since the PVC was created for the previous one.
            selected = (claim["metadata"].get("annotations") or {}).get(SELECTED_NODE_ANNOTATION) or placement.node
            gone = selected != placement.node and await self._is_gone(selected)
            placement = replace(placement, node=None if gone else selected)
        cache = await ensure_cache(run, request.cache, node=placement.node)
        storage = await run.read_storage_access(request.location)
        if late or request.volume:
            # The scheduler chose the node of the target's consumer by these, and there the volume is. A user who edits
            # the PVC can name another node, but gets a mover no further than a pod.
            selection = Selection(PODS, request.target_namespace, field_selector="status.phase=Pending")
            tolerations = tolerations_of_consumers(await self._client.list(selection), request.target_claim)
            bound = placement.node or request.volume
            placement = replace(placement, tolerations=(TO_CORDONED_NODE, *tolerations) if bound else tolerations)
        manifest = build_restore_pod(
            request, manifests.volume_mode(claim), placement=placement, storage=storage, cache=cache
        )
        return await run.ensure(PODS, manifest)

    async def _is_gone(self, node: str) -> bool:
        return await self._client.read(NODES, "", node) is None

    async def _select_again(self, target: PersistentVolumeClaim, node: str) -> Pending:
        """Have another node selected for the target's consumer, as a provisioner would if the target had no selector.

        Nothing runs on a node while its pods wait for their volumes, and an autoscaler removes it.
        Source: external-provisioner v6.3, pkg/controller/controller.go (prepareProvision).
        """
        change: Manifest = {"metadata": {"annotations": {SELECTED_NODE_ANNOTATION: None}}}
        await self._client.patch_if_unchanged(PERSISTENT_VOLUME_CLAIMS, target, change)
        place = f"target PVC {target['metadata']['namespace']}/{target['metadata']['name']}"
        text = f"node {node}, which was selected for {place}, no longer exists: another one is being selected"
        return Pending(PendingReason.TARGET_CLAIM_UNCONSUMED, text)

    async def _ensure_claim(
        self, request: RestoreRequest, run: ExposeRun, target: PersistentVolumeClaim, *, node: str | None
    ) -> PersistentVolumeClaim:
        """Return the restore PVC; an existing volume is taken for it first."""
        await in_place.take_over_lent(self._client, request)
        existing = await in_place.check_existing(request, target=target, reader=self._client)
        if existing is not None:
            taken = await in_place.ensure_taken(self._client, run, request=request, volume=existing)
            existing = await in_place.ensure_shown(self._client, run, request=request, volume=taken)
        excluded = request.settings.excluded_metadata
        manifest = manifests.build_restore_claim(
            request.owner, target, node=node, excluded=excluded, volume=existing, by_block=request.by_block
        )
        return await run.ensure(PERSISTENT_VOLUME_CLAIMS, manifest)

    async def _read_target(self, request: RestoreRequest, reader: Reader) -> PersistentVolumeClaim:
        """Return the target PVC; raise ExposeError if it has a volume other than the one that is restored into."""
        namespace, name = request.target_namespace, request.target_claim
        place = f"target PVC {namespace}/{name}"
        target = await reader.read(PERSISTENT_VOLUME_CLAIMS, namespace, name)
        if target is None:
            text = f"PersistentVolumeClaim {namespace}/{name} to restore into does not exist"
            raise PendingError(Pending(PendingReason.TARGET_CLAIM_MISSING, text, timeout=_TARGET_TIMEOUT))
        if target["metadata"].get("deletionTimestamp"):
            raise PendingError(Pending(PendingReason.TARGET_CLAIM_ABSENT, f"{place} is being deleted"))
        if (volume := target["spec"].get("volumeName")) and volume != request.volume:
            raise ExposeError(f"cannot restore into {place}: it is already bound to PersistentVolume {volume}")
        _check_restore(request, target)
        return target

    async def _place(self, request: RestoreRequest, target: PersistentVolumeClaim, reader: Reader) -> Placement:
        """Return the nodes for the volume and its mover; PendingError: they are not known yet.

        With late binding, the consumer's node is the only one; otherwise the rules apply. To an existing volume the
        scheduler adds the nodes that can reach it. ExposeError: Windows is required.
        """
        if request.for_windows:
            # Velero's agent accepted it.
            raise ExposeError(WINDOWS_ONLY)
        class_name = target["spec"].get("storageClassName") or ""
        if class_name and not request.volume and not request.settings.ignore_delay_binding:
            place = f"target PVC {request.target_namespace}/{request.target_claim}"
            storage_class = await reader.read(STORAGE_CLASSES, "", class_name)
            if storage_class is None:
                # To change one, it is deleted and created again.
                text = f"StorageClass {class_name} of {place} does not exist"
                raise PendingError(Pending(PendingReason.TARGET_CLASS_MISSING, text, blocked=True))
            if ownership.binds_late(storage_class):
                node = (target["metadata"].get("annotations") or {}).get(SELECTED_NODE_ANNOTATION)
                if node:
                    return Placement(node=node)
                raise PendingError(Pending(PendingReason.TARGET_CLAIM_UNCONSUMED, f"{place} is not used by a pod yet"))
        return Placement(alternatives=request.settings.nodes.choose(class_name))

    async def rebind(self, request: RestoreRequest, kept: KeptVolume) -> Pending | None:
        """Take the next steps; None once the target PVC is bound to the volume.

        Raises:
            ExposeError: target PVC or volume were deleted, or the target PVC has another volume.
        """
        target = await self._read_bound_target(request, kept)
        volume = await self._read_volume(request, kept)
        if isinstance(volume, Pending):
            return volume
        if volume is None or volume["metadata"].get("deletionTimestamp"):
            stays = await self._explain_device(request)
            raise ExposeError(f"PersistentVolume {kept.pv_name} with the restored data was deleted{stays}")
        with Translated(NotFoundError, ExposeError, "cannot bind the restored volume to the target PVC"):
            return await self._rebind(request, kept, target=target, volume=volume)

    async def drop_volume(self, request: RestoreRequest, kept: KeptVolume) -> Pending | None:
        """Delete a volume that cannot be rebound; None once it is deleted.

        A volume that the target PVC points at is kept for it. One that was not provisioned for the restore is
        released, with the reclaim policy that it came with.
        """
        volume = await self._read_volume(request, kept)
        if volume is None or isinstance(volume, Pending):
            return volume
        name = volume["metadata"]["name"]
        target = await self._client.read(PERSISTENT_VOLUME_CLAIMS, request.target_namespace, request.target_claim)
        if target is not None and target["spec"].get("volumeName") == name:
            await ownership.restore_reclaim_policy(self._client, volume, kept.reclaim_policy)
            return None
        if not _owned_by_restore(request, volume):
            return None
        pending = ownership.describe_reclaim(volume)
        try:
            if kept.provisioned:
                volume = await ownership.set_reclaim_policy(self._client, volume, ownership.DELETE)
            else:
                volume = await ownership.restore_reclaim_policy(self._client, volume, kept.reclaim_policy)
            deleting = await self._delete_pod_and_claim(request.owner)
            if deleting:
                return deleting
            reference = volume["spec"].get("claimRef") or {}
            if not reference.get("uid") or (target is not None and _claimed_by(volume, target)):
                # Pointed at a deleted PVC, its controller reclaims it: if the target PVC was bound to another one, it
                # was only made Available again. To delete the object is not enough: a provisioner acts on Released.
                # Source: sig-storage-lib-external-provisioner v11, controller/controller.go.
                owner = request.owner
                patch: Manifest = {
                    "spec": {"claimRef": manifests.point_at_claim(owner.namespace, owner.name, owner.uid)}
                }
                await self._client.patch_if_unchanged(PERSISTENT_VOLUMES, volume, patch)
        except NotFoundError:
            return None
        return pending if kept.provisioned else None

    async def give_back(self, request: RestoreRequest) -> Pending | None:
        """Give the existing volume of an unfinished restore, taken or only released, back to its PVC; None: done."""
        if request.volume is None:
            return None
        await in_place.take_over_lent(self._client, request)
        volume = await self._client.read(PERSISTENT_VOLUMES, "", request.volume)
        own = in_place.OwnClaim(request.owner.namespace, request.target_namespace, request.target_claim)
        if volume is not None and in_place.is_taken_by(volume, request.owner):
            attached = None if in_place.is_given_away(volume, own) else in_place.shown_name(request, volume)
            pending = await self._delete_pod_and_claim(request.owner, attached=attached)
            pending = pending or await in_place.delete_shown(self._client, request.owner.uid, request.volume)
            if pending:
                return pending
            volume = await self._client.read(PERSISTENT_VOLUMES, "", request.volume)
        if volume is None:
            return None
        target = await self._client.read(PERSISTENT_VOLUME_CLAIMS, request.target_namespace, request.target_claim)
        if in_place.is_taken_by(volume, request.owner) or in_place.is_released(volume, request, target):
            await in_place.give_back(self._client, volume, own)
        return None

    async def _rebind(
        self, request: RestoreRequest, kept: KeptVolume, *, target: PersistentVolumeClaim, volume: PersistentVolume
    ) -> Pending | None:
        name = volume["metadata"]["name"]
        if not _claimed_by(volume, target):
            _check_owned(request, volume)
            # By these, garbage collection deletes it or, once it is bound to the target, restores its policy.
            marks = {"labels": request.owner.labels, "annotations": in_place.record_claim(request, kept.reclaim_policy)}
            marks = marks if kept.provisioned else {}
            volume = await ownership.set_reclaim_policy(self._client, volume, ownership.RETAIN, marks=marks)
            shown = in_place.shown_name(request, volume) if request.volume else name
            names = () if request.volume else ownership.attachment_names(volume, request.nodes)
            pending = await self._delete_pod_and_claim(request.owner, attached=shown, names=names)
            if pending is None and shown != name:
                pending = await in_place.delete_shown(self._client, request.owner.uid, name)
            if pending:
                return pending
            # Read again: its controller has recorded meanwhile that the PVC was deleted.
            volume = await self._client.get(PERSISTENT_VOLUMES, "", name)
            _check_owned(request, volume)
            if manifests.volume_mode(volume) is not manifests.volume_mode(target):
                return await self._change_mode(request, kept, volume)
            await self._point_volume(volume, target)
            # Its controller is to see that first. If it sees the PVC point at a volume that is another PVC's, it looks
            # at the PVC again only 15 seconds later.
            return _binding(request, name)
        if not target["spec"].get("volumeName"):
            change: Manifest = {"spec": {"volumeName": name}}
            target = await self._client.patch_if_unchanged(PERSISTENT_VOLUME_CLAIMS, target, change)
        if not _bound(volume, target):
            return _binding(request, name)
        await ownership.restore_reclaim_policy(self._client, volume, kept.reclaim_policy)
        return None

    async def _read_volume(self, request: RestoreRequest, kept: KeptVolume) -> PersistentVolume | Pending | None:
        """Return the PersistentVolume of the restored data; Pending while another one replaces it."""
        volume = await self._client.read(PERSISTENT_VOLUMES, "", kept.pv_name)
        changes = request.by_block and not request.volume
        if not changes or (volume is not None and not volume["metadata"].get("deletionTimestamp")):
            return volume
        changed = await self._client.read(PERSISTENT_VOLUMES, "", manifests.changed_name(kept.pv_name))
        if volume is None or changed is None:
            return changed or volume
        return _changing(kept)

    async def _explain_device(self, request: RestoreRequest) -> str:
        """Return the end of a message: which PersistentVolume still names the storage of a deleted existing one."""
        name = in_place.device_name(request.volume) if request.by_block and request.volume else ""
        device = await self._client.read(PERSISTENT_VOLUMES, "", name) if name else None
        own = device is not None and in_place.is_taken_by(device, request.owner)
        return f": PersistentVolume {name}, which stays, names its storage" if own else ""

    async def _change_mode(self, request: RestoreRequest, kept: KeptVolume, volume: PersistentVolume) -> Pending:
        """Replace the retained volume of a device by one with a file system; raise ExposeError if it may not."""
        if not kept.provisioned or manifests.volume_mode(volume) is not VolumeMode.BLOCK:
            mode = volume["spec"].get("volumeMode")
            raise ExposeError(f"PersistentVolume {kept.pv_name} has volumeMode {mode}, unlike the target PVC")
        manifest = manifests.build_changed_volume(volume, fs_type=request.fs_type or kept.fs_type)
        await ownership.replace_volume(self._client, request.owner, volume, manifest)
        return _changing(kept)

    async def _delete_pod_and_claim(
        self, owner: Owner, *, attached: str | None = None, names: Iterable[str] = ()
    ) -> Pending | None:
        """Delete both, the PVC once the PersistentVolume `attached` is on no node; None once they are gone.

        `names` are the VolumeAttachments that it may have; none: not known.
        """
        pending = await ownership.delete_owned(self._client, owner, PODS)
        if pending is None and attached:
            pending = await ownership.find_detaching(self._client, attached, names)
        return pending or await ownership.delete_owned(self._client, owner, PERSISTENT_VOLUME_CLAIMS)

    async def _read_bound_target(self, request: RestoreRequest, kept: KeptVolume) -> PersistentVolumeClaim:
        namespace, name = request.target_namespace, request.target_claim
        place = f"target PVC {namespace}/{name}"
        target = await self._client.read(PERSISTENT_VOLUME_CLAIMS, namespace, name)
        if target is None or target["metadata"].get("deletionTimestamp"):
            raise ExposeError(f"{place} was deleted")
        other = target["spec"].get("volumeName") or kept.pv_name
        changes = request.by_block and not request.volume
        if other not in {kept.pv_name, *([manifests.changed_name(kept.pv_name)] if changes else [])}:
            raise ExposeError(f"{place} was bound to PersistentVolume {other} meanwhile")
        if (target.get("status") or {}).get("phase") == "Lost":
            raise ExposeError(f"{place} has phase Lost")
        _check_restore(request, target)
        return target

    async def _point_volume(self, volume: PersistentVolume, target: PersistentVolumeClaim) -> PersistentVolume:
        meta = target["metadata"]
        selected = (target["spec"].get("selector") or {}).get("matchLabels") or {}
        present = volume["metadata"].get("labels") or {}
        labels = {key: value for key, value in selected.items() if key not in present}
        patch: Manifest = {
            "metadata": {"labels": labels, "annotations": {ownership.BOUND_BY_CONTROLLER: None}},
            "spec": {"claimRef": manifests.point_at_claim(meta["namespace"], meta["name"], meta["uid"])},
        }
        return await self._client.patch_if_unchanged(PERSISTENT_VOLUMES, volume, patch)


def _binding(request: RestoreRequest, volume: str) -> Pending:
    place = f"{request.target_namespace}/{request.target_claim}"
    return Pending(PendingReason.BINDING, f"target PVC {place} is being bound to PersistentVolume {volume}")


def _changing(kept: KeptVolume) -> Pending:
    text = f"PersistentVolume {kept.pv_name} of the device is being replaced by {manifests.changed_name(kept.pv_name)}"
    return Pending(PendingReason.BINDING, text)


def _owned_by_restore(request: RestoreRequest, volume: PersistentVolume) -> bool:
    """Return whether the volume is bound to the restore PVC, reserved for the target PVC, or unbound with our label.

    An unbound volume without the label was freed by an administrator.
    """
    reference = volume["spec"].get("claimRef") or {}
    if not reference:
        return request.owner.labels.items() <= (volume["metadata"].get("labels") or {}).items()
    claims = ((request.owner.namespace, request.owner.name), (request.target_namespace, request.target_claim))
    return (reference.get("namespace"), reference.get("name")) in claims


def _check_owned(request: RestoreRequest, volume: PersistentVolume) -> None:
    if not _owned_by_restore(request, volume):
        owner = "belongs to another PersistentVolumeClaim" if volume["spec"].get("claimRef") else "was freed"
        raise ExposeError(f"PersistentVolume {volume['metadata']['name']} with the restored data {owner}")


def _check_restore(request: RestoreRequest, target: PersistentVolumeClaim) -> None:
    """Raise ExposeError if another restore made the target after this one's was deleted: it has its own data to come.

    A restore makes its PVC when it makes the DataDownload. A later one that updates what exists writes its name there,
    too, and brings no data. An existing volume goes to no other PVC in any case.
    Source: Velero v1.18, pkg/restore/restore.go (addRestoreLabels, processUpdateResourcePolicy).
    """
    asked, other = request.requested_at, ownership.name_other_restore(target, request.restore)
    if request.volume or asked is None or other is None:
        return
    if parse_time(target["metadata"]["creationTimestamp"]) - asked > _TARGET_TIMEOUT:
        place = f"target PVC {request.target_namespace}/{request.target_claim}"
        raise ExposeError(f"{place} was made by restore {other} meanwhile")


def _claimed_by(volume: PersistentVolume, claim: PersistentVolumeClaim) -> bool:
    reference = volume["spec"].get("claimRef") or {}
    return bool(reference.get("uid") == claim["metadata"]["uid"])


def _bound(volume: PersistentVolume, target: PersistentVolumeClaim) -> bool:
    phases = {(volume.get("status") or {}).get("phase"), (target.get("status") or {}).get("phase")}
    return phases == {"Bound"} and target["spec"].get("volumeName") == volume["metadata"]["name"]

"""Restores in place: an existing PersistentVolume is lent to a restore PVC, and given back.

One write takes the volume: it is retained, reserved for the restore PVC, and marked with all that is needed to give it
back. One write gives it back: it is reserved for its own PVC again, with its reclaim policy. A volume whose reference
has no UID is never reclaimed, and only a PVC of that name can get it.

A device cannot be written through a volume with a file system, whose mode never changes. So a second PersistentVolume
of volumeMode Block, retained too, shows its storage to the restore PVC alone, while no node has the first one: both
would have the same VolumeAttachment, named by the storage's handle. The first one stays taken, and nothing can be bound
to it. The second one is deleted, once no node has it, before the first one is given back; it stays if the first one was
deleted meanwhile. The mover opens the device exclusively, which fails while a node without attachments has it mounted.
Source: Kubernetes v1.34, pkg/volume/csi/csi_attacher.go (getAttachmentName).
Source: Velero main at 4a7db86f17d3, pkg/restore/actions/csi/pvc_action.go: the server retains the volume and deletes
its PVC before it creates the DataDownload, and recreates the PVC, unbound, after it; Kubernetes v1.34,
pkg/controller/volume/persistentvolume/pv_controller.go (syncVolume, syncUnboundClaim).
"""

import json
from typing import Any, Final, NamedTuple, NoReturn

from core.contract import VolumeMode
from core.errors import ExposeError
from core.kube.client import KubeClient, Selection
from core.kube.errors import AlreadyExistsError, ForbiddenError
from core.kube.resources import PERSISTENT_VOLUME_CLAIMS, PERSISTENT_VOLUMES, PODS
from core.kube.types import Manifest, ObjectReference, PersistentVolume, PersistentVolumeClaim
from core.models import names as wire
from core.models.reasons import PendingReason
from exposer import ownership
from exposer.expose_run import ExposeRun
from exposer.manifests import build_claim_reference, point_at_claim, volume_mode
from exposer.model import Owner, Pending, PendingError, Reader, RestoreRequest
from exposer.workload import describe_users


def is_taken_by(volume: PersistentVolume, owner: Owner) -> bool:
    """Return whether `volume` was taken for the restore of `owner`."""
    return _taker(volume) == owner.uid


def _taker(volume: PersistentVolume) -> str | None:
    return (volume["metadata"].get("labels") or {}).get(wire.IN_PLACE_LABEL)


_DEVICE: Final = "-block"


def device_name(volume: str) -> str:
    """Return the name of the PersistentVolume through which this one's device is restored into."""
    return f"{volume}{_DEVICE}"


def existing_name(device: str) -> str:
    """Return the name of the PersistentVolume whose device this one shows."""
    return device.removesuffix(_DEVICE)


def build_device_volume(owner: Owner, volume: PersistentVolume) -> Manifest:
    """Return a PersistentVolume of volumeMode Block with the storage of `volume`, for the restore PVC alone.

    It is retained, and names no provisioner, which therefore never deletes its storage, whatever its policy becomes.
    Source: sig-storage-lib-external-provisioner v11, controller/controller.go (shouldDelete).
    """
    kept = {key: value for key, value in volume["spec"].items() if key != "mountOptions"}
    spec = kept | {
        "volumeMode": str(VolumeMode.BLOCK),
        "persistentVolumeReclaimPolicy": ownership.RETAIN,
        "claimRef": build_claim_reference(owner.namespace, owner.name),
    }
    meta = {"name": device_name(volume["metadata"]["name"]), "labels": {wire.IN_PLACE_LABEL: owner.uid}}
    return PERSISTENT_VOLUMES.build(meta, spec=spec)


def shown_name(request: RestoreRequest, volume: PersistentVolume) -> str:
    """Return the name of the PersistentVolume that the mover gets for the existing `volume`."""
    name = volume["metadata"]["name"]
    return device_name(name) if request.by_block and volume_mode(volume) is VolumeMode.FILESYSTEM else name


class OwnClaim(NamedTuple):
    """Namespace and name of the PVC that a volume is given back to; `agents` is the namespace it was lent into."""

    agents: str
    namespace: str
    name: str


def read_claim_of(volume: PersistentVolume) -> OwnClaim | None:
    """Return the PVC that a transfer's volume is given to."""
    parts = (volume["metadata"].get("annotations") or {}).get(wire.IN_PLACE_CLAIM_ANNOTATION, "").split("/")
    return OwnClaim(*parts) if len(parts) == len(OwnClaim._fields) and all(parts) else None


async def check_existing(
    request: RestoreRequest, *, target: PersistentVolumeClaim, reader: Reader
) -> PersistentVolume | None:
    """Return the existing volume of the request; None: a new one is restored into. It only reads.

    PendingError: it cannot be taken yet. ExposeError: it can never be restored into.
    """
    if request.volume is None:
        return None
    volume = await reader.read(PERSISTENT_VOLUMES, "", request.volume)
    if volume is None or volume["metadata"].get("deletionTimestamp"):
        state = "does not exist" if volume is None else "is being deleted"
        raise ExposeError(f"PersistentVolume {request.volume} to restore into {state}")
    if is_taken_by(volume, request.owner):
        return volume
    if _taker(volume):
        raise _in_use(f"PersistentVolume {request.volume} is being restored by another DataDownload")
    _check_owner(request, target, volume)
    shown = shown_name(request, volume)
    if shown != request.volume and (device := await reader.read(PERSISTENT_VOLUMES, "", shown)) is not None:
        _reject_name(device)
    if users := await find_users(reader, volume):
        raise _in_use(f"PersistentVolume {request.volume} is in use: {users}")
    if pending := await ownership.find_detaching(reader, request.volume):
        raise PendingError(pending)
    return volume


def _in_use(message: str) -> PendingError:
    return PendingError(Pending(PendingReason.VOLUME_IN_USE, message, blocked=True))


def _check_owner(request: RestoreRequest, target: PersistentVolumeClaim, volume: PersistentVolume) -> None:
    """Raise ExposeError unless the volume is the target's, which a user or the Velero server has released."""
    place = f"PersistentVolume {volume['metadata']['name']}"
    claim = f"PVC {request.target_namespace}/{request.target_claim}"
    reference = volume["spec"].get("claimRef")
    if reference and not _refers_to(reference, request.target_namespace, request.target_claim):
        other = f"{reference.get('namespace')}/{reference.get('name')}"
        raise ExposeError(f"{place} to restore into belongs to PVC {other}, not to {claim}")
    if reference and reference.get("uid") == target["metadata"]["uid"]:
        raise ExposeError(f"{place} to restore into is bound to {claim}: it must be released first")
    mode, wanted = volume_mode(volume), volume_mode(target)
    if mode is not wanted:
        raise ExposeError(f"{place} to restore into has volumeMode {mode}, and {claim} has {wanted}")
    if request.by_block and mode is VolumeMode.FILESYSTEM:
        _check_device(request, volume)


def _check_device(request: RestoreRequest, volume: PersistentVolume) -> None:
    """Raise ExposeError unless the volume, which has a file system, has a device below it, and will be mounted."""
    place, csi = f"PersistentVolume {volume['metadata']['name']}", volume["spec"].get("csi")
    if not csi:
        raise ExposeError(f"{place} to restore into by block is of no CSI driver: restore into a new volume")
    mounted = csi.get("fsType")
    if mounted and request.fs_type and mounted != request.fs_type:
        raise ExposeError(f"{place} to restore into is mounted as {mounted}, and the backup has {request.fs_type}")


def _refers_to(reference: ObjectReference, namespace: str, name: str) -> bool:
    return (reference.get("namespace"), reference.get("name")) == (namespace, name)


async def find_users(reader: Reader, volume: PersistentVolume) -> str | None:
    """Return which pods, or else which nodes, use the storage of `volume` through another PersistentVolume, or None."""
    storage, name = _storage_of(volume), volume["metadata"]["name"]
    if storage is None:
        return None
    listed = await reader.list(Selection(PERSISTENT_VOLUMES))
    same = [one for one in listed if _storage_of(one) == storage and one["metadata"]["name"] != name]
    others = [one for one in same if not _taker(one) or _taker(one) != _taker(volume)]
    for other in others:
        claim = other["spec"].get("claimRef") or {}
        namespace, claim_name = claim.get("namespace", ""), claim.get("name", "")
        pods = await reader.list(Selection(PODS, namespace)) if namespace and claim_name else []
        if users := describe_users(pods, claim_name):
            return f"{', '.join(users)} has PersistentVolume {other['metadata']['name']} of the same storage"
    names = sorted({one["metadata"]["name"] for one in others})
    nodes = await ownership.attached_nodes(reader, *names) if names else []
    text = f"PersistentVolume {', '.join(names)} of the same storage is on node {', '.join(nodes)}"
    return text if nodes else None


def _storage_of(volume: PersistentVolume) -> tuple[str, str] | None:
    """Return driver and handle of a CSI volume, or server and path of one of NFS; None for any other one."""
    if csi := volume["spec"].get("csi"):
        found = (csi.get("driver", ""), csi.get("volumeHandle", ""))
    else:
        nfs = volume["spec"].get("nfs") or {}
        found = (nfs.get("server", ""), nfs.get("path", ""))
    return found if all(found) else None


def record_claim(request: RestoreRequest, policy: str) -> dict[str, str]:
    """Return the annotations by which garbage collection gives a volume to its PVC, with that reclaim policy."""
    return {
        wire.IN_PLACE_CLAIM_ANNOTATION: f"{request.owner.namespace}/{request.target_namespace}/{request.target_claim}",
        wire.RECLAIM_POLICY_ANNOTATION: policy,
    }


async def take_over_lent(client: KubeClient, request: RestoreRequest) -> None:
    """Mark the existing volume as taken if an agent of Velero has lent it to the restore PVC.

    Without a mark, it looks like one that was provisioned for that PVC, which is deleted with it.
    Source: Velero at 093b61dc6, createRestorePVC in pkg/exposer/generic_restore.go.
    """
    claim = await ownership.read_owned(client, request.owner, PERSISTENT_VOLUME_CLAIMS) if request.volume else None
    volume = await client.read(PERSISTENT_VOLUMES, "", request.volume or "") if claim is not None else None
    if claim is None or volume is None or _taker(volume):
        return
    reference = volume["spec"].get("claimRef") or {}
    here = _refers_to(reference, request.owner.namespace, request.owner.name)
    if here and reference.get("uid", claim["metadata"]["uid"]) == claim["metadata"]["uid"]:
        await client.patch_if_unchanged(PERSISTENT_VOLUMES, volume, {"metadata": _taken_marks(request, volume)})


def _taken_marks(request: RestoreRequest, volume: PersistentVolume) -> Manifest:
    return {
        "labels": {wire.IN_PLACE_LABEL: request.owner.uid},
        "annotations": {
            **record_claim(request, ownership.original_policy(volume)),
            # By that, agents of earlier versions do not take it for provisioned, which they would delete.
            ownership.BOUND_BY_CONTROLLER: "yes",
        },
    }


async def ensure_taken(
    client: KubeClient, run: ExposeRun, *, request: RestoreRequest, volume: PersistentVolume
) -> PersistentVolume:
    """Return `volume`, taken for the restore: reserved for its PVC, which does not exist yet."""
    if is_taken_by(volume, request.owner):
        return volume
    # What follows is undone by cleanup alone.
    await run.confirm()
    owner = request.owner
    patch: Manifest = {
        "metadata": _taken_marks(request, volume),
        "spec": {
            "persistentVolumeReclaimPolicy": ownership.RETAIN,
            "claimRef": point_at_claim(owner.namespace, owner.name),
        },
    }
    return await client.patch_if_unchanged(PERSISTENT_VOLUMES, volume, patch)


async def ensure_shown(
    client: KubeClient, run: ExposeRun, *, request: RestoreRequest, volume: PersistentVolume
) -> PersistentVolume:
    """Return the PersistentVolume for the restore PVC: `volume`, which is taken, or a second one for its device.

    Raises:
        ExposeError: another volume has its name, or the permission to create it is missing.
        PendingError: the PersistentVolume of an earlier restore has its name.
        NotOwnerError: from the run's guard; nothing was created.
    """
    name = shown_name(request, volume)
    if name == volume["metadata"]["name"]:
        return volume
    found = await client.read(PERSISTENT_VOLUMES, "", name)
    if found is None:
        await run.confirm()
        try:
            found = await client.create(PERSISTENT_VOLUMES, build_device_volume(request.owner, volume))
        except AlreadyExistsError:
            found = await client.get(PERSISTENT_VOLUMES, "", name)
        except ForbiddenError as e:
            raise ExposeError(
                f"no permission to create persistentvolumes, for the device of PersistentVolume {request.volume}: "
                f"apply deploy/agent/rbac.yaml: {e}"
            ) from e
    if not is_taken_by(found, request.owner) or found["metadata"].get("deletionTimestamp"):
        _reject_name(found)
    return found


def _reject_name(device: PersistentVolume) -> NoReturn:
    """Raise PendingError: the one of an earlier restore must go first; or ExposeError: no restore created it."""
    place = f"PersistentVolume {device['metadata']['name']}"
    # One that is given back to a PVC is itself an existing volume, whose name happens to end so.
    if not _taker(device) or read_claim_of(device) is not None:
        raise ExposeError(f"{place} already exists and was created by no restore: a restore by block needs its name")
    raise PendingError(Pending(PendingReason.NAME_TAKEN, f"{place} of an earlier restore must be deleted first"))


async def delete_shown(client: KubeClient, taker: str, name: str) -> Pending | None:
    """Delete the second PersistentVolume of the existing one of that name, which the restore with UID `taker` created.

    None once it is deleted, or stays since nothing else names its storage any more: then it is no restore's.
    """
    device = await client.read(PERSISTENT_VOLUMES, "", device_name(name))
    if device is None or _taker(device) != taker:
        return None
    volume = await client.read(PERSISTENT_VOLUMES, "", name)
    if volume is None or _storage_of(volume) != _storage_of(device):
        # With it, garbage collection would look for what is left of the restore forever.
        await ownership.patch_if_there(
            client, PERSISTENT_VOLUMES, device, {"metadata": {"labels": {wire.IN_PLACE_LABEL: None}}}
        )
        return None
    if volume["metadata"].get("deletionTimestamp"):
        return None
    device = await ownership.set_reclaim_policy(client, device, ownership.RETAIN)
    return await ownership.delete_object(client, PERSISTENT_VOLUMES, device, unchanged=True)


def read_released_claim(volume: PersistentVolume) -> tuple[str, dict[str, Any]] | None:
    """Return the restore for which a command has released the volume, and the PVC that it had; None: no command has."""
    try:
        found = json.loads((volume["metadata"].get("annotations") or {}).get(wire.RELEASED_CLAIM_ANNOTATION, "{}"))
        return str(found["restore"]), dict(found["claim"])
    except (ValueError, KeyError, TypeError):
        return None


def is_released(volume: PersistentVolume, request: RestoreRequest, target: PersistentVolumeClaim | None) -> bool:
    """Return whether `volume` was released for this restore, and was neither taken nor bound again.

    A later restore may have released it once more, and must find it as it left it: a command records its name, and a
    Velero server writes it on the PVC that it recreates.
    """
    reference = volume["spec"].get("claimRef") or {}
    # Also to one that is being deleted.
    bound = target is not None and reference.get("uid") == target["metadata"]["uid"]
    if _taker(volume) or bound or not _refers_to(reference, request.target_namespace, request.target_claim):
        return False
    if recorded := read_released_claim(volume):
        return recorded[0] == request.restore
    return target is None or ownership.name_other_restore(target, request.restore) is None


def is_given_away(volume: PersistentVolume, own: OwnClaim) -> bool:
    """Return whether `volume` refers to a PVC that is neither its own nor in the agents' namespace.

    An administrator has given it to that one, whose pods may use it by now.
    """
    reference = volume["spec"].get("claimRef") or {}
    away = reference.get("namespace") != own.agents and not _refers_to(reference, own.namespace, own.name)
    return bool(reference) and away


async def give_back(client: KubeClient, volume: PersistentVolume, own: OwnClaim) -> None:
    """Reserve `volume` for its own PVC again, which need not exist, with its reclaim policy.

    A PVC of that name that has no other volume is bound to it within seconds. One that was given to another PVC stays
    there, and retained.
    """
    if is_given_away(volume, own):
        await ownership.patch_volume(
            client, volume, ownership.without_marks(volume, volume["spec"].get("persistentVolumeReclaimPolicy"))
        )
        return
    reference = volume["spec"].get("claimRef") or {}
    claim = await client.read(PERSISTENT_VOLUME_CLAIMS, own.namespace, own.name)
    here = _refers_to(reference, own.namespace, own.name)
    if claim is not None and claim["metadata"].get("deletionTimestamp"):
        claim = None
    bound = here and claim is not None and reference.get("uid") == claim["metadata"]["uid"]
    patch = ownership.without_marks(volume)
    if not bound and (not here or reference.get("uid")):
        patch["spec"]["claimRef"] = point_at_claim(own.namespace, own.name)
        patch["metadata"].setdefault("annotations", {})[ownership.BOUND_BY_CONTROLLER] = None
    await ownership.patch_volume(client, volume, patch)

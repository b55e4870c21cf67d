"""Restores volumes of a backup into the PVCs that they had: releases each volume, and starts its transfer.

A VolumeSnapshot, for the way back, comes before, and so does a plan (`client.restores.in_place_preview`).

What must come back is recorded on the PersistentVolume before anything is deleted: its reclaim policy, and the PVC. The
PVC is deleted, since a volume can be mounted in the namespace of its PVC alone, and recreated as it was, pointing at
the volume, so that no provisioner serves it. It is bound again once the transfer has ended (`exposer.in_place`). A
repetition continues at any step. Acts with the user's permissions.
"""

import asyncio
import json
import secrets
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Final, cast

from client.backups.manifests import BackupError, Method, SnapshotWay, build_snapshot, choose_method
from client.backups.plan import ClaimName, read_classes
from client.install.options import place_of
from client.restores.create import check_creation, ensure_transfer, read_transfer
from client.restores.manifests import PlannedRestore, RequestedRestore
from client.restores.sources import RestoreError, SavedVolume
from client.session import REQUEST_TIMEOUT, Session, StepTimeoutError
from client.text import format_bytes
from core.clock import Deadline
from core.contract import VolumeMode
from core.errors import AgentError
from core.kube import resources as kube
from core.kube.client import KubeClient, Selection
from core.kube.errors import AlreadyExistsError, KubeError
from core.kube.types import Manifest, PersistentVolume, PersistentVolumeClaim, VolumeSnapshot
from core.models import names as wire
from core.models.transfers import RESTORE_TYPE
from core.models.units import parse_quantity
from exposer.in_place import OwnClaim, find_users, give_back, read_released_claim
from exposer.manifests import read_error, volume_mode
from exposer.ownership import DELETE, RETAIN, original_policy, patch_if_there, without_marks
from exposer.workload import describe_users

_READY_TIMEOUT: Final = timedelta(minutes=10)
_POLL_SECONDS: Final = 1.0


async def plan_snapshot(tools: Session, one: PlannedRestore, claim: PersistentVolumeClaim) -> Manifest:
    """Return the VolumeSnapshot for the way back; RestoreError: none is possible, or could not be created."""
    try:
        way = cast("SnapshotWay", choose_method(claim, Method.CSI_SNAPSHOT, await read_classes(tools.client), ()))
    except BackupError as e:
        raise RestoreError(f"{e}: --no-snapshot restores without a way back") from e
    meta = {
        "name": await _find_free_name(tools, one),
        "namespace": one.target.namespace,
        "labels": {wire.RESTORE_LABEL: wire.label_value(one.request.name)},
        "annotations": {wire.COMMAND_ANNOTATION: secrets.token_hex(8)},
    }
    snapshot = build_snapshot(meta, way.snapshot_class, one.target.name)
    await check_creation(tools, one, kube.VOLUME_SNAPSHOTS, snapshot)
    return snapshot


async def _find_free_name(tools: Session, one: PlannedRestore) -> str:
    """Return a name for the snapshot that no other one has, which may be of older data."""
    name, number = f"{one.name}-before", 1
    while await tools.client.read(kube.VOLUME_SNAPSHOTS, one.target.namespace, name) is not None:
        number += 1
        name = f"{one.name}-before-{number}"
    return name


async def make_snapshot(tools: Session, snapshot: Manifest) -> None:
    """Create the VolumeSnapshot; a cancellation is raised after that; RestoreError: another run has created it."""
    create = partial(tools.client.create, kube.VOLUME_SNAPSHOTS, snapshot)
    try:
        await tools.finish(f"create {place_of(snapshot)}", REQUEST_TIMEOUT, create)
    except AlreadyExistsError as e:
        if await _read_own(tools, snapshot) is not None:
            # The answer to an earlier attempt was lost.
            return
        # It may have been made long before.
        raise RestoreError(f"{place_of(snapshot)} was made meanwhile, nothing was changed: repeat the command") from e


async def wait_until_ready(tools: Session, snapshot: Manifest) -> VolumeSnapshot:
    """Return the VolumeSnapshot once it can be restored; RestoreError: it is not ready in time, or failed."""
    meta, deadline = snapshot["metadata"], Deadline.after(tools.clock, _READY_TIMEOUT)
    while True:
        stored = await tools.client.get(kube.VOLUME_SNAPSHOTS, meta["namespace"], meta["name"])
        status = stored.get("status") or {}
        if status.get("readyToUse") and status.get("boundVolumeSnapshotContentName"):
            return stored
        if deadline.expired:
            error = read_error(stored)
            raise RestoreError(f"{place_of(snapshot)} is not ready, nothing was changed{f': {error}' if error else ''}")
        await tools.clock.sleep(_POLL_SECONDS)


async def delete_snapshots(tools: Session, snapshots: Iterable[Manifest]) -> None:
    """Delete the VolumeSnapshots of these that this run has created, with their data; name what stays."""
    for snapshot in snapshots:
        meta = snapshot["metadata"]
        try:
            if (stored := await _read_own(tools, snapshot)) is not None:
                await _let_delete(tools.client, stored)
                await tools.client.delete(
                    kube.VOLUME_SNAPSHOTS, meta["namespace"], meta["name"], uid=stored["metadata"]["uid"]
                )
        except KubeError as e:
            command = f"kubectl -n {meta['namespace']} delete volumesnapshot {meta['name']}"
            tools.on_note(f"{place_of(snapshot)} is left, to delete by {command}: {e}")


async def _read_own(tools: Session, snapshot: Manifest) -> VolumeSnapshot | None:
    """Return the VolumeSnapshot as stored; None: it does not exist, or another run has created it."""
    meta = snapshot["metadata"]
    stored = await tools.client.read(kube.VOLUME_SNAPSHOTS, meta["namespace"], meta["name"])
    own = stored is not None and meta["annotations"].items() <= (stored["metadata"].get("annotations") or {}).items()
    return stored if own else None


async def _let_delete(client: KubeClient, snapshot: VolumeSnapshot) -> None:
    """Have the storage's snapshot deleted too, also if the class retains snapshots: nothing would name it."""
    name = (snapshot.get("status") or {}).get("boundVolumeSnapshotContentName", "")
    content = await client.read(kube.VOLUME_SNAPSHOT_CONTENTS, "", name) if name else None
    if content is None or content["spec"].get("deletionPolicy") != RETAIN:
        return
    if (content["spec"].get("volumeSnapshotRef") or {}).get("uid") == snapshot["metadata"]["uid"]:
        await patch_if_there(client, kube.VOLUME_SNAPSHOT_CONTENTS, content, {"spec": {"deletionPolicy": DELETE}})


_TIMEOUT: Final = timedelta(minutes=15)
"""For one volume: more than its snapshot and the deletion of its PVC together."""
_READ_SECONDS: Final = 30
_DELETION_TIMEOUT: Final = timedelta(minutes=2)

_BINDING: Final = ("pv.kubernetes.io/bind-completed", "pv.kubernetes.io/bound-by-controller")
"""What the volume controller records on a PVC once it is bound.

Source: Kubernetes v1.34, component-helpers/storage/volume/pv_helpers.go.
"""


@dataclass(frozen=True)
class InPlaceRestore:
    """One volume to restore into, and the PVC that it is bound to; None: an earlier run has released the volume.

    `snapshot` is the VolumeSnapshot that is made of it before; None: none is. `pods` were there before that, by UID.
    """

    one: PlannedRestore
    claim: PersistentVolumeClaim | None
    mode: VolumeMode
    snapshot: Manifest | None
    pods: frozenset[str] = frozenset()


async def plan_in_place(
    tools: Session, request: RequestedRestore, volumes: Sequence[SavedVolume], *, snapshots: bool
) -> list[InPlaceRestore]:
    """Return the volumes to restore into, without those whose transfers exist; nothing is changed.

    Raises:
        RestoreError: one cannot be restored into: it does not exist, is in use, or does not fit.
    """
    await _check_agents(tools, request.namespace)
    planned = []
    for saved in volumes:
        one = PlannedRestore(request, saved, len(volumes))
        claim, volume = await _find_volume(tools, one)
        one = replace(one, existing=volume["metadata"]["name"])
        if await read_transfer(tools.client, one) is not None:
            continue
        _check_fit(one, volume)
        snapshot, pods = None, frozenset[str]()
        if claim is not None and _is_bound(claim, volume):
            pods = await _check_unused(tools, one.target, volume)
            snapshot = await plan_snapshot(tools, one, claim) if snapshots else None
        else:
            # Of an earlier run.
            claim = None
        await check_creation(tools, one, one.resource, one.build_transfer())
        planned.append(InPlaceRestore(one, claim, volume_mode(volume), snapshot, pods))
    return planned


async def _check_agents(tools: Session, namespace: str) -> None:
    agents = await tools.client.list(Selection(kube.PODS, namespace, label_selector=wire.AGENT_SELECTOR))
    announced = [(pod["metadata"].get("annotations") or {}).get(wire.FEATURES_ANNOTATION, "").split() for pod in agents]
    if not any(wire.RESTORE_IN_PLACE in features for features in announced):
        raise RestoreError(f"no node agent in namespace {namespace} can restore in place: update them first")


async def _find_volume(tools: Session, one: PlannedRestore) -> tuple[PersistentVolumeClaim | None, PersistentVolume]:
    """Return the PVC and its volume; of an earlier run, the volume that it has released."""
    target = one.target
    claim = await tools.client.read(kube.PERSISTENT_VOLUME_CLAIMS, target.namespace, target.name)
    if claim is not None and claim["metadata"].get("deletionTimestamp"):
        raise RestoreError(f"PVC {target} is being deleted: repeat the command once it is gone")
    if claim is not None and not claim["spec"].get("volumeName"):
        raise RestoreError(f"PVC {target} has no volume to restore into: leave out --in-place")
    if claim is not None:
        volume = await tools.client.get(kube.PERSISTENT_VOLUMES, "", claim["spec"]["volumeName"])
        if not _is_bound(claim, volume) and _recorded(one, volume) is None:
            _refuse_released(one, volume)
            raise RestoreError(f"PVC {target} is not bound to PersistentVolume {volume['metadata']['name']}")
        return claim, volume
    volumes = await tools.client.list(Selection(kube.PERSISTENT_VOLUMES))
    for volume in volumes:
        if _recorded(one, volume) is not None:
            return None, volume
    for volume in volumes:
        _refuse_released(one, volume)
    raise RestoreError(f"PVC {target} does not exist: leave out --in-place")


def _is_bound(claim: PersistentVolumeClaim, volume: PersistentVolume) -> bool:
    return (volume["spec"].get("claimRef") or {}).get("uid") == claim["metadata"]["uid"]


def _recorded(one: PlannedRestore, volume: PersistentVolume) -> Manifest | None:
    restore, claim = _read_record(one, volume) or ("", None)
    return claim if restore == one.request.name else None


def _read_record(one: PlannedRestore, volume: PersistentVolume) -> tuple[str, Manifest] | None:
    """Return the restore that has released the volume of this PVC, and the PVC; None: none has."""
    recorded = read_released_claim(volume)
    meta = (recorded[1].get("metadata") or {}) if recorded else {}
    return recorded if (meta.get("namespace"), meta.get("name")) == (one.target.namespace, one.target.name) else None


def _refuse_released(one: PlannedRestore, volume: PersistentVolume) -> None:
    """Check that no other restore has released the volume of this PVC."""
    if recorded := _read_record(one, volume):
        raise RestoreError(
            f"PersistentVolume {volume['metadata']['name']} of PVC {one.target} was released for restore {recorded[0]}:"
            f" to continue that: nodeagent restore create {recorded[0]}, with the options that it had"
        )


def _check_fit(one: PlannedRestore, volume: PersistentVolume) -> None:
    """Check that the data can be written to the volume, as far as is known."""
    place = f"PersistentVolume {volume['metadata']['name']} of PVC {one.target}"
    mode, wanted = volume_mode(volume), one.volume.claim.volume_mode
    if one.volume.by_block and mode is VolumeMode.FILESYSTEM and not volume["spec"].get("csi"):
        raise RestoreError(f"{place} is of no CSI driver: restore its backup by block into a new PVC")
    # Without a size, the backup has the name of the PVC only.
    if one.volume.claim.size and mode != wanted:
        raise RestoreError(f"{place} has volumeMode {mode}, and the backup is of one with {wanted}")
    capacity = volume["spec"].get("capacity", {}).get("storage", "")
    if capacity and one.volume.size_bytes > parse_quantity(capacity):
        raise RestoreError(f"{place} has {capacity}, and the backup has {format_bytes(one.volume.size_bytes)}")


async def _check_unused(
    tools: Session, target: ClaimName, volume: PersistentVolume, before: frozenset[str] | None = None
) -> frozenset[str]:
    """Return the UIDs of the pods in the namespace.

    RestoreError: it is in use, or a pod used it that was not there `before`: the snapshot may lack its data.
    """
    name = volume["metadata"]["name"]
    if wire.IN_PLACE_LABEL in (volume["metadata"].get("labels") or {}):
        raise RestoreError(f"PVC {target}: its PersistentVolume {name} is being restored into")
    pods = {pod["metadata"]["uid"]: pod for pod in await tools.client.list(Selection(kube.PODS, target.namespace))}
    if users := describe_users(pods.values(), target.name):
        raise RestoreError(f"PVC {target} is used by {', '.join(users)}: stop it first, such as by kubectl scale")
    new = [pod for uid, pod in pods.items() if before is not None and uid not in before]
    if users := describe_users(new, target.name, ended=True):
        raise RestoreError(f"PVC {target} was used by {', '.join(users)} meanwhile: repeat the command")
    if others := await find_users(tools.client, volume):
        raise RestoreError(f"PVC {target}: its PersistentVolume {name} is in use: {others}")
    return frozenset(pods)


async def start_in_place(tools: Session, planned: Sequence[InPlaceRestore]) -> bool:
    """Release the volumes and create the transfers, one after the other; return whether one was created.

    An interruption lets the volume finish that is being started.

    Raises:
        RestoreError: a volume is not restored; the message says in what state it is.
    """
    created = False
    for started, plan in enumerate(planned):
        try:
            created |= await tools.finish("restore in place", _TIMEOUT, partial(_start, tools, plan))
        except AgentError as e:
            late = f"not started within {_TIMEOUT.seconds // 60} minutes"
            failure = f"{late}; {await _describe_state(tools, plan.one)}" if isinstance(e, StepTimeoutError) else e
            state = f"{started} of {len(planned)} volumes were started" if started else "none was started"
            raise RestoreError(f"PVC {plan.one.target} is not restored: {failure}; {state}") from e
    return created


async def _describe_state(tools: Session, one: PlannedRestore) -> str:
    try:
        async with asyncio.timeout(_READ_SECONDS):
            claim = await tools.client.read(kube.PERSISTENT_VOLUME_CLAIMS, one.target.namespace, one.target.name)
            volume = await tools.client.get(kube.PERSISTENT_VOLUMES, "", one.existing)
    except (AgentError, TimeoutError):
        return f"the state of PersistentVolume {one.existing} cannot be read"
    if claim is None or claim["metadata"].get("deletionTimestamp"):
        state = "does not exist" if claim is None else "is being deleted"
        return f"the PVC {state}, and PersistentVolume {one.existing} is retained and records it"
    bound = _is_bound(claim, volume)
    return f"the PVC is {'still bound' if bound else 'recreated, and not bound'} to PersistentVolume {one.existing}"


async def _start(tools: Session, plan: InPlaceRestore) -> bool:
    """Take all steps for one volume, from any state that an earlier run has left."""
    one, client = plan.one, tools.client
    claim, volume = await _find_volume(tools, one)
    bound = claim["metadata"]["uid"] if claim is not None and _is_bound(claim, volume) else ""
    planned = plan.claim["metadata"]["uid"] if plan.claim is not None else ""
    if volume["metadata"]["name"] != one.existing or (bound and bound != planned):
        # Its snapshot, if it has one, is of something else.
        raise RestoreError("the PVC or its volume was replaced meanwhile: repeat the command")
    if claim is not None and bound:
        volume = await _release(tools, plan, claim=claim, volume=volume)
        claim = None
    try:
        if claim is None:
            await _recreate(tools, one, volume)
        created = await ensure_transfer(client, one)
        await _note_pruned(tools, one)
    except AgentError as e:
        raise RestoreError(f"{e}; {await _return(tools, one)}") from e
    return created


async def _note_pruned(tools: Session, one: PlannedRestore) -> None:
    stored = await read_transfer(tools.client, one)
    wanted = one.request.in_place
    if stored and wanted and wanted.incremental and RESTORE_TYPE not in (stored.get("spec") or {}):
        text = "the definitions of the cluster drop restoreType: update them (nodeagent install --crds-only)"
        tools.on_note(f"PVC {one.target} is restored in full: {text}")


async def _release(
    tools: Session, plan: InPlaceRestore, *, claim: PersistentVolumeClaim, volume: PersistentVolume
) -> PersistentVolume:
    """Record the PVC, retain the volume, and delete the PVC; return the volume."""
    client, one, target = tools.client, plan.one, plan.one.target
    record = json.dumps({"restore": one.request.name, "claim": _build_claim(claim)}, separators=(",", ":"))
    annotations = {wire.RELEASED_CLAIM_ANNOTATION: record, wire.RECLAIM_POLICY_ANNOTATION: original_policy(volume)}
    patch: Manifest = {"metadata": {"annotations": annotations}, "spec": {"persistentVolumeReclaimPolicy": RETAIN}}
    volume = await client.patch_if_unchanged(kube.PERSISTENT_VOLUMES, volume, patch)
    try:
        # A pod that started meanwhile would keep the PVC from being deleted, which cannot be undone.
        await _check_unused(tools, target, volume, plan.pods)
    except AgentError:
        with suppress(KubeError):
            await client.patch_if_unchanged(kube.PERSISTENT_VOLUMES, volume, without_marks(volume))
        raise
    await client.delete(kube.PERSISTENT_VOLUME_CLAIMS, target.namespace, target.name, uid=claim["metadata"]["uid"])
    deadline = Deadline.after(tools.clock, _DELETION_TIMEOUT)
    while (left := await client.read(kube.PERSISTENT_VOLUME_CLAIMS, target.namespace, target.name)) is not None:
        if left["metadata"]["uid"] != claim["metadata"]["uid"]:
            break
        if deadline.expired:
            users = describe_users(await client.list(Selection(kube.PODS, target.namespace)), target.name)
            why = f"used by {', '.join(users)}" if users else f"finalizers: {left['metadata'].get('finalizers')}"
            raise RestoreError(f"PVC {target} is still being deleted ({why}): repeat the command once it is gone")
        await tools.clock.sleep(_POLL_SECONDS)
    return volume


def _build_claim(claim: PersistentVolumeClaim) -> Manifest:
    """Return the PVC as it is recreated: with its labels, annotations, owners and volume."""
    meta = cast("Manifest", claim["metadata"])
    kept = {key: meta[key] for key in ("name", "namespace", "labels", "ownerReferences") if key in meta}
    annotations = {key: value for key, value in (meta.get("annotations") or {}).items() if key not in _BINDING}
    return kube.PERSISTENT_VOLUME_CLAIMS.build(kept | {"annotations": annotations}, spec=dict(claim["spec"]))


async def _recreate(tools: Session, one: PlannedRestore, volume: PersistentVolume) -> None:
    """Create the PVC as it was recorded; one that was made meanwhile is not overwritten."""
    manifest = _recorded(one, volume)
    if manifest is None:
        raise RestoreError(f"PersistentVolume {one.existing} does not say any more which PVC it had")
    try:
        await tools.client.create(kube.PERSISTENT_VOLUME_CLAIMS, manifest)
    except AlreadyExistsError as e:
        found = await tools.client.get(kube.PERSISTENT_VOLUME_CLAIMS, one.target.namespace, one.target.name)
        if found["spec"].get("volumeName") != one.existing:
            raise RestoreError(f"PVC {one.target} was made by another client meanwhile") from e


async def _return(tools: Session, one: PlannedRestore) -> str:
    """Give the volume back to its PVC, unless it is missing or a transfer has the volume; return its state."""
    place = f"PersistentVolume {one.existing} was not changed"
    try:
        volume = await tools.client.get(kube.PERSISTENT_VOLUMES, "", one.existing)
        transfer = await tools.client.read(one.resource, one.request.namespace, one.name)
        if transfer is not None or wire.IN_PLACE_LABEL in (volume["metadata"].get("labels") or {}):
            return f"PersistentVolume {one.existing} is being restored into"
        claim = await tools.client.read(kube.PERSISTENT_VOLUME_CLAIMS, one.target.namespace, one.target.name)
        if claim is None:
            return f"{place}, and is retained for PVC {one.target}, which is missing: repeat the command"
        await give_back(tools.client, volume, OwnClaim(one.request.namespace, one.target.namespace, one.target.name))
    except KubeError as e:
        return f"{place}, and is retained, but not bound: {e}"
    return f"{place}, and is reserved for PVC {one.target}"

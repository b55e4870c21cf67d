"""A scratch volume: one volume of a backup restored into a new PVC, compared with its snapshot, and removed again.

The PVC is as the old one was, under a generated name in the agents' namespace, where the Job can mount it. So no
workload is touched, and a class with late binding binds it for the Job's pod. What a command that was killed has left,
the next one removes.
"""

import asyncio
import secrets
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Final

from msgspec import structs

from client.backups.manifests import transfer_name
from client.collections.models import BackupVolume
from client.mover_jobs import end_jobs, list_mounting
from client.restores.create import check_restore, plan_restore, start_restore
from client.restores.manifests import PlannedRestore, RequestedRestore
from client.restores.sources import SavedVolume
from client.session import Session, StepTimeoutError
from client.verifications.read_back import Keep, VerificationWork, plan_verification, verify_snapshots
from client.verifications.report import VerificationError
from core.clock import Deadline
from core.contract import VolumeMode
from core.errors import AgentError
from core.kube.client import Selection
from core.kube.errors import KubeError
from core.kube.resources import DATA_DOWNLOADS, PERSISTENT_VOLUME_CLAIMS, PERSISTENT_VOLUMES, Resource
from core.kube.types import Job, Metadata, VolumeSource
from core.models.backups import SavedClaim
from core.models.base import parse_time
from core.models.names import EXCLUDE_LABEL, RESTORE_ANNOTATION, RESTORE_LABEL, SNAPSHOT_VERIFICATION_LABEL
from core.models.phases import Phase
from core.models.transfers import DataDownload
from exposer.pod_manifest import MoverVolume

_PREFIX: Final = "nodeagent-verify-"

_POLL_SECONDS: Final = 2.0
_CLEANUP_TIMEOUT: Final = timedelta(minutes=5)
"""An agent deletes what a transfer needed within a minute, and a pod that is deleted ends within half a minute."""
_ABANDONED_AFTER: Final = timedelta(minutes=30)
"""A command creates the Job seconds after the PVC, and deletes it seconds after its end."""


class NotRestoredError(AgentError):
    """The transfer of the restore has failed; its message says why."""


async def compare_restored(
    tools: Session, volume: BackupVolume, work: VerificationWork, keep: Keep, *, storage_class: str | None = None
) -> None:
    """Restore the volume and compare it with its snapshot; `keep` gets the result, before the volume is removed again.

    With `storage_class`, the scratch volume is of that class.

    Raises:
        NotRestoredError: the restore failed.
        VerificationError: it is not known which PVC the volume had.
        RestoreError: its PVC or its transfer cannot be created.
        ResultError: the termination message of the Job is not a verification's.
        JobError: the Job that compares failed, cannot start, or did not end in time.
    """
    claim = volume.saved if volume.saved is not None and volume.saved.size else await _read_source(tools, volume)
    request, saved = _plan_scratch(tools, volume, claim, storage_class)
    # Which classes bind late, and whether they exist, is no news for the user: the Job's pod uses the PVC.
    restoring = replace(tools, on_note=lambda _: None)
    planned = await plan_restore(restoring, request, [saved])
    await check_restore(restoring, planned)
    scratch = _Scratch(tools, planned[0])
    mode = VolumeMode(saved.claim.volume_mode)
    source: VolumeSource = {"persistentVolumeClaim": {"claimName": planned[0].target.name}}
    work = replace(work, volume=MoverVolume(source, mode, read_only=True))
    manifest = await plan_verification(tools, work)
    try:
        await start_restore(restoring, planned)
        # The pod of the Job is there before the volume: it decides where a volume with late binding is.
        await scratch.wait_beside(verify_snapshots(scratch.quiet_tools, work, keep, manifest))
    finally:
        remove = partial(_remove, tools, planned[0].name, planned[0].target.name)
        try:
            await tools.finish("remove the scratch volume", 2 * _CLEANUP_TIMEOUT, remove)
        except StepTimeoutError as e:
            tools.on_note(f"PVC {planned[0].target} may be left: {e}")


async def remove_abandoned(tools: Session, now: datetime) -> None:
    """Remove the scratch volumes of commands that were killed, with their Jobs and transfers, and name each of them."""
    client, namespace = tools.client, tools.namespace
    try:
        listed = await client.list(Selection(PERSISTENT_VOLUME_CLAIMS, namespace, RESTORE_LABEL))
        names = [one["metadata"]["name"] for one in listed if _is_abandoned(one["metadata"], now)]
        for name in names:
            mounting = await list_mounting(tools, SNAPSHOT_VERIFICATION_LABEL, name)
            if any(_is_in_use(job, now) for job in mounting):
                continue
            await end_jobs(tools, mounting, _CLEANUP_TIMEOUT)
            if await _remove(tools, transfer_name(name, namespace, name), name):
                tools.on_note(f"removed PVC {namespace}/{name}, which a verification that was killed had left")
    except AgentError as e:
        tools.on_note(f"what verifications that were killed have left was not removed: {e}")


def _is_abandoned(meta: Metadata, now: datetime) -> bool:
    name, restore = meta["name"], (meta.get("annotations") or {}).get(RESTORE_ANNOTATION)
    old = now - parse_time(meta["creationTimestamp"]) >= _ABANDONED_AFTER
    # Of a PVC that a person restores, the restore has another name.
    return bool(old and name.startswith(_PREFIX) and restore == name)


def _is_in_use(job: Job, now: datetime) -> bool:
    """Return whether the Job has not ended, or so recently that its command may not have read the result."""
    conditions = (job.get("status") or {}).get("conditions") or []
    ended = [
        parse_time(one["lastTransitionTime"])
        for one in conditions
        if one["type"] in {"Complete", "Failed"} and one["status"] == "True"
    ]
    return not ended or now - max(ended) < _ABANDONED_AFTER


async def _read_source(tools: Session, volume: BackupVolume) -> SavedClaim:
    """Return the PVC of the volume as it is now: backups of Velero do not say how it was."""
    cause = "there is no such PVC any more"
    try:
        found = await tools.client.read(PERSISTENT_VOLUME_CLAIMS, volume.namespace, volume.claim)
        if found is not None and (claim := SavedClaim.from_claim(found)).size:
            return claim
    except AgentError as e:
        cause = str(e)
    raise VerificationError(f"its backup does not say the size of its PVC: verify it without --restore ({cause})")


def _plan_scratch(
    tools: Session, volume: BackupVolume, claim: SavedClaim, storage_class: str | None
) -> tuple[RequestedRestore, SavedVolume]:
    """Return the restore of the volume into a new PVC of the agents' namespace, like `claim`, or of that class."""
    name = f"{_PREFIX}{secrets.token_hex(4)}"
    # Without a class, it gets the default one: the empty class makes no volume.
    chosen = storage_class or claim.storage_class or None
    # It is no workload's volume: backups of this namespace leave it out, and none is due.
    labels = {EXCLUDE_LABEL: "true"}
    claim = structs.replace(claim, namespace=tools.namespace, name=name, labels=labels, storage_class=chosen)
    if volume.by_block:
        # A device is compared, whatever is on it.
        claim = structs.replace(claim, volume_mode=str(VolumeMode.BLOCK))
    place = volume.snapshot_id, volume.namespace, volume.location
    saved = SavedVolume(*place, claim, volume.total_bytes, volume.by_block)
    return RequestedRestore(name=name, namespace=tools.namespace, owners=tools.owners), saved


@dataclass
class _Scratch:
    """The PVC and the transfer of `planned`; `restored` once the data is there."""

    tools: Session
    planned: PlannedRestore
    restored: bool = False

    @property
    def quiet_tools(self) -> Session:
        """Tools for the Job, whose pod waits for the PVC, which is nothing to show before it is restored."""

        def show(doing: str) -> None:
            if self.restored:
                self.tools.on_progress(doing)

        return replace(self.tools, on_progress=show)

    async def wait_beside(self, job: Coroutine[Any, Any, None]) -> None:
        """Return once the Job has ended, and the restore has completed too."""
        comparing = asyncio.create_task(job, name="compare")
        restoring = asyncio.create_task(self._wait_restored(), name="restore")
        both: set[asyncio.Task[Any]] = {comparing, restoring}
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for task in both:
                task.cancel()
            await asyncio.wait(both)
        if not restoring.cancelled():
            restoring.result()
        comparing.result()

    async def _wait_restored(self) -> None:
        namespace, name, shown = self.planned.request.namespace, self.planned.name, ""
        client = self.tools.client.patiently()
        place = f"{DATA_DOWNLOADS.kind} {namespace}/{name}"
        while True:
            raw = await client.read(DATA_DOWNLOADS, namespace, name)
            if raw is None:
                raise NotRestoredError(f"{place} was deleted before it ended")
            transfer = DataDownload.parse(raw)
            if transfer.phase is Phase.COMPLETED:
                self.restored = True
                return
            doing = ": ".join(filter(None, (f"{place} is {transfer.phase}", transfer.status.message)))
            if transfer.phase.final:
                raise NotRestoredError(doing)
            if doing != shown:
                self.tools.on_progress(doing)
                shown = doing
            await self.tools.clock.sleep(_POLL_SECONDS)


async def _remove(tools: Session, transfer: str, claim: str) -> bool:
    """Delete the transfer, whose agent then deletes what it needed, and the PVC; return whether both are gone."""
    namespace, deadline = tools.namespace, Deadline.after(tools.clock, _CLEANUP_TIMEOUT)
    tools.on_progress(f"removing the scratch volume {namespace}/{claim}")
    ended = await _delete(tools, DATA_DOWNLOADS, transfer, deadline)
    volume = await _find_retained(tools, claim)
    removed = await _delete(tools, PERSISTENT_VOLUME_CLAIMS, claim, deadline)
    if volume:
        text = f"PersistentVolume {volume} of the verification stays by its policy Retain, as does its volume"
        tools.on_note(f"{text} in the storage: delete both, the first by kubectl delete pv {volume}")
    return ended and removed


async def _find_retained(tools: Session, name: str) -> str | None:
    """Return the name of the restored PersistentVolume, if it stays; None: it does not, or that is not known."""
    try:
        claim = await tools.client.read(PERSISTENT_VOLUME_CLAIMS, tools.namespace, name)
        volume = claim["spec"].get("volumeName") if claim else None
        stored = await tools.client.read(PERSISTENT_VOLUMES, "", volume) if volume else None
    except KubeError:
        return None
    retained = stored is not None and stored["spec"].get("persistentVolumeReclaimPolicy") == "Retain"
    return volume if retained else None


async def _delete(tools: Session, resource: Resource, name: str, deadline: Deadline) -> bool:
    """Delete an object, and return once it is gone; if it stays, say how to delete it, and return False."""
    client, namespace, cause = tools.client.patiently(), tools.namespace, ""
    try:
        while await client.read(resource, namespace, name) is not None:
            if not cause:
                await client.delete(resource, namespace, name)
                cause = "it is being deleted, and still there"
            if deadline.expired:
                break
            await tools.clock.sleep(_POLL_SECONDS)
        else:
            return True
    except KubeError as e:
        cause = str(e)
    command = f"kubectl -n {namespace} delete {resource.plural} {name}"
    tools.on_note(f"{resource.kind} {namespace}/{name} of the verification is left, to delete by {command}: {cause}")
    return False

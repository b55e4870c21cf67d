"""Exposer of pod volumes: a mover pod on the same node mounts the volume's directory."""

from dataclasses import replace

from msgspec import structs

from core.contract import MoverVerb
from core.errors import ExposeError
from core.kube.client import KubeClient, Selection
from core.kube.resources import PERSISTENT_VOLUME_CLAIMS, PERSISTENT_VOLUMES, POD_VOLUME_RESTORES, PODS
from core.kube.types import PersistentVolume, PersistentVolumeClaim, Pod, UncheckedObject, Volume
from core.models.names import POD_UID_LABEL, POD_VOLUME_FINALIZER
from core.models.phases import FINAL_PHASES
from core.models.reasons import PendingReason
from core.models.transfers import PodReference
from exposer.causes import CauseFinder
from exposer.expose_run import ExposeRun, MoverExposer, ensure_cache
from exposer.in_place import find_users
from exposer.manifests import cache_claim_name
from exposer.model import Exposed, Guard, LocatedVolume, Pending, PodVolumeRequest, Reader, or_pending
from exposer.ownership import delete_claim, delete_owned, read_owned
from exposer.pods import build_pod_volume_pod
from exposer.settings import read_exclusions
from exposer.workload import (
    build_block_error,
    build_volume_directory,
    check_alive,
    check_restore_of,
    check_restore_wait,
    check_running,
    claim_of,
    describe_users,
    find_volume,
    find_volume_directory,
    pod_of_directory,
    read_restore_of,
    restore_wait_completed,
    tolerations_to_stay,
    waits_for_restore,
)


class PodVolumeExposer(MoverExposer):
    """The exposer of PodVolumeBackups and PodVolumeRestores."""

    def __init__(self, client: KubeClient, causes: CauseFinder, *, node: str | None = None) -> None:
        """Expose volumes of pods; look up the directories of those on `node`, where this process runs."""
        super().__init__(client, causes)
        self._node = node

    async def locate(self, request: PodVolumeRequest, reader: Reader) -> LocatedVolume | Pending:
        """Return where the volume is, or why it is pending; ExposeError: it can never be exposed. Reads only."""
        ref = request.workload
        if not request.settings.template.host_pods:
            raise ExposeError(
                "pod volumes are not accessible: the node agent's DaemonSet does not mount the volume host-pods"
            )
        if not (ref.namespace and ref.name):
            raise ExposeError("spec.pod: namespace and name are required")
        found = await _read_workload(request, reader)
        if found is None and not ref.uid and request.verb is MoverVerb.RESTORE:
            return Pending(PendingReason.WORKLOAD_ABSENT, f"workload pod {ref} does not exist yet")
        pod = check_alive(ref, found)
        volume = find_volume(ref, pod, request.volume)
        check = check_running if request.verb is MoverVerb.BACKUP else check_restore_wait
        if pending := check(ref, pod):
            return pending
        if request.verb is MoverVerb.RESTORE:
            check_restore_of(ref, pod, request.restore)
        claim, pv = await _read_volume(request, pod, volume, reader=reader)
        node = pod["spec"].get("nodeName", "")
        if not node:
            raise ExposeError(f"workload pod {ref} has no node")
        followed = await _find_followed(request, pod, claim_of(pod, volume), reader=reader)
        if isinstance(followed, Pending):
            return followed
        root = request.settings.template.kubelet_root
        return LocatedVolume(
            node=node,
            directory=build_volume_directory(root, pod["metadata"]["uid"], volume, pv=pv),
            tolerations=tolerations_to_stay(pod),
            storage_class=pv["spec"].get("storageClassName") or None if pv else None,
            claim=claim_of(pod, volume),
            excluded=read_exclusions(claim),
            followed=followed,
        )

    async def read_node(self, request: PodVolumeRequest) -> str | None:
        """Return the node of the workload pod; None where it has none, or no longer exists."""
        pod = await _read_workload(request, self._client)
        if pod is None or not request.workload.matches(pod["metadata"]["uid"]):
            return None
        return pod["spec"].get("nodeName") or None

    async def confirm(self, request: PodVolumeRequest, *, waits: bool = False) -> None:
        """Raise ExposeError unless the workload pod still has the volume and, if it `waits`, waits for its data.

        A mover continues in an empty directory when the volume is unmounted: its success alone proves
        nothing. A restored pod whose init container completed has found its data.
        """
        ref = request.workload if request.workload.uid else await self._read_ref(request)
        pod = await _read_workload(request, self._client)
        if waits:
            check_restore_wait(ref, check_alive(ref, pod))
        elif request.verb is MoverVerb.BACKUP or not restore_wait_completed(ref, pod):
            check_alive(ref, pod)

    async def confirm_alone(self, request: PodVolumeRequest) -> None:
        """Raise ExposeError if anything else uses the volume of a restore in place; reads only."""
        if request.in_place is None:
            return
        ref = request.workload
        pod = check_alive(ref, await _read_workload(request, self._client))
        if use := await self._find_use(request, claim_of(pod, find_volume(ref, pod, request.volume))):
            raise ExposeError(use)

    async def _find_use(self, request: PodVolumeRequest, claim: str | None) -> str | None:
        """Return what uses the volume beside the workload pod, if a restore in place needs it alone.

        A pod that waits for data of the same Velero restore does not: it writes nothing. Every other one does,
        also one that this restore made beside it.
        Source: Velero at 508ecd5a8d83, pkg/restore/inplace/preflight.go (CheckPVCNotInUse): its server makes no
        PodVolumeRestore in place while there is such a pod.
        """
        if request.in_place is None or not claim:
            return None
        ref = request.workload
        listed = {pod["metadata"]["name"]: pod for pod in await self._client.list(Selection(PODS, ref.namespace))}
        workload = listed.pop(ref.name, None)
        restore = read_restore_of(workload) if workload is not None else None
        others = [pod for pod in listed.values() if not waits_for_restore(pod, restore)]
        place = f"PersistentVolumeClaim {ref.namespace}/{claim}"
        if users := describe_users(others, claim):
            return f"{place} is in use by {', '.join(users)}: a restore in place needs it alone"
        found = await self._client.read(PERSISTENT_VOLUME_CLAIMS, ref.namespace, claim)
        name = found["spec"].get("volumeName", "") if found is not None else ""
        volume = await self._client.read(PERSISTENT_VOLUMES, "", name) if name else None
        if volume is not None and (use := await find_users(self._client, volume)):
            return f"{place} is in use: {use}: a restore in place needs it alone"
        return None

    @or_pending
    async def ensure(self, request: PodVolumeRequest, guard: Guard) -> Exposed | Pending:
        """Create the mover pod and return it, or why it is pending.

        ExposeError: it can never be created, or never run. NotOwnerError: the resource is no longer this agent's.
        """
        async with ExposeRun(self._client, request.owner, guard) as run:
            # The workload may be deleted while the mover pod is pending: then the mover can never succeed.
            located = await self.locate(request, self._client)
            if isinstance(located, Pending):
                return located
            pod = await run.read(PODS, request.owner.name)
            if pod is None and (use := await self._find_use(request, located.claim)):
                return Pending(PendingReason.VOLUME_IN_USE, use, blocked=True)
            pod = pod or await self._ensure_all(request, run, located)
            return await self._causes.inspect(pod)

    async def clean_up(self, request: PodVolumeRequest) -> Pending | None:
        """Delete mover pod and cache PVC; None once they are deleted."""
        owner = request.owner
        pending = await delete_owned(self._client, owner, PODS)
        return pending or await delete_claim(self._client, owner, cache_claim_name(owner))

    async def _ensure_all(self, request: PodVolumeRequest, run: ExposeRun, located: LocatedVolume) -> Pod:
        found = replace(located, directory=self._find_directory(request, located))
        cache = await ensure_cache(run, request.cache, node=located.node)
        storage = await run.read_storage_access(request.location)
        return await run.ensure(PODS, build_pod_volume_pod(request, found, storage=storage, cache=cache))

    def _find_directory(self, request: PodVolumeRequest, located: LocatedVolume) -> str:
        host_pods = request.settings.template.host_pods
        if located.node != self._node or host_pods is None:
            return located.directory
        what = f"volume {request.volume} of workload pod {request.workload}"
        return find_volume_directory(host_pods, located.directory, what=what)

    async def _read_ref(self, request: PodVolumeRequest) -> PodReference:
        """Return the workload pod of the mover's directory, for a request without a UID; ExposeError: not known."""
        owner, ref = request.owner, request.workload
        mover = await read_owned(self._client, owner, PODS)
        if mover is None:
            raise ExposeError(
                f"cannot determine the UID of workload pod {ref}: spec.pod has none, and there is no data mover pod"
            )
        mounted = [v.get("hostPath") or {} for v in mover["spec"].get("volumes") or [] if v["name"] == owner.uid]
        uid = pod_of_directory(mounted[0].get("path", "")) if mounted else None
        if uid is None:
            place = f"data mover pod {owner.namespace}/{owner.name}"
            raise ExposeError(f"{place} mounts no directory of workload pod {ref}")
        return structs.replace(ref, uid=uid)


async def _read_workload(request: PodVolumeRequest, reader: Reader) -> Pod | None:
    return await reader.read(PODS, request.workload.namespace, request.workload.name)


async def _find_followed(request: PodVolumeRequest, pod: Pod, claim: str | None, *, reader: Reader) -> Pending | bool:
    """Return whether another restore of the PVC into this pod follows; Pending: an earlier one has not ended.

    A Velero server makes one for each volume of the pod that names the PVC, and the pod waits for one done file:
    written by the first, it would let the pod start while the others write. Two at once would mix their files.
    Source: Velero v1.18, pkg/backup/item_backupper.go: only what other pods have backed up is left out.
    """
    sharing = {volume["name"] for volume in pod["spec"].get("volumes") or [] if claim_of(pod, volume) == claim}
    if request.verb is MoverVerb.BACKUP or not claim or len(sharing) == 1:
        return False
    owner, label = request.owner, f"{POD_UID_LABEL}={pod['metadata']['uid']}"
    listed = await reader.list(Selection(POD_VOLUME_RESTORES, owner.namespace, label))
    into = [one for one in listed if one["spec"]["volume"] in sharing]
    into.sort(key=lambda one: (one["metadata"]["creationTimestamp"], one["metadata"]["name"]))
    own = next((at for at, one in enumerate(into) if one["metadata"]["uid"] == owner.uid), None)
    if own is None:
        return False
    if earlier := next((one["metadata"]["name"] for one in into[:own] if not _has_ended(one, cleaned_up=True)), None):
        place = f"PersistentVolumeClaim {request.workload.namespace}/{claim}"
        text = f"{place} is being restored by PodVolumeRestore {earlier}, for another volume of the pod"
        return Pending(PendingReason.VOLUME_IN_USE, text)
    return not all(map(_has_ended, into[own + 1 :]))


def _has_ended(restore: UncheckedObject, *, cleaned_up: bool = False) -> bool:
    ended = (restore.get("status") or {}).get("phase") in FINAL_PHASES
    return ended and not (cleaned_up and POD_VOLUME_FINALIZER in (restore["metadata"].get("finalizers") or []))


async def _read_volume(
    request: PodVolumeRequest, pod: Pod, volume: Volume, *, reader: Reader
) -> tuple[PersistentVolumeClaim, PersistentVolume] | tuple[None, None]:
    """Return the PVC and the PersistentVolume behind `volume`; None for one without a PVC.

    Raises:
        ExposeError: PVC or volume do not exist, or it is a block volume.
    """
    name = claim_of(pod, volume)
    if not name:
        return None, None
    place = f"PersistentVolumeClaim {request.workload.namespace}/{name} of volume {volume['name']}"
    claim = await reader.read(PERSISTENT_VOLUME_CLAIMS, request.workload.namespace, name)
    if claim is None:
        raise ExposeError(f"{place} does not exist")
    pv_name = claim["spec"].get("volumeName", "")
    pv = await reader.read(PERSISTENT_VOLUMES, "", pv_name) if pv_name else None
    if pv is None:
        raise ExposeError(f"{place} has no PersistentVolume")
    if pv["spec"].get("volumeMode") == "Block":
        raise build_block_error(request.workload, volume["name"])
    return claim, pv

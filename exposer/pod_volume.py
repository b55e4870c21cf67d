"""Exposes one volume of a running pod: a mover pod beside it sees the same folder.

Knows which volumes can be reached that way, on which node, and when their pod may be relied
on. Does not know where kubelets mount what (`exposer.workload`), how a workload's pod
reads (`exposer.workload`), or who owns the PodVolumeBackup or PodVolumeRestore.
"""

from dataclasses import replace

from core.contract import MoverVerb
from core.errors import ExposeError
from core.kube.client import KubeClient
from core.kube.resources import PERSISTENT_VOLUME_CLAIMS, PERSISTENT_VOLUMES, PODS
from core.models.base import JsonDict
from core.models.reasons import PendingReason
from exposer.causes import CauseFinder
from exposer.claims import cache_claim_name
from exposer.model import Exposed, Guard, LocatedVolume, Pending, PodVolumeRequest, Reader, WorkloadRef
from exposer.ownership import ExposeRun, belongs, remove_owned
from exposer.placement import LINUX, WINDOWS
from exposer.pods import build_pod_volume_pod
from exposer.source_volume import read_node_os
from exposer.volumes import CacheClaims, remove_claim
from exposer.workload import (
    block_refused,
    build_volume_folder,
    check_alive,
    check_restore_wait,
    check_running,
    claim_of,
    find_volume,
    pod_of_folder,
    tolerations_to_stay,
    took_its_data,
)

__all__ = ["PodVolumeExposer"]


class PodVolumeExposer:
    """The exposer of PodVolumeBackups and PodVolumeRestores."""

    def __init__(self, client: KubeClient, causes: CauseFinder) -> None:
        self._client = client
        self._causes = causes
        self._caches = CacheClaims(client)

    async def locate(self, request: PodVolumeRequest, reader: Reader) -> LocatedVolume | Pending:
        """Return where the volume is, or what its pod has to reach first; reads only.

        Raises:
            ExposeError: it cannot be moved.
            KubeError: the API server refused a read.
        """
        ref = request.workload
        if not request.settings.template.host_pods_mounted:
            raise ExposeError(
                "volumes of pods cannot be reached: the node agent's DaemonSet does not mount the volume host-pods"
            )
        if not (ref.namespace and ref.name):
            raise ExposeError("spec.pod names no pod: its namespace and its name are needed")
        found = await _read_workload(request, reader)
        if found is None and not ref.uid and request.verb is MoverVerb.RESTORE:
            return Pending(PendingReason.WORKLOAD_ABSENT, f"workload pod {ref} does not exist yet")
        pod = check_alive(ref, found)
        volume = find_volume(ref, pod, request.volume)
        if request.verb is MoverVerb.BACKUP:
            check_running(ref, pod)
        elif waiting := check_restore_wait(ref, pod):
            return waiting
        pv = await _read_volume(request, pod, volume, reader=reader)
        node = pod["spec"]["nodeName"]
        node_os = await _read_os(request, node, reader)
        root = request.settings.template.for_os(node_os).kubelet_root
        return LocatedVolume(
            node=node,
            folder=build_volume_folder(root, pod["metadata"]["uid"], volume, pv=pv),
            tolerations=tolerations_to_stay(pod),
            node_os=node_os,
        )

    async def read_node(self, request: PodVolumeRequest) -> str:
        """Return the node of the workload's pod; empty where it has none, or is gone."""
        pod = await _read_workload(request, self._client)
        if pod is None or not request.workload.means(pod):
            return ""
        return str(pod["spec"].get("nodeName", ""))

    async def confirm(self, request: PodVolumeRequest) -> None:
        """Return if the pod still has the volume.

        A mover goes on in an empty folder when a volume is unmounted under it: its word alone
        says nothing. A restored pod that went on from its init container has seen its data.

        Raises:
            ExposeError: the pod is gone, or about to go.
        """
        ref = request.workload if request.workload.uid else await self._read_ref(request)
        pod = await _read_workload(request, self._client)
        if request.verb is MoverVerb.RESTORE and took_its_data(ref, pod):
            return
        check_alive(ref, pod)

    async def ensure(self, request: PodVolumeRequest, guard: Guard) -> Exposed | Pending:
        """Make the mover pod and return it, or what has to be waited for.

        Raises:
            ExposeError: it can never be done.
            NotOwnerError: the custom resource is somebody else's by now.
            KubeError: the API server refused.
        """
        async with ExposeRun(self._client, request.owner, guard) as run:
            # While the mover pod waits for its node, the workload may go: then waiting is in vain.
            located = await self.locate(request, self._client)
            if isinstance(located, Pending):
                return located
            pod = await run.read(PODS, request.owner.name) or await self._ensure_all(request, run, located)
            return await self._causes.judge(pod)

    async def clean_up(self, request: PodVolumeRequest) -> Pending | None:
        """Delete mover pod and cache; None once they are gone."""
        owner = request.owner
        waiting = await remove_owned(self._client, owner, PODS, owner.name)
        return waiting or await remove_claim(self._client, owner, cache_claim_name(owner))

    async def _ensure_all(
        self, request: PodVolumeRequest, run: ExposeRun, located: LocatedVolume
    ) -> JsonDict | Pending:
        cache = await self._caches.ensure(run, request.owner, cache=request.cache, node=located.node)
        if isinstance(cache, Pending):
            return cache
        return await run.ensure(PODS, build_pod_volume_pod(request, located, cache_claim=cache))

    async def _read_ref(self, request: PodVolumeRequest) -> WorkloadRef:
        """Return which pod the mover's folder is of, for a request that names no UID.

        Raises:
            ExposeError: the mover pod is gone, and nothing else tells that.
        """
        owner, ref = request.owner, request.workload
        mover = await self._client.read(PODS, owner.namespace, owner.name)
        if mover is None or not belongs(mover, owner):
            raise ExposeError(f"nothing tells any more whose volume it was: no UID of pod {ref} is named")
        (folder,) = [v["hostPath"]["path"] for v in mover["spec"]["volumes"] if v["name"] == owner.uid]
        return replace(ref, uid=pod_of_folder(folder))


async def _read_os(request: PodVolumeRequest, node: str, reader: Reader) -> str:
    """Return the operating system of the node; where no agent serves Windows, it is not asked."""
    if request.settings.template.windows is None:
        return LINUX
    return WINDOWS if await read_node_os(reader, node) == WINDOWS else LINUX


async def _read_workload(request: PodVolumeRequest, reader: Reader) -> JsonDict | None:
    return await reader.read(PODS, request.workload.namespace, request.workload.name)


async def _read_volume(
    request: PodVolumeRequest, pod: JsonDict, volume: JsonDict, *, reader: Reader
) -> JsonDict | None:
    """Return the PersistentVolume behind `volume`; None for one without a claim.

    Raises:
        ExposeError: claim or volume are missing, or it is a device.
    """
    name = claim_of(pod, volume)
    if not name:
        return None
    place = f"PersistentVolumeClaim {request.workload.namespace}/{name} of volume {volume['name']}"
    claim = await reader.read(PERSISTENT_VOLUME_CLAIMS, request.workload.namespace, name)
    if claim is None:
        raise ExposeError(f"{place} does not exist")
    pv_name = claim["spec"].get("volumeName", "")
    pv = await reader.read(PERSISTENT_VOLUMES, "", pv_name) if pv_name else None
    if pv is None:
        raise ExposeError(f"{place} has no PersistentVolume")
    if pv["spec"].get("volumeMode") == "Block":
        raise block_refused(request.workload, volume["name"])
    return pv

"""Placement of a snapshot's backup, derived from its source volume, and which volumes are left to Velero's agents.

Reads source PVC, volume, StorageClass, attachments and nodes; `exposer.placement` turns the result
into a node affinity.
Source: Velero v1.18.2, GetVolumeTopology and GetPVCAttachingNodeOS in pkg/util/kube/pvc_pv.go
and its use in pkg/exposer/csi_snapshot.go.
"""

from typing import Final

from core.contract import VolumeMode
from core.errors import ExposeError
from core.kube.client import KubeClient
from core.kube.resources import (
    NODES,
    PERSISTENT_VOLUME_CLAIMS,
    PERSISTENT_VOLUMES,
    STORAGE_CLASSES,
)
from core.kube.types import NodeSelectorTerm, PersistentVolumeClaim, StorageClass
from core.models.names import AGENT_DAEMONSET_WINDOWS, SELECTED_NODE_ANNOTATION
from core.models.reasons import PendingReason
from exposer.claims import claim_volume_mode
from exposer.model import Pending, SnapshotRequest
from exposer.placement import WINDOWS, Placement
from exposer.template import AgentTemplate
from exposer.volumes import attached_nodes

__all__ = ["WINDOWS_ONLY", "binds_late", "leave_to_velero", "needs_windows", "place_backup"]

_FAST_CLONE_ANNOTATION: Final = "csi.vsphere.volume/fast-provisioning"
_OS_LABEL: Final = "kubernetes.io/os"
_FS_TYPE: Final = "csi.storage.k8s.io/fstype"
_WINDOWS_FS: Final = "ntfs"
WINDOWS_ONLY: Final = "the volume requires a Windows node"


def binds_late(storage_class: StorageClass | None) -> bool:
    """Return whether volumes of the StorageClass are provisioned on the node of their first pod."""
    return storage_class is not None and storage_class.get("volumeBindingMode") == "WaitForFirstConsumer"


def leave_to_velero(template: AgentTemplate) -> Pending:
    """Return that Velero's agent carries out a transfer that requires a Windows node.

    Raises:
        ExposeError: there is no DaemonSet of such agents.
    """
    if not template.windows:
        raise ExposeError(f"{WINDOWS_ONLY}, and there is no DaemonSet {AGENT_DAEMONSET_WINDOWS} of Velero's agents")
    return Pending(PendingReason.LEFT_TO_VELERO, f"{WINDOWS_ONLY}: left to Velero's node agent there")


async def needs_windows(client: KubeClient, request: SnapshotRequest) -> bool:
    """Return whether the volume of the snapshot can only be read on a Windows node."""
    claim = await client.read(PERSISTENT_VOLUME_CLAIMS, request.source_namespace, request.source_claim)
    return claim is not None and await _is_for_windows(client, request, claim, await _read_class(client, request))


async def place_backup(client: KubeClient, request: SnapshotRequest) -> Placement:
    """Return the nodes where the volume created from the snapshot can be read.

    A source PVC that no longer exists adds no restriction.

    Raises:
        ExposeError: the volume can only be read on a Windows node.
    """
    rules = request.settings.nodes.choose(request.backup_class)
    claim = await client.read(PERSISTENT_VOLUME_CLAIMS, request.source_namespace, request.source_claim)
    if claim is None:
        return Placement(alternatives=rules)
    storage_class = await _read_class(client, request)
    if await _is_for_windows(client, request, claim, storage_class):
        # Velero's agent accepted it, or there is none.
        raise ExposeError(WINDOWS_ONLY)
    avoided: tuple[str, ...] = ()
    if _FAST_CLONE_ANNOTATION in (claim["metadata"].get("annotations") or {}) | request.backup_pvc.annotations:
        # A linked clone cannot be attached where its source is.
        avoided = await _attached_nodes(client, claim)
    return Placement(
        avoid_nodes=avoided,
        alternatives=rules,
        topology=await _read_topology(client, claim, storage_class),
    )


async def _read_class(client: KubeClient, request: SnapshotRequest) -> StorageClass | None:
    name = request.storage_class
    return await client.read(STORAGE_CLASSES, "", name) if name else None


async def _read_topology(
    client: KubeClient, claim: PersistentVolumeClaim, storage_class: StorageClass | None
) -> tuple[NodeSelectorTerm, ...]:
    """Return the topology of the source volume, as `nodeSelectorTerms`.

    Needed for late-binding classes only: the backup PVC would be provisioned on any node that the
    mover pod is scheduled to. Other classes provision first, and the scheduler follows the volume.
    """
    volume = claim["spec"].get("volumeName")
    if not volume or not binds_late(storage_class):
        return ()
    found = await client.read(PERSISTENT_VOLUMES, "", volume)
    affinity = (found["spec"].get("nodeAffinity") or {}) if found else {}
    return tuple((affinity.get("required") or {}).get("nodeSelectorTerms") or [])


async def _is_for_windows(
    client: KubeClient, request: SnapshotRequest, claim: PersistentVolumeClaim, storage_class: StorageClass | None
) -> bool:
    """Return whether only Windows nodes can read the volume.

    Where no agent of Velero's runs on Windows, the nodes are not read: a volume is for Linux unless its class
    declares a Windows file system.
    """
    if claim_volume_mode(claim) is VolumeMode.BLOCK:
        return False
    if request.settings.template.windows:
        nodes = await _attached_nodes(client, claim)
        selected = (claim["metadata"].get("annotations") or {}).get(SELECTED_NODE_ANNOTATION, "")
        if found := await _read_node_os(client, nodes[0] if nodes else selected):
            return found == WINDOWS
    parameters = (storage_class.get("parameters") or {}) if storage_class else {}
    return str(parameters.get(_FS_TYPE, "")).lower() == _WINDOWS_FS


async def _read_node_os(client: KubeClient, node: str) -> str:
    """Return the operating system of a node; empty where its label is missing."""
    found = await client.read(NODES, "", node) if node else None
    labels = (found["metadata"].get("labels") or {}) if found else {}
    return str(labels.get(_OS_LABEL, ""))


async def _attached_nodes(client: KubeClient, claim: PersistentVolumeClaim) -> tuple[str, ...]:
    """Return the nodes to which the volume of `claim` is attached, in their order."""
    volume = claim["spec"].get("volumeName")
    return await attached_nodes(client, volume) if volume else ()

"""Placement of a snapshot's backup, derived from its source volume.

Reads source PVC, volume, StorageClass, attachments and nodes; `exposer.placement` turns the result
into a node affinity.
Source: Velero v1.18.2, GetVolumeTopology and GetPVCAttachingNodeOS in pkg/util/kube/pvc_pv.go
and its use in pkg/exposer/csi_snapshot.go.
"""

from typing import Final

from core.contract import VolumeMode
from core.kube.client import KubeClient
from core.kube.resources import (
    NODES,
    PERSISTENT_VOLUME_CLAIMS,
    PERSISTENT_VOLUMES,
    STORAGE_CLASSES,
)
from core.models.base import JsonDict
from core.models.names import SELECTED_NODE_ANNOTATION
from exposer.claims import claim_volume_mode
from exposer.model import Reader, SnapshotRequest
from exposer.placement import LINUX, WINDOWS, Placement
from exposer.volumes import attached_nodes

__all__ = ["binds_late", "place_backup", "read_node_os"]

_FAST_CLONE_ANNOTATION: Final = "csi.vsphere.volume/fast-provisioning"
_OS_LABEL: Final = "kubernetes.io/os"
_FS_TYPE: Final = "csi.storage.k8s.io/fstype"
_WINDOWS_FS: Final = "ntfs"


def binds_late(storage_class: JsonDict | None) -> bool:
    """Return whether volumes of the StorageClass are provisioned on the node of their first pod."""
    return storage_class is not None and storage_class.get("volumeBindingMode") == "WaitForFirstConsumer"


async def read_node_os(reader: Reader, node: str) -> str:
    """Return the operating system of a node; empty where its label is missing."""
    found = await reader.read(NODES, "", node) if node else None
    labels = (found or {"metadata": {}})["metadata"].get("labels") or {}
    return str(labels.get(_OS_LABEL, ""))


async def place_backup(client: KubeClient, request: SnapshotRequest) -> Placement:
    """Return the nodes where the volume created from the snapshot can be read.

    A source PVC that no longer exists adds no restriction.
    """
    rules = request.settings.nodes.choose(request.backup_class)
    claim = await client.read(PERSISTENT_VOLUME_CLAIMS, request.source_namespace, request.source_claim)
    if claim is None:
        return Placement(alternatives=rules)
    name = request.storage_class
    storage_class = await client.read(STORAGE_CLASSES, "", name) if name else None
    avoided: tuple[str, ...] = ()
    if _FAST_CLONE_ANNOTATION in (claim["metadata"].get("annotations") or {}) | request.backup_pvc.annotations:
        # A linked clone cannot be attached where its source is.
        avoided = await _attached_nodes(client, claim)
    return Placement(
        node_os=await _read_os(client, request, claim, storage_class=storage_class),
        avoid_nodes=avoided,
        alternatives=rules,
        topology=await _read_topology(client, claim, storage_class),
    )


async def _read_topology(client: KubeClient, claim: JsonDict, storage_class: JsonDict | None) -> tuple[JsonDict, ...]:
    """Return the topology of the source volume, as `nodeSelectorTerms`.

    Needed for late-binding classes only: the backup PVC would be provisioned on any node that the
    mover pod is scheduled to. Other classes provision first, and the scheduler follows the volume.
    """
    volume = claim["spec"].get("volumeName")
    if not volume or not binds_late(storage_class):
        return ()
    found = await client.read(PERSISTENT_VOLUMES, "", volume)
    affinity = ((found or {"spec": {}})["spec"].get("nodeAffinity") or {}).get("required") or {}
    return tuple(affinity.get("nodeSelectorTerms") or [])


async def _read_os(
    client: KubeClient, request: SnapshotRequest, claim: JsonDict, *, storage_class: JsonDict | None
) -> str:
    """Return the operating system whose nodes can read the volume.

    Where no agent runs on Windows, the nodes are not read: a volume is for Linux unless its class
    declares a Windows file system.
    """
    if claim_volume_mode(claim) is VolumeMode.BLOCK:
        return LINUX
    if request.settings.template.windows is not None:
        nodes = await _attached_nodes(client, claim)
        selected = (claim["metadata"].get("annotations") or {}).get(SELECTED_NODE_ANNOTATION, "")
        found = await read_node_os(client, nodes[0] if nodes else selected)
        if found:
            return WINDOWS if found == WINDOWS else LINUX
    parameters = (storage_class or {}).get("parameters") or {}
    return WINDOWS if str(parameters.get(_FS_TYPE, "")).lower() == _WINDOWS_FS else LINUX


async def _attached_nodes(client: KubeClient, claim: JsonDict) -> tuple[str, ...]:
    """Return the nodes to which the volume of `claim` is attached, in their order."""
    volume = claim["spec"].get("volumeName")
    return await attached_nodes(client, volume) if volume else ()

"""Worlds with a volume to expose, and exposers over a transport that may fail."""

from dataclasses import replace
from typing import Any, Final

from core.kube.resources import PERSISTENT_VOLUME_CLAIMS, VOLUME_SNAPSHOT_CONTENTS, VOLUME_SNAPSHOTS
from core.kube.transport import Transport
from exposer.csi_snapshot import CSISnapshotExposer
from exposer.generic_restore import GenericRestoreExposer
from exposer.model import RestoreRequest, SnapshotRequest
from tests.exposer.support.inputs import restore_request, snapshot_request
from tests.exposer.support.world import World
from tests.support.objects import JsonDict
from tests.support.versions import built

HANDLE: Final = "be3289d2"
SOURCE_CONTENT: Final = "snapcontent-f925c1b6"
_BOUND: Final = "snapshot.storage.kubernetes.io/volumesnapshot-bound-protection"
_DRIVER: Final = "hostpath.csi.k8s.io"
_TAKEN_AT: Final = "2026-11-21T11:00:20Z"
"""Before the recorded DataUpload was created."""


class BackupScene:
    """A PVC with a snapshot that is ready, and a snapshot of another owner.

    `source` is namespace and name of the first one.
    """

    def __init__(
        self,
        *,
        ready: bool = True,
        mode: str = "Filesystem",
        policy: str = "Delete",
        source: tuple[str, str] = ("app", "velero-data-lwkc4"),
        **world: Any,
    ) -> None:
        self.world = World(**world)
        self._policy = policy
        self._namespace, name = source
        self.request: SnapshotRequest = snapshot_request(source_namespace=self._namespace, volume_snapshot=name)
        self._put_claim(mode)
        self.put_snapshot(name, SOURCE_CONTENT, HANDLE, ready=ready)
        self.put_snapshot("bystander", "snapcontent-bystander", "other", ready=True)
        self.world.handles = {HANDLE, "other"}

    def exposer(self, transport: Transport | None = None) -> CSISnapshotExposer:
        """Return a new exposer, without state of earlier ones."""
        client = self.world.client_over(transport or self.world.kube)
        return CSISnapshotExposer(client, self.world.causes_over(client))

    def _put_claim(self, mode: str) -> None:
        spec: JsonDict = {
            "volumeMode": mode,
            "volumeName": "pvc-source",
            "storageClassName": "hostpath",
            "resources": {"requests": {"storage": "1Gi"}},
        }
        self.world.put(
            PERSISTENT_VOLUME_CLAIMS,
            "data",
            namespace=self._namespace,
            uid="source-claim",
            spec=spec,
            status={"phase": "Bound"},
        )

    def put_snapshot(self, name: str, content: str, handle: str, *, ready: bool) -> None:
        """Store a VolumeSnapshot of the PVC with its content, whose snapshot has this handle."""
        status = {"boundVolumeSnapshotContentName": content, "readyToUse": True, "restoreSize": "2Gi"}
        self.world.put(
            VOLUME_SNAPSHOTS,
            name,
            namespace=self._namespace,
            uid=f"uid-{name}",
            creationTimestamp=_TAKEN_AT,
            finalizers=[_BOUND],
            spec={"source": {"persistentVolumeClaimName": "data"}, "volumeSnapshotClassName": "hostpath"},
            status=status if ready else {"readyToUse": False},
        )
        reference = {"namespace": self._namespace, "name": name, "uid": f"uid-{name}"}
        self.world.put(
            VOLUME_SNAPSHOT_CONTENTS,
            content,
            uid=f"uid-{content}",
            finalizers=[_BOUND],
            spec={
                "deletionPolicy": self._policy,
                "driver": _DRIVER,
                "source": {"volumeHandle": "pvc-source"},
                "volumeSnapshotClassName": "hostpath",
                "volumeSnapshotRef": reference,
            },
            status={"snapshotHandle": handle, "readyToUse": True, "restoreSize": 2 << 30},
        )


class RestoreScene:
    """An unbound target PVC, and a PVC of another owner."""

    def __init__(self, *, mode: str = "Filesystem", node: str = "", by_block: bool = False, **world: Any) -> None:
        self.world = World(**world)
        self.request: RestoreRequest = restore_request(by_block=by_block)
        self.put_target("data", mode=mode, node=node)
        self.put_target("bystander", mode=mode)

    def exposer(self, transport: Transport | None = None) -> GenericRestoreExposer:
        """Return a new exposer, without state of earlier ones."""
        client = self.world.client_over(transport or self.world.kube)
        return GenericRestoreExposer(client, self.world.causes_over(client))

    def put_existing(self, *, policy: str = "Retain", **spec: Any) -> None:
        """Store volume and PVC of the target as a Velero server leaves them, and restore into the volume.

        `policy`: the reclaim policy that it had before it was retained, as a command of ours records it.
        """
        volume, target = built("persistentvolume"), built("target-pvc")
        self.request = replace(self.request, volume=volume["metadata"]["name"])
        # The storage loses it if either of its PersistentVolumes is reclaimed.
        self.world.disks.add(volume["spec"]["csi"]["volumeHandle"])
        volume["metadata"]["finalizers"] = ["test/provisioner"]
        if policy != "Retain":
            volume["metadata"]["annotations"]["nodeagent.io/reclaim-policy"] = policy
        volume["spec"] |= spec
        self.world.kube.put(volume)
        self.world.kube.put(target)

    def put_target(
        self, name: str, *, mode: str = "Filesystem", node: str = "", meta: JsonDict | None = None, **spec: Any
    ) -> None:
        """Store a PVC as restored by a Velero server: its selector prevents provisioning."""
        annotations = {"volume.kubernetes.io/selected-node": node} if node else {}
        wanted: JsonDict = {
            "accessModes": ["ReadWriteOnce"],
            "volumeMode": mode,
            "storageClassName": "hostpath",
            "selector": {"matchLabels": {"velero.io/dynamic-pv-restore": f"app3.{name}.x"}},
            "resources": {"requests": {"storage": "1Gi"}},
        }
        self.world.put(
            PERSISTENT_VOLUME_CLAIMS,
            name,
            namespace="app3",
            **{
                "uid": f"uid-{name}",
                "annotations": annotations,
                "labels": {"velero.io/restore-name": "r2"},
                **(meta or {}),
            },
            spec=wanted | spec,
            status={"phase": "Pending"},
        )

"""The API resources that the project uses, and their paths.

Source: Kubernetes v1.34 API reference; tests/recordings/velero-1.18.2/crds for velero.io.
"""

from dataclasses import dataclass
from typing import Final

__all__ = [
    "BACKUPS",
    "BACKUP_REPOSITORIES",
    "BACKUP_STORAGE_LOCATIONS",
    "CONFIG_MAPS",
    "DAEMON_SETS",
    "DATA_DOWNLOADS",
    "DATA_UPLOADS",
    "DEPLOYMENTS",
    "EVENTS",
    "JOBS",
    "LEASES",
    "NODES",
    "PERSISTENT_VOLUMES",
    "PERSISTENT_VOLUME_CLAIMS",
    "PODS",
    "POD_VOLUME_BACKUPS",
    "POD_VOLUME_RESTORES",
    "PRIORITY_CLASSES",
    "SECRETS",
    "STORAGE_CLASSES",
    "VOLUME_ATTACHMENTS",
    "VOLUME_SNAPSHOTS",
    "VOLUME_SNAPSHOT_CONTENTS",
    "Resource",
]


@dataclass(frozen=True)
class Resource:
    """One API resource: group, version, kind and path."""

    kind: str
    plural: str
    group: str = ""
    version: str = "v1"
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        """`apiVersion` of its objects."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str = "", name: str = "", *, subresource: str = "") -> str:
        """Return the URL path of the collection, an object or its subresource.

        An empty `namespace` of a namespaced resource means all namespaces.
        """
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        parts = [root]
        if self.namespaced and namespace:
            parts += ["namespaces", namespace]
        parts.append(self.plural)
        if name:
            parts.append(name)
        if subresource:
            parts.append(subresource)
        return "/".join(parts)


_SNAPSHOTS = "snapshot.storage.k8s.io"

PODS: Final = Resource("Pod", "pods")
EVENTS: Final = Resource("Event", "events")
SECRETS: Final = Resource("Secret", "secrets")
CONFIG_MAPS: Final = Resource("ConfigMap", "configmaps")
PERSISTENT_VOLUME_CLAIMS: Final = Resource("PersistentVolumeClaim", "persistentvolumeclaims")
PERSISTENT_VOLUMES: Final = Resource("PersistentVolume", "persistentvolumes", namespaced=False)
NODES: Final = Resource("Node", "nodes", namespaced=False)
DAEMON_SETS: Final = Resource("DaemonSet", "daemonsets", "apps")
DEPLOYMENTS: Final = Resource("Deployment", "deployments", "apps")
JOBS: Final = Resource("Job", "jobs", "batch")
LEASES: Final = Resource("Lease", "leases", "coordination.k8s.io")
STORAGE_CLASSES: Final = Resource("StorageClass", "storageclasses", "storage.k8s.io", namespaced=False)
VOLUME_ATTACHMENTS: Final = Resource("VolumeAttachment", "volumeattachments", "storage.k8s.io", namespaced=False)
PRIORITY_CLASSES: Final = Resource("PriorityClass", "priorityclasses", "scheduling.k8s.io", namespaced=False)
VOLUME_SNAPSHOTS: Final = Resource("VolumeSnapshot", "volumesnapshots", _SNAPSHOTS)
VOLUME_SNAPSHOT_CONTENTS: Final = Resource(
    "VolumeSnapshotContent", "volumesnapshotcontents", _SNAPSHOTS, namespaced=False
)
DATA_UPLOADS: Final = Resource("DataUpload", "datauploads", "velero.io", "v2alpha1")
DATA_DOWNLOADS: Final = Resource("DataDownload", "datadownloads", "velero.io", "v2alpha1")
POD_VOLUME_BACKUPS: Final = Resource("PodVolumeBackup", "podvolumebackups", "velero.io")
POD_VOLUME_RESTORES: Final = Resource("PodVolumeRestore", "podvolumerestores", "velero.io")
BACKUPS: Final = Resource("Backup", "backups", "velero.io")
BACKUP_REPOSITORIES: Final = Resource("BackupRepository", "backuprepositories", "velero.io")
BACKUP_STORAGE_LOCATIONS: Final = Resource("BackupStorageLocation", "backupstoragelocations", "velero.io")

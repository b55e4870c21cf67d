"""The API resources that the project uses, and their paths.

Source: Kubernetes v1.34 API reference; tests/recordings/velero-1.18.2/crds for velero.io.
"""

from dataclasses import dataclass
from typing import Final

__all__ = [
    "BACKUPS",
    "BACKUP_REPOSITORIES",
    "BACKUP_STORAGE_LOCATIONS",
    "CLUSTER_ROLES",
    "CLUSTER_ROLE_BINDINGS",
    "CONFIG_MAPS",
    "CRON_JOBS",
    "CUSTOM_RESOURCE_DEFINITIONS",
    "DAEMON_SETS",
    "DATA_DOWNLOADS",
    "DATA_UPLOADS",
    "DEPLOYMENTS",
    "EVENTS",
    "JOBS",
    "LEASES",
    "NAMESPACES",
    "NETWORK_POLICIES",
    "NODES",
    "PERSISTENT_VOLUMES",
    "PERSISTENT_VOLUME_CLAIMS",
    "PODS",
    "POD_VOLUME_BACKUPS",
    "POD_VOLUME_RESTORES",
    "PRIORITY_CLASSES",
    "ROLES",
    "ROLE_BINDINGS",
    "SCHEDULES",
    "SECRETS",
    "SECURITY_CONTEXT_CONSTRAINTS",
    "SERVICE_ACCOUNTS",
    "STORAGE_CLASSES",
    "VOLUME_ATTACHMENTS",
    "VOLUME_SNAPSHOTS",
    "VOLUME_SNAPSHOT_CLASSES",
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


_RBAC = "rbac.authorization.k8s.io"
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
CRON_JOBS: Final = Resource("CronJob", "cronjobs", "batch")
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
SCHEDULES: Final = Resource("Schedule", "schedules", "velero.io")
BACKUP_REPOSITORIES: Final = Resource("BackupRepository", "backuprepositories", "velero.io")
BACKUP_STORAGE_LOCATIONS: Final = Resource("BackupStorageLocation", "backupstoragelocations", "velero.io")
NAMESPACES: Final = Resource("Namespace", "namespaces", namespaced=False)
SERVICE_ACCOUNTS: Final = Resource("ServiceAccount", "serviceaccounts")
ROLES: Final = Resource("Role", "roles", _RBAC)
ROLE_BINDINGS: Final = Resource("RoleBinding", "rolebindings", _RBAC)
CLUSTER_ROLES: Final = Resource("ClusterRole", "clusterroles", _RBAC, namespaced=False)
CLUSTER_ROLE_BINDINGS: Final = Resource("ClusterRoleBinding", "clusterrolebindings", _RBAC, namespaced=False)
NETWORK_POLICIES: Final = Resource("NetworkPolicy", "networkpolicies", "networking.k8s.io")
CUSTOM_RESOURCE_DEFINITIONS: Final = Resource(
    "CustomResourceDefinition", "customresourcedefinitions", "apiextensions.k8s.io", namespaced=False
)
SECURITY_CONTEXT_CONSTRAINTS: Final = Resource(
    "SecurityContextConstraints", "securitycontextconstraints", "security.openshift.io", namespaced=False
)
VOLUME_SNAPSHOT_CLASSES: Final = Resource("VolumeSnapshotClass", "volumesnapshotclasses", _SNAPSHOTS, namespaced=False)

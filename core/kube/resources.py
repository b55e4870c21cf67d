"""The API resources that the project uses, and their paths.

Source: Kubernetes v1.34 API reference; tests/recordings/velero-1.18.2/crds for velero.io.
"""

from dataclasses import dataclass, field
from typing import Final, Generic

from core.kube import types
from core.kube.types import Object, Object_co

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
    "Selection",
]


@dataclass(frozen=True)
class Resource(Generic[Object_co]):
    """One API resource: group, version, kind, path and the type of its objects.

    `form` is the type that its objects are checked against. What is not stored, such as a review, has none.
    """

    kind: str
    plural: str
    group: str = ""
    version: str = "v1"
    namespaced: bool = True
    form: type[Object_co] | None = field(default=None, compare=False, repr=False)

    @property
    def api_version(self) -> str:
        """`apiVersion` of its objects."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def full_name(self) -> str:
        """Its plural and group, such as `datauploads.velero.io`: the name of its definition."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

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


@dataclass(frozen=True)
class Selection(Generic[Object_co]):
    """The objects of a list or watch; an empty namespace selects all namespaces."""

    resource: Resource[Object_co]
    namespace: str = ""
    label_selector: str = ""
    field_selector: str = ""

    @property
    def query(self) -> dict[str, str]:
        """The selectors as query parameters."""
        pairs = {"labelSelector": self.label_selector, "fieldSelector": self.field_selector}
        return {key: value for key, value in pairs.items() if value}


_RBAC = "rbac.authorization.k8s.io"
_SNAPSHOTS = "snapshot.storage.k8s.io"

PODS: Final = Resource("Pod", "pods", form=types.Pod)
EVENTS: Final = Resource("Event", "events", form=types.Event)
SECRETS: Final = Resource("Secret", "secrets", form=types.ConfigObject)
CONFIG_MAPS: Final = Resource("ConfigMap", "configmaps", form=types.ConfigObject)
PERSISTENT_VOLUME_CLAIMS: Final = Resource(
    "PersistentVolumeClaim", "persistentvolumeclaims", form=types.PersistentVolumeClaim
)
PERSISTENT_VOLUMES: Final = Resource(
    "PersistentVolume", "persistentvolumes", namespaced=False, form=types.PersistentVolume
)
NODES: Final = Resource("Node", "nodes", namespaced=False, form=types.NodeObject)
DAEMON_SETS: Final = Resource("DaemonSet", "daemonsets", "apps", form=types.DaemonSet)
DEPLOYMENTS: Final = Resource("Deployment", "deployments", "apps", form=types.UncheckedObject)
JOBS: Final = Resource("Job", "jobs", "batch", form=types.Job)
CRON_JOBS: Final = Resource("CronJob", "cronjobs", "batch", form=types.UncheckedObject)
LEASES: Final = Resource("Lease", "leases", "coordination.k8s.io", form=types.LeaseObject)
STORAGE_CLASSES: Final = Resource(
    "StorageClass", "storageclasses", "storage.k8s.io", namespaced=False, form=types.StorageClass
)
VOLUME_ATTACHMENTS: Final = Resource(
    "VolumeAttachment", "volumeattachments", "storage.k8s.io", namespaced=False, form=types.VolumeAttachment
)
PRIORITY_CLASSES: Final = Resource(
    "PriorityClass", "priorityclasses", "scheduling.k8s.io", namespaced=False, form=types.PriorityClassObject
)
VOLUME_SNAPSHOTS: Final = Resource("VolumeSnapshot", "volumesnapshots", _SNAPSHOTS, form=types.VolumeSnapshot)
VOLUME_SNAPSHOT_CONTENTS: Final = Resource(
    "VolumeSnapshotContent", "volumesnapshotcontents", _SNAPSHOTS, namespaced=False, form=types.VolumeSnapshotContent
)
DATA_UPLOADS: Final = Resource("DataUpload", "datauploads", "velero.io", "v2alpha1", form=types.UncheckedObject)
DATA_DOWNLOADS: Final = Resource("DataDownload", "datadownloads", "velero.io", "v2alpha1", form=types.UncheckedObject)
POD_VOLUME_BACKUPS: Final = Resource("PodVolumeBackup", "podvolumebackups", "velero.io", form=types.UncheckedObject)
POD_VOLUME_RESTORES: Final = Resource("PodVolumeRestore", "podvolumerestores", "velero.io", form=types.UncheckedObject)
BACKUPS: Final = Resource("Backup", "backups", "velero.io", form=types.UncheckedObject)
SCHEDULES: Final = Resource("Schedule", "schedules", "velero.io", form=types.UncheckedObject)
BACKUP_REPOSITORIES: Final = Resource(
    "BackupRepository", "backuprepositories", "velero.io", form=types.RepositoryObject
)
BACKUP_STORAGE_LOCATIONS: Final = Resource(
    "BackupStorageLocation", "backupstoragelocations", "velero.io", form=types.UncheckedObject
)
NAMESPACES: Final = Resource("Namespace", "namespaces", namespaced=False, form=Object)
SERVICE_ACCOUNTS: Final = Resource("ServiceAccount", "serviceaccounts", form=Object)
ROLES: Final = Resource("Role", "roles", _RBAC, form=Object)
ROLE_BINDINGS: Final = Resource("RoleBinding", "rolebindings", _RBAC, form=Object)
CLUSTER_ROLES: Final = Resource("ClusterRole", "clusterroles", _RBAC, namespaced=False, form=Object)
CLUSTER_ROLE_BINDINGS: Final = Resource(
    "ClusterRoleBinding", "clusterrolebindings", _RBAC, namespaced=False, form=Object
)
NETWORK_POLICIES: Final = Resource("NetworkPolicy", "networkpolicies", "networking.k8s.io", form=Object)
CUSTOM_RESOURCE_DEFINITIONS: Final = Resource(
    "CustomResourceDefinition",
    "customresourcedefinitions",
    "apiextensions.k8s.io",
    namespaced=False,
    form=types.UncheckedObject,
)
SECURITY_CONTEXT_CONSTRAINTS: Final = Resource(
    "SecurityContextConstraints", "securitycontextconstraints", "security.openshift.io", namespaced=False, form=Object
)
VOLUME_SNAPSHOT_CLASSES: Final = Resource(
    "VolumeSnapshotClass", "volumesnapshotclasses", _SNAPSHOTS, namespaced=False, form=types.VolumeSnapshotClass
)

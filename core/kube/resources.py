"""The API resources that the project uses, their paths, and the check of their objects' form.

Custom resources may be of another version than their definitions, so each object is checked where it enters.
Source: Kubernetes v1.34 API reference; tests/recordings/velero-1.18.2/crds for velero.io.
"""

import re
from dataclasses import dataclass, field
from typing import Any, Final, Generic

import msgspec

from core.kube import types
from core.kube.errors import MalformedObjectError, NotFoundError
from core.kube.types import Object, Object_co
from core.models.base import JsonDict, explain_invalid


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

    def build(self, metadata: types.Manifest, **content: Any) -> types.Manifest:  # noqa: ANN401 - any JSON value
        """Return an object with these metadata and this content."""
        return {"apiVersion": self.api_version, "kind": self.kind, "metadata": metadata, **content}

    def path(self, namespace: str = "", name: str = "", *, subresource: str = "") -> str:
        """Return the URL path of the collection, an object or its subresource; an empty `namespace` means all."""
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        place = ("namespaces", namespace) if self.namespaced and namespace else ()
        return "/".join(filter(None, (root, *place, self.plural, name, subresource)))


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
SNAPSHOT_METADATA_SERVICES: Final = Resource(
    "SnapshotMetadataService",
    "snapshotmetadataservices",
    "cbt.storage.k8s.io",
    "v1beta1",
    namespaced=False,
    form=types.SnapshotMetadataService,
)
DATA_UPLOADS: Final = Resource("DataUpload", "datauploads", "velero.io", "v2alpha1", form=types.UncheckedObject)
DATA_DOWNLOADS: Final = Resource("DataDownload", "datadownloads", "velero.io", "v2alpha1", form=types.UncheckedObject)
POD_VOLUME_BACKUPS: Final = Resource("PodVolumeBackup", "podvolumebackups", "velero.io", form=types.UncheckedObject)
POD_VOLUME_RESTORES: Final = Resource("PodVolumeRestore", "podvolumerestores", "velero.io", form=types.UncheckedObject)
TRANSFERS: Final = (DATA_UPLOADS, DATA_DOWNLOADS, POD_VOLUME_BACKUPS, POD_VOLUME_RESTORES)
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

BY_KIND: Final[dict[str, Resource[Any]]] = {one.kind: one for one in list(vars().values()) if isinstance(one, Resource)}
"""All of these, by the kinds of their objects."""

_SEGMENT: Final = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9._:-]+")
"""Superset of the valid names of objects and namespaces; excludes every special path segment.

Source: Kubernetes v1.34, apimachinery, pkg/api/validation/path and pkg/util/validation.
"""


def object_path(resource: Resource, namespace: str, name: str, *, attempted: str, subresource: str = "") -> str:
    """Return the URL path of one object, or of its subresource; raise NotFoundError if no object can have the name.

    A name from a custom resource may be any string: empty it would address the whole collection, with a slash a
    different object.
    """
    parts = (namespace, name) if resource.namespaced else (name,)
    if not all(_SEGMENT.fullmatch(part) for part in parts):
        raise NotFoundError(f"{attempted}: 404 NotFound: invalid name", status=404, reason="NotFound")
    return resource.path(namespace, name, subresource=subresource)


def collection_path(resource: Resource, namespace: str, *, attempted: str) -> str:
    """Return the URL path of a collection; raise NotFoundError if no namespace can have the name."""
    if namespace and not _SEGMENT.fullmatch(namespace):
        raise NotFoundError(f"{attempted}: 404 NotFound: invalid namespace", status=404, reason="NotFound")
    return resource.path(namespace)


LONGEST_NAME: Final = 253
"""Source: Kubernetes, the maximum length of an object's name."""


def check_form(resource: Resource, obj: JsonDict, *, identity: bool = False) -> None:
    """Check that `obj` has the form of its kind; resources that are not stored, such as reviews, have none.

    With `identity`, check the metadata alone.

    Raises:
        MalformedObjectError: it does not; the message names the object and the field.
    """
    form, fault = Object if identity else resource.form, ""
    if form is None:
        return
    try:
        msgspec.convert(obj, form)
    except (ValueError, RecursionError) as e:
        fault = explain_invalid(e)
    if not fault and resource.namespaced and not obj["metadata"].get("namespace"):
        fault = "metadata: Object missing required field `namespace`"
    if fault:
        meta = obj.get("metadata")
        known = meta if isinstance(meta, dict) else {}
        place = "/".join(str(known[key])[:LONGEST_NAME] for key in ("namespace", "name") if key in known)
        raise MalformedObjectError(f"malformed {resource.kind} {place or 'without a name'}: {fault}")

"""Kinds of objects that the test bed's storage deals with, its classes, and every name it uses."""

from tests.testbed.api import Json, Resource

DRIVER = "bed.node-agent.test"
"""The CSI driver: provisioner of the storage classes and driver of the snapshot classes."""

TOPOLOGY_KEY = "topology.bed.node-agent.test/node"
"""Segment of the topology of the driver: the only node that reaches a volume."""

FAULT_ANNOTATION = "bed.node-agent.test/fault"
FAULT_CONFIG_MAP = ("default", "bed-faults")
"""How tests ask the storage for faults: an annotation, or a ConfigMap (namespace, name). Source: `tools/csi/driver`."""

SHARED = "shared"
"""The parameter of storage classes whose volumes every node reaches; `true` or nothing."""

SHARED_CLASS = "bed-shared"

GROUP_CLASS, GROUP_CLASS_TOGETHER = "bed", "bed-together"
"""Classes of groups of snapshots: each member can be deleted alone, or only all of them with their group."""

_DEFAULT_SNAPSHOT_CLASS = "snapshot.storage.kubernetes.io/is-default-class"
"""Annotation. Source: external-snapshotter v8."""

_SNAPSHOT_GROUP = "/apis/snapshot.storage.k8s.io/v1"
_STORAGE_GROUP = "/apis/storage.k8s.io/v1"

CLAIMS = Resource("/api/v1", "persistentvolumeclaims")
VOLUMES = Resource("/api/v1", "persistentvolumes", namespaced=False)
CONFIG_MAPS = Resource("/api/v1", "configmaps")
EVENTS = Resource("/api/v1", "events")
STORAGE_CLASSES = Resource(_STORAGE_GROUP, "storageclasses", namespaced=False)
ATTACHMENTS = Resource(_STORAGE_GROUP, "volumeattachments", namespaced=False)
DRIVERS = Resource(_STORAGE_GROUP, "csidrivers", namespaced=False)
SNAPSHOTS = Resource(_SNAPSHOT_GROUP, "volumesnapshots")
CONTENTS = Resource(_SNAPSHOT_GROUP, "volumesnapshotcontents", namespaced=False)
SNAPSHOT_CLASSES = Resource(_SNAPSHOT_GROUP, "volumesnapshotclasses", namespaced=False)
CHANGES_SERVICES = Resource("/apis/cbt.storage.k8s.io/v1beta1", "snapshotmetadataservices", namespaced=False)
GROUP_CLASSES = Resource("/apis/groupsnapshot.storage.k8s.io/v1", "volumegroupsnapshotclasses", namespaced=False)


_DRIVER_OBJECT: Json = {
    "apiVersion": "storage.k8s.io/v1",
    "kind": "CSIDriver",
    "metadata": {"name": DRIVER},
    "spec": {"attachRequired": True, "fsGroupPolicy": "File", "volumeLifecycleModes": ["Persistent"]},
}


def class_objects() -> list[tuple[Resource, Json]]:
    """The classes that every test bed has, with the kind of each."""
    return [
        (DRIVERS, _DRIVER_OBJECT),
        (STORAGE_CLASSES, _storage_class("bed", "Immediate", "Delete")),
        (STORAGE_CLASSES, _storage_class("bed-wait", "WaitForFirstConsumer", "Delete")),
        (STORAGE_CLASSES, _storage_class("bed-retain", "Immediate", "Retain")),
        (STORAGE_CLASSES, {**_storage_class(SHARED_CLASS, "Immediate", "Delete"), "parameters": {SHARED: "true"}}),
        (SNAPSHOT_CLASSES, _snapshot_class("bed", "Delete", {_DEFAULT_SNAPSHOT_CLASS: "true"})),
        (SNAPSHOT_CLASSES, _snapshot_class("bed-retain", "Retain")),
        (GROUP_CLASSES, _group_class(GROUP_CLASS)),
        (GROUP_CLASSES, {**_group_class(GROUP_CLASS_TOGETHER), "parameters": {"together": "true"}}),
    ]


def _storage_class(name: str, binding: str, reclaim: str) -> Json:
    return {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {"name": name},
        "provisioner": DRIVER,
        "volumeBindingMode": binding,
        "reclaimPolicy": reclaim,
        "allowVolumeExpansion": True,
    }


def _snapshot_class(name: str, policy: str, annotations: dict[str, str] | None = None) -> Json:
    return {
        "apiVersion": "snapshot.storage.k8s.io/v1",
        "kind": "VolumeSnapshotClass",
        "metadata": {"name": name, "annotations": annotations or {}},
        "driver": DRIVER,
        "deletionPolicy": policy,
    }


def _group_class(name: str) -> Json:
    return {
        "apiVersion": "groupsnapshot.storage.k8s.io/v1",
        "kind": "VolumeGroupSnapshotClass",
        "metadata": {"name": name},
        "driver": DRIVER,
        "deletionPolicy": "Delete",
    }

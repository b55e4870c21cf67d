"""Kinds of objects that the test bed's storage deals with, its classes, and every name it uses."""

from core.kube.resources import STORAGE_CLASSES, VOLUME_SNAPSHOT_CLASSES, Resource
from tests.support.objects import build_object
from tests.testbed.api import Json

DRIVER = "bed.node-agent.test"
"""The CSI driver: provisioner of the storage classes and driver of the snapshot classes."""

TOPOLOGY_KEY = "topology.bed.node-agent.test/node"
"""Segment of the topology of the driver: the only node that reaches a volume."""

FAULT_CONFIG_MAP = ("default", "bed-faults")
"""How tests ask the storage for faults (namespace, name). Source: `tools/csi/driver`."""

SHARED_CLASS = "bed-shared"
"""The storage class whose volumes every node reaches."""

GROUP_CLASS, GROUP_CLASS_TOGETHER = "bed", "bed-together"
"""Classes of groups of snapshots: each member can be deleted alone, or only all of them with their group."""

_DEFAULT_SNAPSHOT_CLASS = "snapshot.storage.kubernetes.io/is-default-class"
"""Annotation. Source: external-snapshotter v8."""

DRIVERS = Resource("CSIDriver", "csidrivers", "storage.k8s.io", namespaced=False)
GROUP_CLASSES = Resource(
    "VolumeGroupSnapshotClass", "volumegroupsnapshotclasses", "groupsnapshot.storage.k8s.io", namespaced=False
)


def class_objects() -> list[tuple[Resource, Json]]:
    """The classes that every test bed has, with the kind of each."""
    driver = {"attachRequired": True, "fsGroupPolicy": "File", "volumeLifecycleModes": ["Persistent"]}
    meta, deletes = {"annotations": {_DEFAULT_SNAPSHOT_CLASS: "true"}}, {"driver": DRIVER, "deletionPolicy": "Delete"}
    return [
        (DRIVERS, build_object(DRIVERS, DRIVER, spec=driver)),
        (STORAGE_CLASSES, _storage_class("bed", "Immediate")),
        (STORAGE_CLASSES, _storage_class("bed-wait", "WaitForFirstConsumer")),
        (STORAGE_CLASSES, _storage_class(SHARED_CLASS, "Immediate", parameters={"shared": "true"})),
        (VOLUME_SNAPSHOT_CLASSES, build_object(VOLUME_SNAPSHOT_CLASSES, "bed", metadata=meta, **deletes)),
        (GROUP_CLASSES, build_object(GROUP_CLASSES, GROUP_CLASS, **deletes)),
        (GROUP_CLASSES, build_object(GROUP_CLASSES, GROUP_CLASS_TOGETHER, **deletes, parameters={"together": "true"})),
    ]


def _storage_class(name: str, binding: str, **more: object) -> Json:
    modes = {"volumeBindingMode": binding, "reclaimPolicy": "Delete", "allowVolumeExpansion": True}
    return build_object(STORAGE_CLASSES, name, provisioner=DRIVER, **modes, **more)

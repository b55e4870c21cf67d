"""Kinds of objects that the test bed's storage deals with, its classes, and every name it uses."""

from core.kube.resources import STORAGE_CLASSES, VOLUME_SNAPSHOT_CLASSES, Resource
from tests.support.objects import build_object
from tests.testbed.api import Json

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

DRIVERS = Resource("CSIDriver", "csidrivers", "storage.k8s.io", namespaced=False)
GROUP_CLASSES = Resource(
    "VolumeGroupSnapshotClass", "volumegroupsnapshotclasses", "groupsnapshot.storage.k8s.io", namespaced=False
)


def class_objects() -> list[tuple[Resource, Json]]:
    """The classes that every test bed has, with the kind of each."""
    driver = {"attachRequired": True, "fsGroupPolicy": "File", "volumeLifecycleModes": ["Persistent"]}
    return [
        (DRIVERS, build_object(DRIVERS, DRIVER, spec=driver)),
        (STORAGE_CLASSES, _storage_class("bed", "Immediate", "Delete")),
        (STORAGE_CLASSES, _storage_class("bed-wait", "WaitForFirstConsumer", "Delete")),
        (STORAGE_CLASSES, _storage_class("bed-retain", "Immediate", "Retain")),
        (STORAGE_CLASSES, _storage_class(SHARED_CLASS, "Immediate", "Delete", parameters={SHARED: "true"})),
        (VOLUME_SNAPSHOT_CLASSES, _snapshot_class("bed", "Delete", {_DEFAULT_SNAPSHOT_CLASS: "true"})),
        (VOLUME_SNAPSHOT_CLASSES, _snapshot_class("bed-retain", "Retain")),
        (GROUP_CLASSES, _group_class(GROUP_CLASS)),
        (GROUP_CLASSES, _group_class(GROUP_CLASS_TOGETHER, parameters={"together": "true"})),
    ]


def _storage_class(name: str, binding: str, reclaim: str, **more: object) -> Json:
    modes = {"volumeBindingMode": binding, "reclaimPolicy": reclaim, "allowVolumeExpansion": True}
    return build_object(STORAGE_CLASSES, name, provisioner=DRIVER, **modes, **more)


def _snapshot_class(name: str, policy: str, annotations: dict[str, str] | None = None) -> Json:
    meta = {"annotations": annotations or {}}
    return build_object(VOLUME_SNAPSHOT_CLASSES, name, metadata=meta, driver=DRIVER, deletionPolicy=policy)


def _group_class(name: str, **more: object) -> Json:
    return build_object(GROUP_CLASSES, name, driver=DRIVER, deletionPolicy="Delete", **more)

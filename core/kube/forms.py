"""The form that an object must have to be read as a JSON dict: the types of the fields that are read.

The API server validates its own kinds, and custom resources by their definitions, but those may be of
another version. So each object is checked where it enters; all code behind trusts the types below.
A field that is read beyond them is added here. Custom resources of velero.io have models
(`core.models`); of them only the metadata is checked.
Source: Kubernetes v1.34, API reference; external-snapshotter v8, client/config/crd.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, NotRequired, Required, TypedDict

import msgspec

from core.kube import resources
from core.kube.errors import MalformedObjectError
from core.kube.resources import Resource
from core.models.base import Int64, JsonDict, Time, explain_invalid

__all__ = ["check_form", "check_identity"]

_Strings = dict[str, str]
_Quantities = dict[str, str | int | float]
_Int32 = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
_Version = Annotated[str, msgspec.Meta(max_length=256)]
"""A resourceVersion: compared as a number where it is one."""


_LONGEST_NAME: Final = 253
"""Source: Kubernetes, the maximum length of an object's name."""


class _OwnerReference(TypedDict):
    kind: str
    name: str
    uid: str
    controller: NotRequired[bool]


class _Meta(TypedDict, total=False):
    name: Required[str]
    namespace: str
    uid: Required[str]
    resourceVersion: Required[_Version]
    creationTimestamp: Required[Time]
    deletionTimestamp: Time
    deletionGracePeriodSeconds: int
    labels: _Strings
    annotations: _Strings
    finalizers: list[str]
    ownerReferences: list[_OwnerReference]


class _Object(TypedDict):
    """Any object; what else it has is checked by its model, or not read."""

    apiVersion: str
    kind: str
    metadata: _Meta


class _Named(TypedDict):
    name: str


class _VolumeMount(_Named, total=False):
    mountPath: str


class _Requirement(TypedDict):
    key: str
    operator: str
    values: NotRequired[list[str]]


class _Term(TypedDict, total=False):
    matchExpressions: list[_Requirement]
    matchFields: list[_Requirement]


class _Terms(TypedDict, total=False):
    nodeSelectorTerms: list[_Term]


class _Condition(TypedDict, total=False):
    type: Required[str]
    status: Required[str]
    reason: str
    message: str
    lastTransitionTime: Time


class _Resources(TypedDict, total=False):
    limits: _Quantities
    requests: _Quantities


class _Toleration(TypedDict, total=False):
    key: str
    effect: str


class _HostPath(TypedDict, total=False):
    path: str


class _ClaimSource(TypedDict):
    claimName: str


class _Flex(TypedDict, total=False):
    driver: str


class _Volume(TypedDict, total=False):
    name: Required[str]
    hostPath: _HostPath
    persistentVolumeClaim: _ClaimSource
    flexVolume: _Flex


class _Security(TypedDict, total=False):
    readOnlyRootFilesystem: bool


class _Container(TypedDict, total=False):
    name: Required[str]
    image: str
    resources: _Resources
    volumeMounts: list[_VolumeMount]
    volumeDevices: list[_Named]
    env: list[JsonDict]
    envFrom: list[JsonDict]
    securityContext: _Security


class _NodeAffinity(TypedDict, total=False):
    requiredDuringSchedulingIgnoredDuringExecution: _Terms


class _Affinity(TypedDict, total=False):
    nodeAffinity: _NodeAffinity


class _PodSpec(TypedDict, total=False):
    nodeName: str
    containers: list[_Container]
    initContainers: list[_Container]
    volumes: list[_Volume]
    tolerations: list[_Toleration]
    affinity: _Affinity


class _Waiting(TypedDict, total=False):
    reason: str
    message: str


class _Terminated(TypedDict, total=False):
    exitCode: _Int32
    reason: str
    message: str


class _State(TypedDict, total=False):
    waiting: _Waiting
    running: JsonDict
    terminated: _Terminated


class _ContainerStatus(TypedDict, total=False):
    name: Required[str]
    state: _State


class _PodStatus(TypedDict, total=False):
    phase: str
    reason: str
    message: str
    conditions: list[_Condition]
    containerStatuses: list[_ContainerStatus]
    initContainerStatuses: list[_ContainerStatus]


class _Pod(_Object):
    spec: _PodSpec
    status: NotRequired[_PodStatus]


class _TemplateMeta(TypedDict, total=False):
    labels: _Strings
    annotations: _Strings


class _Template(TypedDict, total=False):
    metadata: _TemplateMeta
    spec: _PodSpec


class _DaemonSetSpec(TypedDict, total=False):
    template: _Template


class _DaemonSet(_Object):
    spec: _DaemonSetSpec


class _Phase(TypedDict, total=False):
    phase: str


class _Selector(TypedDict, total=False):
    matchLabels: _Strings


class _ClaimSpec(TypedDict, total=False):
    accessModes: list[str]
    resources: _Resources
    selector: _Selector
    storageClassName: str
    volumeMode: Literal["Filesystem", "Block"]
    volumeName: str


class _Claim(_Object):
    spec: _ClaimSpec
    status: NotRequired[_Phase]


class _Reference(TypedDict, total=False):
    namespace: str
    name: str
    uid: str


class _VolumeAffinity(TypedDict, total=False):
    required: _Terms


class _PersistentVolumeSpec(TypedDict, total=False):
    claimRef: _Reference
    flexVolume: _Flex
    nodeAffinity: _VolumeAffinity
    persistentVolumeReclaimPolicy: str
    volumeMode: str


class _PersistentVolume(_Object):
    spec: _PersistentVolumeSpec
    status: NotRequired[_Phase]


class _StorageClass(_Object, total=False):
    parameters: _Strings
    reclaimPolicy: str
    volumeBindingMode: str


class _AttachmentSource(TypedDict, total=False):
    persistentVolumeName: str


class _AttachmentSpec(TypedDict):
    nodeName: str
    source: _AttachmentSource


class _Attachment(_Object):
    spec: _AttachmentSpec


class _NodeStatus(TypedDict, total=False):
    conditions: list[_Condition]


class _Node(_Object, total=False):
    status: _NodeStatus


class _Series(TypedDict, total=False):
    lastObservedTime: Time


class _Source(TypedDict, total=False):
    component: str


class _Event(_Object, total=False):
    involvedObject: _Reference
    type: str
    reason: str
    message: str
    firstTimestamp: Time
    lastTimestamp: Time
    eventTime: Time
    series: _Series
    reportingComponent: str
    source: _Source


class _Data(_Object, total=False):
    """A ConfigMap or a Secret."""

    data: _Strings


class _JobStatus(TypedDict, total=False):
    completionTime: Time
    conditions: list[_Condition]


class _Job(_Object, total=False):
    status: _JobStatus


class _LeaseSpec(TypedDict, total=False):
    holderIdentity: str
    leaseDurationSeconds: _Int32
    leaseTransitions: _Int32


class _Lease(_Object, total=False):
    spec: _LeaseSpec


class _PriorityClass(_Object, total=False):
    value: _Int32


class _SnapshotSource(TypedDict, total=False):
    volumeSnapshotContentName: str
    snapshotHandle: str


class _SnapshotError(TypedDict, total=False):
    message: str


class _SnapshotStatus(TypedDict, total=False):
    boundVolumeSnapshotContentName: str
    readyToUse: bool
    error: _SnapshotError


class _SnapshotSpec(TypedDict, total=False):
    source: _SnapshotSource
    volumeSnapshotClassName: str


class _Snapshot(_Object):
    spec: _SnapshotSpec
    status: NotRequired[_SnapshotStatus]


class _ContentStatus(TypedDict, total=False):
    snapshotHandle: str
    restoreSize: Int64
    error: _SnapshotError


class _ContentSpec(TypedDict, total=False):
    driver: str
    deletionPolicy: str
    source: _SnapshotSource
    volumeSnapshotClassName: str
    volumeSnapshotRef: _Reference


class _Content(_Object):
    spec: _ContentSpec
    status: NotRequired[_ContentStatus]


class _RepositorySpec(TypedDict, total=False):
    volumeNamespace: str
    backupStorageLocation: str
    repositoryType: str
    repositoryConfig: JsonDict


class _Repository(_Object, total=False):
    spec: _RepositorySpec


_PLAIN: Final = (
    resources.BACKUPS,
    resources.BACKUP_STORAGE_LOCATIONS,
    resources.CLUSTER_ROLES,
    resources.CLUSTER_ROLE_BINDINGS,
    resources.CRON_JOBS,
    resources.CUSTOM_RESOURCE_DEFINITIONS,
    resources.DATA_DOWNLOADS,
    resources.DATA_UPLOADS,
    resources.DEPLOYMENTS,
    resources.NAMESPACES,
    resources.NETWORK_POLICIES,
    resources.POD_VOLUME_BACKUPS,
    resources.POD_VOLUME_RESTORES,
    resources.ROLES,
    resources.ROLE_BINDINGS,
    resources.SCHEDULES,
    resources.SECURITY_CONTEXT_CONSTRAINTS,
    resources.SERVICE_ACCOUNTS,
    resources.VOLUME_SNAPSHOT_CLASSES,
)
"""Kinds of which nothing is read beyond their metadata, or that have a model."""

_FORMS: Final[Mapping[Resource, Any]] = {
    **dict.fromkeys(_PLAIN, _Object),
    resources.BACKUP_REPOSITORIES: _Repository,
    resources.CONFIG_MAPS: _Data,
    resources.DAEMON_SETS: _DaemonSet,
    resources.EVENTS: _Event,
    resources.JOBS: _Job,
    resources.LEASES: _Lease,
    resources.NODES: _Node,
    resources.PERSISTENT_VOLUMES: _PersistentVolume,
    resources.PERSISTENT_VOLUME_CLAIMS: _Claim,
    resources.PODS: _Pod,
    resources.PRIORITY_CLASSES: _PriorityClass,
    resources.SECRETS: _Data,
    resources.STORAGE_CLASSES: _StorageClass,
    resources.VOLUME_ATTACHMENTS: _Attachment,
    resources.VOLUME_SNAPSHOTS: _Snapshot,
    resources.VOLUME_SNAPSHOT_CONTENTS: _Content,
}


def check_form(resource: Resource, obj: JsonDict) -> None:
    """Check that `obj` has the form of its kind; resources that are not stored, such as reviews, have none.

    Raises:
        MalformedObjectError: it does not; the message names the object and the field.
    """
    if resource in _FORMS:
        _check(resource, obj, _FORMS[resource])


def check_identity(resource: Resource, obj: JsonDict) -> None:
    """Check that the metadata of `obj` has the right form.

    Raises:
        MalformedObjectError: it does not.
    """
    _check(resource, obj, _Object)


def _check(resource: Resource, obj: JsonDict, form: Any) -> None:  # noqa: ANN401 - what msgspec takes
    fault = _find_fault(obj, form)
    if not fault and resource.namespaced and not obj["metadata"].get("namespace"):
        fault = "metadata: Object missing required field `namespace`"
    if fault:
        meta = obj.get("metadata")
        known = meta if isinstance(meta, dict) else {}
        place = "/".join(str(known[key])[:_LONGEST_NAME] for key in ("namespace", "name") if key in known)
        raise MalformedObjectError(f"malformed {resource.kind} {place or 'without a name'}: {fault}")


def _find_fault(obj: JsonDict, form: Any) -> str:  # noqa: ANN401 - what msgspec takes
    try:
        msgspec.convert(obj, form)
    except (ValueError, RecursionError) as e:
        return explain_invalid(e)
    return ""

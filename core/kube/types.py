"""Types of the API objects that are read, with the fields that are read: the dictionaries as they come from JSON.

The API client checks each object against the type of its resource (`core.kube.resources`). A field that is read beyond
them is added here. Custom resources of velero.io have models (`core.models`): only their metadata is checked.
Source: Kubernetes v1.34, API reference; external-snapshotter v8, client/config/crd.
"""

from typing import TYPE_CHECKING, Annotated, Any, Literal, NotRequired, Required, TypedDict

import msgspec

from core.models.base import Int64, JsonDict, Time

if TYPE_CHECKING:
    from typing_extensions import TypeVar
else:
    from typing import TypeVar

Manifest = dict[str, Any]
"""An object that is built to be created or applied, a patch, or a part of one."""

_Strings = dict[str, str]
Quantities = dict[str, str | int | float]
_Int32 = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
if TYPE_CHECKING:
    _Stamp = str
else:
    # A text, which msgspec checks as a time.
    _Stamp = Time
_Version = Annotated[str, msgspec.Meta(max_length=256)]
"""A resourceVersion: compared as a number where it is one."""


class OwnerRef(TypedDict):
    apiVersion: NotRequired[str]
    kind: str
    name: str
    uid: str
    controller: NotRequired[bool]


class Metadata(TypedDict, total=False):
    name: Required[str]
    namespace: str
    uid: Required[str]
    resourceVersion: Required[_Version]
    generation: int
    creationTimestamp: Required[_Stamp]
    deletionTimestamp: _Stamp
    deletionGracePeriodSeconds: int
    labels: _Strings
    annotations: _Strings
    finalizers: list[str]
    ownerReferences: list[OwnerRef]


class Object(TypedDict):
    """Any object; what else it has is checked by its model, or not read."""

    apiVersion: str
    kind: str
    metadata: Metadata


ObjectT = TypeVar("ObjectT", bound=Object)
if TYPE_CHECKING:
    # With a default, as Python has since 3.13: a bare `Resource` or `Selection` is one of any objects.
    Object_co = TypeVar("Object_co", covariant=True, default=Object)
else:
    Object_co = TypeVar("Object_co", covariant=True)


class UncheckedObject(Object, total=False):
    """An object that its model or its reader checks: all but the metadata."""

    spec: Any
    status: Any


class VolumeDevice(TypedDict, total=False):
    name: Required[str]
    devicePath: str


class EnvVar(TypedDict, total=False):
    name: Required[str]
    value: str
    valueFrom: JsonDict


class VolumeMount(TypedDict, total=False):
    name: Required[str]
    mountPath: str
    mountPropagation: str
    readOnly: bool


class NodeRequirement(TypedDict):
    key: str
    operator: str
    values: NotRequired[list[str]]


class NodeSelectorTerm(TypedDict, total=False):
    matchExpressions: list[NodeRequirement]
    matchFields: list[NodeRequirement]


class NodeSelector(TypedDict, total=False):
    nodeSelectorTerms: list[NodeSelectorTerm]


class Condition(TypedDict, total=False):
    type: str
    status: str
    reason: str
    message: str
    lastTransitionTime: _Stamp


class ResourceRequirements(TypedDict, total=False):
    limits: Quantities
    requests: Quantities


class PodToleration(TypedDict, total=False):
    key: str
    operator: str
    value: str
    effect: str
    tolerationSeconds: int


class ClaimSource(TypedDict, total=False):
    claimName: Required[str]
    readOnly: bool


class FlexVolume(TypedDict, total=False):
    driver: str


class VolumeSource(TypedDict, total=False):
    hostPath: _Strings
    persistentVolumeClaim: ClaimSource
    flexVolume: FlexVolume
    emptyDir: _Strings
    ephemeral: JsonDict
    nfs: JsonDict
    projected: JsonDict


class Volume(VolumeSource):
    name: str


class ContainerSecurity(TypedDict, total=False):
    readOnlyRootFilesystem: bool


class Container(TypedDict, total=False):
    name: Required[str]
    image: str
    imagePullPolicy: str
    command: list[str]
    args: list[str]
    resources: ResourceRequirements
    volumeMounts: list[VolumeMount]
    volumeDevices: list[VolumeDevice]
    env: list[EnvVar]
    envFrom: list[JsonDict]
    securityContext: ContainerSecurity


class NodeAffinity(TypedDict, total=False):
    requiredDuringSchedulingIgnoredDuringExecution: NodeSelector


class Affinity(TypedDict, total=False):
    nodeAffinity: NodeAffinity


class PodSpec(TypedDict, total=False):
    nodeName: str
    activeDeadlineSeconds: int
    restartPolicy: str
    priorityClassName: str
    imagePullSecrets: list[_Strings]
    containers: list[Container]
    initContainers: list[Container]
    ephemeralContainers: list[Container]
    volumes: list[Volume]
    tolerations: list[PodToleration]
    affinity: Affinity


class Waiting(TypedDict, total=False):
    reason: str
    message: str


class Terminated(TypedDict, total=False):
    exitCode: _Int32
    reason: str
    message: str


class ContainerState(TypedDict, total=False):
    waiting: Waiting
    running: JsonDict
    terminated: Terminated


class ContainerStatus(TypedDict, total=False):
    name: Required[str]
    state: ContainerState
    lastState: ContainerState


class PodStatus(TypedDict, total=False):
    phase: str
    reason: str
    message: str
    conditions: list[Condition]
    containerStatuses: list[ContainerStatus]
    initContainerStatuses: list[ContainerStatus]


class Pod(Object):
    spec: PodSpec
    status: NotRequired[PodStatus]


class TemplateMetadata(TypedDict, total=False):
    labels: _Strings
    annotations: _Strings


class PodTemplate(TypedDict, total=False):
    metadata: TemplateMetadata
    spec: PodSpec


class MatchLabels(TypedDict, total=False):
    matchLabels: _Strings


class DaemonSetSpec(TypedDict, total=False):
    selector: MatchLabels
    template: PodTemplate


class DaemonSetStatus(TypedDict, total=False):
    desiredNumberScheduled: int
    numberAvailable: int
    numberReady: int
    observedGeneration: int
    updatedNumberScheduled: int


class DaemonSet(Object):
    spec: DaemonSetSpec
    status: NotRequired[DaemonSetStatus]


class PhaseStatus(TypedDict, total=False):
    phase: str


class ClaimSpec(TypedDict, total=False):
    accessModes: list[str]
    resources: ResourceRequirements
    selector: MatchLabels
    storageClassName: str
    volumeAttributesClassName: str
    volumeMode: Literal["Filesystem", "Block"]
    volumeName: str


class PersistentVolumeClaim(Object):
    spec: ClaimSpec
    status: NotRequired[PhaseStatus]


class ObjectReference(TypedDict, total=False):
    namespace: str
    name: str
    uid: str


class CSIVolume(TypedDict, total=False):
    driver: str
    volumeHandle: str


class NFSVolume(TypedDict, total=False):
    server: str
    path: str


class PersistentVolumeSpec(TypedDict, total=False):
    accessModes: list[str]
    capacity: _Strings
    claimRef: ObjectReference
    csi: CSIVolume
    nfs: NFSVolume
    flexVolume: FlexVolume
    nodeAffinity: dict[str, NodeSelector]
    persistentVolumeReclaimPolicy: str
    storageClassName: str
    volumeMode: str


class PersistentVolume(Object):
    spec: PersistentVolumeSpec
    status: NotRequired[PhaseStatus]


class StorageClass(Object, total=False):
    provisioner: str
    parameters: _Strings
    reclaimPolicy: str
    volumeBindingMode: str


class AttachmentSource(TypedDict, total=False):
    persistentVolumeName: str


class AttachmentSpec(TypedDict):
    nodeName: str
    source: AttachmentSource


class VolumeAttachment(Object):
    spec: AttachmentSpec


class NodeStatus(TypedDict, total=False):
    conditions: list[Condition]


class NodeObject(Object, total=False):
    status: NodeStatus


class EventSeries(TypedDict, total=False):
    lastObservedTime: _Stamp


class Event(Object, total=False):
    count: int
    involvedObject: ObjectReference
    type: str
    reason: str
    message: str
    firstTimestamp: _Stamp
    lastTimestamp: _Stamp
    eventTime: _Stamp
    series: EventSeries
    reportingComponent: str
    source: _Strings


class ConfigObject(Object, total=False):
    """A ConfigMap or a Secret."""

    type: str
    data: _Strings
    binaryData: _Strings


class JobStatus(TypedDict, total=False):
    active: int
    succeeded: int
    failed: int
    completionTime: _Stamp
    conditions: list[Condition]


class JobSpec(TypedDict, total=False):
    activeDeadlineSeconds: int
    suspend: bool
    template: PodTemplate


class Job(Object, total=False):
    spec: JobSpec
    status: JobStatus


class LeaseSpec(TypedDict, total=False):
    holderIdentity: str
    leaseDurationSeconds: _Int32
    leaseTransitions: _Int32


class LeaseObject(Object, total=False):
    spec: LeaseSpec


class PriorityClassObject(Object, total=False):
    value: _Int32


class SnapshotReference(TypedDict, total=False):
    volumeSnapshotContentName: str
    snapshotHandle: str
    volumeHandle: str


class SnapshotError(TypedDict, total=False):
    message: str
    time: _Stamp


class SnapshotStatus(TypedDict, total=False):
    boundVolumeSnapshotContentName: str
    creationTime: _Stamp
    readyToUse: bool
    error: SnapshotError


class SnapshotSpec(TypedDict, total=False):
    source: SnapshotReference
    volumeSnapshotClassName: str


class VolumeSnapshot(Object):
    spec: SnapshotSpec
    status: NotRequired[SnapshotStatus]


class ContentStatus(TypedDict, total=False):
    snapshotHandle: str
    restoreSize: Int64
    error: SnapshotError


class ContentSpec(TypedDict, total=False):
    driver: str
    deletionPolicy: str
    source: SnapshotReference
    volumeSnapshotClassName: str
    volumeSnapshotRef: ObjectReference


class VolumeSnapshotContent(Object):
    spec: ContentSpec
    status: NotRequired[ContentStatus]


class MetadataServiceSpec(TypedDict):
    address: str
    audience: str
    caCert: str


class SnapshotMetadataService(Object):
    spec: MetadataServiceSpec


class RepositorySpec(TypedDict, total=False):
    volumeNamespace: str
    backupStorageLocation: str
    repositoryType: str
    repositoryConfig: JsonDict


class RepositoryObject(Object, total=False):
    spec: RepositorySpec
    status: Any


class VolumeSnapshotClass(Object, total=False):
    driver: str
    deletionPolicy: str

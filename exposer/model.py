"""What goes into an exposer and what comes out of it.

Knows owners, requests, and the answers of an exposer. Does no I/O and does not know how a volume
is brought to a pod (`exposer.csi_snapshot`, `exposer.generic_restore`, `exposer.pod_volume`).
"""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Protocol, Self, TypeVar

from core.contract import MoverVerb
from core.errors import AgentError
from core.kube.resources import Resource
from core.models.base import CustomResource, JsonDict
from core.models.names import OWNER_UID_LABEL
from exposer.placement import LINUX
from exposer.settings import BackupPVCSettings, CacheVolume, ExposeSettings

__all__ = [
    "Exposed",
    "Exposer",
    "Guard",
    "KeptVolume",
    "LocatedVolume",
    "NotOwnerError",
    "Owner",
    "Pending",
    "PodVolumeRequest",
    "Reader",
    "RestoreExposer",
    "RestoreRequest",
    "SnapshotRequest",
    "WorkloadRef",
]


class NotOwnerError(AgentError):
    """The custom resource is not this agent's to expose any more.

    `ended` is true where nobody will carry it on (final, gone, or replaced by another UID):
    an exposer then deletes by UID what its run made or found of that owner. Where another
    agent goes on (another node's label, a later phase) everything stays: the other one
    continues from these very objects.
    """

    def __init__(self, message: str, *, ended: bool) -> None:
        """Keep whether anybody else goes on."""
        super().__init__(message)
        self.ended = ended


class Reader(Protocol):
    """Reads single objects: the API client, or a cache of recent answers."""

    async def read(self, resource: Resource, namespace: str, name: str) -> JsonDict | None:
        """Return the object, or None where it does not exist; callers must not modify it.

        Raises:
            KubeError: the API server rejected the read, or could not be reached.
        """
        ...


class Guard(Protocol):
    """Asked before each create by what was seen last, and for certain once something was made."""

    async def __call__(self, *, sure: bool) -> None:
        """Return if the owner is this agent's to expose; `sure`: as the API server says now.

        Raises:
            NotOwnerError: it is not.
        """
        ...


@dataclass(frozen=True)
class Owner:
    """The custom resource that everything of one expose belongs to."""

    api_version: str
    kind: str
    namespace: str
    name: str
    uid: str

    @classmethod
    def of(cls, cr: CustomResource) -> Self:
        """Return the owner that `cr` is."""
        meta = cr.metadata
        return cls(cr.api_version, cr.kind, meta.namespace, meta.name, meta.uid)

    @property
    def reference(self) -> JsonDict:
        """The entry of `metadata.ownerReferences`."""
        return {
            "apiVersion": self.api_version,
            "kind": self.kind,
            "name": self.name,
            "uid": self.uid,
            "controller": True,
        }

    @property
    def labels(self) -> dict[str, str]:
        """What every object of the expose is labelled with."""
        return {OWNER_UID_LABEL: self.uid}


@dataclass(frozen=True)
class Exposed:
    """The volume is reachable in `pod` (a v1 Pod as JSON dict): it runs or has ended."""

    pod: JsonDict


@dataclass(frozen=True)
class Pending:
    """Not yet: `reason` in CamelCase, `message` for the custom resource's reader.

    `blocked` says that no good run waits for this: somebody may have to do something. `since` is
    when the cluster was asked for the one operation that is waited for, as the API server tells;
    None where it is no single operation, or nobody wrote that down.
    """

    reason: str
    message: str
    blocked: bool = False
    since: datetime | None = None


@dataclass(frozen=True)
class KeptVolume:
    """A restored volume: its PersistentVolume, and the reclaim policy it came with."""

    pv_name: str
    reclaim_policy: str


@dataclass(frozen=True)
class SnapshotRequest:
    """Bring the data of a CSI snapshot to a mover pod.

    `made_at` is when somebody asked for it, by the API server's clock: whatever is called like the
    snapshot and came later is another one.
    """

    owner: Owner
    source_namespace: str
    source_claim: str
    volume_snapshot: str
    storage_class: str
    settings: ExposeSettings
    operation_timeout: timedelta | None = None
    made_at: datetime | None = None

    @property
    def backup_pvc(self) -> BackupPVCSettings:
        """The settings of the PVC that is created from the snapshot."""
        return self.settings.backup_pvc(self.storage_class)

    @property
    def backup_class(self) -> str:
        """The storage class of the claim that is made for the snapshot."""
        return self.backup_pvc.storage_class or self.storage_class


@dataclass(frozen=True)
class RestoreRequest:
    """Bring a new volume to a mover pod, to be handed to a waiting claim afterwards."""

    owner: Owner
    target_namespace: str
    target_claim: str
    settings: ExposeSettings
    operation_timeout: timedelta | None = None
    cache: CacheVolume | None = None
    node_os: str = LINUX


_Request_contra = TypeVar("_Request_contra", contravariant=True)


@dataclass(frozen=True)
class WorkloadRef:
    """The pod whose volume is moved; another one of the same name is not it, unless `uid` is empty."""

    namespace: str
    name: str
    uid: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"

    def means(self, pod: JsonDict) -> bool:
        """Whether `pod` (a v1 Pod as JSON dict) of that name is the one.

        Who writes a custom resource by hand may leave the UID out, as the peer never reads it.
        Source: Velero v1.18, pkg/exposer/pod_volume.go.
        """
        return self.uid in {"", pod["metadata"]["uid"]}


@dataclass(frozen=True)
class PodVolumeRequest:
    """Bring one volume of a pod, as it is mounted on its node, to a mover pod.

    `verb` says whether it is read (BACKUP) or filled (RESTORE); only a restore has a `cache`.
    """

    owner: Owner
    verb: MoverVerb
    workload: WorkloadRef
    volume: str
    settings: ExposeSettings
    cache: CacheVolume | None = None


@dataclass(frozen=True)
class LocatedVolume:
    """Where the volume of a workload's pod is, and what a pod must tolerate to be there with it."""

    node: str
    folder: str
    tolerations: tuple[JsonDict, ...] = ()
    node_os: str = LINUX


class Exposer(Protocol[_Request_contra]):
    """Brings a volume to a mover pod, in steps that may be cut and repeated anywhere."""

    async def check(self, request: _Request_contra, reader: Reader) -> Pending | None:
        """Say what the expose still has to wait for before it can begin; reads only.

        Raises:
            ExposeError: it can never begin.
            KubeError: the API server refused a read.
        """
        ...

    async def ensure(self, request: _Request_contra, guard: Guard) -> Exposed | Pending:
        """Do what is still to do and return the pod, or what has to be waited for.

        Raises:
            ExposeError: it can never be done.
            NotOwnerError: from `guard`; its `ended` decides what was done about it.
            KubeError: the API server refused; InvalidError and ForbiddenError tell that it
                does not want one of the objects.
        """
        ...

    async def clean_up(self, request: _Request_contra) -> Pending | None:
        """Delete one thing after the other; None once nothing of the owner is left.

        Works at any stage, also where nothing was ever made. Only what belongs to the
        owner's UID is touched.
        """
        ...


class RestoreExposer(Exposer[RestoreRequest], Protocol):
    """Exposes a new volume and gives it to the target claim."""

    async def read_volume(self, request: RestoreRequest) -> KeptVolume:
        """Return the volume that was written, before anything is done to it.

        Raises:
            ExposeError: there is none.
        """
        ...

    async def rebind(self, request: RestoreRequest, kept: KeptVolume) -> Pending | None:
        """Give the volume to the target claim; None once it is bound.

        Raises:
            ExposeError: that can never be; call `drop_volume`.
        """
        ...

    async def drop_volume(self, request: RestoreRequest, kept: KeptVolume) -> Pending | None:
        """Delete the volume that cannot be handed over; None once it is gone.

        A volume that the target claim has is left alone.
        """
        ...

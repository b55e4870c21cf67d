"""Inputs and results of exposers: owners, requests, exposed volumes and pending reasons. Does no I/O."""

from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import wraps
from typing import Any, Final, ParamSpec, Protocol, Self, TypeVar

from core.contract import MoverVerb
from core.errors import AgentError, ExposeError
from core.kube.resources import Resource, Selection
from core.kube.types import Manifest, NodeRequirement, ObjectT, Pod, PodToleration
from core.models.base import CustomResource
from core.models.names import EXCLUDE_LABEL, OWNER_UID_LABEL
from core.models.transfer_settings import InPlace
from core.models.transfers import PodReference, Transfer
from exposer.settings import BackupPVCSettings, CacheVolume, ExposeSettings

LINUX: Final = "linux"
WINDOWS: Final = "windows"

NOT_WINDOWS: Final[NodeRequirement] = {"key": "kubernetes.io/os", "operator": "NotIn", "values": [WINDOWS]}
"""What each pod of ours requires of its node."""


class NotOwnerError(AgentError):
    """The custom resource is no longer this agent's to expose.

    `ended` is true where no agent continues with it (final, deleted, or recreated with another UID): an exposer then
    deletes by UID what its run created or read for that owner. Where another agent continues (another node label, a
    later phase) everything stays: the other agent continues with these objects.
    """

    def __init__(self, message: str, *, ended: bool) -> None:
        super().__init__(message)
        self.ended = ended


class NoDeviceError(ExposeError):
    """The StorageClass has no volumes of volumeMode Block: its provisioner refuses them."""


class Reader(Protocol):
    """Reads objects: the API client, or a cache of recent answers."""

    async def read(self, resource: Resource[ObjectT], namespace: str, name: str) -> ObjectT | None:
        """Return the object, or None where it does not exist; callers must not modify it."""

    async def list(self, selection: Selection[ObjectT]) -> list[ObjectT]:
        """Return the selected objects; from a cache, they may have only the fields that show who uses a volume."""


class Guard(Protocol):
    """Ownership check: before each create from the cache, after the last one by a read."""

    async def __call__(self, *, sure: bool) -> None:
        """Raise NotOwnerError unless the owner is this agent's to expose; `sure`: by a read from the API server."""


@dataclass(frozen=True)
class Owner:
    """The custom resource that the objects of one expose belong to, and the number of its attempt."""

    api_version: str
    kind: str
    namespace: str
    name: str
    uid: str
    attempt: int = 1

    @classmethod
    def of(cls, cr: CustomResource) -> Self:
        """Return `cr` as an owner."""
        meta = cr.metadata
        attempt = cr.attempts.number if isinstance(cr, Transfer) else 1
        return cls(cr.api_version, cr.kind, meta.namespace, meta.name, meta.uid, attempt)

    @property
    def reference(self) -> Manifest:
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
        """The labels of every object of the expose."""
        return {OWNER_UID_LABEL: self.uid}

    @property
    def temporary_labels(self) -> dict[str, str]:
        """The labels of what a Velero backup of the agents' namespace leaves out. Source: velero-io/velero#8981."""
        return self.labels | {EXCLUDE_LABEL: "true"}


@dataclass(frozen=True)
class Exposed:
    """The volume is exposed in `pod` (a v1 Pod as JSON dict), which is running or has terminated."""

    pod: Pod


@dataclass(frozen=True)
class Pending:
    """Not exposed yet: `reason` in CamelCase, `message` for the custom resource's status.

    `blocked` marks a reason that never occurs in a healthy transfer and may need action. `operation`
    identifies the one operation on the cluster that is pending, which has a timeout; None where there
    is no single one. `timeout` is its own, or before admission the reason's; None: the one of all of the transfer.
    """

    reason: str
    message: str
    blocked: bool = False
    operation: str | None = None
    timeout: timedelta | None = None


class PendingError(AgentError):
    """The step ends here: the expose is pending."""

    def __init__(self, pending: Pending) -> None:
        super().__init__(pending.message)
        self.pending = pending


_P = ParamSpec("_P")
_T = TypeVar("_T")


def or_pending(step: Callable[_P, Awaitable[_T]]) -> Callable[_P, Coroutine[Any, Any, _T | Pending]]:
    """Have `step` return what it is pending for, instead of raising PendingError."""

    @wraps(step)
    async def run(*args: _P.args, **kwargs: _P.kwargs) -> _T | Pending:
        try:
            return await step(*args, **kwargs)
        except PendingError as e:
            return e.pending

    return run


@dataclass(frozen=True)
class KeptVolume:
    """A restored volume: its PersistentVolume, and the reclaim policy it came with.

    `provisioned` is whether it was created for the restore. One that existed before is never deleted. `fs_type` is the
    file system that the data mover found on a device; None: none that it knows, or it wrote files.
    """

    pv_name: str
    reclaim_policy: str
    provisioned: bool = False
    fs_type: str | None = None


@dataclass(frozen=True)
class CopyPlan:
    """The Secrets and ConfigMaps that an expose copies from `namespace`, the volume's, to the one of `owner`.

    `configured` are those that the active settings name, each with its kind: `Secret/token`; `recorded` those that the
    custom resource was accepted with, by its annotation.
    """

    owner: Owner
    namespace: str
    configured: tuple[str, ...] = ()
    recorded: tuple[str, ...] = ()

    @property
    def needed(self) -> tuple[str, ...]:
        """What a transfer to be accepted needs: nothing if its volume is in the agent's namespace."""
        return self.configured if self.namespace != self.owner.namespace else ()

    @property
    def allowed(self) -> tuple[str, ...]:
        """What is copied: never what the active settings do not name."""
        return tuple(word for word in self.needed if word in self.recorded) if self.recorded else self.needed

    @property
    def possible(self) -> tuple[str, ...]:
        """What may have been copied."""
        return tuple(dict.fromkeys((*self.recorded, *self.needed)))


@dataclass(frozen=True, kw_only=True)
class ExposeRequest:
    """What all requests have: the settings are those for the attempt of `owner`.

    `location` is the name of the BackupStorageLocation. `requested_at` is when the transfer was created, by the API
    server's clock: a snapshot of the same name that was created later is a different one. `copied` is what the custom
    resource was accepted with (`CopyPlan.recorded`). `by_block`: as a device, also where the volume has a file system.
    """

    owner: Owner
    location: str
    settings: ExposeSettings
    operation_timeout: timedelta | None = None
    requested_at: datetime | None = None
    copied: tuple[str, ...] = ()
    by_block: bool = False

    @classmethod
    def of(cls, cr: Transfer, settings: ExposeSettings, **more: Any) -> Self:  # noqa: ANN401 - the fields of a kind
        """Return the request of `cr`."""
        return cls(
            owner=Owner.of(cr),
            location=cr.spec.backup_storage_location,
            settings=settings.for_attempt(cr),
            operation_timeout=cr.operation_timeout,
            requested_at=cr.metadata.creation_timestamp,
            copied=cr.copies,
            by_block=cr.by_block,
            **more,
        )


@dataclass(frozen=True, kw_only=True)
class SnapshotRequest(ExposeRequest):
    """Expose the data of a CSI snapshot in a mover pod.

    `fell_back`: no longer as a device, since an earlier step found that its class has none. `completed`: the backup is
    complete.
    """

    source_namespace: str
    source_claim: str
    volume_snapshot: str
    storage_class: str
    fell_back: bool = False
    completed: bool = False

    @property
    def copies(self) -> CopyPlan:
        """What is copied for the backup PVC."""
        return CopyPlan(self.owner, self.source_namespace, self.backup_pvc.copies, self.copied)

    @property
    def backup_pvc(self) -> BackupPVCSettings:
        """The settings of the PVC that is created from the snapshot."""
        return self.settings.backup_pvc(self.storage_class)

    @property
    def backup_class(self) -> str:
        """The storage class of the backup PVC."""
        return self.backup_pvc.storage_class or self.storage_class


@dataclass(frozen=True, kw_only=True)
class RestoreRequest(ExposeRequest):
    """Expose a volume in a mover pod, to be bound to the target PVC later.

    `volume` names the existing PersistentVolume that the data goes into; None: a new one.
    `for_windows`: only Windows nodes can read it. `base_snapshot` is namespace and name of a VolumeSnapshot that was
    taken for the DataDownload alone. `restore` is the restore that it is part of. `fs_type` is the file system of the
    target, if it is known. `nodes` are those on which its movers ran.
    """

    target_namespace: str
    target_claim: str
    cache: CacheVolume | None = None
    for_windows: bool = False
    volume: str | None = None
    base_snapshot: tuple[str, str] | None = None
    restore: str | None = None
    fs_type: str | None = None
    nodes: tuple[str, ...] = ()

    @property
    def copies(self) -> CopyPlan:
        """What is copied for the restore PVC."""
        return CopyPlan(self.owner, self.target_namespace, self.settings.restore_copies, self.copied)


@dataclass(frozen=True, kw_only=True)
class PodVolumeRequest(ExposeRequest):
    """Expose one volume of a workload pod, as mounted on its node, in a mover pod.

    `verb` is BACKUP or RESTORE; only a restore has a `cache`, the UID of its Restore in `restore`, and
    `in_place` if the volume may have data.
    """

    verb: MoverVerb
    workload: PodReference
    volume: str
    cache: CacheVolume | None = None
    restore: str | None = None
    in_place: InPlace | None = None


@dataclass(frozen=True)
class LocatedVolume:
    """Node and directory of a workload pod's volume, and the tolerations that a pod needs on that node.

    `claim` is its PVC, and `storage_class` its PersistentVolume's; None without one.
    `excluded` is what the annotation of the PVC names. `followed`: another restore of it follows.
    """

    node: str
    directory: str
    tolerations: tuple[PodToleration, ...] = ()
    storage_class: str | None = None
    claim: str | None = None
    excluded: str | None = None
    followed: bool = False

"""What the adapters of the four kinds of transfers have in common: their steps, and the check of the location.

Nothing outside this directory compares kinds. The bucket is not accessed here: the mover does that.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from enum import Enum
from typing import Any, ClassVar, Final, Generic, TypeVar, cast

from core.errors import ConfigError, ContractError, ExposeError
from core.kube.resources import BACKUP_STORAGE_LOCATIONS, SECRETS, Resource
from core.kube.types import UncheckedObject
from core.models.base import JsonDict
from core.models.names import BUILT_IN_DATA_MOVERS
from core.models.reasons import FailureReason, PendingReason
from core.models.storage import BackupStorageLocation
from core.models.transfer_settings import InPlace
from core.models.transfers import DataDownload, PodVolumeRestore, Transfer
from exposer.model import Exposed, Guard, Pending, Reader
from exposer.settings import ExposeSettings
from nodeagent.metrics import Metrics
from nodeagent.transfers.outcome import MoverResult, Outcome

COMMON_STATUS_FIELDS: Final = frozenset(
    {
        "phase",
        "message",
        "progress",
        "acceptedTimestamp",
        "startTimestamp",
        "completionTimestamp",
        "activities",
        "fallbackFull",
    }
)
"""The fields of `status` that every kind has; definitions before Velero 1.19 drop the last two.

Source: Velero main, config/crd (tests/recordings/velero-main/crds).
"""


class AdmissionState(Enum):
    """Whether a New transfer may be admitted."""

    READY = "ready"
    PENDING = "pending"
    FAILED = "failed"


@dataclass(frozen=True)
class Admission:
    """The result of an admission check.

    `reason` is a pending or failure reason, `message` the text for `status.message`. `node` names the only node that
    can run the transfer; None: any node can. `indefinite` exempts a pending transfer from the prepare timeout; `limit`
    replaces that timeout where it is shorter. `blocked` says that the reason never occurs in a healthy transfer. `pod`
    is the namespace and name of the workload pod whose change ends the pending state, if there is one. `warning` is
    recorded once a ready transfer is accepted: what may make it fail later. `copies` are the Secrets and ConfigMaps
    that its expose copies, such as `Secret/token`. `datamover` is the preferred one of a transfer that names none;
    None: it is left as it is.
    """

    decision: AdmissionState
    reason: str = ""
    message: str = ""
    node: str | None = None
    indefinite: bool = False
    blocked: bool = False
    limit: timedelta | None = None
    pod: tuple[str, str] | None = None
    warning: str | None = None
    copies: tuple[str, ...] = ()
    datamover: str | None = None


def find_unsupported(cr: DataDownload | PodVolumeRestore) -> Admission | None:
    """Return the failed admission of a restore of an unsupported type."""
    try:
        # Also where the volume is a new one.
        InPlace.of(cr.spec.restore_type, cr.settings)
    except ConfigError as e:
        return Admission(AdmissionState.FAILED, FailureReason.RESTORE_TYPE_UNSUPPORTED, str(e))
    return None


def admit_exposable(ready: Admission, waiting: Pending | None, copies: tuple[str, ...]) -> Admission:
    """Return `ready`, or that the transfer is pending for what its exposer waits for, with the copies it needs."""
    if waiting is None:
        return replace(ready, copies=copies)
    return Admission(
        AdmissionState.PENDING,
        waiting.reason,
        waiting.message,
        indefinite=waiting.reason in {PendingReason.COPY_IN_USE, PendingReason.LEFT_TO_VELERO},
        blocked=waiting.blocked,
        limit=waiting.timeout,
        copies=copies,
    )


READY: Final = Admission(AdmissionState.READY)
"""The transfer may be admitted, on any node."""


@dataclass(frozen=True)
class KindSpec:
    """The data of one kind.

    Attributes:
        model: the model of the custom resource.
        resource: its REST resource.
        finalizer: the finalizer that marks pending cleanup.
        status_fields: the names of the status fields that its CRD has.
        restores: whether its direction is restore; otherwise it is backup.
        bound_to_node: whether only the node of its volume can run it.
    """

    model: type[Transfer]
    resource: Resource[UncheckedObject]
    finalizer: str
    status_fields: frozenset[str]
    restores: bool
    bound_to_node: bool

    @property
    def name(self) -> str:
        """`kind` of the custom resource, such as `DataUpload`."""
        return self.model.kind_name


C = TypeVar("C", bound=Transfer)
"""The model of one kind's custom resource."""


@dataclass(frozen=True)
class Kind(ABC, Generic[C]):
    """The adapter of one kind: its data, and the steps that differ from other kinds'.

    Every step is idempotent: it reads the cluster, does what is missing, and may be repeated after any interruption.

    Attributes:
        exposer: exposes the volume; each adapter has its own one.
        expose_settings: returns the active settings; called for each request.
        datamovers: the values of `spec.datamover` that select this data mover, in kinds that have the field; empty is
            a valid value.
        volume_fault: the reason for which the admission of a volume fails that can never be exposed.
    """

    exposer: Any
    expose_settings: Callable[[], ExposeSettings]
    datamovers: frozenset[str]

    volume_fault: ClassVar[FailureReason]

    @property
    @abstractmethod
    def spec(self) -> KindSpec:
        """The data of the kind."""

    def parse(self, raw: Mapping[str, Any]) -> C:
        """Return the model of `raw`; raise ContractError if it is not a valid resource of this kind."""
        return cast("C", self.spec.model.parse(raw))

    def managed(self, cr: C) -> bool:
        """Return whether `spec.datamover` selects this data mover; a kind without it is the built-in one's."""
        named = getattr(cr.spec, "datamover", None)
        return not self.datamovers.isdisjoint(BUILT_IN_DATA_MOVERS if named is None else {named})

    def count(self, cr: C, metrics: Metrics) -> None:
        """Update the metrics that Velero has for this kind alone; `cr` has just become InProgress or final."""

    # What the leader needs.

    @abstractmethod
    def queue_namespace(self, cr: C) -> str:
        """Return the namespace of the volume, for fair share in the admission queue."""

    async def check_admission(self, cr: C, reader: Reader) -> Admission:
        """Return whether `cr` may be admitted now; every object is read through `reader`."""
        if refused := self._refuse(cr):
            return refused
        admission = await check_location(reader, cr)
        if admission.decision is not AdmissionState.READY:
            return admission
        try:
            return await self._check_volume(cr, reader, admission)
        except ExposeError as e:
            return Admission(AdmissionState.FAILED, self.volume_fault, str(e))

    def _refuse(self, cr: C) -> Admission | None:  # noqa: ARG002 - some kinds override it
        """Return the failed admission of what this agent cannot carry out, which would otherwise stay New."""
        return None

    @abstractmethod
    async def _check_volume(self, cr: C, reader: Reader, ready: Admission) -> Admission:
        """Return `ready`, whether the volume is, or on which node; raise ExposeError if it never will be."""

    async def read_node(self, cr: C) -> str | None:  # noqa: ARG002 - some kinds read it
        """Return the node that `cr` is bound to; None where any node can run it, or none is known."""
        return None

    # How the volume gets a mover pod.

    @abstractmethod
    def _request(self, cr: C) -> Any:  # noqa: ANN401 - of the exposer's type
        """Return what is asked of the exposer."""

    def _check_supported(self, cr: C) -> None:
        """Raise ExposeError for what another agent accepted and this one cannot carry out."""
        if (refused := self._refuse(cr)) is not None:
            raise ExposeError(refused.message)

    async def ensure_exposed(self, cr: C, guard: Guard) -> Exposed | Pending:
        """Take the next steps toward a mover pod, calling `guard` before each create.

        Raises:
            ExposeError: the volume can never be exposed.
            NotOwnerError: from `guard`; the objects that this call created are deleted.
        """
        self._check_supported(cr)
        return cast("Exposed | Pending", await self.exposer.ensure(self._request(cr), guard))

    async def confirm_volume(self, cr: C, *, moved: bool = False) -> None:  # noqa: ARG002 - restores override it
        """Raise ExposeError unless the volume is still the one that `cr` names; reads only.

        Called before the data path starts, before a mover's success is recorded (`moved`: the content of a volume that
        was unmounted in between must not pass for its data), and before the leader lets an interrupted transfer wait.
        """
        await self.exposer.confirm(self._request(cr))

    async def withdraw(self, cr: C, guard: Guard) -> Pending | None:
        """Delete what keeps another attempt of `cr` from being exposed; None once it is gone."""
        last = cr.attempts.last
        return cast("Pending | None", last and await self.exposer.withdraw(self._request(cr), last, guard))

    async def clean_up(self, cr: C) -> Pending | None:
        """Delete the expose objects of `cr`, which is final; None once all of them are deleted."""
        return cast("Pending | None", await self.exposer.clean_up(self._request(cr)))

    # What follows from a result.

    @abstractmethod
    def parse_result(self, message: str) -> MoverResult:
        """Return the result that a mover with exit code 0 left as termination message, or raise ResultError."""

    async def keep(self, cr: C, outcome: Outcome) -> Outcome:  # noqa: ARG002 - some kinds add to it
        """Return `outcome` with everything that `complete` needs once the mover pod is deleted."""
        return outcome

    async def complete(self, cr: C, outcome: Outcome) -> Pending | None:  # noqa: ARG002 - as above
        """Make the moved data available to the user; None once it is. Raise ExposeError if that is impossible."""
        return None

    @abstractmethod
    def final_status(self, cr: C, outcome: Outcome) -> JsonDict:
        """Return the status fields of `cr` that a successful `outcome` sets, beside phase and timestamps."""


_MISSING_TIMEOUT: Final = timedelta(minutes=2)
"""How long a location or its Secret may be missing: a rotation or a GitOps tool deletes and creates it again."""


async def check_location(reader: Reader, cr: Transfer) -> Admission:
    """Return whether the backup storage location of `cr` exists and has its Secrets.

    One that is not Available delays nothing, as in Velero: its phase, which may be outdated, is a warning.
    """
    namespace, name = cr.metadata.namespace, cr.spec.backup_storage_location
    raw = await reader.read(BACKUP_STORAGE_LOCATIONS, namespace, name)
    if raw is None:
        message = f"BackupStorageLocation {namespace}/{name} does not exist"
        return _build_missing(PendingReason.LOCATION_MISSING, message)
    try:
        location = BackupStorageLocation.parse(raw)
    except ContractError as e:
        return Admission(AdmissionState.PENDING, PendingReason.LOCATION_UNREADABLE, str(e), blocked=True)
    for secret in (location.spec.credential, location.spec.object_storage.ca_cert_ref):
        if secret is None:
            continue
        stored = await reader.read(SECRETS, namespace, secret.name)
        what = f"Secret {namespace}/{secret.name} of BackupStorageLocation {name}"
        if stored is None:
            return _build_missing(PendingReason.LOCATION_SECRET_MISSING, f"{what} does not exist")
        if secret.key not in (stored.get("data") or {}):
            return _build_missing(PendingReason.LOCATION_SECRET_MISSING, f"{what} has no key {secret.key}")
    if not location.available:
        why = f": {location.status.message}" if location.status.message else ""
        message = f"BackupStorageLocation {namespace}/{name} is {location.status.phase}{why}"
        return Admission(AdmissionState.READY, warning=message)
    return READY


def _build_missing(reason: PendingReason, message: str) -> Admission:
    return Admission(AdmissionState.PENDING, reason, message, blocked=True, limit=_MISSING_TIMEOUT)

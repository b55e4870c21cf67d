"""What the life cycle asks of a kind of load: the adapter's protocol.

Knows the questions and the form of their answers. Does not know any kind; the adapters
stand beside this file, and nothing outside this folder compares kinds.

The answers of a kind that has nothing of its own to say.

Knows what each step does where there is nothing to do. Does not know which kinds that holds for:
they inherit from here, and answer the rest themselves.
"""

from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import Final, Protocol

from core.kube.resources import Resource
from core.models.base import JsonDict
from core.models.transfers import Transfer
from exposer.model import Exposed, Guard, Pending, Reader
from nodeagent.runtime.metrics import Metrics
from nodeagent.transfers.outcome import MoverResult, Outcome

__all__ = ["COMMON_STATUS_FIELDS", "READY", "Admission", "AdmissionState", "Kind", "PlainKind"]


COMMON_STATUS_FIELDS: Final = frozenset(
    {
        "phase",
        "message",
        "progress",
        "acceptedTimestamp",
        "startTimestamp",
        "completionTimestamp",
    }
)
"""What `status` of every kind holds.

Source: Velero v1.18, config/crd (tests/recordings/velero-1.18.2/crds).
"""


class AdmissionState(Enum):
    """Whether a load that nobody accepted may start."""

    READY = "ready"
    PENDING = "pending"
    FAILED = "failed"


@dataclass(frozen=True)
class Admission:
    """The answer to "may this load be accepted now?".

    `reason` is one CamelCase word, `message` a sentence for the custom resource's reader.
    `node` names the only node that can do it, empty where any can. `indefinite` says that the
    wait may last until somebody cancels: it never runs into the prepare timeout. `limit` is how
    long it may last where that is less than the prepare timeout. `blocked` says that no good run
    waits for this. `pod` is the namespace and name of the pod that is waited
    for, if that is all.
    """

    verdict: AdmissionState
    reason: str = ""
    message: str = ""
    node: str = ""
    indefinite: bool = False
    blocked: bool = False
    limit: timedelta | None = None
    pod: tuple[str, str] | None = None


READY: Final = Admission(AdmissionState.READY)
"""Nothing stands against accepting the load."""


class Kind(Protocol):
    """One kind of load: its names, and the steps that differ from the other kinds'.

    Every step is idempotent: it reads the cluster, does what is missing, and may be run
    again after any interruption.
    """

    @property
    def name(self) -> str:
        """`kind` of the custom resource, such as `DataUpload`."""
        ...

    @property
    def resource(self) -> Resource:
        """Where the API serves it."""
        ...

    @property
    def finalizer(self) -> str:
        """The finalizer that marks pending clean-up."""
        ...

    @property
    def pod_label(self) -> str:
        """The label of a mover pod that holds its load's name."""
        ...

    @property
    def status_fields(self) -> frozenset[str]:
        """The API names of the status fields that the kind's CRD has."""
        ...

    @property
    def restores(self) -> bool:
        """Whether its data comes out of the repository, and does not go into it."""
        ...

    @property
    def datamovers(self) -> frozenset[str]:
        """What custom resources call this data mover; empty is a name too."""
        ...

    @property
    def bound_to_node(self) -> bool:
        """Whether only the node of its volume can carry a load of this kind out."""
        ...

    def parse(self, raw: JsonDict) -> Transfer:
        """Return the model of `raw`.

        Raises:
            ContractError: `raw` does not have the form of this kind.
        """
        ...

    def managed(self, cr: Transfer) -> bool:
        """Whether the load is meant for this data mover."""
        ...

    def queue_namespace(self, cr: Transfer) -> str:
        """The namespace whose turn it is when the load is admitted: its volume's."""
        ...

    async def check_admission(self, cr: Transfer, reader: Reader) -> Admission:
        """Return whether `cr` may be admitted now; every object is read through `reader`."""
        ...

    async def read_node(self, cr: Transfer) -> str:
        """Return the node that `cr` is bound to; empty where any will do, or none is known."""
        ...

    async def ensure_exposed(self, cr: Transfer, guard: Guard) -> Exposed | Pending:
        """Take the volume one step nearer to a mover pod, calling `guard` before each create.

        Raises:
            ExposeError: waiting will not help.
            NotOwnerError: `guard` found the load in other hands; what this call made is gone.
        """
        ...

    async def confirm_volume(self, cr: Transfer) -> None:
        """Return if the volume is still what the load is about; reads only.

        Asked before the data path is started, and again before a mover's good end counts: what
        a mover finds in a volume that went away must not pass for its data.

        Raises:
            ExposeError: it is not there any more.
        """
        ...

    async def keep(self, cr: Transfer, outcome: Outcome) -> Outcome:
        """Return `outcome` with all that `complete` needs once the mover pod is gone."""
        ...

    async def complete(self, cr: Transfer, outcome: Outcome) -> Pending | None:
        """Bring the moved data where it belongs; None says that it is there.

        Raises:
            ExposeError: that fails for good.
        """
        ...

    async def clean_up(self, cr: Transfer) -> Pending | None:
        """Remove what was made for `cr`, which is final; None says that all of it is gone."""
        ...

    def parse_result(self, message: str) -> MoverResult:
        """Return the result a mover that exited with 0 left as termination message.

        Raises:
            ResultError: it cannot be read.
        """
        ...

    def count(self, cr: Transfer, metrics: Metrics) -> None:
        """Tell `metrics` what the peer counts of this kind alone, of a load just InProgress or final."""
        ...

    def final_status(self, outcome: Outcome) -> JsonDict:
        """Return the status fields that a good `outcome` sets, beside phase and timestamps."""
        ...


class PlainKind:
    """A kind whose loads go to any node, and that is done once the mover is."""

    async def read_node(self, cr: Transfer) -> str:  # noqa: ARG002 - as the protocol has it
        """Return nothing: any node will do."""
        return ""

    async def confirm_volume(self, cr: Transfer) -> None:
        """Return at once: the mover's claim keeps the volume in its place."""

    async def keep(self, cr: Transfer, outcome: Outcome) -> Outcome:  # noqa: ARG002 - as the protocol has it
        """Return `outcome`: there is nothing beside it to keep."""
        return outcome

    async def complete(self, cr: Transfer, outcome: Outcome) -> Pending | None:  # noqa: ARG002 - as the protocol has it
        """Return None: the data is where it belongs."""
        return None

    def count(self, cr: Transfer, metrics: Metrics) -> None:
        """Count nothing: the peer has no such metrics of this kind."""

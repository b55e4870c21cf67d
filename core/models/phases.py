"""The course of a transfer: its place in the queue, its phases with the legal moves, and its attempts. Pure.

Attempts are kept in an annotation of the custom resource, which stays InProgress; without it this is the first one.
"""

from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Annotated, ClassVar, Final, Protocol, Self, TypeVar

from msgspec import Meta
from msgspec.structs import replace

from core.errors import AgentError
from core.models.base import SparseModel, Time, WireModel
from core.models.names import ATTEMPTS_ANNOTATION


class Phase(StrEnum):
    """`status.phase` of DataUpload, DataDownload, PodVolumeBackup and PodVolumeRestore.

    Source: Velero v1.18, pkg/apis/velero/v2alpha1/data_upload_types.go. An absent phase reads as NEW.
    """

    NEW = "New"
    ACCEPTED = "Accepted"
    PREPARED = "Prepared"
    IN_PROGRESS = "InProgress"
    CANCELING = "Canceling"
    CANCELED = "Canceled"
    COMPLETED = "Completed"
    FAILED = "Failed"

    @property
    def final(self) -> bool:
        """Whether this phase is final."""
        return self in FINAL_PHASES


FINAL_PHASES: Final = frozenset({Phase.CANCELED, Phase.COMPLETED, Phase.FAILED})

HOLDING_PHASES: Final = frozenset({Phase.ACCEPTED, Phase.PREPARED})
"""The phases that count toward `prepareQueueLength`."""

RUNNING_PHASES: Final = frozenset({Phase.IN_PROGRESS, Phase.CANCELING})
"""The phases in which a data mover may move data."""

_BROKEN = {Phase.CANCELED, Phase.FAILED}
TRANSITIONS: Final = {
    Phase.NEW: frozenset({Phase.ACCEPTED} | _BROKEN),
    Phase.ACCEPTED: frozenset({Phase.PREPARED} | _BROKEN),
    Phase.PREPARED: frozenset({Phase.IN_PROGRESS} | _BROKEN),
    Phase.IN_PROGRESS: frozenset({Phase.CANCELING, Phase.COMPLETED} | _BROKEN),
    Phase.CANCELING: frozenset({Phase.COMPLETED} | _BROKEN),
    Phase.CANCELED: frozenset[Phase](),
    Phase.COMPLETED: frozenset[Phase](),
    Phase.FAILED: frozenset[Phase](),
}
"""The legal moves from each phase."""


class IllegalMoveError(AgentError):
    """A move that is not in the table; nothing was written."""


_KEPT: Final = 10
"""Interruptions and starts that the annotation has: its size is limited, however often a transfer is interrupted."""

_MESSAGE_CHARACTERS: Final = 300


class AttemptStage(StrEnum):
    """How far the attempt is that `Attempts.number` names."""

    RUNNING = "Running"
    """Its data mover may move data."""
    WAITING = "Waiting"
    """The one before was interrupted: what is left of it is removed, and the next start is delayed."""
    READY = "Ready"
    """The leader may let it begin: it counts toward no limit yet."""
    EXPOSING = "Exposing"
    """It gets a data mover, which then waits for a slot; it counts as Prepared."""


class InterruptionCause(StrEnum):
    """Why an attempt ended although the transfer can continue."""

    CRASHED = "Crashed"
    """kopia or the data mover ended by a signal of its own, or the container without a message."""
    DELETED = "Deleted"
    """The pod was deleted, or no longer exists."""
    EVICTED = "Evicted"
    FENCED = "Fenced"
    """The data mover ended itself: the API server did not answer for too long."""
    KILLED = "Killed"
    """SIGKILL, for an unknown reason."""
    NODE_LOST = "NodeLost"
    OUT_OF_MEMORY = "OOMKilled"
    PREEMPTED = "Preempted"
    REJECTED = "Rejected"
    """The kubelet did not admit the pod."""
    STOPPED = "Stopped"
    """SIGTERM without a cancel request: a drain, or the node shuts down."""
    STORAGE_UNAVAILABLE = "StorageUnavailable"


_OF_THE_MOVER: Final = frozenset(
    {
        InterruptionCause.CRASHED,
        InterruptionCause.FENCED,
        InterruptionCause.KILLED,
        InterruptionCause.OUT_OF_MEMORY,
        InterruptionCause.STORAGE_UNAVAILABLE,
    }
)


class Uptime(WireModel):
    """A reading of a machine's clock that only a restart of the machine sets back.

    `boot` identifies the machine and its start, `seconds` counts from then, also while it is suspended.
    """

    boot: str
    seconds: float


class Interruption(SparseModel, omit_defaults=True):
    """The end of one attempt: when it was noticed, why, and on which node it ran.

    `terminated`: the kubelet reported that its container had ended, so nothing of it runs any more. `at` is by the API
    server's clock, `uptime` by the clock of the machine of the agent that noticed it; None if that was the leader.
    """

    at: Time
    cause: InterruptionCause
    message: str | None = None
    node: str | None = None
    terminated: bool = False
    uptime: Uptime | None = None

    @property
    def in_place(self) -> bool:
        """Whether the next attempt can use what was exposed for this one: its mover alone ended, and not its node."""
        return self.terminated and self.cause in _OF_THE_MOVER


_Number = Annotated[int, Meta(ge=1, le=2**31)]


class Attempts(WireModel, omit_defaults=True):
    """The attempts of one transfer.

    `number` counts from 1. `uncounted` is how many of the interruptions do not count toward `maxRetries`.
    `interruptions` are the last ones, oldest first. `starts` are the times at which kopia began the snapshots of the
    last attempts, by the clock of their data movers: a checkpoint has no tags, and is known by its time.
    """

    annotation: ClassVar[str] = ATTEMPTS_ANNOTATION

    number: _Number = 1
    stage: AttemptStage = AttemptStage.RUNNING
    uncounted: int = 0
    interruptions: tuple[Interruption, ...] = ()
    starts: tuple[Time, ...] = ()

    @property
    def retries(self) -> int:
        """How many retries count toward `maxRetries`, with the one that comes next."""
        return max(0, self.number - 1 - self.uncounted)

    @property
    def last(self) -> Interruption | None:
        """The last interruption; None in the first attempt."""
        return self.interruptions[-1] if self.interruptions else None

    def explain_last(self, why: str | None = None) -> str:
        """Return what interrupted the attempt before; `why` is the message where more of it is known than is kept."""
        known = why or (self.last and (self.last.message or self.last.cause))
        return f"attempt {self.number - 1} was interrupted{f': {known}' if known else ''}"

    def describe(self) -> list[str]:
        """Return what interrupted the last attempts, the oldest first, and how this one was resumed."""
        first = self.number - len(self.interruptions)
        lines = [
            f"attempt {number} was interrupted{f' on node {one.node}' if one.node else ''}: {one.message or one.cause}"
            for number, one in enumerate(self.interruptions, first)
        ]
        if self.last is not None and self.stage is AttemptStage.RUNNING:
            how = "the same volume" if self.last.in_place else "its volume exposed again"
            lines.append(f"attempt {self.number} resumed with {how}")
        return lines

    def interrupt(self, interruption: Interruption) -> Self:
        """Return the attempts with this one interrupted and the next one waiting."""
        short = replace(interruption, message=interruption.message and interruption.message[:_MESSAGE_CHARACTERS])
        uncounted = self.uncounted + (interruption.cause is InterruptionCause.FENCED)
        kept = (*self.interruptions, short)[-_KEPT:]
        return replace(
            self, number=self.number + 1, stage=AttemptStage.WAITING, uncounted=uncounted, interruptions=kept
        )

    def move(self, stage: AttemptStage) -> Self:
        """Return the attempts with this one in `stage`."""
        return replace(self, stage=stage)

    def with_start(self, start: Time) -> Self:
        """Return the attempts with a snapshot that kopia began at `start`; unchanged if it is known."""
        return self if start in self.starts else replace(self, starts=(*self.starts, start)[-_KEPT:])


@dataclass(frozen=True)
class RetryRules:
    """When a transfer of one kind gets another attempt; a `deadline` of None: at any age.

    `oom_memory_factor` multiplies the memory limit of the next data mover after one that ran out of memory, up to
    `oom_memory_limit_max`, a quantity; None: up to four times the configured limit.
    """

    enabled: bool = True
    max_retries: int = 3
    initial_backoff: timedelta = timedelta(seconds=30)
    max_backoff: timedelta = timedelta(minutes=10)
    deadline: timedelta | None = timedelta(hours=4)
    oom_memory_factor: float = 1.5
    oom_memory_limit_max: str | None = None


class Queued(Protocol):
    """What the order depends on: `queue` is the volume namespace, `created` the creation time as the API prints it."""

    @property
    def kind(self) -> str:
        """The kind of the custom resource."""

    @property
    def queue(self) -> str:
        """The namespace of the volume."""

    @property
    def created(self) -> str:
        """The creation time, RFC 3339 in UTC with whole seconds: it sorts as time does."""

    @property
    def name(self) -> str:
        """The name of the custom resource."""


_Q = TypeVar("_Q", bound=Queued)


def in_order(entries: Iterable[_Q], *, after: str, first: AbstractSet[str] = frozenset()) -> Iterator[_Q]:
    """Yield `entries` in the order in which they are to be admitted.

    All transfers of the kinds named in `first` go before the others. Within both groups namespaces alternate.
    """
    listed = list(entries)
    for preferred in (True, False):
        yield from round_robin([one for one in listed if (one.kind in first) is preferred], after=after)


def round_robin(entries: Iterable[_Q], *, after: str) -> Iterator[_Q]:
    """Yield `entries` with alternating namespaces, beginning behind the one that was served last (`after`).

    Within a namespace the oldest goes first, then the first by name.
    """
    by_namespace: dict[str, list[_Q]] = {}
    for entry in entries:
        by_namespace.setdefault(entry.queue, []).append(entry)
    ranked = [
        (turn, name <= after, name, entry)
        for name, queue in by_namespace.items()
        for turn, entry in enumerate(sorted(queue, key=lambda entry: (entry.created, entry.name)))
    ]
    ranked.sort(key=lambda one: one[:3])
    yield from (entry for *_, entry in ranked)

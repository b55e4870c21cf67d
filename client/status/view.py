"""The document of `nodeagent status`: what a snapshot shows, in the order in which it is shown.

Pure. Its fields are stable: they are the JSON of the command, in camelCase.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Final

from client.leader_page import node_of_holder
from client.status.health import Finding, Health, failed_recently, is_managed, judge, worst
from client.status.records import (
    TRANSFER_KINDS,
    ClusterSnapshot,
    ConfigRecord,
    LocationRecord,
    RepositoryRecord,
    TransferRecord,
    UnreadPart,
)
from core.models.backups import RetentionReport
from core.models.base import Time, WireModel
from core.models.phases import AttemptStage, Phase, in_order
from core.models.reasons import PendingReason
from nodeagent.config.keys import NO_QUEUE_LENGTH
from nodeagent.runtime.preflight import DefinitionReport

RateOf = Callable[[TransferRecord, datetime], float | None]
"""Returns how many bytes a second a transfer moves at that time; None: not known."""

_RESTORES: Final = frozenset(kind.name for kind in TRANSFER_KINDS if kind.restores)
_BETWEEN: Final = frozenset({AttemptStage.WAITING, AttemptStage.READY})


class _UnfinishedRow(WireModel):
    """A transfer that has not ended."""

    kind: str
    namespace: str
    name: str
    volume_namespace: str
    volume: str
    reason: str
    message: str
    attempt: int
    canceling: bool


class PendingRow(_UnfinishedRow):
    """A transfer that is not admitted, or waits for its next attempt; `position` in the queue, None: it has none."""

    position: int | None
    created: str


class ActiveRow(_UnfinishedRow):
    """A transfer that has a node. `bytes_per_second` and `eta_seconds` are None where they are not known."""

    phase: Phase
    node: str
    bytes_done: int
    total_bytes: int
    bytes_per_second: float | None
    eta_seconds: float | None
    began: Time | None


class FailedRow(WireModel):
    """A transfer that failed within the last day."""

    kind: str
    namespace: str
    name: str
    completed: Time | None
    message: str


class NodeRow(WireModel):
    """A node with an agent. `slots` is None where it is not known; `preparing` counts Accepted and Prepared."""

    node: str
    pod: str
    ready: bool
    leader: bool
    running: int
    slots: int | None
    preparing: int
    config: str
    restarts: int


class LeaderRow(WireModel):
    """The leader: `holder` is empty if there is none; `page` says whether its status page was read."""

    holder: str = ""
    node: str = ""
    expires: Time | None = None
    version: str = ""
    page: bool = False


class VolumeSummary(WireModel):
    """How many volumes are in each state, as `nodeagent volumes` lists them; `sentence` says so in words."""

    sentence: str
    counts: dict[str, int]
    complete: bool
    notes: tuple[str, ...]


class StatusView(WireModel):
    """Everything that `nodeagent status` shows, the most important first in each list.

    `phases` counts all transfers. `queued` are those that wait for the admission quota alone, `queue_length` is the
    quota; None: there is none. `positions_computed`: the leader did not say them. `retention` is the last report of
    retention, None if there is none, and `old_schedules` are the schedules that delete by older rules. `volumes` is
    None until they are read. `unread` are the parts that could not be read, or not as a whole: what is shown of
    them is not known to be all.
    """

    health: Health
    namespace: str
    at: Time
    findings: list[Finding]
    volumes: VolumeSummary | None
    leader: LeaderRow
    phases: dict[str, int]
    queued: int
    queue_length: int | None
    positions_computed: bool
    pending: list[PendingRow]
    transfers: list[ActiveRow]
    failed: list[FailedRow]
    nodes: list[NodeRow]
    repositories: list[RepositoryRecord]
    locations: list[LocationRecord]
    retention: RetentionReport | None
    old_schedules: list[str]
    configuration: ConfigRecord
    unread: list[str]
    notes: list[str]


def average_rate(transfer: TransferRecord, now: datetime) -> float | None:
    """Return the rate since the data path began; None in a later attempt, whose bytes include those before it."""
    if transfer.began is None or not transfer.moving or not transfer.bytes_done or transfer.number > 1:
        return None
    seconds = (now - transfer.began).total_seconds()
    return transfer.bytes_done / seconds if seconds >= 1.0 else None


def build_view(snapshot: ClusterSnapshot, rate_of: RateOf = average_rate) -> StatusView:
    """Return what the snapshot shows."""
    findings = judge(snapshot)
    managed = [one for one in snapshot.transfers if not one.fault and is_managed(snapshot, one)]
    active = [one for one in managed if one.active]
    waiting = [one for one in active if _is_waiting(one)]
    busy = [one for one in active if not _is_waiting(one)]
    # Those that move data come first.
    busy.sort(key=lambda one: (not one.moving, one.node, one.name))
    positions = _positions(snapshot, waiting)
    page = snapshot.page
    return StatusView.like(
        snapshot,
        health=worst(findings),
        findings=findings,
        volumes=_sum_up(snapshot),
        leader=LeaderRow.like(
            snapshot.lease,
            node=node_of_holder(snapshot.lease.holder),
            version=page.version if page else "",
            page=page is not None,
        ),
        phases=dict(Counter(str(one.phase) for one in managed)),
        queued=page.queue.queued if page else len(positions),
        queue_length=snapshot.config.queue_length,
        positions_computed=page is None,
        pending=_pending_rows(waiting, positions),
        transfers=[_active_row(one, snapshot.at, rate_of) for one in busy],
        failed=_failed_rows(snapshot, managed),
        nodes=_node_rows(snapshot, busy),
        repositories=sorted(snapshot.repositories, key=lambda one: one.name),
        locations=sorted(snapshot.locations, key=lambda one: one.name),
        old_schedules=list(snapshot.old_schedules),
        configuration=snapshot.config,
        unread=sorted({str(one.part) for one in snapshot.unread}),
        notes=_notes(snapshot, len(snapshot.transfers) - len(managed)),
    )


def _sum_up(snapshot: ClusterSnapshot) -> VolumeSummary | None:
    coverage = snapshot.coverage
    if coverage is None or snapshot.volumes is None:
        return None
    return VolumeSummary(
        sentence=coverage.sentence,
        counts={str(state): number for state, number in coverage.counts.items()},
        complete=coverage.complete,
        # That transfers were not read is a finding.
        notes=snapshot.volumes.notes,
    )


def _is_waiting(transfer: TransferRecord) -> bool:
    return transfer.phase is Phase.NEW or transfer.stage in _BETWEEN


def _positions(snapshot: ClusterSnapshot, waiting: Iterable[TransferRecord]) -> Mapping[tuple[str, str], int]:
    """Return the positions in the queue by kind and name: the leader's, or computed as it does."""
    if snapshot.page is not None:
        return {(one.kind, one.name): one.position for one in snapshot.page.queue.queue}
    queued = (
        one
        for one in waiting
        if one.phase is Phase.NEW and one.reason in {"", PendingReason.QUEUED} and not one.canceling
    )
    first = _RESTORES if snapshot.config.restores_first else frozenset[str]()
    return {(one.kind, one.name): n for n, one in enumerate(in_order(queued, after="", first=first), start=1)}


def _pending_rows(waiting: Iterable[TransferRecord], positions: Mapping[tuple[str, str], int]) -> list[PendingRow]:
    """Return the rows of transfers that wait: the queue in order, then the others, the oldest first."""
    rows = [
        PendingRow.like(
            one, position=positions.get((one.kind, one.name)), volume_namespace=one.queue, attempt=one.number
        )
        for one in waiting
    ]
    return sorted(rows, key=lambda row: (row.position is None, row.position or 0, row.created, row.name))


def _active_row(one: TransferRecord, now: datetime, rate_of: RateOf) -> ActiveRow:
    rate = rate_of(one, now) if one.moving else None
    left = one.total_bytes - one.bytes_done
    eta_seconds = left / rate if rate and one.total_bytes and left >= 0 else None
    known = {"volume_namespace": one.queue, "attempt": one.number}
    return ActiveRow.like(one, **known, bytes_per_second=rate, eta_seconds=eta_seconds)


def _failed_rows(snapshot: ClusterSnapshot, managed: Iterable[TransferRecord]) -> list[FailedRow]:
    failed = [one for one in managed if failed_recently(snapshot, one)]
    failed.sort(key=lambda one: one.completed or snapshot.at, reverse=True)
    return list(map(FailedRow.like, failed))


def _node_rows(snapshot: ClusterSnapshot, busy: Iterable[TransferRecord]) -> list[NodeRow]:
    """Return a row for each agent: those that are not ready, then the busiest ones."""
    running, preparing = Counter[str](), Counter[str]()
    for one in busy:
        (running if one.moving else preparing)[one.node] += 1
    leader = node_of_holder(snapshot.lease.holder)
    rows = [
        NodeRow.like(
            agent,
            leader=bool(leader) and agent.node == leader,
            running=running[agent.node],
            slots=snapshot.slots_of(agent.node),
            preparing=preparing[agent.node],
        )
        for agent in snapshot.agents
    ]
    return sorted(rows, key=lambda row: (row.ready, -row.running, -row.preparing, row.node))


def _notes(snapshot: ClusterSnapshot, others: int) -> list[str]:
    said = "the leader did not answer, so positions in the queue are computed here"
    notes = [f"{said}: {one.why}" for one in snapshot.unread if one.part is UnreadPart.PAGE]
    if others:
        notes.append(f"{others} transfers are for other data movers or cannot be read, and are not listed")
    if snapshot.page is not None:
        notes += _definition_notes(snapshot, snapshot.page.definitions)
    return notes


def _definition_notes(snapshot: ClusterSnapshot, definitions: DefinitionReport) -> Iterator[str]:
    if definitions.message and not definitions.warning:
        yield definitions.message
    known = not (snapshot.config.errors or snapshot.is_unread(UnreadPart.CONFIG))
    if definitions.next_velero and known and snapshot.config.queue_length is None:
        yield f"prepareQueueLength {NO_QUEUE_LENGTH}"

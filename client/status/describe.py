"""Everything about one transfer: its phases with their times, its attempts, Events, pods, the end of its mover's log.

Read by a handful of requests. What cannot be read is named, and the rest is shown.
"""

from collections.abc import Awaitable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import accumulate, pairwise
from typing import Any, Final, Self, TypeVar

from msgspec import field

from client.installation import read_events, read_named
from client.status.health import advise
from client.status.parse import transfer_record
from client.status.records import Target, TransferRecord
from client.text import EventLine, format_ago, format_bytes
from core.contract import DataPathReason
from core.errors import AgentError, ContractError
from core.kube.client import KubeClient, Selection
from core.kube.errors import UnauthorizedError, UnreachableError
from core.kube.resources import BACKUPS, PODS, VOLUME_SNAPSHOT_CONTENTS
from core.kube.types import Object, Pod, UncheckedObject
from core.models import names as wire
from core.models.backups import velero_backup_of
from core.models.base import JsonDict, ObjectMeta, Time, WireModel, parse_time
from core.models.phases import RUNNING_PHASES, Interruption, Phase
from core.models.transfer_settings import BandwidthLimits, LeftOut
from core.models.transfers import Transfer
from core.redact import redact
from core.text import format_age
from exposer.pod_status import attempt_of, diagnose_pod, explain_exit, mover_status, parse_pod_end

_T = TypeVar("_T")

_BYTES: Final = frozenset({DataPathReason.PROGRESS, DataPathReason.COMPLETED})
"""Events about bytes: they are no step in the life of a transfer that its status does not have."""

_LOG_BYTES: Final = 8 * 1024
_LOG_LINES: Final = 40


class Moment(WireModel):
    """One step in the life of a transfer, and what is known of it."""

    at: Time
    what: str
    message: str = ""


class PodLine(WireModel):
    """A pod of the transfer; `state` says why it has not started, or how it ended; empty: it runs."""

    name: str
    phase: str
    node: str
    attempt: int
    state: str


class TransferDetails(TransferRecord):
    """Everything that is known about one transfer.

    `history` begins with the oldest moment, `events` with the newest. `log` are the last lines of its newest pod's log.
    `retries` count toward `maxRetries`. `schedule` is what started its backup: a CronJob of `nodeagent schedule`, or a
    Schedule of Velero. `left_out` is what exclusions left out of a backup. `bandwidth` holds now; without its fields,
    nothing limits the data mover. `base_snapshot` is the handle of the snapshot that the storage keeps for the next
    backup; empty: none of this one. `advice` is what to do next.
    """

    spec: JsonDict = field(default_factory=dict)
    schedule: str = ""
    snapshot_id: str = field(default="", name="snapshotID")
    base_snapshot: str = ""
    outcome: str = ""
    retries: int = 0
    bandwidth: BandwidthLimits = field(default_factory=BandwidthLimits)
    interruptions: tuple[Interruption, ...] = ()
    history: list[Moment] = field(default_factory=list)
    events: list[EventLine] = field(default_factory=list)
    pods: list[PodLine] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    left_out: LeftOut | None = None
    advice: str = ""
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, record: TransferRecord, **more: Any) -> Self:  # noqa: ANN401 - fields of any type
        """Return what is known of the record, its advice, and more fields."""
        return cls.like(record, advice=advise(record), **more)


class TransferReader:
    """Reads one transfer for one command."""

    def __init__(self, client: KubeClient, namespace: str) -> None:
        self._client = client
        self._namespace = namespace
        self._notes: list[str] = []

    async def describe(self, target: Target) -> TransferDetails:
        """Return everything about a transfer.

        Raises:
            NotFoundError: it does not exist; the message has the name that may be meant.
        """
        kind, name = target
        raw = await read_named(self._client, kind.resource, self._namespace, name)
        record = transfer_record(kind, raw)
        events = await self._try("Events", read_events(self._client, self._namespace, raw["metadata"]["uid"]), [])
        pods = await self._try("pods", self._read_pods(raw), [])
        log = await self._try("the log of its pod", self._read_log(pods), []) if pods else []
        schedule = await self._try("its Backup", self._read_schedule(raw), None)
        base = await self._try("its base snapshot", self._read_base(raw, record.datamover), None)
        try:
            more = _facts(kind.model.parse(raw), events)
        except ContractError:
            more = {}
        return TransferDetails.of(
            record,
            **more,
            # Values that are objects are shown elsewhere.
            spec={key: value for key, value in (raw.get("spec") or {}).items() if not isinstance(value, dict | list)},
            schedule=schedule or "",
            base_snapshot=base or "",
            outcome=redact(str((raw["metadata"].get("annotations") or {}).get(wire.OUTCOME_ANNOTATION, ""))),
            events=events,
            pods=[_pod_line(pod) for pod in pods],
            log=log,
            notes=self._notes,
        )

    async def _try(self, what: str, read: Awaitable[_T], otherwise: _T) -> _T:
        try:
            return await read
        except (UnreachableError, UnauthorizedError):
            raise
        except AgentError as e:
            self._notes.append(f"{what} could not be read: {e}")
            return otherwise

    async def _read_schedule(self, raw: UncheckedObject) -> str | None:
        labels = raw["metadata"].get("labels") or {}
        backup = velero_backup_of(ObjectMeta.from_wire(raw["metadata"]))
        if not backup:
            return labels.get(wire.SCHEDULE_LABEL)
        owner = await self._client.read(BACKUPS, self._namespace, backup)
        return (owner["metadata"].get("labels") or {}).get(wire.VELERO_SCHEDULE_LABEL) if owner else None

    async def _read_base(self, raw: Object, datamover: str) -> str | None:
        if datamover != wire.BLOCK_DATA_MOVER:
            return None
        meta = raw["metadata"]
        content = await self._client.read(VOLUME_SNAPSHOT_CONTENTS, "", meta["name"])
        if content is None or (content["metadata"].get("labels") or {}).get(wire.BASE_SNAPSHOT_LABEL) != meta["uid"]:
            return None
        return (content["spec"].get("source") or {}).get("snapshotHandle")

    async def _read_pods(self, raw: Object) -> list[Pod]:
        selection = Selection(PODS, self._namespace, f"{wire.OWNER_UID_LABEL}={raw['metadata']['uid']}")
        pods = await self._client.list(selection)
        return sorted(pods, key=lambda pod: str(pod["metadata"].get("creationTimestamp", "")), reverse=True)

    async def _read_log(self, pods: list[Pod]) -> list[str]:
        """Return the last lines of the newest mover's log, without secrets; none before its container has started."""
        meta, mover = pods[0]["metadata"], mover_status(pods[0])
        if mover is None or not (mover.get("state") or {}).keys() & {"running", "terminated"}:
            return []
        log = await self._client.pod_log(
            meta["namespace"], meta["name"], container=mover.get("name", ""), limit_bytes=_LOG_BYTES
        )
        return redact(log).splitlines()[-_LOG_LINES:]


def _pod_line(pod: Pod) -> PodLine:
    status = pod.get("status") or {}
    try:
        end, pending = parse_pod_end(pod), diagnose_pod(pod)
        state = explain_exit(end) if end is not None else pending.message if pending is not None else ""
    except AgentError as e:
        state = str(e)
    return PodLine(
        name=pod["metadata"]["name"],
        phase=str(status.get("phase", "")),
        node=str((pod.get("spec") or {}).get("nodeName", "")),
        attempt=attempt_of(pod),
        state=state,
    )


def _facts(cr: Transfer, events: list[EventLine]) -> JsonDict:
    attempts = cr.attempts
    limits = BandwidthLimits.from_annotations(cr.metadata.annotations) if cr.phase in RUNNING_PHASES else None
    return {
        "snapshot_id": cr.status.snapshot_id or "",
        "retries": attempts.retries,
        "bandwidth": limits or BandwidthLimits(),
        "interruptions": attempts.interruptions,
        "left_out": LeftOut.from_annotations(cr.metadata.annotations),
        "history": _history(cr, events),
    }


def _history(cr: Transfer, events: list[EventLine]) -> list[Moment]:
    """Return the phases, attempts and pending reasons with their times, the oldest first.

    Phases are from the status, attempts from the annotation, pending reasons from Events, which are kept for an hour.
    """
    status, attempts = cr.status, cr.attempts
    where = f"on node {status.accepted_by_node}" if status.accepted_by_node else None
    known: list[tuple[datetime | None, str, str | None]] = [
        (cr.metadata.creation_timestamp, "created", None),
        (status.accepted_timestamp, "Accepted", where),
        (cr.began_at, "InProgress", f"on node {status.node}" if status.node else None),
        *((one.at, f"attempt interrupted: {one.cause}", one.message) for one in attempts.interruptions),
        *((start, "snapshot began", None) for start in attempts.starts),
        *((event.last_seen, f"Event {event.reason}", event.message) for event in events if event.reason not in _BYTES),
        (cr.metadata.deletion_timestamp, "deletion requested", None),
        (status.completion_timestamp, str(cr.phase), status.message),
    ]
    moments = [Moment(at=at, what=what, message=message or "") for at, what, message in known if at is not None]
    return sorted(moments, key=lambda moment: moment.at)


@dataclass(frozen=True)
class TransferStage:
    """What the transfer did from `began` to `ended`: `pending`, `preparing` or `moving`."""

    name: str
    began: datetime
    ended: datetime

    @property
    def length(self) -> timedelta:
        """How long it took."""
        return self.ended - self.began


def find_stages(one: TransferDetails, now: datetime) -> list[TransferStage]:
    """Return its stages up to its end, or to now; none if it is not known when it was created.

    A node's clock may differ from the API server's: what is before the stage before has no length.
    """
    if not one.created:
        return []
    started = next((moment.at for moment in one.history if moment.what == Phase.IN_PROGRESS), one.began)
    borders = [("pending", parse_time(one.created)), ("preparing", one.accepted), ("moving", started)]
    known = [(name, moment) for name, moment in borders if moment is not None]
    moments = accumulate([*(moment for _, moment in known), one.completed or now], max)
    return [TransferStage(name, *times) for (name, _), times in zip(known, pairwise(moments), strict=True)]


def tell_story(one: TransferDetails, now: datetime) -> Iterator[str]:
    """Yield what has become of it, a sentence for each step; nothing if it is not known when it was created."""
    stages = {stage.name: stage for stage in find_stages(one, now)}
    pending, preparing, moving = (stages.get(name) for name in ("pending", "preparing", "moving"))
    if pending is None:
        return
    what = "back up" if one.is_backup else "restore"
    yield f"It was created {format_ago(pending.began, now)} to {what} {one.queue}/{one.volume}."
    where = f" on node {one.node}" if one.node else ""
    if preparing is not None:
        yield f"After {format_age(pending.length)} the leader accepted it."
    if moving is not None and preparing is not None:
        yield f"After {format_age(preparing.length)} more, its data mover{where} began to move data."
    for end in one.interruptions:
        there = f" on node {end.node}" if end.node else ""
        yield f"It was interrupted {format_ago(end.at, now)}{there}: {end.cause}."
    if one.phase.final:
        yield _tell_end(one, moving)
    elif one.moving:
        share = f" of {format_bytes(one.total_bytes)}" if one.total_bytes else ""
        attempt = f" in attempt {one.number}" if one.number > 1 else ""
        yield f"It has moved {format_bytes(one.bytes_done)}{share}{attempt}."
    elif one.reason:
        yield f"It waits: {one.reason}{f': {one.message}' if one.message else ''}."
    if one.canceling:
        yield "It is being canceled."


def _tell_end(one: TransferDetails, moving: TransferStage | None) -> str:
    after = f" after {format_age(moving.length)}" if moving is not None else ""
    if one.phase is Phase.COMPLETED:
        new = "" if one.new_bytes is None else f", {format_bytes(one.new_bytes)} of it new"
        return f"It moved {format_bytes(one.total_bytes)}{new}, and completed{after}."
    how = "failed" if one.phase is Phase.FAILED else "was canceled"
    return f"It {how}{after}{f': {one.message}' if one.message else ''}."

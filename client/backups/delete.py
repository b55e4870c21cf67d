"""Deletes backups of `nodeagent backup create`: their transfers first, then the snapshots of these, by a Job.

Each step may be repeated: what is to be deleted is recorded before the first transfer goes, and the next command that
deletes anything finishes what an interruption left. The rules are in `client.backups.retention`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Final

from client.backups.copies import Copy, KeepPolicy
from client.backups.deletion_jobs import (
    DeletionGuard,
    DeletionRecord,
    Located,
    LocationJobs,
    locate,
    read_copies,
    read_locations,
    read_restoring,
)
from client.backups.retention import (
    Check,
    DeletionError,
    RetentionDecision,
    RetentionRule,
    Situation,
    decide_now,
    find_witnesses,
    judge_backups,
    limit_deletions,
)
from client.collections.collection import Backups
from client.session import Session
from core.clock import Deadline
from core.errors import AgentError, ConfigError
from core.kube.resources import BACKUP_STORAGE_LOCATIONS, BY_KIND
from core.kube.transport import Deletion
from core.kube.types import Job
from core.kube.velero_server import has_velero_server
from core.models.base import parse_time
from core.snapshot_contract import CopyToCheck, DeletedSnapshot
from nodeagent.config.expose_settings import read_cluster

_MOST_RECORDED: Final = 2000
"""Transfers in the record: some 250 KiB of a ConfigMap's 1 MiB; what went within a day needs 50 bytes a copy.

One backup is never divided: if it has more than some 8,000 volumes, the API server rejects the record, and the backup
stays."""

_NOT_DELETED: Final = "snapshots were not deleted, repeat the command to delete them"

_GONE_WITHIN: Final = timedelta(minutes=1)
_POLL_SECONDS: Final = 1.0

_DATE: Final = "the Date of the API server's answer"
_POD: Final = "the clock of this pod"
_JOB_POD: Final = "the clock of the check Job's pod"

_REFUSED: Final = frozenset({RetentionRule.FOREIGN, RetentionRule.IN_PROGRESS, RetentionRule.RESTORING})
"""What holds also a backup that a person names."""

_CHANGES: Final = _REFUSED | {RetentionRule.NEWEST_COPY, RetentionRule.SHRUNK, RetentionRule.LOCATION}
"""What speaks against the deletion of a named backup if it came up after the question."""


@dataclass(frozen=True)
class DeletionWish:
    """What is to be deleted: the backup of that `name`, or all that are expired (None).

    Of these, `most`, whatever the limit of their volumes; None: that limit counts. `begun` is when the Job of this run
    was created. `policies` are of schedules, by their labels, in place of what their newest backups say.
    """

    name: str | None = None
    most: int | None = None
    begun: datetime | None = None
    policies: Mapping[str, KeepPolicy | None] = field(default_factory=dict)

    @property
    def shown(self) -> str:
        """It as text."""
        return f"backup {self.name}" if self.name is not None else "expired backups"


@dataclass(frozen=True)
class DeletionPlan:
    """What is to be deleted: backups, and snapshots of earlier deletions that were interrupted (`unfinished`).

    `judgments` are about all backups. `stale` entries of the record are of transfers that still exist. `cluster` is
    what identifies the cluster in the tags of its snapshots. Transfers in `absent` locations, which do not exist, stay
    recorded. `check` is what the check Jobs found; None: they did not run. `time` returns the time now, by the
    witnesses of the run; None: there are none. `now` is when it was made; None: ages do not matter.
    """

    wish: DeletionWish
    cluster: str
    record: DeletionRecord
    judgments: tuple[RetentionDecision, ...]
    deleted: tuple[RetentionDecision, ...] = ()
    unfinished: frozenset[Located] = frozenset()
    stale: frozenset[Located] = frozenset()
    absent: frozenset[str] = frozenset()
    check: Check | None = None
    time: Callable[[], datetime] | None = None
    now: datetime | None = None

    @property
    def kept(self) -> list[RetentionDecision]:
        """The backups that are expired, and held by another rule."""
        return [one for one in self.judgments if self.wish.name is None and one.expired and one.holds]

    @property
    def refusals(self) -> list[str]:
        """The places in which nothing can be deleted, and why."""
        refused = self.check.refused if self.check is not None else {}
        return [f"nothing can be deleted in BackupStorageLocation {name}: {why}" for (name, _), why in refused.items()]

    @property
    def copies(self) -> list[Copy]:
        """The volumes of the backups that are to be deleted."""
        return [copy for one in self.deleted for copy in one.copies]

    @property
    def transfers(self) -> frozenset[Located]:
        """All transfers whose snapshots are to be deleted."""
        return frozenset(one for one in self.unfinished | set(map(locate, self.copies)) if one[0] not in self.absent)


async def plan_deletion(tools: Session, wish: DeletionWish | None = None) -> DeletionPlan:
    """Return the plan to delete a backup that is named, or every backup that is expired and that no rule holds.

    It is as much as is known before a check. A backup that is named also goes before it expires, and if it has the last
    copy of a volume.

    Raises:
        NotFoundError: there is no such backup; the message has the name that may be meant.
        DeletionError: nothing, or not this backup, may be deleted; or what would be needed to decide is not known.
    """
    wish = wish or DeletionWish()
    plan = await _judge(tools, wish)
    if wish.name is None or (plan.unfinished and not plan.deleted):
        return plan
    if not plan.deleted:
        await Backups(tools.client, tools.namespace).find_own(wish.name)
        raise DeletionError(f"backup {wish.name} cannot be deleted: it was just created")
    if holds := plan.deleted[0].held_by(_REFUSED):
        raise DeletionError(f"backup {wish.name} cannot be deleted: {holds[0].text}")
    return plan


async def _judge(
    tools: Session, wish: DeletionWish, check: Check | None = None, time: Callable[[], datetime] | None = None
) -> DeletionPlan:
    client, namespace = tools.client, tools.namespace
    if await has_velero_server(client, namespace):
        raise DeletionError(f"a Velero server is in namespace {namespace}: nothing is deleted beside it")
    # Before the transfers: what is recorded after that is not taken for stale.
    record = DeletionRecord(client, namespace)
    await record.read()
    recorded = record.recorded
    begun = {one.uid for _, one in recorded}
    copies = [replace(copy, recorded=copy.uid in begun) async for copy in read_copies(client, namespace)]
    restoring = {snapshot: restore async for snapshot, restore in read_restoring(client, namespace)}
    closed = await read_locations(client, namespace, check.locations if check is not None else {})
    absent = {copy.location for copy in copies} | {location for location, _ in recorded}
    absent -= closed.keys()
    closed |= {name: f"{BACKUP_STORAGE_LOCATIONS.kind} {namespace}/{name} does not exist" for name in absent}
    cluster = await read_cluster(client)
    if not cluster:
        raise DeletionError("Namespace kube-system cannot be read: its UID says which snapshots are of this cluster")
    existing = {copy.uid for copy in copies}
    unfinished = frozenset(one for one in recorded if one[1].uid not in existing)
    # What is going away stays recorded: its snapshots would not be deleted if another rule kept its backup now.
    stale = recorded - unfinished - {locate(copy) for copy in copies if copy.deleting}
    plan = DeletionPlan(wish, cluster, record, (), stale=stale, absent=frozenset(absent), check=check, time=time)
    situation = Situation(restoring, closed, _now(tools, plan), check, wish.policies)
    judgments = judge_backups(copies, situation)
    if wish.name is not None:
        unfinished, stale = (
            frozenset(one for one in some if one[1].backup == wish.name) for some in (unfinished, stale)
        )
        deleted = tuple(one for one in judgments if one.backup == wish.name)
        return replace(plan, judgments=tuple(judgments), deleted=deleted, unfinished=unfinished, stale=stale)
    if situation.now is None:
        raise DeletionError("the API server's answers have no Date: how old backups are is not known")
    if check is not None:
        # What was not looked at, such as what has expired since, is for the next run.
        looked = [one for one in judgments if one.holds or check.wanted.issuperset(copy.uid for copy in one.copies)]
        gone = record.find_gone(existing, situation.now)
        judgments = limit_deletions(looked, gone, situation.now, most=wish.most)
    return replace(
        plan,
        now=situation.now,
        judgments=tuple(judgments),
        deleted=tuple(one for one in judgments if not one.holds),
        # What is left in a location that is closed waits until it is open again.
        unfinished=frozenset(
            (where, one)
            for where, one in unfinished
            if not (closed.get(where) or (check is not None and check.refusal(where, one.volume_namespace)))
        ),
    )


def _now(tools: Session, plan: DeletionPlan) -> datetime | None:
    """Return the time by which ages count: once checked, by the witnesses; None: not known, or not needed."""
    if plan.wish.name is not None:
        return None
    if plan.time is not None:
        return plan.time()
    if not tools.in_pod:
        return tools.date()
    # With a Date that is behind nothing would be expired, and no Job would show that it is wrong.
    return decide_now({_DATE: tools.date(), _POD: tools.clock.now()}, plan.wish.begun)


async def check_plan(tools: Session, plan: DeletionPlan) -> tuple[DeletionPlan, list[DeletedSnapshot]]:
    """Return the plan by what Jobs find in the bucket, and the snapshots that would be deleted; nothing is changed.

    Raises:
        DeletionError: the clocks do not agree, so that no age is known.
    """
    witnesses = find_witnesses(copy for one in plan.judgments for copy in one.copies)
    wanted = [copy for copy in plan.copies if copy.has_data and copy.series in witnesses]
    needed = {copy.uid: witnesses[copy.series] for copy in wanted if witnesses[copy.series].backup != copy.backup}
    run = _CheckRun(tools, needed)
    for location in _list_locations(plan.transfers):
        await run.look(plan, location)
    check = replace(run.check, wanted=frozenset(one.uid for _, one in plan.transfers), found=_uids(run.found))
    time = run.decide_time(plan.wish.begun) if plan.wish.name is None else None
    settled = await _judge(tools, plan.wish, check, time)
    left = {one.uid for _, one in settled.transfers}
    return settled, [one for one in run.found if one.transfer_uid in left]


def _list_locations(transfers: Iterable[Located]) -> list[str]:
    return sorted({location for location, _ in transfers})


def _uids(found: Iterable[DeletedSnapshot]) -> frozenset[str]:
    return frozenset(one.transfer_uid for one in found)


@dataclass
class _CheckRun:
    """The check Jobs of a run, and what they found; times are those at the creation of the last one.

    `needed` are the copies that have to be restorable, by the UIDs of the transfers that may go because they are.
    """

    tools: Session
    needed: dict[str, Copy]
    found: list[DeletedSnapshot] = field(default_factory=list)
    check: Check = field(default_factory=Check)
    said: dict[str, datetime | None] = field(default_factory=dict)
    at_seconds: float = 0.0

    async def look(self, plan: DeletionPlan, location: str) -> None:
        run = LocationJobs(replace(self.tools, on_created=self._note_times), location, plan.cluster)
        checks = {uid: CopyToCheck(one.namespace, one.snapshot_id or "") for uid, one in self.needed.items()}
        before = self.said, self.at_seconds
        try:
            await run.run(plan.transfers, checks)
        except ConfigError:
            raise
        except AgentError as e:
            self.check.refused[location, None] = str(e)
            self.said, self.at_seconds = before
            return
        if not self.tools.in_pod and run.ended is not None:
            taken = timedelta(seconds=self.tools.clock.monotonic() - self.at_seconds)
            self.said[_JOB_POD] = run.ended - taken
        self.found += run.found
        if run.spec is not None:
            self.check.locations[location] = run.spec
        self.check.refused.update({(location, namespace): text for namespace, text in run.unread.items()})
        for uid, one in checks.items():
            if one in run.faults:
                self.check.faults[self.needed[uid].uid] = run.faults[one]

    def _note_times(self, job: Job) -> None:
        self.at_seconds = self.tools.clock.monotonic()
        created = parse_time(job["metadata"]["creationTimestamp"])
        self.said = {_DATE: self.tools.date(), f"the creation of Job {job['metadata']['name']}": created}
        self.said |= {_POD: self.tools.clock.now()} if self.tools.in_pod else {_JOB_POD: None}

    def decide_time(self, begun: datetime | None) -> Callable[[], datetime] | None:
        """Return what returns the time now, by the witnesses; None: there was no Job."""
        if not self.said:
            return None
        said, clock, at_seconds = decide_now(self.said, begun), self.tools.clock, self.at_seconds
        return lambda: said + timedelta(seconds=clock.monotonic() - at_seconds)


async def execute_plan(tools: Session, plan: DeletionPlan, guard: DeletionGuard) -> list[DeletedSnapshot]:
    """Delete the transfers and the snapshots, and return the snapshots, also those that are kept.

    Each part is judged again before: a question, or Jobs that check the snapshots, may have taken hours.

    Raises:
        DeletionError: not all is deleted; the next deletion continues.
    """
    found: list[DeletedSnapshot] = []
    changed: list[str] = []
    for planned in _divide(plan):
        await guard.confirm()
        part, why = await _judge_again(tools, planned)
        if plan.wish.name is not None:
            changed += why
        else:
            # Such as a backup that was completed meanwhile: the next run looks again.
            for text in why:
                tools.on_note(text)
        await part.record.drop({one for _, one in part.stale})
        found += await _execute(tools, part, guard)
        if plan.wish.name is not None and part.deleted:
            await part.record.forget(plan.wish.name)
    if changed:
        raise DeletionError(changed[0])
    return found


def _divide(plan: DeletionPlan) -> Iterator[DeletionPlan]:
    """Yield parts of the plan that the record can have at a time, at least one; first what is unfinished."""
    part = replace(plan, deleted=())
    for judgment in plan.deleted:
        if part.transfers and len(part.transfers) + len(judgment.copies) > _MOST_RECORDED:
            yield part
            part = replace(plan, deleted=(), unfinished=frozenset())
        part = replace(part, deleted=(*part.deleted, judgment))
    yield part


async def _judge_again(tools: Session, part: DeletionPlan) -> tuple[DeletionPlan, list[str]]:
    """Return the part without the backups that another rule keeps now, and why each of them is kept."""
    # Without a check, nothing was looked at, so nothing that is only expired goes.
    fresh = await _judge(tools, part.wish, part.check or Check(), part.time)
    now = {one.backup: one for one in fresh.judgments}
    allowed = {one.backup for one in fresh.deleted}
    left, changed = [], []
    for one in part.deleted:
        if why := _find_change(one, now.get(one.backup), named=part.wish.name is not None):
            changed.append(f"backup {one.backup} is not deleted, it has changed since the plan was made: {why}")
        elif one.backup in allowed:
            left.append(now[one.backup])
    return replace(fresh, deleted=tuple(left), unfinished=part.unfinished & fresh.unfinished), changed


def _find_change(planned: RetentionDecision, later: RetentionDecision | None, *, named: bool) -> str | None:
    """Return what of a later judgment of the backup speaks against its deletion; None: nothing.

    A hold that was known when it was planned, such as a last copy that was named, does not.
    """
    if later is None or {one.uid for one in later.copies} != {one.uid for one in planned.copies}:
        return "its transfers are others"
    holds = later.held_by(_CHANGES) if named else later.holds
    return next((hold.text for hold in holds if hold not in planned.holds), None)


async def _execute(tools: Session, plan: DeletionPlan, guard: DeletionGuard) -> list[DeletedSnapshot]:
    """Delete the transfers and the snapshots, and return the snapshots; DeletionError: some are left."""
    record = plan.record
    if plan.deleted:
        await record.add(plan.copies)
    held = await _delete_transfers(tools, plan.copies, guard)
    # The snapshots of what is still being deleted stay until it is gone.
    transfers = plan.transfers - set(map(locate, held))
    found: list[DeletedSnapshot] = []
    failed = list(held.values())
    for location in _list_locations(transfers):
        await guard.confirm()
        run = LocationJobs(tools, location, plan.cluster)
        try:
            await run.run(transfers, None)
        except AgentError as e:
            failed.append(f"{_NOT_DELETED}: {e}")
            continue
        found += run.found
        kept = {one.transfer_uid for one in run.found if one.kept}
        failed += [f"{_NOT_DELETED}: {text}" for text in run.unread.values()]
        done = {one for where, one in transfers if where == location and one.uid not in kept}
        dropped = {one for one in done if not {None, one.volume_namespace} & run.unread.keys()}
        # What was there shortly before is not gone, but out of sight: the location may name another place now.
        if missed := {one for one in dropped if plan.check and one.uid in plan.check.found - _uids(run.found)}:
            failed.append(f"{_NOT_DELETED}: {len(missed)} of them are not in {location}, where a check has found them")
        # Without witnesses, one of two clocks may be wrong: the later one counts for longer.
        now = plan.time() if plan.time else max(filter(None, (tools.date(), tools.clock.now())))
        await record.drop(dropped - missed, now, proved=plan.time is not None)
    if failed:
        raise DeletionError(failed[0])
    return found


async def _delete_transfers(tools: Session, copies: Sequence[Copy], guard: DeletionGuard) -> dict[Copy, str]:
    """Delete the transfers, and return those that are still being deleted after a while, and why."""
    deadline = Deadline.after(tools.clock, _GONE_WITHIN)
    left = []
    for copy in copies:
        guard.check()
        answer = await tools.client.delete(BY_KIND[copy.kind], tools.namespace, copy.transfer, uid=copy.uid)
        # A conflict may be about this object, which is still there then.
        if answer in {Deletion.STARTED, Deletion.CONFLICT}:
            left.append(copy)
    held = {}
    for copy in left:
        while True:
            raw = await tools.client.read(BY_KIND[copy.kind], tools.namespace, copy.transfer)
            if raw is None or raw["metadata"]["uid"] != copy.uid:
                break
            if deadline.expired:
                by = ", ".join(raw["metadata"].get("finalizers") or ["no finalizer"])
                held[copy] = f"{copy.kind} {copy.transfer} is still being deleted ({by}): repeat the command"
                break
            await tools.clock.sleep(_POLL_SECONDS)
    return held

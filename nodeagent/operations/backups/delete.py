"""Deletes backups of `nodeagent backup create`: their transfers first, then the snapshots of these, by a Job.

Each step may be repeated: what is to be deleted is recorded before the first transfer goes, and the next command that
deletes anything finishes what an interruption left. The rules are in `nodeagent.operations.backups.deletion`.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Final

from core.clock import Deadline
from core.contract import parse_result
from core.errors import AgentError, ConfigError
from core.kube.answers import Deletion
from core.kube.resources import DATA_UPLOADS, POD_VOLUME_BACKUPS
from core.kube.velero_server import has_velero_server
from core.models.storage import RepositoryKey
from core.snapshot_contract import DELETED_LINE, DeletedSnapshot, SnapshotDeletion, TransferToDelete
from exposer.maintenance_job import build_deletion_job
from exposer.model import Owner
from nodeagent.operations.backups.deletion import Copy, Judgment, Rule, judge_backups
from nodeagent.operations.backups.deletion_reads import DeletionError, read_copies, read_restoring
from nodeagent.operations.backups.deletion_record import DeletionRecord
from nodeagent.operations.backups.follow import find_own_backup
from nodeagent.operations.mover_jobs import JobSubject, JobTools, plan_job, read_location, run_job
from nodeagent.startup import read_cluster

__all__ = ["DeletionError", "DeletionPlan", "DeletionTools", "check_plan", "execute_plan", "plan_expired", "plan_named"]

_JOB_TIMEOUT: Final = timedelta(hours=1)

_AT_ONCE: Final = 1000
"""Transfers of one Job: some 100 KiB of its command line."""

_MOST_RECORDED: Final = 4000
"""Transfers in the record: some 400 KiB of a ConfigMap's 1 MiB."""

_NOT_DELETED: Final = "snapshots were not deleted, repeat the command to delete them"

_GONE_WITHIN: Final = timedelta(minutes=1)
_POLL_SECONDS: Final = 1.0

_BACKUPS: Final = {one.kind: one for one in (DATA_UPLOADS, POD_VOLUME_BACKUPS)}

_WAIVED: Final = frozenset({Rule.NOT_EXPIRED, Rule.NEWEST_COPY})
"""What does not hold a backup that a person names."""

Located = tuple[str, TransferToDelete]
"""The name of a BackupStorageLocation, and a transfer with snapshots in it."""

Place = tuple[str, str]
"""The name of a BackupStorageLocation, and the namespace of a repository in it; empty: all of them."""


@dataclass(frozen=True)
class DeletionTools:
    """What a deletion works with; `date` returns the Date of the API server's last answer, None: it has none."""

    jobs: JobTools
    date: Callable[[], datetime | None]


@dataclass(frozen=True)
class DeletionPlan:
    """What is to be deleted: backups, and snapshots of earlier deletions that were interrupted (`unfinished`).

    `kept` are backups that are expired, and held by another rule. `stale` entries of the record are of transfers that
    still exist. `cluster` is what identifies the cluster in the tags of its snapshots. `held` are transfers that are
    still being deleted: their snapshots stay until they are gone.
    """

    cluster: str
    record: DeletionRecord
    deleted: tuple[Judgment, ...] = ()
    kept: tuple[Judgment, ...] = ()
    unfinished: frozenset[Located] = frozenset()
    stale: frozenset[Located] = frozenset()
    held: frozenset[Located] = frozenset()

    @property
    def copies(self) -> list[Copy]:
        """The volumes of the backups that are to be deleted."""
        return [copy for one in self.deleted for copy in one.copies]

    @property
    def transfers(self) -> frozenset[Located]:
        """All transfers whose snapshots are to be deleted."""
        return (self.unfinished | {_located(copy) for copy in self.copies}) - self.held

    @property
    def locations(self) -> list[str]:
        """The locations with snapshots to be deleted."""
        return sorted({location for location, _ in self.transfers})

    def without(self, places: Collection[Place]) -> "DeletionPlan":
        """Return the plan without what is in these places."""

        def is_left(where: Located) -> bool:
            location, one = where
            return not {(location, ""), (location, one.volume_namespace)} & set(places)

        return replace(
            self,
            deleted=tuple(one for one in self.deleted if all(is_left(_located(copy)) for copy in one.copies)),
            unfinished=frozenset(filter(is_left, self.unfinished)),
        )


def _located(copy: Copy) -> Located:
    return copy.location, TransferToDelete(copy.volume_namespace, copy.backup, copy.uid)


async def plan_expired(tools: DeletionTools) -> DeletionPlan:
    """Return the plan to delete every backup that is expired and that no rule holds.

    Raises:
        DeletionError: nothing may be deleted here, or what would be needed to decide is not known.
        KubeError: the API server rejected a request.
    """
    plan, judgments = await _prepare(tools)
    expired = [one for one in judgments if not one.held_by((Rule.NOT_EXPIRED,))]
    return replace(
        plan,
        deleted=tuple(one for one in expired if not one.holds),
        kept=tuple(one for one in expired if one.holds),
    )


async def plan_named(tools: DeletionTools, name: str) -> DeletionPlan:
    """Return the plan to delete one backup, also before it expires, and if it has the last copy of a volume.

    Raises:
        NotFoundError: there is no such backup; the message has the name that may be meant.
        DeletionError: it may not be deleted; the message names the rule.
        KubeError: the API server rejected a request.
    """
    plan, judgments = await _prepare(tools)
    plan = replace(plan, unfinished=_of_backup(plan.unfinished, name), stale=_of_backup(plan.stale, name))
    found = next((one for one in judgments if one.backup == name), None)
    if found is None:
        if plan.unfinished:
            return plan
        await find_own_backup(tools.jobs.client, tools.jobs.namespace, name)
        raise DeletionError(f"backup {name} cannot be deleted: it was just created")
    if holds := found.held_by(set(Rule) - _WAIVED):
        raise DeletionError(f"backup {name} cannot be deleted: {holds[0].text}")
    return replace(plan, deleted=(found,))


def _of_backup(located: frozenset[Located], name: str) -> frozenset[Located]:
    return frozenset((location, one) for location, one in located if one.backup == name)


async def _prepare(tools: DeletionTools) -> tuple[DeletionPlan, list[Judgment]]:
    client, namespace = tools.jobs.client, tools.jobs.namespace
    if await has_velero_server(client, namespace):
        raise DeletionError(f"a Velero server is in namespace {namespace}: nothing is deleted beside it")
    # Before the transfers: what is recorded after that is not taken for stale.
    record = DeletionRecord(client, namespace)
    await record.read()
    copies = [copy async for copy in read_copies(client, namespace)]
    restoring = {snapshot: restore async for snapshot, restore in read_restoring(client, namespace)}
    cluster = await read_cluster(client)
    if not cluster:
        raise DeletionError("Namespace kube-system cannot be read: its UID says which snapshots are of this cluster")
    now = tools.date()
    if now is None:
        raise DeletionError("the API server's answers have no Date: how old backups are is not known")
    recorded = {one for entry in record.entries.values() for one in entry}
    existing = {copy.uid for copy in copies}
    unfinished = frozenset(one for one in recorded if one[1].uid not in existing)
    plan = DeletionPlan(cluster, record, unfinished=unfinished, stale=frozenset(recorded - unfinished))
    return plan, judge_backups(copies, restoring, now)


async def check_plan(tools: DeletionTools, plan: DeletionPlan) -> tuple[list[DeletedSnapshot], dict[Place, str]]:
    """Return the snapshots that would be deleted, and why none can be in some places; nothing is changed.

    Raises:
        ConfigError: no agent is installed, or its configuration cannot be read.
    """
    found: list[DeletedSnapshot] = []
    refused: dict[Place, str] = {}
    for location in plan.locations:
        try:
            listed, unread = await _run_jobs(tools, plan, location, dry_run=True)
        except ConfigError:
            raise
        except AgentError as e:
            refused[location, ""] = str(e)
            continue
        found += listed
        refused |= {(location, namespace): text for namespace, text in unread.items()}
    return found, refused


async def execute_plan(tools: DeletionTools, plan: DeletionPlan) -> list[DeletedSnapshot]:
    """Delete the transfers and the snapshots, and return the snapshots, also those that are kept.

    Each backup is judged again before: a question, or Jobs that check the snapshots, may have taken hours.

    Raises:
        DeletionError: not all is deleted; the next deletion continues.
        KubeError: the API server rejected a request.
    """
    plan, changed = await _judge_again(tools, plan)
    await plan.record.drop({one for _, one in plan.stale})
    found: list[DeletedSnapshot] = []
    for part in _divide(plan):
        deleted, failed = await _execute(tools, part)
        found += deleted
        if failed:
            raise DeletionError(failed[0])
    if changed:
        raise DeletionError(changed[0])
    return found


def _divide(plan: DeletionPlan) -> Iterator[DeletionPlan]:
    """Yield parts of the plan that the record can have at a time; first what is unfinished."""
    part = replace(plan, deleted=())
    for judgment in plan.deleted:
        if part.transfers and len(part.transfers) + len(judgment.copies) > _MOST_RECORDED:
            yield part
            part = replace(plan, deleted=(), unfinished=frozenset())
        part = replace(part, deleted=(*part.deleted, judgment))
    if part.transfers:
        yield part


async def _execute(tools: DeletionTools, plan: DeletionPlan) -> tuple[list[DeletedSnapshot], list[str]]:
    """Delete the transfers and the snapshots, and return the snapshots, and why some are left."""
    record = plan.record
    for judgment in plan.deleted:
        await record.add(judgment.backup, [_located(copy) for copy in judgment.copies])
    held = await _delete_transfers(tools.jobs, plan.copies)
    plan = replace(plan, held=frozenset(_located(copy) for copy in held))
    found: list[DeletedSnapshot] = []
    failed = list(held.values())
    for location in plan.locations:
        try:
            deleted, unread = await _run_jobs(tools, plan, location, dry_run=False)
        except AgentError as e:
            failed.append(f"{_NOT_DELETED}: {e}")
            continue
        found += deleted
        kept = {one.transfer_uid for one in deleted if one.kept}
        failed += [f"{_NOT_DELETED}: {text}" for text in unread.values()]
        done = {one for where, one in plan.transfers if where == location and one.uid not in kept}
        await record.drop({one for one in done if not {"", one.volume_namespace} & unread.keys()})
    return found, failed


async def _judge_again(tools: DeletionTools, plan: DeletionPlan) -> tuple[DeletionPlan, list[str]]:
    """Return the plan without the backups of which another rule speaks now, and why each of them is kept."""
    fresh, judgments = await _prepare(tools)
    now = {one.backup: one for one in judgments}
    left, changed = [], []
    for one in plan.deleted:
        if why := one.changed_since(now.get(one.backup)):
            changed.append(f"backup {one.backup} is not deleted, it has changed since the plan was made: {why}")
        else:
            left.append(one)
    return replace(plan, record=fresh.record, stale=plan.stale & fresh.stale, deleted=tuple(left)), changed


async def _delete_transfers(jobs: JobTools, copies: Sequence[Copy]) -> dict[Copy, str]:
    """Delete the transfers, and return those that are still being deleted after a while, and why."""
    deadline = Deadline.after(jobs.clock, _GONE_WITHIN)
    left = []
    for copy in copies:
        answer = await jobs.client.delete(_BACKUPS[copy.kind], jobs.namespace, copy.transfer, uid=copy.uid)
        if answer is Deletion.STARTED:
            left.append(copy)
    held = {}
    for copy in left:
        while True:
            raw = await jobs.client.read(_BACKUPS[copy.kind], jobs.namespace, copy.transfer)
            if raw is None or raw["metadata"]["uid"] != copy.uid:
                break
            if deadline.expired:
                by = ", ".join(raw["metadata"].get("finalizers") or ["no finalizer"])
                held[copy] = f"{copy.kind} {copy.transfer} is still being deleted ({by}): repeat the command"
                break
            await jobs.clock.sleep(_POLL_SECONDS)
    return held


async def _run_jobs(
    tools: DeletionTools, plan: DeletionPlan, location_name: str, *, dry_run: bool
) -> tuple[list[DeletedSnapshot], dict[str, str]]:
    """Run the Jobs of one location, and return the snapshots that they found.

    The texts are why some were not looked for, by the namespace of their repository; empty: of any.

    Raises:
        AgentError: a Job cannot run, or failed.
    """
    jobs = tools.jobs
    location = await read_location(jobs.client, jobs.namespace, location_name)
    subject = JobSubject(Owner.of(location), "delete", RepositoryKey("", location_name))
    transfers = sorted(one for where, one in plan.transfers if where == location_name)
    found: list[DeletedSnapshot] = []
    unread: dict[str, str] = {}
    for first in range(0, len(transfers), _AT_ONCE):
        options = [f"--transfer={one}" for one in transfers[first : first + _AT_ONCE]]
        options += [f"--cluster={plan.cluster}", *(["--dry-run"] if dry_run else [])]
        run, expose = await plan_job(jobs, subject, location)
        answer = await run_job(jobs, build_deletion_job(run, expose, options), "deletion", _JOB_TIMEOUT)
        totals = parse_result(SnapshotDeletion, answer.message)
        for missed in totals.unread:
            key = missed.volume_namespace if totals.unread_count == len(totals.unread) else ""
            unread[key] = f"the repository of namespace {missed.volume_namespace}: {missed.message}"
        lines = DELETED_LINE.find(answer.log)
        if len(lines) < totals.deleted + totals.kept:
            unread[""] = f"the log of the pod has only {len(lines)} of {totals.deleted + totals.kept} snapshots"
        found += lines
    return found, unread

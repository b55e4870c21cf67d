"""A deletion in the cluster: the Lease that allows one at a time, its record, and the Jobs for one location.

Without the Lease, two commands would each take what the other one deletes for the copy that stays. The record, a
ConfigMap, has the transfers of each backup until their snapshots are gone. It is written before the first transfer is
deleted: nothing else would tell a snapshot whose deletion was interrupted from one whose custom resource was lost, and
which may be the only copy of a volume. It also has what went within a day, which limits what may go next, and the
report of the last run.
"""

import asyncio
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from operator import attrgetter
from typing import Final, NamedTuple

import msgspec
from msgspec import structs

from client.backups.copies import Copy, build_copy, build_unreadable_copy
from client.backups.retention import WINDOW, DeletionError, GoneCopy
from client.collections.collection import Backups, Restores
from client.install.options import build_object
from client.mover_jobs import JobAnswer, JobTimeoutError, end_jobs, find_subject, plan_job, run_job
from client.session import Session
from core.clock import Clock, Deadline
from core.contract import parse_result
from core.errors import AgentError, ContractError, Translated
from core.kube.client import KubeClient, Selection
from core.kube.errors import AlreadyExistsError, ConflictError, ForbiddenError, NotFoundError
from core.kube.resources import BACKUP_STORAGE_LOCATIONS, CONFIG_MAPS, JOBS, LEASES, Resource
from core.kube.types import Job, LeaseSpec, Manifest, Object
from core.models.backups import REPORT_KEY, RetentionReport, read_report
from core.models.names import DELETIONS_CONFIGMAP, DELETIONS_LEASE, SNAPSHOT_DELETION_LABEL
from core.models.storage import BackupStorageLocation, BackupStorageLocationSpec
from core.models.units import format_duration
from core.mover_specs import DeleteSnapshots
from core.snapshot_contract import (
    CHECKED_LINE,
    DELETED_LINE,
    CopyToCheck,
    DeletedSnapshot,
    SnapshotDeletion,
    TransferToDelete,
)
from nodeagent.runtime.lease import Lease

HISTORY_KEY: Final = "_history"
"""The key of what was deleted lately; no entry's key begins with an underscore."""

_MOST_HISTORY: Final = 10_000
"""Copies that went by their backup's name, of some 50 bytes: more than go so within a day."""

_RULES_KEY: Final = "_rules"
_RULES: Final = "Versions with other rules of retention cannot read this, and delete nothing."
"""A schedule keeps its image, and so its rules, until it is renewed: this keeps older ones from deleting."""

Located = tuple[str, TransferToDelete]
"""The name of a BackupStorageLocation, and a transfer with snapshots in it."""

_Seconds = int
"""Since the epoch; 0 stands for a time that is not known."""

_Entry = dict[str, dict[str, tuple[str, _Seconds]]]
"""By the BackupStorageLocation, and by the transfer as `TransferToDelete` writes it: the name of the PVC, and when the
copy was completed."""

_History = dict[str, dict[str, dict[str, list[tuple[_Seconds, _Seconds]]]]]
"""By the location, the namespace and the name of the PVC: when copies went, and when they were completed."""


def build_record(namespace: str) -> Manifest:
    """Return the ConfigMap without an entry; applying it again keeps what there is."""
    return build_object("v1", CONFIG_MAPS.kind, DELETIONS_CONFIGMAP, namespace) | {"data": {_RULES_KEY: _RULES}}


def build_lease(namespace: str) -> Manifest:
    """Return the Lease of deletions without a holder: without `spec`, so that applying it again keeps what there is."""
    return build_object(LEASES.api_version, LEASES.kind, DELETIONS_LEASE, namespace)


class _Detail(NamedTuple):
    """What the limit of deletions needs of a recorded copy; one that was never completed has no time, and no limit."""

    claim: str = ""
    completed: datetime | None = None


def locate(copy: Copy) -> Located:
    """Return where the snapshots of the copy are."""
    return copy.location, TransferToDelete(copy.namespace, copy.backup, copy.uid)


@dataclass
class DeletionRecord:
    """The record in a namespace; `entries` are as read and written by this process, by backup.

    One command writes at a time: that which holds the Lease of deletions.
    """

    client: KubeClient
    namespace: str
    entries: dict[str, dict[Located, _Detail]] = field(default_factory=dict)
    history: list[GoneCopy] = field(default_factory=list)
    report: RetentionReport | None = None

    async def read(self) -> None:
        """Read it, if it exists; ContractError: an entry is invalid: only these commands should write it."""
        stored = await self.client.read(CONFIG_MAPS, self.namespace, DELETIONS_CONFIGMAP)
        data = (stored.get("data") or {}) if stored else {}
        self.report, self.history, self.entries = read_report(data), [], {}
        for name, text in data.items():
            try:
                if name == HISTORY_KEY:
                    self.history = _parse_history(text)
                elif name not in {REPORT_KEY, _RULES_KEY}:
                    self.entries[name] = _parse(text)
            except (ValueError, OverflowError) as e:
                place = f"ConfigMap {self.namespace}/{DELETIONS_CONFIGMAP}"
                raise ContractError(f"{place}: invalid entry {name}: {e}") from e

    @property
    def recorded(self) -> frozenset[Located]:
        """All transfers in it."""
        return frozenset(one for entry in self.entries.values() for one in entry)

    def find_gone(self, existing: Collection[str], now: datetime) -> list[GoneCopy]:
        """Return what went lately, with what is being deleted: recorded transfers that do not exist any more."""
        return [*self.history, *self._list(now, lambda one: one.uid not in existing)]

    def _list(self, at: datetime, has_gone: Callable[[TransferToDelete], bool]) -> list[GoneCopy]:
        """Return the recorded copies that have gone, as of `at`."""
        return [
            GoneCopy((one.volume_namespace, detail.claim), location, at, detail.completed)
            for entry in self.entries.values()
            for (location, one), detail in entry.items()
            if has_gone(one) and detail.completed is not None
        ]

    async def add(self, copies: Iterable[Copy]) -> None:
        """Note, in one request, that the snapshots of these transfers are to be deleted."""
        changed: dict[str, dict[Located, _Detail]] = {}
        for one in copies:
            entry = changed.setdefault(one.backup, dict(self.entries.get(one.backup, {})))
            entry[locate(one)] = _Detail(one.claim, one.completed if one.has_data else None)
        await self._write({backup: _format(entry) for backup, entry in changed.items()})
        self.entries |= changed

    async def drop(
        self, transfers: Collection[TransferToDelete], gone_at: datetime | None = None, *, proved: bool = False
    ) -> None:
        """Note that nothing is to be deleted any more of these transfers.

        `gone_at`: since they went then, with their snapshots; `proved`: by witnesses, not by one clock alone.
        """
        left = {
            backup: {where: detail for where, detail in entry.items() if where[1] not in transfers}
            for backup, entry in self.entries.items()
        }
        changes = {
            name: _format(entry) if entry else None for name, entry in left.items() if entry != self.entries[name]
        }
        history = self.history
        if gone_at is not None:
            history = [*history, *self._list(gone_at, lambda one: one in transfers)]
            if proved:
                # What a wrong clock has noted in the future went before now.
                history = [one._replace(at=min(one.at, gone_at)) for one in history if one.at > gone_at - WINDOW]
            else:
                # Where nothing goes by age, it would grow until the ConfigMap is full.
                history = sorted(history, key=attrgetter("at"))[-_MOST_HISTORY:]
            changes[HISTORY_KEY] = _format_history(history)
        if changes:
            await self._write(changes)
        self.entries = {name: entry for name, entry in left.items() if entry}
        self.history = history

    async def write_report(self, report: RetentionReport) -> None:
        """Keep the report of a run, for `nodeagent status` and the leader."""
        await self._write({REPORT_KEY: report.to_json()})

    async def forget(self, backup: str) -> None:
        """Take a backup that a person has deleted out of the last report."""
        if self.report is not None:
            held = [one for one in self.report.held if one.backup != backup]
            if gone := len(self.report.held) - len(held):
                await self.write_report(
                    structs.replace(self.report, held=held, held_count=self.report.held_count - gone)
                )

    async def _write(self, data: Mapping[str, str | None]) -> None:
        try:
            await self.client.patch(CONFIG_MAPS, self.namespace, DELETIONS_CONFIGMAP, {"data": data})
        except NotFoundError:
            record = build_record(self.namespace)
            kept = {key: text for key, text in data.items() if text is not None}
            try:
                await self.client.create(CONFIG_MAPS, record | {"data": record["data"] | kept})
            except AlreadyExistsError:
                await self.client.patch(CONFIG_MAPS, self.namespace, DELETIONS_CONFIGMAP, {"data": data})


def _to_seconds(moment: datetime | None) -> _Seconds:
    return int(moment.timestamp()) if moment is not None else 0


def _format(entry: Mapping[Located, _Detail]) -> str:
    found: _Entry = {}
    for (location, one), detail in sorted(entry.items()):
        found.setdefault(location, {})[str(one)] = (detail.claim, _to_seconds(detail.completed))
    return msgspec.json.encode(found).decode()


def _parse(text: str) -> dict[Located, _Detail]:
    found: dict[Located, _Detail] = {}
    for location, entry in msgspec.json.decode(text, type=_Entry).items():
        for one, (claim, seconds) in entry.items():
            completed = datetime.fromtimestamp(seconds, UTC) if seconds else None
            found[location, TransferToDelete.parse(one)] = _Detail(claim, completed)
    return found


def _format_history(history: Iterable[GoneCopy]) -> str:
    found: _History = {}
    for one in history:
        namespace, claim = one.volume
        times = found.setdefault(one.location, {}).setdefault(namespace, {}).setdefault(claim, [])
        times.append((_to_seconds(one.at), _to_seconds(one.completed)))
    return msgspec.json.encode(found).decode()


def _parse_history(text: str) -> list[GoneCopy]:
    return [
        GoneCopy((namespace, claim), location, datetime.fromtimestamp(at, UTC), datetime.fromtimestamp(completed, UTC))
        for location, namespaces in msgspec.json.decode(text, type=_History).items()
        for namespace, claims in namespaces.items()
        for claim, times in claims.items()
        for at, completed in times
    ]


_TIMEOUT: Final = timedelta(hours=1)

_AT_ONCE: Final = 1000
"""Transfers of one Job: some 100 KiB of its command line."""


@dataclass
class LocationJobs:
    """The Jobs of one location, and what they found. `cluster` is the cluster in the tags of its snapshots.

    `unread` has why some snapshots were not looked for, by the namespace of their repository; None: of any. `faults`
    are of the copies that were checked, `ended` is the time by the clock of the last pod. `spec` is the location's,
    before the first Job.
    """

    tools: Session
    location: str
    cluster: str
    found: list[DeletedSnapshot] = field(default_factory=list)
    unread: dict[str | None, str] = field(default_factory=dict)
    faults: dict[CopyToCheck, str | None] = field(default_factory=dict)
    ended: datetime | None = None
    spec: BackupStorageLocationSpec | None = None

    async def run(self, transfers: Iterable[Located], checks: Mapping[str, CopyToCheck] | None) -> None:
        """Run them for the transfers that are in the location.

        Args:
            transfers: those whose snapshots are to be found.
            checks: only to check, also these copies, by the UIDs of the transfers that need them; None: to delete.

        Raises:
            AgentError: a Job cannot run, failed, or has not all results in its log.
        """
        tools = self.tools
        subject = await find_subject(tools, "delete", self.location)
        self.spec = subject.location.spec
        here = sorted(one for where, one in transfers if where == self.location)
        for first in range(0, len(here), _AT_ONCE):
            some = here[first : first + _AT_ONCE]
            needed = {checks[one.uid] for one in some if one.uid in checks} if checks is not None else set()
            spec = DeleteSnapshots(
                transfer=tuple(map(str, some)),
                check=tuple(map(str, sorted(needed))),
                cluster=self.cluster,
                dry_run=checks is not None,
            )
            manifest = await plan_job(tools, subject, spec)
            self._read(await run_job(tools, manifest, "deletion", _TIMEOUT))

    def _read(self, answer: JobAnswer) -> None:
        totals = parse_result(SnapshotDeletion, answer.message)
        for missed in totals.unread:
            key = missed.volume_namespace if totals.unread_count == len(totals.unread) else None
            self.unread[key] = f"the repository of namespace {missed.volume_namespace}: {missed.message}"
        self.found += answer.find(DELETED_LINE)
        checked = answer.find(CHECKED_LINE)
        self.faults |= {CopyToCheck(one.volume_namespace, one.snapshot_id): one.fault for one in checked}
        self.ended = totals.now


async def read_copies(client: KubeClient, namespace: str) -> AsyncIterator[Copy]:
    """Yield the volumes of all backups of ours; one that cannot be read holds its backup, and is no copy of a volume.

    Raises:
        DeletionError: a transfer is no object at all: it may be of any backup.
    """
    for resource, model in Backups.models.items():
        async for raw in _read_all(client, resource, namespace):
            try:
                copy = build_copy(model.parse(raw))
            except ContractError as e:
                copy = build_unreadable_copy(resource.kind, raw, str(e))
            if copy is not None:
                yield copy


async def read_restoring(client: KubeClient, namespace: str) -> AsyncIterator[tuple[str, str]]:
    """Yield the snapshots that restores name which have not ended, and the restores.

    Raises:
        DeletionError: a restore is no object at all.
        ContractError: one is invalid: it may name any snapshot.
    """
    for resource, model in Restores.models.items():
        async for raw in _read_all(client, resource, namespace):
            restore = model.parse(raw)
            if not restore.phase.final:
                yield restore.spec.snapshot_id, f"{restore.kind_name} {restore.name}"


async def read_locations(
    client: KubeClient, namespace: str, checked: Mapping[str, BackupStorageLocationSpec]
) -> dict[str, str | None]:
    """Return why nothing may be deleted in each location that exists, by its name; None: something may.

    `checked` has the locations as they were when their snapshots were looked for.
    """
    found: dict[str, str | None] = {}
    for raw in await client.list(Selection(BACKUP_STORAGE_LOCATIONS, namespace)):
        name = raw["metadata"]["name"]
        why = None
        try:
            location = BackupStorageLocation.parse(raw)
        except ContractError as e:
            why = f"cannot be read: {e}"
        else:
            if not location.available:
                why = f"is {location.status.phase}"
            elif location.read_only:
                why = "is read-only"
            elif checked.get(name, location.spec) != location.spec:
                why = "has changed since its snapshots were checked"
        found[name] = f"{BACKUP_STORAGE_LOCATIONS.kind} {namespace}/{name} {why}" if why else None
    return found


async def _read_all(client: KubeClient, resource: Resource, namespace: str) -> AsyncIterator[Object]:
    async for page in client.pages(Selection(resource, namespace)):
        if page.malformed:
            raise DeletionError(f"a {resource.kind} in namespace {namespace} is malformed: nothing is deleted")
        for raw in page.items:
            yield raw


_DURATION: Final = timedelta(seconds=60)
"""What a command that was killed keeps others waiting."""

_LONGEST_SLEEP: Final = timedelta(seconds=15)
"""Of a machine that holds the Lease: less than is left once it must have been renewed."""

_LONGEST_WAIT: Final = timedelta(hours=2)
"""For another command: longer than a Job of its may take."""

_ENDED_WITHIN: Final = timedelta(minutes=5)
_POLL_SECONDS: Final = 2.0


@dataclass
class DeletionGuard:
    """The Lease while it is held."""

    lease: Lease
    clock: Clock

    def __post_init__(self) -> None:
        self._ahead_seconds = self._read_ahead()

    def _read_ahead(self) -> float:
        """Return how far the wall clock is ahead of the monotonic one, which stands still while the machine sleeps."""
        return self.clock.now().timestamp() - self.clock.monotonic()

    def check(self) -> None:
        """Check, before each request that deletes, the last renewal; DeletionError: another command may delete now."""
        # A clock that was set hides how long it slept.
        slept_seconds = abs(self._read_ahead() - self._ahead_seconds)
        if not self.lease.may_write or slept_seconds > _LONGEST_SLEEP.total_seconds():
            raise DeletionError(f"Lease {DELETIONS_LEASE} was lost, another command may delete: repeat the command")

    async def confirm(self) -> None:
        """Renew the Lease; called before each part; DeletionError: another command may delete now."""
        ahead_seconds = self._read_ahead()
        with Translated((AgentError, TimeoutError), DeletionError, f"Lease {DELETIONS_LEASE} cannot be renewed"):
            renewed = await self.lease.renew()
        if not renewed:
            raise DeletionError(f"Lease {DELETIONS_LEASE} was lost, another command deletes: repeat the command")
        self._ahead_seconds = ahead_seconds


@asynccontextmanager
async def hold_deletions(tools: Session) -> AsyncIterator[DeletionGuard]:
    """Wait for the Lease, end what is left of its last holder, and hold it in the block.

    Raises:
        DeletionError: the user may not hold it, or another command did not end in time.
    """
    identity = f"{socket.gethostname()}-{secrets.token_hex(4)}"
    lease = Lease(tools.client, tools.clock, (tools.namespace, DELETIONS_LEASE), identity=identity, duration=_DURATION)
    await _acquire(tools, lease)
    renewing = asyncio.create_task(lease.renew_until_lost(), name="renewal of the Lease of deletions")
    try:
        await _end_jobs(tools)
        yield DeletionGuard(lease, tools.clock)
    finally:
        renewing.cancel()
        await asyncio.gather(renewing, return_exceptions=True)
        await lease.release()


async def _acquire(tools: Session, lease: Lease) -> None:
    clock, deadline, client = tools.clock, Deadline.after(tools.clock, _LONGEST_WAIT), tools.client.patiently()
    last_holder, seen, since_seconds = "", "", clock.monotonic()
    while True:
        try:
            observed = await client.read(LEASES, tools.namespace, DELETIONS_LEASE)
            spec: LeaseSpec = (observed.get("spec") or {}) if observed else {}
            holder = spec.get("holderIdentity", "")
            version = observed["metadata"]["resourceVersion"] if observed else ""
            promised_seconds = min(float(spec.get("leaseDurationSeconds") or 0), _DURATION.total_seconds())
            if not holder or (version == seen and clock.monotonic() >= since_seconds + promised_seconds):
                await lease.acquire(observed)
                return
        except ForbiddenError as e:
            raise DeletionError(
                f"nothing is deleted, since one command may delete at a time, and knows it by a Lease: {e}; nodeagent "
                "schedule renew, or applying its files again, gives a schedule this permission"
            ) from e
        except ConflictError:
            continue
        except TimeoutError as e:
            raise DeletionError(f"nothing is deleted: Lease {DELETIONS_LEASE} cannot be acquired in time") from e
        if version != seen:
            seen, since_seconds = version, clock.monotonic()
        if holder != last_holder:
            last_holder, deadline = holder, Deadline.after(clock, _LONGEST_WAIT)
            tools.on_progress(f"waiting for another command that deletes backups: {holder}")
        if deadline.expired:
            raise DeletionError(
                f"nothing is deleted: {holder} has deleted backups for {format_duration(_LONGEST_WAIT)}"
            )
        await clock.sleep(_POLL_SECONDS)


async def _end_jobs(tools: Session) -> None:
    """End the Jobs that delete snapshots: their commands do not hold the Lease any more."""
    found = await tools.client.list(Selection(JOBS, tools.namespace, label_selector=SNAPSHOT_DELETION_LABEL))
    with Translated(JobTimeoutError, DeletionError, "nothing is deleted"):
        await end_jobs(tools, [one for one in found if not _only_checks(one)], _ENDED_WITHIN)


def _only_checks(job: Job) -> bool:
    return any("--dry-run" in (one.get("args") or []) for one in job["spec"]["template"]["spec"]["containers"])

"""The backups of each PVC, how often there are to be some, what retention has reported, and their history."""

import asyncio
import base64
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from itertools import groupby
from typing import Any, Final, TypeVar

import msgspec

from core.aio import run_for_many
from core.clock import Backoff
from core.errors import AgentError, ContractError
from core.kube.client import KubeClient, Selection
from core.kube.errors import ForbiddenError, KubeError, NotFoundError
from core.kube.resources import CONFIG_MAPS, CRON_JOBS, PERSISTENT_VOLUME_CLAIMS, SCHEDULES
from core.kube.types import UncheckedObject
from core.logs import fields
from core.models import names
from core.models.backups import RetentionReport, read_report
from core.models.base import ObjectMeta, WireModel
from core.models.verification import Verification
from nodeagent.config.windows import parse_interval
from nodeagent.coverage import history
from nodeagent.coverage.read import RunTimes
from nodeagent.coverage.states import is_of_another, parse_annotated
from nodeagent.leader.context import Cluster
from nodeagent.leader.election import NotLeaderError
from nodeagent.leader.index import Entry, VolumeCopy

ClaimKey = tuple[str, str]
"""Namespace and name of a PVC."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How often a PVC is to be backed up, and its backups are to be verified; None: not set."""

    backup: timedelta | None = None
    verification: timedelta | None = None


@dataclass(frozen=True, slots=True)
class Claim:
    """A PVC: when it was created, what its annotations ask for, and its UID; empty: not known."""

    created: datetime
    plan: Plan = field(default_factory=Plan)
    uid: str = ""


@dataclass(frozen=True)
class Plans:
    """The PVCs of the cluster as read at `read_at`, and the plans of Schedules and CronJobs by name.

    `claims` is None where the PVCs are not known. Times are by the API server's clock. `report` is the last one of
    retention, None if there is none; `cron_jobs` are the schedules of `nodeagent schedule` as JSON dicts.
    `verification` is how often the leader verifies all backups, None: it does not.
    """

    read_at: datetime
    claims: Mapping[ClaimKey, Claim] | None = None
    schedules: Mapping[str, Plan] = field(default_factory=dict)
    report: RetentionReport | None = None
    cron_jobs: Sequence[UncheckedObject] = ()
    verification: timedelta | None = None


@dataclass(frozen=True, slots=True)
class VolumeState:
    """What is known of the backups of one PVC; times in seconds since 1970, None and 0 where something is not known.

    `backup_at` is the creation of the newest completed backup, `bytes` the size of its files. `backup_interval` is how
    often there is to be one, in seconds, and `backup_due_at` when the next one is due. `verified_at` is the end of the
    last verification of any of the backups, and `verified_ok` what it found. `shrunk`: the newest completed backup is
    Shrunk, and was not acknowledged; None: not so. `day_new_bytes` and `day_seconds` are what the backups that
    were completed within a day had new, and how long they took together.
    """

    namespace: str
    claim: str
    backup_at: float | None = None
    bytes: int | None = None
    day_new_bytes: int | None = None
    day_seconds: float | None = None
    shrunk: bool | None = None
    backup_interval: float | None = None
    backup_due_at: float | None = None
    verified_at: float | None = None
    verified_ok: bool | None = None
    verification_interval: float | None = None
    verification_due_at: float | None = None


@dataclass(slots=True)
class Remembered:
    """What outlives the transfers of a PVC, which expire with their backups."""

    began: datetime | None = None
    verification: Verification | None = None

    def add(self, copy: VolumeCopy) -> None:
        """Take over what this complete backup adds."""
        self.began = min(self.began or copy.created, copy.created)
        last, found = self.verification, copy.verification
        # Of several copies that were verified at once, a damaged one counts.
        if found is not None and (last is None or found.rank >= last.rank):
            self.verification = found


@dataclass(slots=True)
class _Found:
    """Of the backups of one PVC: the newest complete one, the first and last of all, their Schedules, sums of a day."""

    first: datetime
    last: datetime
    newest: VolumeCopy | None = None
    schedules: set[str] = field(default_factory=set)
    day_new_bytes: int | None = None
    day_seconds: float | None = None

    def add(self, copy: VolumeCopy, day_began: datetime) -> None:
        self.first, self.last = min(self.first, copy.created), max(self.last, copy.created)
        if copy.complete and copy.completed is not None and copy.completed > day_began:
            self.day_seconds = (self.day_seconds or 0.0) + max(0.0, copy.seconds)
            if copy.new_bytes is not None:
                self.day_new_bytes = (self.day_new_bytes or 0) + copy.new_bytes
        if copy.complete and (self.newest is None or copy.created >= self.newest.created):
            self.newest = copy
        if copy.schedule is not None:
            self.schedules.add(copy.schedule)


def build_states(
    entries: Iterable[Entry], plans: Plans, memory: dict[ClaimKey, Remembered] | None = None
) -> list[VolumeState]:
    """Return the state of each PVC that has a completed backup or is to have one, unless it is known to be deleted.

    The shortest interval of the Schedules and CronJobs that created its backups counts first, also if none of these
    completed, then the PVC's. The period in which the leader verifies all backups counts if it is shorter.
    `memory` is what earlier calls have left, and is brought up to date. A day has passed when the plans were read.
    """
    memory = {} if memory is None else memory
    day_began = plans.read_at - timedelta(days=1)
    claims = plans.claims or {}
    found: dict[ClaimKey, _Found] = {}
    for key in [key for key, one in memory.items() if key in claims and one.began and one.began < claims[key].created]:
        # It is of a deleted PVC of the same name, as the copies below.
        del memory[key]
    for entry in entries:
        if (copy := entry.copy) is not None and copy.claim and entry.managed:
            key = (entry.queue, copy.claim)
            if (claim := claims.get(key)) is not None and (
                copy.created < claim.created or is_of_another(copy.claim_uid, claim.uid)
            ):
                # It only says which schedule is to back this one up.
                copy = replace(copy, complete=False)
            found.setdefault(key, _Found(copy.created, copy.created)).add(copy, day_began)
            if copy.complete:
                memory.setdefault(key, Remembered()).add(copy)
    kept = {
        key: backups
        for key, backups in found.items()
        # A PVC that is younger than the list is not in it.
        if plans.claims is None or key in claims or backups.last >= plans.read_at
    }
    planned = [key for key, claim in claims.items() if claim.plan.backup and key not in kept]
    for key in memory.keys() - kept.keys() - claims.keys():
        del memory[key]
    states = (_build_state(key, kept.get(key), memory.get(key, Remembered()), plans) for key in (*kept, *planned))
    return [state for state in states if state.backup_at is not None or state.backup_interval is not None]


def _build_state(key: ClaimKey, found: _Found | None, remembered: Remembered, plans: Plans) -> VolumeState:
    claim = (plans.claims or {}).get(key)
    asked = claim.plan if claim is not None else Plan()
    newest, schedules = (found.newest, found.schedules) if found is not None else (None, set[str]())
    planned = [plans.schedules[name] for name in schedules if name in plans.schedules]
    backup = _shortest(plan.backup for plan in planned) or asked.backup
    verification = _shortest(plan.verification for plan in planned) or asked.verification
    verification = _shortest((verification, plans.verification))
    # Until there is a complete backup, the first one is due one interval after the PVC was created; if that is not
    # known, after the first attempt.
    created = claim.created if claim is not None else found.first if found is not None else None
    last = remembered.verification
    # Until there is a verification, the first one is due one interval after the first backup.
    verified_at = last.at if last is not None else None
    return VolumeState(
        *key,
        backup_at=newest.created.timestamp() if newest is not None else None,
        bytes=newest.bytes if newest is not None else None,
        day_new_bytes=found.day_new_bytes if found is not None else None,
        day_seconds=found.day_seconds if found is not None else None,
        shrunk=True if newest is not None and newest.shrunk else None,
        backup_interval=_interval(backup),
        backup_due_at=_due(newest.created if newest is not None else created, backup),
        verified_at=verified_at.timestamp() if verified_at is not None else None,
        verified_ok=last.passed if last is not None else None,
        verification_interval=_interval(verification) if remembered.began else None,
        verification_due_at=_due(verified_at or remembered.began, verification),
    )


def _shortest(intervals: Iterable[timedelta | None]) -> timedelta | None:
    return min(filter(None, intervals), default=None)


def _interval(interval: timedelta | None) -> float | None:
    return interval.total_seconds() if interval else None


def _due(last: datetime | None, interval: timedelta | None) -> float | None:
    return last.timestamp() + interval.total_seconds() if last is not None and interval else None


_log = logging.getLogger(__name__)

_T = TypeVar("_T")

_INTERVALS: Final = (names.BACKUP_INTERVAL_ANNOTATION, names.VERIFICATION_INTERVAL_ANNOTATION)


class _Planned(WireModel):
    """A PVC, Schedule or CronJob."""

    metadata: ObjectMeta
    spec: RunTimes = msgspec.field(default_factory=RunTimes)

    @property
    def annotated(self) -> Plan:
        """What its annotations ask for; an invalid interval counts as absent."""
        texts = (self.metadata.annotations.get(key, "") for key in _INTERVALS)
        return Plan(*map(parse_annotated, texts))


class PlanReader:
    """Reads how often there are to be backups."""

    def __init__(self, client: KubeClient, namespace: str, now: Callable[[], datetime]) -> None:
        self._client = client
        self._namespace = namespace
        self._now = now
        self._intervals: dict[tuple[str, str], timedelta | None] = {}
        self._claims: Mapping[ClaimKey, Claim] | None = None
        self._cron_jobs: list[UncheckedObject] | None = None
        self._schedules: Mapping[str, Plan] | None = None
        self._report: RetentionReport | None = None

    async def read(self) -> Plans:
        """Return the plans; those that may not be read are left out, others that cannot be are as last read."""
        read_at = self._now()
        cron_jobs_of_ours = Selection(CRON_JOBS, self._namespace, label_selector=names.SCHEDULE_LABEL)
        self._claims = await _attempt(self._read_claims(), self._claims)
        self._cron_jobs = await _attempt(self._client.list(cron_jobs_of_ours), self._cron_jobs)
        self._schedules = await _attempt(self._read_schedules(), self._schedules)
        self._report = await _attempt(self._read_report(), self._report)
        cron_jobs = self._cron_jobs or ()
        running = (one for one in _parse_all(cron_jobs) if not one.spec.suspend)
        labeled = {one.metadata.labels.get(names.SCHEDULE_LABEL, ""): self._plan_of(one) for one in running}
        return Plans(read_at, self._claims, {**(self._schedules or {}), **labeled}, self._report, cron_jobs)

    async def _read_claims(self) -> Mapping[ClaimKey, Claim]:
        claims = {}
        async for page in self._client.pages(Selection(PERSISTENT_VOLUME_CLAIMS)):
            for one in _parse_all({"metadata": raw["metadata"]} for raw in page.items):
                meta = one.metadata
                if meta.creation_timestamp is not None:
                    claims[meta.namespace, meta.name] = Claim(meta.creation_timestamp, one.annotated, meta.uid)
        return claims

    async def _read_schedules(self) -> Mapping[str, Plan]:
        listed = _parse_all(await self._client.list(Selection(SCHEDULES, self._namespace)))
        return {one.metadata.name: self._plan_of(one) for one in listed if not one.spec.paused}

    async def _read_report(self) -> RetentionReport | None:
        stored = await self._client.get(CONFIG_MAPS, self._namespace, names.DELETIONS_CONFIGMAP)
        return read_report(stored.get("data"))

    def _plan_of(self, one: _Planned) -> Plan:
        """Return the plan of a Schedule or CronJob, whose times are computed once."""
        key = (one.spec.schedule, one.spec.time_zone)
        if key not in self._intervals:
            try:
                self._intervals[key] = parse_interval(*key, self._now())
            except ValueError as e:
                self._intervals[key] = None
                extra = fields(name=one.metadata.name)
                _log.warning("schedule cannot be read, the metrics have no interval for it: %s", e, extra=extra)
        return Plan(self._intervals[key], one.annotated.verification)


async def _attempt(read: Awaitable[_T], last: _T | None) -> _T | None:
    """Return what `read` returns; None without the permission or the resource, `last` after any other error."""
    try:
        return await read
    except (ForbiddenError, NotFoundError) as e:
        _log.debug("not read for the metrics of volumes: %s", e)
        return None
    except KubeError as e:
        _log.info("cannot read for the metrics of volumes, will retry: %s", e)
        return last


def _parse_all(objects: Iterable[Mapping[str, Any]]) -> Iterator[_Planned]:
    """Yield the models of `objects`, without those that do not have the form of their kind."""
    for raw in objects:
        try:
            yield _Planned.from_wire(raw)
        except ContractError as e:
            _log.debug("object left out of the metrics of volumes: %s", e)


_PAUSE_SECONDS: Final = 60.0
"""Between two writes: each writes all volumes of a month."""

_RETRY: Final = Backoff(_PAUSE_SECONDS, 3600.0)

_MOST_PENDING: Final = 100_000
"""Backups that wait to be added, which is for long without the permission to write."""


class HistoryKeeper:
    """Adds each complete backup to the history once."""

    def __init__(self, cluster: Cluster, namespace: str, *, entries: Callable[[], Sequence[Entry]]) -> None:
        """Write ConfigMaps in `namespace`; `entries` returns all transfers, and is called once."""
        self._cluster = cluster
        self._namespace = namespace
        self._entries = entries
        self._ended: dict[str, history.EndedBackup] = {}
        self._added: dict[str, int] = {}
        self._changed = asyncio.Event()

    def observe(self, entry: Entry) -> None:
        """Add the changed `entry` soon, if it is a complete backup; also one that was deleted before."""
        backup = _backup_of(entry)
        # An older one was there when this leader began.
        if backup is None or backup.day < self._today() - 1 or backup.uid in self._added:
            return
        if len(self._ended) >= _MOST_PENDING:
            return
        self._ended[backup.uid] = backup
        self._changed.set()

    async def run(self) -> None:
        """Keep the history until canceled; NotLeaderError: this agent is not the leader any more."""
        self._ended |= {one.uid: one for entry in self._entries() if (one := _backup_of(entry)) is not None}
        failures = 0
        while True:
            self._changed.clear()
            try:
                await self._write()
            except NotLeaderError:
                raise
            except AgentError as e:
                failures += 1
                log = _log.warning if failures == 1 else _log.debug
                log("cannot write the history of backups, will retry: %s", e)
                await self._cluster.clock.sleep(_RETRY.seconds_after(failures))
                continue
            failures = 0
            await self._changed.wait()
            await self._cluster.clock.sleep(_PAUSE_SECONDS)

    def _today(self) -> int:
        return self._cluster.now().toordinal()

    async def _write(self) -> None:
        """Add what has ended; what could not be added is added later."""
        today, ended = self._today(), dict(self._ended)
        shown = [one for one in ended.values() if one.day > today - history.HISTORY_DAYS]
        shown.sort(key=lambda one: one.completed)
        for block, members in groupby(shown, key=lambda one: history.block_of(one.day)):
            await self._add(block, list(members), today)
        self._ended = {uid: one for uid, one in self._ended.items() if uid not in ended}
        added = self._added | {uid: one.day for uid, one in ended.items()}
        self._added = {uid: day for uid, day in added.items() if day >= today - 1}

    async def _add(self, block: int, backups: Sequence[history.EndedBackup], today: int) -> None:
        client, name = self._cluster.client, history.name_of_block(block)
        stored = await client.read(CONFIG_MAPS, self._namespace, name)
        before = history.content_of(stored)
        number = max(len(backups), history.count_volumes(before or b""))
        after = await run_for_many(number, history.merge_history, before, block, backups, today)
        if after is None:
            return
        change = {"binaryData": {history.HISTORY_KEY: base64.b64encode(after).decode()}}
        self._cluster.check_leading()
        if stored is not None:
            await client.patch_if_unchanged(CONFIG_MAPS, stored, change)
            return
        meta = {"name": name, "namespace": self._namespace}
        await client.create(CONFIG_MAPS, CONFIG_MAPS.build(meta, **change))


def _backup_of(entry: Entry) -> history.EndedBackup | None:
    """Return the backup that a transfer was; None: it is none, or is not complete."""
    copy = entry.copy
    if copy is None or not copy.complete or copy.completed is None or not entry.managed:
        return None
    return history.EndedBackup(
        entry.uid, entry.queue, copy.claim or "", copy.completed, copy.bytes, copy.new_bytes, max(0.0, copy.seconds)
    )

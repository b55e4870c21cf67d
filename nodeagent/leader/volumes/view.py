"""Shows the backups of volumes, how many are in each state, and what retention keeps, in the leader's metrics."""

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from operator import attrgetter
from typing import Final

from core.aio import run_for_many, wait_for_event
from core.kube.client import KubeClient, Selection
from core.kube.errors import ForbiddenError, KubeError
from core.kube.resources import BACKUP_STORAGE_LOCATIONS
from core.models.backups import HeldBackup, RetentionReport, deletes_by_old_rules
from core.models.base import format_time
from core.models.names import ALERT_NOT_PROTECTED_LABEL
from core.models.phases import Phase
from nodeagent import metrics as metric
from nodeagent.config.own_keys import OwnKeys
from nodeagent.coverage.read import ObservedVolumes, TooManyObjectsError, VolumeReader
from nodeagent.coverage.states import CompletedBackup, Coverage, VolumePlan, build_coverage
from nodeagent.leader.context import Cluster, DispatchRules
from nodeagent.leader.index import Entry
from nodeagent.leader.volumes.states import ClaimKey, PlanReader, Plans, Remembered, VolumeState, build_states
from nodeagent.metrics import Metrics

_Series = Mapping[tuple[str, ...], float]

_log = logging.getLogger(__name__)

_MOST_OBJECTS: Final = 20_000
"""Of each kind that are read: while they are, they take some 100 MiB."""

_MOST_NAMESPACES: Final = 500
"""With series of their own, at most seven for each."""

_MOST_FAILURES: Final = 6
"""Reads in a row, five minutes apart, for which the plans of the last good one stay."""

_MOST_NOTES: Final = 10
"""In one line of the log."""


@dataclass(frozen=True)
class PlannedCoverage:
    """The PVCs with the backups that are expected of them, None if they are not known; and whose names are shown.

    `locations` are the names of storage locations at `read_at`; None: they are not known.
    """

    plans: tuple[VolumePlan, ...] | None = None
    alerting: frozenset[str] = field(default_factory=frozenset)
    locations: frozenset[str] | None = None
    read_at: datetime | None = None


class CoverageReader:
    """Reads what is expected of the PVCs; what it has read of the cluster is not kept."""

    def __init__(self, client: KubeClient, namespace: str, now: Callable[[], datetime]) -> None:
        self._client = client
        self._now = now
        self._places = Selection(BACKUP_STORAGE_LOCATIONS, namespace)
        self._volumes = VolumeReader(client, namespace, now, most=_MOST_OBJECTS)
        self._last = PlannedCoverage()
        self._failures = 0
        self._said: Sequence[str] = ()

    async def read(self, keys: OwnKeys) -> PlannedCoverage:
        """Return what there is now, by the active `keys`; for six reads that fail, what the last good one returned."""
        try:
            read_at, locations = self._now(), await self._read_locations()
            observed = await self._volumes.read()
        except TooManyObjectsError as e:
            self._say(logging.WARNING, "the metrics do not show which volumes are protected", [str(e)])
            self._last = PlannedCoverage()
        except KubeError as e:
            self._say(logging.INFO, "cannot read which volumes are protected, will retry", [str(e)])
            if self._is_given_up(failed=True):
                self._last = PlannedCoverage()
        else:
            self._say(logging.INFO, "cannot read all about which volumes are protected, will retry", observed.notes)
            if self._is_given_up(failed=observed.passing) or not observed.passing or self._last.plans is None:
                number = len(observed.cluster.claims) if observed.cluster else 0
                planned = await run_for_many(number, plan_coverage, observed, keys)
                self._last = replace(planned, locations=locations, read_at=read_at)
        return self._last

    async def _read_locations(self) -> frozenset[str] | None:
        try:
            return frozenset(one["metadata"]["name"] for one in await self._client.list(self._places))
        except ForbiddenError:
            return None

    def _is_given_up(self, *, failed: bool) -> bool:
        """Count a read, and return whether too many in a row have failed."""
        self._failures = self._failures + 1 if failed else 0
        return self._failures > _MOST_FAILURES

    def _say(self, level: int, what: str, notes: Sequence[str]) -> None:
        """Log what is not known, and again only once that has changed."""
        said, self._said = self._said, sorted(notes)
        if self._said and self._said != said:
            _log.log(level, "%s: %s", what, "; ".join(self._said[:_MOST_NOTES]))


def plan_coverage(observed: ObservedVolumes, keys: OwnKeys) -> PlannedCoverage:
    """Return what is expected of the PVCs that were read; a volume of a pod without one has no transfers here."""
    if (cluster := observed.cluster) is None:
        return PlannedCoverage()
    plans = observed.plan(keys.leave_out_namespaces).plans or ()
    labels = {name: one.metadata.labels for name, one in cluster.namespaces.items()}
    named = {name for name, each in labels.items() if each.get(ALERT_NOT_PROTECTED_LABEL) == "true"}
    alerting = {plan.key[0] for plan in plans} if keys.alert_not_protected else named
    return PlannedCoverage(tuple(plan for plan in plans if plan.key in cluster.claims), frozenset(alerting))


async def show_coverage(metrics: Metrics, planned: PlannedCoverage, entries: Sequence[Entry], now: datetime) -> None:
    """Show the states of the PVCs at `now`; nothing where they are not known."""
    number = len(planned.plans or ()) + len(entries)
    states, named = await run_for_many(number, _build_series, planned, entries, now)
    metrics.show(metric.VOLUMES, states)
    metrics.show(metric.VOLUME_NOT_PROTECTED, named)


def _build_series(planned: PlannedCoverage, entries: Sequence[Entry], now: datetime) -> tuple[_Series, _Series]:
    """Return the values of both metrics by labels: how many PVCs are in each state, and those that are named."""
    if planned.plans is None:
        return {}, {}
    copies = (
        CompletedBackup(
            (entry.queue, copy.claim or ""),
            copy.created,
            entry.name,
            complete=copy.complete and not copy.damaged,
            failed=entry.phase is Phase.FAILED or copy.damaged,
            shrunk="" if copy.shrunk else None,
            claim_uid=copy.claim_uid,
            location=entry.location or "",
        )
        for entry in entries
        if (copy := entry.copy) is not None
    )
    locations, read_at = planned.locations, planned.read_at
    if locations is not None and read_at is not None:
        # A location may be younger than the list.
        locations |= {one.location or "" for one in entries if one.copy is not None and one.copy.created >= read_at}
    coverage = build_coverage(planned.plans, copies, now, locations=locations)
    urgent = [one for one in coverage.volumes if one.needs_attention and one.namespace in planned.alerting]
    named: _Series = {(one.namespace, one.volume, str(one.state)): 1 for one in urgent[: metric.MAX_NAMED_VOLUMES]}
    return _count(coverage), named


def _count(coverage: Coverage) -> _Series:
    """Return the numbers by namespace and state; of too many namespaces, those that need attention first."""
    kept = set(list(dict.fromkeys(one.namespace for one in coverage.volumes))[:_MOST_NAMESPACES])
    numbers = Counter((one.namespace, str(one.state)) for one in coverage.volumes if one.namespace in kept)
    return {key: float(number) for key, number in numbers.items()}


_READ_SECONDS: Final = 300.0
"""Between two lists of all PVCs, which take one request and about a megabyte for each 500 of them;"""

_CLAIMS_PER_SECOND: Final = 100
"""longer for more of them, so that 100,000 take less than one request in five seconds."""

_SHOW_SECONDS: Final = 2.0
"""Between two updates while transfers change; longer for more of them,"""

_ENTRIES_PER_SECOND: Final = 5000
"""so that 100,000 take some percent of a core."""


class VolumeView:
    """Keeps the metrics of volumes up to date."""

    def __init__(self, cluster: Cluster, rules: DispatchRules, *, entries: Callable[[], Sequence[Entry]]) -> None:
        self._cluster = cluster
        self._rules = rules
        self._entries = entries
        self._plans = PlanReader(cluster.client, rules.namespace, cluster.now)
        self._coverage = CoverageReader(cluster.client, rules.namespace, cluster.now)
        self._planned = PlannedCoverage()
        self._reported_at: datetime | None = None
        self._changed = asyncio.Event()
        self._memory: dict[ClaimKey, Remembered] = {}
        self._shown: Sequence[VolumeState] = ()

    def observe(self, entry: Entry) -> None:
        """Request an update if the changed `entry` is a backup that has ended."""
        if entry.copy is not None:
            self._changed.set()

    async def run(self) -> None:
        """Show the volumes until canceled; then none, since another agent shows them."""
        try:
            while True:
                keys = self._rules.config().own
                verification = plan.period if (plan := keys.verification_plan) is not None else None
                plans = replace(await self._plans.read(), verification=verification)
                await self._show_retention(plans)
                self._planned = await self._coverage.read(keys)
                due_at = self._cluster.clock.monotonic() + _READ_SECONDS + len(plans.claims or ()) / _CLAIMS_PER_SECOND
                while (left := due_at - self._cluster.clock.monotonic()) > 0:
                    await self._show_changes(plans, left)
        finally:
            show_volumes(self._cluster.metrics, ())
            show_retention(self._cluster.metrics, None, ())
            self._cluster.metrics.show(metric.VOLUMES, {})
            self._cluster.metrics.show(metric.VOLUME_NOT_PROTECTED, {})

    async def _show_retention(self, plans: Plans) -> None:
        """Show the last report of retention; once for each, record an Event about a backlog on its schedule."""
        report = plans.report
        old = [one["metadata"]["name"] for one in plans.cron_jobs if deletes_by_old_rules(one)]
        show_retention(self._cluster.metrics, report, old)
        if report is None or report.backlog is None or report.at == self._reported_at:
            return
        for one in plans.cron_jobs:
            if one["metadata"]["name"] == report.schedule:
                self._reported_at = report.at
                await self._cluster.events.record_warning(one, "RetentionBacklog", report.backlog)

    async def _show_changes(self, plans: Plans, seconds: float) -> None:
        """Show the volumes, then wait for a change or until `seconds` have passed."""
        self._changed.clear()
        entries = self._entries()
        self._shown = show_volumes(self._cluster.metrics, build_states(entries, plans, self._memory), self._shown)
        await show_coverage(self._cluster.metrics, self._planned, entries, self._cluster.now())
        if await wait_for_event(self._changed, seconds):
            await self._cluster.clock.sleep(_SHOW_SECONDS + len(entries) / _ENTRIES_PER_SECOND)


def show_volumes(
    metrics: Metrics, states: Sequence[VolumeState], shown: Sequence[VolumeState] = ()
) -> Sequence[VolumeState]:
    """Show these volumes, of too many those due first, instead of the `shown` ones; return those that are shown."""
    chosen = sorted(states, key=_rank)[: metric.MAX_VOLUMES]
    if chosen == shown:
        return shown
    for name, gauge in metric.VOLUME_GAUGES.items():
        value_of = attrgetter(name)
        values = {(state.namespace, state.claim): value_of(state) for state in chosen}
        metrics.show(gauge, {labels: value for labels, value in values.items() if value is not None})
    metrics.show(metric.VOLUMES_OMITTED, {(): len(states) - len(chosen)} if states else {})
    return chosen


def _rank(state: VolumeState) -> tuple[bool, float, float, str, str]:
    """Return what sorts the volumes that alerts are about, and may soon be about, before all others."""
    due_at = [at for at in (state.backup_due_at, state.verification_due_at) if at is not None]
    return (not state.shrunk, min(due_at, default=math.inf), -(state.backup_at or 0.0), state.namespace, state.claim)


def show_retention(metrics: Metrics, report: RetentionReport | None, old_schedules: Sequence[str]) -> None:
    """Show this report, None if there is none, and the schedules that delete by older rules; nothing else."""
    for gauge in (metric.RETENTION_HELD_BYTES, metric.RETENTION_WAITING, metric.RETENTION_WAITING_UNTIL):
        metrics.show(gauge, {})
    metrics.show(metric.RETENTION_OLD_RULES, {(schedule,): 1 for schedule in old_schedules})
    if report is None:
        return
    metrics.set(metric.RETENTION_WAITING, report.waiting, report.waiting_why or "")
    if report.through is not None:
        metrics.set(metric.RETENTION_WAITING_UNTIL, report.through.timestamp())
    held: dict[tuple[str, str, str], list[HeldBackup]] = {}
    for one in sorted(report.held, key=lambda one: one.created or report.at):
        held.setdefault((one.namespace, one.claim, one.rule), []).append(one)
    for key, backups in held.items():
        oldest = backups[0]
        created = format_time(oldest.created) if oldest.created is not None else ""
        metrics.set(metric.RETENTION_HELD_BYTES, sum(one.bytes for one in backups), *key, oldest.backup, created)

"""Shows in the metrics how many volumes are in each state, and names the first ones that need attention."""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from core.aio import run_for_many
from core.kube.client import KubeClient
from core.kube.errors import KubeError
from core.models.names import ALERT_NOT_PROTECTED_LABEL
from core.models.phases import Phase
from nodeagent.coverage.read import ObservedVolumes, TooManyObjectsError, VolumeReader
from nodeagent.coverage.states import CompletedBackup, Coverage, CoverageRules, VolumePlan, build_coverage
from nodeagent.leader.index import Entry
from nodeagent.metrics.registry import Metrics
from nodeagent.metrics.table import MAX_NAMED_VOLUMES, VOLUME_NOT_PROTECTED, VOLUMES

__all__ = ["CoverageReader", "PlannedCoverage", "hide_coverage", "plan_coverage", "show_coverage"]

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
    """The PVCs with the backups that are expected of them, None if they are not known; and whose names are shown."""

    plans: tuple[VolumePlan, ...] | None = None
    alerting: frozenset[str] = field(default_factory=frozenset)


class CoverageReader:
    """Reads what is expected of the PVCs; what it has read of the cluster is not kept."""

    def __init__(self, client: KubeClient, namespace: str, now: Callable[[], datetime]) -> None:
        """Read PVCs, pods and volumes of all namespaces, and schedules in `namespace`; `now` returns the time."""
        self._volumes = VolumeReader(client, namespace, now, most=_MOST_OBJECTS)
        self._last = PlannedCoverage()
        self._failures = 0
        self._said: Sequence[str] = ()

    async def read(self, rules: CoverageRules) -> PlannedCoverage:
        """Return what there is now; for six reads that fail, what the last good one returned."""
        try:
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
                self._last = await run_for_many(number, plan_coverage, observed, rules)
        return self._last

    def _is_given_up(self, *, failed: bool) -> bool:
        """Count a read, and return whether too many in a row have failed."""
        self._failures = self._failures + 1 if failed else 0
        return self._failures > _MOST_FAILURES

    def _say(self, level: int, what: str, notes: Sequence[str]) -> None:
        """Log what is not known, and again only once that has changed."""
        said, self._said = self._said, sorted(notes)
        if self._said and self._said != said:
            _log.log(level, "%s: %s", what, "; ".join(self._said[:_MOST_NOTES]))


def plan_coverage(observed: ObservedVolumes, rules: CoverageRules) -> PlannedCoverage:
    """Return what is expected of the PVCs that were read; a volume of a pod without one has no transfers here."""
    if observed.cluster is None:
        return PlannedCoverage()
    plans = observed.plan(rules.leave_out_namespaces).plans or ()
    named = [
        name
        for name, one in observed.cluster.namespaces.items()
        if one.metadata.labels.get(ALERT_NOT_PROTECTED_LABEL) == "true"
    ]
    alerting = {plan.key[0] for plan in plans} if rules.alert_everywhere else named
    claims = observed.cluster.claims
    return PlannedCoverage(tuple(plan for plan in plans if plan.key in claims), frozenset(alerting))


async def show_coverage(metrics: Metrics, planned: PlannedCoverage, entries: Sequence[Entry], now: datetime) -> None:
    """Show the states of the PVCs at `now`; nothing where they are not known."""
    if planned.plans is None:
        hide_coverage(metrics)
        return
    number, plans, alerting = len(planned.plans) + len(entries), planned.plans, planned.alerting
    states, named = await run_for_many(number, _build_series, plans, alerting, entries, now)
    metrics.show(VOLUMES, states)
    metrics.show(VOLUME_NOT_PROTECTED, named)


def hide_coverage(metrics: Metrics) -> None:
    """Show no states."""
    metrics.show(VOLUMES, {})
    metrics.show(VOLUME_NOT_PROTECTED, {})


def _build_series(
    plans: Sequence[VolumePlan], alerting: Collection[str], entries: Iterable[Entry], now: datetime
) -> tuple[_Series, _Series]:
    """Return the values of both metrics by labels: how many PVCs are in each state, and those that are named."""
    copies = (_copy_of(entry) for entry in entries if entry.copy is not None)
    coverage = build_coverage(plans, (copy for copy in copies if copy is not None), now)
    urgent = [one for one in coverage.volumes if one.needs_attention and one.namespace in alerting]
    named: _Series = {(one.namespace, one.volume, str(one.state)): 1 for one in urgent[:MAX_NAMED_VOLUMES]}
    return _count(coverage), named


def _copy_of(entry: Entry) -> CompletedBackup | None:
    copy = entry.copy
    if copy is None:
        return None
    return CompletedBackup(
        (entry.queue, copy.claim),
        copy.created,
        entry.name,
        complete=copy.complete,
        failed=entry.phase is Phase.FAILED,
        shrunk="" if copy.shrunk else None,
    )


def _count(coverage: Coverage) -> _Series:
    """Return the numbers by namespace and state; of too many namespaces, those that need attention first."""
    namespaces = list(dict.fromkeys(one.namespace for one in coverage.volumes))[:_MOST_NAMESPACES]
    kept = set(namespaces)
    numbers = Counter((one.namespace, str(one.state)) for one in coverage.volumes if one.namespace in kept)
    return {key: float(number) for key, number in numbers.items()}

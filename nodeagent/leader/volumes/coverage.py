"""Shows in the metrics how many volumes are in each state, and names the first ones that need attention."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from core.kube.client import KubeClient
from core.kube.errors import KubeError
from core.models.names import ALERT_NOT_PROTECTED_LABEL
from core.models.phases import Phase
from nodeagent.coverage.read import ObservedVolumes, TooManyObjectsError, VolumeReader
from nodeagent.coverage.states import CompletedBackup, Coverage, CoverageRules, VolumePlan, build_coverage
from nodeagent.leader.index import Entry
from nodeagent.metrics.registry import Metrics
from nodeagent.metrics.table import MAX_NAMED_VOLUMES, VOLUME_NOT_PROTECTED, VOLUMES

__all__ = ["CoverageReader", "PlannedCoverage", "plan_coverage", "show_coverage"]

_log = logging.getLogger(__name__)

_MOST_OBJECTS: Final = 20_000
"""Of each kind that are read: while they are, they take some 100 MiB."""

_MOST_NAMESPACES: Final = 500
"""With series of their own, at most seven for each."""


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

    async def read(self, rules: CoverageRules) -> PlannedCoverage:
        """Return what there is now, or was when it could be read last."""
        try:
            observed = await self._volumes.read()
        except TooManyObjectsError as e:
            _log.info("the metrics do not show which volumes are protected: %s", e)
            self._last = PlannedCoverage()
        except KubeError as e:
            _log.info("cannot read which volumes are protected, will retry: %s", e)
        else:
            if not observed.passing or self._last.plans is None:
                self._last = plan_coverage(observed, rules)
        return self._last


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


def show_coverage(metrics: Metrics, planned: PlannedCoverage, entries: Iterable[Entry], now: datetime) -> None:
    """Show the states of the PVCs at `now`; nothing where they are not known."""
    if planned.plans is None:
        metrics.show(VOLUMES, {})
        metrics.show(VOLUME_NOT_PROTECTED, {})
        return
    copies = (_copy_of(entry) for entry in entries if entry.copy is not None)
    coverage = build_coverage(planned.plans, (copy for copy in copies if copy is not None), now)
    metrics.show(VOLUMES, _count(coverage))
    urgent = [one for one in coverage.volumes if one.needs_attention and one.namespace in planned.alerting]
    named: dict[tuple[str, ...], float] = {
        (one.namespace, one.volume, str(one.state)): 1 for one in urgent[:MAX_NAMED_VOLUMES]
    }
    metrics.show(VOLUME_NOT_PROTECTED, named)


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


def _count(coverage: Coverage) -> Mapping[tuple[str, ...], float]:
    """Return the numbers by namespace and state; of too many namespaces, those that need attention first."""
    namespaces = list(dict.fromkeys(one.namespace for one in coverage.volumes))[:_MOST_NAMESPACES]
    kept = set(namespaces)
    numbers = Counter((one.namespace, str(one.state)) for one in coverage.volumes if one.namespace in kept)
    return {key: float(number) for key, number in numbers.items()}

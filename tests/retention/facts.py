"""What is true of a copy, and an API server whose Jobs run when it is said."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from client.backups.copies import KeepPolicy, KeepRule
from core.kube.resources import PODS
from core.models.base import JsonDict, format_time, parse_time
from tests.client.support.deletion_scene import JobKube
from tests.nodeagent.support.hand_clock import NOON, HandClock

_DAY_SECONDS: Final = 86400.0
_LATE_SECONDS: Final = 3600.0
"""A run decides by the copies of the 24 h before it; it deletes at most so much later."""

_STAMP_SECONDS: Final = 1.0
"""Stamps have whole seconds."""

_EXTRA: Final = 2


@dataclass
class Fact:
    """A copy of a volume: what is true of it; times are right ones, in seconds after noon."""

    backup: str
    claim: str
    resource: str
    location: str
    bucket: str
    ttl: timedelta | None
    made: float
    stamp: str
    schedule: str = ""
    phase: str = "InProgress"
    completed: float | None = None
    completed_stamp: str = ""
    exists: bool = True
    damaged: bool = False
    shrunk: bool = False
    gone: float | None = None
    by_limit: bool = False

    @property
    def moment(self) -> datetime:
        """When it was made, by its stamp."""
        return parse_time(self.stamp)

    @property
    def sound(self) -> bool:
        """Whether it counts among the copies of its schedule."""
        return self.exists and self.phase == "Completed" and not self.damaged

    @property
    def name(self) -> str:
        return f"{self.backup}-{self.claim}"

    @property
    def snapshot(self) -> str:
        return f"s-{self.name}"

    @property
    def series(self) -> tuple[str, str, str]:
        return self.claim, self.location, self.bucket


_PERIODS: Final[Mapping[KeepRule, Callable[[datetime], object]]] = {
    KeepRule.HOURLY: lambda moment: moment.strftime("%F %H"),
    KeepRule.DAILY: datetime.date,
    KeepRule.WEEKLY: lambda moment: moment.strftime("%G %V"),
    KeepRule.MONTHLY: lambda moment: moment.strftime("%Y %m"),
    KeepRule.YEARLY: lambda moment: moment.year,
}


def is_kept(fact: Fact, others: Iterable[Fact], policy: KeepPolicy) -> bool:
    """Return whether a rule needs the sound copy, beside the sound ones of its schedule and volume among `others`."""
    same = [one for one in others if one.sound and one.series[:2] == fact.series[:2] and one.schedule == fact.schedule]
    newer = [one.moment for one in same if (one.stamp, one.name) > (fact.stamp, fact.name)]
    for rule, count in policy.counts.items():
        periods = {number if rule is KeepRule.LAST else _PERIODS[rule](at) for number, at in enumerate(newer)}
        if len(periods) < count and (rule is KeepRule.LAST or _PERIODS[rule](fact.moment) not in periods):
            return True
    return False


class WorldKube(JobKube):
    """Runs Jobs at once, or, if they are `slow`, when it is said. `closed` locations refuse their Jobs."""

    def __init__(self, clock: HandClock) -> None:
        super().__init__(clock)
        self.slow = False
        self.closed: dict[str, str] = {}
        self.running: dict[str, tuple[JsonDict, float | None]] = {}
        """The Jobs whose pods run, by name, and since when they are deleted."""

    def _run(self, job: JsonDict) -> None:
        if not self.slow:
            self._run_now(job)
            return
        name = job["metadata"]["name"]
        self.running[name] = job, None
        meta = {"name": f"{name}-x", "namespace": "velero", "labels": {"job-name": name}}
        self.put({"apiVersion": "v1", "kind": "Pod", "metadata": meta, "status": {"phase": "Running"}})

    def _run_now(self, job: JsonDict) -> None:
        location = job["metadata"]["labels"]["nodeagent.io/snapshot-deletion"]
        self.refused = self.closed.get(location, "")
        super()._run(job)

    def end_job(self, name: str, *, killed: bool = False) -> None:
        """Let the pod of a Job do all; `killed`: and end without saying so."""
        job, _ = self.running.pop(name)
        self._run_now(job)
        if killed:
            self._end(name, "killed", "", [])

    def forget_job(self, name: str) -> None:
        """Let the pod of a deleted Job end before it does anything."""
        del self.running[name]
        (pod,) = [one for one in self.objects(PODS) if one["metadata"]["name"] == f"{name}-x"]
        self._store.delete(PODS, pod)


def check_limit(fact: Fact, facts: Iterable[Fact], seconds: float, stamp: datetime, jumps: Iterable[float]) -> None:
    """Check that not too many copies went within the day before `seconds`, or `stamp` by the clocks, which jumped."""
    since = seconds - _DAY_SECONDS
    same = [one for one in facts if (one.claim, one.location) == (fact.claim, fact.location)]
    gone = [one for one in same if one.by_limit and one.gone is not None and one.gone > since + _STAMP_SECONDS]
    # One that was completed while clocks were ahead seems to be so for long.
    right = NOON + timedelta(seconds=seconds)
    # Where all clocks are wrong together, it is by them that copies were completed within a day.
    late = format_time(min(right, stamp) - timedelta(seconds=_DAY_SECONDS + _LATE_SECONDS))
    # One that was completed while they were behind was completed within a day all the same.
    completed = [
        one
        for one in same
        if one.completed is not None and (one.completed_stamp > late or one.completed > since - _LATE_SECONDS)
    ]
    most = (len(completed) + _EXTRA) * (sum(at > since for at in jumps) + 1)
    assert len(gone) <= most, f"{len(gone)} of {fact.series} went in a day"

"""Retention by count and calendar, with the semantics of restic: which copies their schedules keep, and why. Pure.

Source: restic v0.18.0, internal/restic/snapshot_policy.go, ApplyPolicy.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final
from zoneinfo import ZoneInfo

from client.backups.copies import Copy, Series
from client.backups.keep_policy import KeepPolicy, KeepRule, parse_keep
from core.models.base import format_time
from nodeagent.config.windows import parse_time_zone

__all__ = ["CLOCK_TOLERANCE", "Keep", "decide_kept", "explain_scheduled"]

CLOCK_TOLERANCE: Final = timedelta(minutes=5)
"""How far the witnesses of the time may be apart: less than any time to live that matters, more than clocks drift."""


def explain_scheduled(
    copies: Iterable[Copy], policies: Mapping[str, KeepPolicy | None], now: datetime
) -> dict[str, str | None]:
    """Return, by the UIDs of copies whose schedule has a policy, why it keeps them; None: it does not.

    Args:
        copies: of all backups.
        policies: of schedules, where they are known; else the newest copy of a schedule has its policy.
        now: when.
    """
    by_schedule: dict[str, list[Copy]] = {}
    for one in copies:
        if one.schedule and not one.foreign:
            by_schedule.setdefault(one.schedule, []).append(one)
    found: dict[str, str | None] = {}
    for schedule, ones in by_schedule.items():
        # A copy that a wrong clock has dated would decide for years.
        newest = max((one for one in ones if not _is_future(one, now)), key=lambda one: one.age_key, default=None)
        keep = newest.keep if newest else ""
        try:
            policy = policies[schedule] if schedule in policies else parse_keep(keep) if keep else None
        except ValueError as e:
            why = f"what schedule {schedule} keeps cannot be read in its newest backup: {e}"
            found |= dict.fromkeys((one.uid for one in ones), why)
            continue
        if policy is not None:
            found |= _explain_schedule(schedule, ones, policy, now)
        elif newest is None or keep or newest.ttl is None:
            # Their time to live was said together with a count, and the schedule has neither now.
            why = f"schedule {schedule} had a count when it was made, and has no time to live without one"
            found |= dict.fromkeys((one.uid for one in ones if one.keep), why)
    return found


def _is_future(one: Copy, now: datetime) -> bool:
    return one.created is not None and one.created > now + CLOCK_TOLERANCE


def _explain_schedule(
    schedule: str, copies: Iterable[Copy], policy: KeepPolicy, now: datetime
) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    by_series: dict[Series, list[Copy]] = {}
    for one in copies:
        if one.created is not None and _is_future(one, now):
            # Else copies that a wrong clock has dated would take the places of all that are made until then.
            found[one.uid] = f"it is from the future: it was made at {format_time(one.created)}"
        else:
            found[one.uid] = None
            by_series.setdefault(one.series, []).append(one)
    for ones in by_series.values():
        for uid, keeps in decide_kept(ones, policy).items():
            found[uid] = f"schedule {schedule} keeps it: {'; '.join(keep.text for keep in keeps)}"
    return found


def _name_week(moment: datetime) -> str:
    year, week, _ = moment.isocalendar()
    return f"{year}-W{week:02}"


_PERIODS: Final[Mapping[KeepRule, Callable[[datetime], str]]] = {
    KeepRule.HOURLY: lambda moment: moment.strftime("%Y-%m-%d %Hh"),
    KeepRule.DAILY: lambda moment: moment.strftime("%Y-%m-%d"),
    KeepRule.WEEKLY: _name_week,
    KeepRule.MONTHLY: lambda moment: moment.strftime("%Y-%m"),
    KeepRule.YEARLY: lambda moment: moment.strftime("%Y"),
}
"""The name of the period of a moment in the time zone: an hour that occurs twice is one, weeks begin on Monday."""


@dataclass(frozen=True)
class Keep:
    """Why a policy keeps a copy: it is the `number`-th that `rule` counts, of `count`.

    `period` is the one whose newest copy it is; None: it needs none. `oldest`: it is not the newest of a period, but
    the oldest copy of all, which stays while fewer than `count` are there.
    """

    rule: KeepRule
    number: int
    count: int
    period: str | None = None
    oldest: bool = False

    @property
    def text(self) -> str:
        """A phrase, such as `daily 3 of 7, the newest of 2026-11-20`."""
        if self.oldest:
            return f"{self.rule} {self.number} of {self.count}, the oldest"
        return f"{self.rule} {self.number} of {self.count}" + (f", the newest of {self.period}" if self.period else "")


def decide_kept(copies: Iterable[Copy], policy: KeepPolicy) -> dict[str, tuple[Keep, ...]]:
    """Return why the policy keeps copies of one volume in one location, by their UIDs; one that is absent may go.

    A copy that failed, or whose verification failed, stays as long as if it counted, and takes no place of another one.
    What has not ended, is foreign, or is being deleted is not considered.
    """
    ended = [one for one in copies if one.phase.final and not (one.foreign or one.deleting or one.recorded)]
    sound = [one for one in ended if one.complete and not one.damaged]
    kept = {} if len(sound) == len(ended) else _apply(ended, policy)
    for one in sound:
        kept.pop(one.uid, None)
    return kept | _apply(sound, policy)


def _apply(copies: Iterable[Copy], policy: KeepPolicy) -> dict[str, tuple[Keep, ...]]:
    zone = parse_time_zone(policy.zone)
    ordered = sorted((one for one in copies if one.created is not None), key=lambda one: one.age_key, reverse=True)
    kept: dict[str, tuple[Keep, ...]] = {}
    for rule in KeepRule:
        if count := policy.counts.get(rule):
            for uid, keep in _apply_rule(ordered, rule, count, zone).items():
                kept[uid] = (*kept.get(uid, ()), keep)
    return kept


def _apply_rule(ordered: Sequence[Copy], rule: KeepRule, count: int, zone: ZoneInfo) -> dict[str, Keep]:
    """Return what one rule keeps of these copies, the newest first."""
    name_period = _PERIODS.get(rule)
    kept: dict[str, Keep] = {}
    before = None
    for one in ordered:
        if len(kept) == count or one.created is None:
            break
        period = name_period(one.created.astimezone(zone)) if name_period else None
        is_new = period is None or period != before
        # The oldest one stays until the rule has as many: so the history becomes as long as it may.
        if is_new or one is ordered[-1]:
            kept[one.uid] = Keep(rule, len(kept) + 1, count, period, oldest=not is_new)
            before = period
    return kept

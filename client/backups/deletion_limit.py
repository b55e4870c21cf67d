"""The pace and the time of retention: how many copies may go at once, and by which time their age counts. Pure.

docs/retention.md has them in the same words.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import pairwise
from math import ceil
from operator import attrgetter
from typing import Final, NamedTuple

from client.backups.copies import Copy, Series
from client.backups.kept_copies import CLOCK_TOLERANCE
from client.backups.retention import DeletionError, KeepReason, RetentionDecision, RetentionRule
from core.models.base import format_time
from core.models.units import format_duration

__all__ = ["WINDOW", "Backlog", "GoneCopy", "decide_now", "explain_backlog", "limit_deletions"]

_EXTRA_DELETIONS: Final = 2
"""Copies of a volume that may go within WINDOW besides as many as were completed in it: what lets a backlog shrink."""

WINDOW: Final = timedelta(hours=24)
"""In which deletions of a volume are limited."""

_MISSED_RUNS: Final = 3
"""Times the usual pause between two backups: a longer one means that runs were missed."""


class GoneCopy(NamedTuple):
    """A copy whose deletion has begun: when, and when it was completed."""

    volume: tuple[str, str]
    location: str
    at: datetime
    completed: datetime


def limit_deletions(
    judgments: Sequence[RetentionDecision], gone: Iterable[GoneCopy], now: datetime, *, most: int | None = None
) -> list[RetentionDecision]:
    """Return the judgments, with a hold for each backup that may be deleted, but not yet.

    Of a volume in a location, as many copies may go in WINDOW as were completed in it, and _EXTRA_DELETIONS more. Those
    of whole backups are counted before the first one goes, the oldest first.

    Args:
        judgments: of all backups, the oldest first.
        gone: what went before, at least in WINDOW.
        now: when.
        most: how many backups may go, whatever the limit of their volumes; None: it counts.
    """
    allowed = _count_allowed(judgments, gone, now)
    left = dict(allowed)
    found, deleted = [], 0
    for judgment in judgments:
        if judgment.holds:
            found.append(judgment)
            continue
        wanted = Counter(copy.series for copy in judgment.copies if copy.has_data)
        if most is not None:
            over = f"no more than {most} backups are to be deleted at once" if deleted >= most else None
        else:
            over = next((_over(one, allowed[one]) for one, count in wanted.items() if count > left[one]), None)
        if over is None:
            deleted += 1
            left |= {series: left[series] - count for series, count in wanted.items()}
            found.append(judgment)
        else:
            # Nothing younger goes before it.
            left |= dict.fromkeys(wanted, 0)
            found.append(replace(judgment, holds=(KeepReason(RetentionRule.LIMIT, over),)))
    return found


def _over(series: Series, allowed: int) -> str:
    volume, location = series
    copies = f"{max(allowed, 0)} cop{'y' if allowed == 1 else 'ies'}"
    return f"{'/'.join(volume)} may lose {copies} in {location} now: it waits for a later run"


def _count_allowed(judgments: Iterable[RetentionDecision], gone: Iterable[GoneCopy], now: datetime) -> Counter[Series]:
    """Return how many copies of each volume and location may go now."""
    since = now - WINDOW
    allowed: Counter[Series] = Counter()
    for copy in (copy for one in judgments for copy in one.copies if copy.has_data):
        allowed.setdefault(copy.series, _EXTRA_DELETIONS)
        allowed[copy.series] += any(
            # The end is by the clock of a node, which may be wrong.
            since < time <= now + CLOCK_TOLERANCE
            for time in (copy.ended or copy.created, copy.created)
            if time is not None
        )
    for one in gone:
        # What went in the future did so by a clock that was wrong: it counts.
        allowed[one.volume, one.location] += (since < one.completed <= now + CLOCK_TOLERANCE) - (one.at > since)
    return allowed


class Backlog(NamedTuple):
    """Expired backups and copies that wait for the limit: how many, why so many, and when the last one is gone."""

    backups: int = 0
    copies: int = 0
    why: str = ""
    through: datetime | None = None


def explain_backlog(judgments: Iterable[RetentionDecision], now: datetime) -> Backlog:
    """Return what waits for the limit of `limit_deletions`."""
    everything = list(judgments)
    backups = [one for one in everything if one.held_by((RetentionRule.LIMIT,))]
    waiting = Counter(copy.series for one in backups for copy in one.copies if copy.has_data)
    if not waiting:
        return Backlog()
    series, most = waiting.most_common(1)[0]
    copies = [copy for one in everything for copy in one.copies if copy.series == series and copy.has_data]
    # As many as are completed from now on expire, too.
    days = ceil(most / _EXTRA_DELETIONS)
    return Backlog(len(backups), waiting.total(), _explain_waiting(copies), now + days * WINDOW)


def _explain_waiting(copies: Sequence[Copy]) -> str:
    """Return why so many copies of one volume in one location expire at once."""
    ordered = sorted((one for one in copies if one.created is not None), key=attrgetter("age_key"))
    schedule, keep = (ordered[-1].schedule, ordered[-1].keep) if ordered else ("", "")
    if keep and any(one.schedule == schedule and one.keep != keep for one in ordered):
        return f"what schedule {schedule} keeps was changed"
    times = [one.ttl for one in ordered if one.ttl is not None]
    if len(set(times)) > 1 and times[-1] < max(times):
        return f"the time to live was shortened from {format_duration(max(times))} to {format_duration(times[-1])}"
    pauses = sorted(
        ((after.age_key[0] - before.age_key[0], before, after) for before, after in pairwise(ordered)), key=_pause
    )
    if pauses and pauses[-1][0] > _MISSED_RUNS * pauses[len(pauses) // 2][0]:
        _, before, after = pauses[-1]
        shown = " and ".join(format_time(one.created) for one in (before, after) if one.created is not None)
        return f"there was no backup between {shown}: runs were missed, or a clock was wrong"
    return "fewer backups are completed than expire"


def _pause(pause: tuple[float, Copy, Copy]) -> float:
    return pause[0]


def decide_now(witnesses: Mapping[str, datetime | None], begun: datetime | None) -> datetime:
    """Return the time by which ages are counted: the earliest of what the witnesses say.

    Args:
        witnesses: the times, taken together, by where they come from; None: it says none.
        begun: when the run's own Job was created; None: it has none.

    Raises:
        DeletionError: they do not agree, or are before the run began; the message has what each says.
    """
    said = {name: time for name, time in witnesses.items() if time is not None}
    if silent := sorted(witnesses.keys() - said.keys()):
        raise DeletionError(f"nothing is deleted: how old backups are is not known without {' and '.join(silent)}")
    shown = ", ".join(f"{name} {format_time(time)}" for name, time in said.items())
    now = min(said.values())
    if max(said.values()) - now > CLOCK_TOLERANCE:
        apart = format_duration(CLOCK_TOLERANCE)
        raise DeletionError(f"nothing is deleted: clocks are more than {apart} apart ({shown})")
    if begun is not None and now < begun - CLOCK_TOLERANCE:
        raise DeletionError(
            f"nothing is deleted: by the clocks ({shown}) this run has not begun yet ({format_time(begun)})"
        )
    return now

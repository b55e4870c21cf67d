"""Windows: when something may start, as a cron schedule in a time zone with a duration.

A schedule has the syntax of CronJobs. It differs from them where a clock is changed: a start in the hour that is
skipped is moved to its end instead of being left out, and one in an hour that occurs twice counts once. `@every` is
invalid, as it would depend on when it was first read.
Source: Kubernetes v1.34, CronJob; its parser is ParseStandard of robfig/cron v3.0.1.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Final, NamedTuple
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from core.errors import Translated
from core.models.units import parse_positive_duration

_DESCRIPTORS: Final = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}


class _Field(NamedTuple):
    """One field of a schedule: its lowest and highest number, and names; the first one is the lowest number."""

    lowest: int
    highest: int
    names: tuple[str, ...] = ()

    def number(self, text: str) -> int:
        lowered = text.lower()
        if not text.isdecimal() and lowered not in self.names:
            raise ValueError(f'not a name: "{text}"')
        number = self.lowest + self.names.index(lowered) if lowered in self.names else int(text)
        if not self.lowest <= number <= self.highest:
            raise ValueError(f"{text} is not from {self.lowest} to {self.highest}")
        return number


_FIELDS: Final = (
    _Field(0, 59),
    _Field(0, 23),
    _Field(1, 31),
    _Field(1, 12, ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")),
    _Field(0, 6, ("sun", "mon", "tue", "wed", "thu", "fri", "sat")),
)

_PERIOD: Final = timedelta(days=35)
_STARTS: Final = 3000
"""A schedule of every few minutes has at least two days in so many."""

_EVERY: Final = "@every "
_ZONE_KEYS: Final = ("CRON_TZ=", "TZ=")
"""What may precede a schedule of Velero. Source: robfig/cron v3.0.1, ParseStandard."""

_TERM: Final = re.compile(
    r"(?:(?P<all>[*?])|(?P<first>[0-9]{1,2}|[A-Za-z]{3})(?:-(?P<last>[0-9]{1,2}|[A-Za-z]{3}))?)"
    r"(?:/(?P<step>[0-9]{1,2}))?"
)


def parse_schedule(text: str) -> str:
    """Return the schedule in `text` with plain numbers, which cronsim and CronJobs understand alike.

    Raises:
        ValueError: it is not a schedule, or one that never begins.
    """
    fields = _DESCRIPTORS.get(text, text).split()
    if len(fields) != len(_FIELDS):
        raise ValueError(f"found {len(fields)} instead of {len(_FIELDS)} fields")
    plain = " ".join(_expand(written, field) for written, field in zip(fields, _FIELDS, strict=True))
    with Translated(CronSimError, ValueError, "no such day"):
        never = next(CronSim(plain, datetime(2000, 1, 1, tzinfo=UTC)), None) is None
    if never:
        raise ValueError("no such day")
    return plain


def _expand(written: str, field: _Field) -> str:
    numbers: set[int] = set()
    whole = False
    for term in written.split(","):
        match = _TERM.fullmatch(term)
        if match is None:
            raise ValueError(f'not a number, range or step: "{term}"')
        step = int(match["step"] or 1)
        # Only with a whole field, the day of the month and the day of the week are conditions that must both hold.
        whole = whole or (bool(match["all"]) and step == 1)
        first = field.lowest if match["all"] else field.number(match["first"])
        alone = match["last"] is None
        last = field.number(match["last"]) if not alone else field.highest if match["step"] or match["all"] else first
        if step == 0 or last < first:
            raise ValueError(f'an empty range: "{term}"')
        numbers.update(range(first, last + 1, step))
    return "*" if whole else ",".join(map(str, sorted(numbers)))


def parse_time_zone(name: str) -> ZoneInfo:
    """Return the time zone of that IANA name; ValueError: there is none."""
    try:
        return ZoneInfo(name)
    except (KeyError, OSError) as e:
        # OSError: the name of a directory of zones, such as "Europe".
        raise ValueError(f"no time zone: {name}") from e


def longest_pause(schedule: str, zone: ZoneInfo, after: datetime) -> timedelta:
    """Return the longest time between two successive starts of a parsed schedule, of those in the next weeks."""
    starts = islice((start.astimezone(UTC) for start in CronSim(schedule, after.astimezone(zone))), _STARTS)
    longest, first = timedelta(), next(starts)
    before = first
    for start in starts:
        longest, before = max(longest, start - before), start
        if start - first > _PERIOD:
            break
    return longest


def parse_interval(schedule: str, zone: str, now: datetime) -> timedelta:
    """Return the longest pause between two starts of `schedule` in the weeks after `now`; ValueError: it is invalid.

    A CronJob or a Schedule of Velero has it: also `@every 6h`, or with `CRON_TZ=`. A `zone` of "" is UTC.
    """
    first, _, rest = schedule.strip().partition(" ")
    for key in _ZONE_KEYS:
        if first.startswith(key):
            schedule, zone = rest.strip(), first.removeprefix(key)
    if schedule.startswith(_EVERY):
        return parse_positive_duration(schedule.removeprefix(_EVERY))
    return longest_pause(parse_schedule(schedule.strip()), parse_time_zone(zone or "UTC"), now)


@dataclass(frozen=True)
class Window:
    """A window: it opens at each time of the schedule, and closes after the duration, which is elapsed time."""

    schedule: str
    zone: ZoneInfo
    duration: timedelta

    def is_open(self, moment: datetime) -> bool:
        """Return whether `moment` is in the window."""
        first = self.start_after(moment - self.duration)
        return first is not None and first <= moment

    def start_after(self, moment: datetime) -> datetime | None:
        """Return when it opens next after `moment`, in UTC; None: never."""
        starts = (start.astimezone(UTC) for start in CronSim(self.schedule, moment.astimezone(self.zone)))
        # In an hour that occurs twice, cronsim begins with the first one.
        return next((start for start in starts if start > moment), None)


@dataclass(frozen=True)
class VerificationPlan:
    """When shares of backup repositories are read.

    All that a repository has is read once in `period`; at the starts of `starts`, None: spread over the period; within
    `windows`, none: maintenance's. With `restore_test`, a volume of it is restored once in the period, into a scratch
    volume of `restore_test_class`; None: of the class that it has.
    """

    period: timedelta
    starts: Window | None = None
    windows: tuple[Window, ...] = ()
    restore_test: bool = False
    restore_test_class: str | None = None


def is_open(windows: Iterable[Window], moment: datetime) -> bool:
    """Return whether `moment` is in one of the windows; without any, it always is."""
    windows = tuple(windows)
    return not windows or any(window.is_open(moment) for window in windows)


def next_start(windows: Iterable[Window], moment: datetime) -> datetime | None:
    """Return when one of the windows opens next after `moment`, in UTC; None: never."""
    return min(filter(None, (window.start_after(moment) for window in windows)), default=None)

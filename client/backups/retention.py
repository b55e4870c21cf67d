"""The rules of retention: which backups may go, how many copies at once, and by which time their age counts. Pure.

docs/retention.md has them in the same words. A backup is kept or deleted as a whole. Does not know how anything is read
or deleted (`client.backups.delete`): what the bucket holds is what the check Jobs of the run found.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from enum import StrEnum
from itertools import pairwise
from math import ceil
from operator import attrgetter
from typing import Final, NamedTuple

from client.backups.copies import CLOCK_TOLERANCE, Copy, KeepPolicy, Series, explain_scheduled
from core.errors import AgentError
from core.models.base import format_time
from core.models.phases import Phase
from core.models.storage import BackupStorageLocationSpec
from core.models.units import format_duration

_KEPT_OF_FAILING: Final = 3
"""The complete copies that a volume keeps in a location while its newest transfer is not completed."""

Place = tuple[str, str | None]
"""The name of a BackupStorageLocation, and the namespace of a repository in it; None: all of them."""


class DeletionError(AgentError):
    """A backup may not be deleted, or was not deleted completely."""


class RetentionRule(StrEnum):
    """Why a backup is kept."""

    FOREIGN = "foreign"
    """Something else than `nodeagent backup create` made or owns one of its transfers."""
    IN_PROGRESS = "in-progress"
    """One of its transfers has not ended."""
    RESTORING = "restoring"
    """A restore that has not ended names one of its snapshots."""
    NOT_EXPIRED = "not-expired"
    KEPT_BY_SCHEDULE = "kept-by-schedule"
    """The schedule that made it keeps it by count or calendar."""
    NEWEST_COPY = "newest-copy"
    """It has the newest complete copy of a volume in its location, or the newest whose verification did not fail."""
    SHRUNK = "shrunk"
    """The newest copy of a volume is Shrunk, and this is the newest one that is not, or one between the two."""
    FAILING_VOLUME = "failing-volume"
    """It has one of the newest three complete copies of a volume whose newest transfer failed, or was canceled."""
    UNDECIDED = "undecided"
    """The same, while that transfer has not ended."""
    LOCATION = "location"
    """Its location is gone, not Available, or not readable in this run."""
    UNCONFIRMED = "unconfirmed"
    """The copy that would justify its deletion is not known to be restorable."""
    NOT_FOUND = "not-found"
    """One of its own snapshots is not in its repository: the location may be another one than it was."""
    LIMIT = "limit"
    """Too many copies of a volume went, or would go, within a day."""


@dataclass(frozen=True)
class KeepReason:
    """One reason to keep a backup, as text, too; `uid` is the UID of the transfer that it is about, if it is one.

    `command` ends it without a deletion; None: there is none.
    """

    rule: RetentionRule
    text: str
    uid: str | None = None
    command: str | None = None


@dataclass(frozen=True)
class RetentionDecision:
    """A backup, and why it is kept; without holds it may be deleted."""

    backup: str
    copies: tuple[Copy, ...]
    holds: tuple[KeepReason, ...]

    def held_by(self, rules: Collection[RetentionRule]) -> tuple[KeepReason, ...]:
        """Return the holds of these rules."""
        return tuple(hold for hold in self.holds if hold.rule in rules)

    @property
    def expired(self) -> bool:
        """Whether its time to live is over, and its schedule does not keep it."""
        return not self.held_by((RetentionRule.NOT_EXPIRED, RetentionRule.KEPT_BY_SCHEDULE))


@dataclass(frozen=True)
class Check:
    """What the check Jobs of a run found.

    `wanted` are the UIDs of the transfers whose snapshots were looked for, `found` of those that have one. `faults`
    has, by the UIDs of copies that justify deletions, why they are not known to be restorable; None: their snapshot is
    listed, and its root directory was read. `refused` has why nothing can be deleted in some places. `locations` are
    the locations as they were then, by name.
    """

    wanted: frozenset[str] = frozenset()
    found: frozenset[str] = frozenset()
    faults: dict[str, str | None] = field(default_factory=dict)
    refused: dict[Place, str] = field(default_factory=dict)
    locations: dict[str, BackupStorageLocationSpec] = field(default_factory=dict)

    def refusal(self, location: str, volume_namespace: str) -> str | None:
        """Return why nothing can be deleted in the repository; None: it can."""
        return self.refused.get((location, None)) or self.refused.get((location, volume_namespace))


@dataclass(frozen=True)
class Situation:
    """What backups are judged by, besides all copies.

    `restoring` are the restores that have not ended, by the ID of the snapshot that they name. `closed` has why nothing
    may be deleted in a location, by its name; a location without an entry is open. A `now` of None: ages do not matter.
    A `check` of None: nothing is known of the bucket yet, and what has to be is assumed. `policies` are from
    schedules, by their labels, in place of what their newest copies say.
    """

    restoring: Mapping[str, str] = field(default_factory=dict)
    closed: Mapping[str, str | None] = field(default_factory=dict)
    now: datetime | None = None
    check: Check | None = None
    policies: Mapping[str, KeepPolicy | None] = field(default_factory=dict)


def judge_backups(copies: Sequence[Copy], situation: Situation) -> list[RetentionDecision]:
    """Return a judgment about each backup, the oldest first; `copies` has all backups in the namespace."""
    if (now := situation.now) is not None:
        # Else what a wrong clock has dated would be the newest until then.
        latest = now + CLOCK_TOLERANCE
        copies = [replace(one, future=True) if one.created and one.created > latest else one for one in copies]
    by_backup: dict[str, list[Copy]] = {}
    for copy in copies:
        by_backup.setdefault(copy.backup, []).append(copy)
    kept, proofs = _find_kept(copies), _Proofs(situation, copies)
    scheduled = explain_scheduled(copies, situation.policies) if now is not None else {}
    judgments = [
        RetentionDecision(name, tuple(found), tuple(_find_holds(found, situation, kept, proofs, scheduled)))
        for name, found in by_backup.items()
    ]
    return sorted(judgments, key=lambda one: (min(copy.age_key[0] for copy in one.copies), one.backup))


def find_witnesses(copies: Iterable[Copy]) -> dict[Series, Copy]:
    """Return the copy of each volume and location that justifies the deletion of older ones: the newest sound one.

    Of those that are not Shrunk, if there are any: a Shrunk one may not have what the older ones have.
    """
    sound = _group(one for one in copies if one.complete and not one.damaged)
    return {series: _latest([one for one in found if not one.shrunk] or found) for series, found in sound}


def _group(copies: Iterable[Copy]) -> Iterable[tuple[Series, list[Copy]]]:
    found: dict[Series, list[Copy]] = {}
    for one in copies:
        found.setdefault(one.series, []).append(one)
    return found.items()


def _latest(copies: Iterable[Copy]) -> Copy:
    return max(copies, key=attrgetter("age_key"))


def _find_kept(copies: Sequence[Copy]) -> dict[str, KeepReason]:
    """Return why copies are to be kept whatever their age, by their UIDs."""
    kept: dict[str, KeepReason] = {}
    failing = _find_failing(copies)
    for (volume, location), found in _group(one for one in copies if one.has_data and not one.deleting):
        shown = f"{'/'.join(volume)} in {location}"
        whole = [one for one in found if one.complete]
        if newest := failing.get(volume):
            rule = RetentionRule.FAILING_VOLUME if newest.phase.final else RetentionRule.UNDECIDED
            why = f"{newest.kind} {newest.transfer}, the newest of {newest.shown_volume}, is {newest.phase}"
            # It goes last: without it, nothing would say that the volume fails.
            kept[newest.uid] = KeepReason(rule, f"{why}: while it is, older copies stay", newest.uid)
            for one in sorted(whole, key=attrgetter("age_key"), reverse=True)[:_KEPT_OF_FAILING]:
                text = f"{why}: the newest {_KEPT_OF_FAILING} complete copies of {shown} stay"
                kept[one.uid] = KeepReason(rule, text, one.uid)
        sound = [one for one in whole if not one.damaged]
        if sound and _latest(whole).damaged:
            best = _latest(sound)
            text = f"it has the newest copy of {shown} whose verification did not fail"
            kept[best.uid] = KeepReason(RetentionRule.NEWEST_COPY, text, best.uid)
        kept |= _hold_full(sound)
        # Also one that a command has begun to delete: it may have been interrupted before it deleted anything.
        for one in {_latest(found), *([_latest(whole)] if whole else [])}:
            text = f"it has the {'only' if len(found) == 1 else 'newest'} copy of {shown}"
            kept[one.uid] = KeepReason(RetentionRule.NEWEST_COPY, text, one.uid)
    return kept


def _hold_full(sound: Sequence[Copy]) -> dict[str, KeepReason]:
    """Keep the newest copy that is not Shrunk, and those after it; none if the newest one of all is not Shrunk."""
    full = [one for one in sound if not one.shrunk]
    if not full or not (shrunk := _latest(sound)).shrunk:
        return {}
    command, since = f"nodeagent backup acknowledge {shrunk.backup}", _latest(full).age_key
    text = f"{shrunk.kind} {shrunk.transfer}, the newest copy of {shrunk.shown_volume} in {shrunk.location}, is Shrunk"
    text += f": the newest that is not stays ({command})"
    return {one.uid: KeepReason(RetentionRule.SHRUNK, text, one.uid, command) for one in sound if one.age_key >= since}


def _find_failing(copies: Sequence[Copy]) -> dict[tuple[str, str], Copy]:
    """Return the newest transfers of volumes, in whatever location, that are not completed."""
    newest: dict[tuple[str, str], Copy] = {}
    for one in sorted(copies, key=attrgetter("age_key")):
        if not (one.deleting or one.recorded or one.future):
            newest[one.volume] = one
    return {volume: one for volume, one in newest.items() if not (one.phase is Phase.COMPLETED and one.snapshot_id)}


def _find_holds(
    copies: Sequence[Copy],
    situation: Situation,
    kept: Mapping[str, KeepReason],
    proofs: "_Proofs",
    scheduled: Mapping[str, str | None],
) -> Iterator[KeepReason]:
    for one in copies:
        place = f"{one.kind} {one.transfer}"
        if one.foreign:
            yield KeepReason(RetentionRule.FOREIGN, f"{place} {one.foreign}", one.uid)
        if not one.phase.final:
            text = f"{place} of {one.shown_volume} is {one.phase}: cancel the backup first"
            yield KeepReason(RetentionRule.IN_PROGRESS, text, one.uid)
        if one.snapshot_id and (restore := situation.restoring.get(one.snapshot_id)):
            yield KeepReason(RetentionRule.RESTORING, f"{restore} restores {one.shown_volume} from it", one.uid)
        if hold := kept.get(one.uid):
            yield hold
        if hold := proofs.find_closed(one) or (proofs.find_missing(one) if one.uid not in kept else None):
            yield hold
        if situation.now is not None:
            yield from _find_ages(one, situation.now, scheduled)


class _Proofs:
    """What proves that nothing is lost with a copy."""

    def __init__(self, situation: Situation, copies: Sequence[Copy]) -> None:
        self._closed = situation.closed
        self._check = check = situation.check
        self._newest = find_witnesses(copies)
        # Another backup may have been completed since the check: what was seen then still proves.
        self._seen = find_witnesses(one for one in copies if check is None or not check.faults.get(one.uid, "not seen"))

    def find_closed(self, one: Copy) -> KeepReason | None:
        if one.foreign:
            return None
        if closed := self._closed.get(one.location):
            return KeepReason(RetentionRule.LOCATION, f"{closed}: nothing in it is deleted", one.uid)
        if self._check is not None and (refusal := self._check.refusal(one.location, one.namespace)):
            text = f"nothing can be deleted in BackupStorageLocation {one.location}: {refusal}"
            return KeepReason(RetentionRule.LOCATION, text, one.uid)
        return None

    def find_missing(self, one: Copy) -> KeepReason | None:
        if not one.has_data or (self._check is not None and one.uid not in self._check.wanted):
            return None
        place = f"{one.shown_volume} in {one.location}"
        seen, newest = self._seen.get(one.series), self._newest.get(one.series)
        # Nothing is known of others that a command has begun to delete.
        if newest is None or (newest.shrunk and not (one.shrunk or one.damaged)):
            what = "whose verification did not fail" if newest is None else "that is not Shrunk"
            text = f"there is no other copy of {place} {what}"
            return KeepReason(RetentionRule.UNCONFIRMED, text, one.uid)
        if seen is None or seen.age_key <= one.age_key or (seen.shrunk and not newest.shrunk):
            fault = self._check and self._check.faults.get(newest.uid)
            text = (
                f"{newest.kind} {newest.transfer}, the newest copy of {place}: {fault or 'not looked at in this run'}"
            )
            return KeepReason(RetentionRule.UNCONFIRMED, f"{text} (nodeagent backup verify {newest.backup})", one.uid)
        if self._check is not None and one.uid not in self._check.found:
            text = f"{one.kind} {one.transfer} of {one.shown_volume}: its snapshot {one.snapshot_id} is not in "
            return KeepReason(RetentionRule.NOT_FOUND, text + one.location, one.uid)
        return None


def _find_ages(one: Copy, now: datetime, scheduled: Mapping[str, str | None]) -> Iterator[KeepReason]:
    """Yield why the copy is not expired, by its age or its schedule: its backup is, once all its copies are."""
    if one.future and one.created:
        text = f"it is from the future: it was made at {format_time(one.created)}"
        yield KeepReason(RetentionRule.NOT_EXPIRED, text, one.uid)
    elif one.created is None or (one.ttl is None and one.uid not in scheduled):
        yield KeepReason(RetentionRule.NOT_EXPIRED, "it has no time to live", one.uid)
    elif one.ttl is not None and now - one.created <= one.ttl:
        what = "its time to live ends at" if one.uid in scheduled else "it expires after"
        text = f"{what} {format_time(one.created + one.ttl)}"
        yield KeepReason(RetentionRule.NOT_EXPIRED, text, one.uid)
    if why := scheduled.get(one.uid):
        yield KeepReason(RetentionRule.KEPT_BY_SCHEDULE, why, one.uid)


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

    `judgments` are of all backups, the oldest first, and `gone` is what went before, at least in WINDOW. `most` is how
    many backups may go, whatever the limit of their volumes; None: it counts.
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

    waiting_backups: int = 0
    waiting: int = 0
    waiting_why: str = ""
    through: datetime | None = None


def explain_backlog(judgments: Sequence[RetentionDecision], now: datetime) -> Backlog:
    """Return what waits for the limit of `limit_deletions`."""
    backups = [one for one in judgments if one.held_by((RetentionRule.LIMIT,))]
    waiting = Counter(copy.series for one in backups for copy in one.copies if copy.has_data)
    if not waiting:
        return Backlog()
    series, most = waiting.most_common(1)[0]
    copies = [copy for one in judgments for copy in one.copies if copy.series == series and copy.has_data]
    # As many as are completed from now on expire, too.
    days = ceil(most / _EXTRA_DELETIONS)
    return Backlog(len(backups), waiting.total(), _explain_waiting(copies), now + days * WINDOW)


def _explain_waiting(copies: Sequence[Copy]) -> str:
    """Return why so many copies of one volume in one location expire at once."""
    ordered = sorted((one for one in copies if one.created is not None), key=attrgetter("age_key"))
    schedule, keep = (ordered[-1].schedule, ordered[-1].keep) if ordered else (None, None)
    if keep and any(one.schedule == schedule and one.keep != keep for one in ordered):
        return f"what schedule {schedule} keeps was changed"
    ttls = [one.ttl for one in ordered if one.ttl is not None]
    if len(set(ttls)) > 1 and ttls[-1] < max(ttls):
        return f"the time to live was shortened from {format_duration(max(ttls))} to {format_duration(ttls[-1])}"
    times = [one.created for one in ordered if one.created is not None]
    pauses = sorted((after - before, before, after) for before, after in pairwise(times))
    if pauses and pauses[-1][0] > _MISSED_RUNS * pauses[len(pauses) // 2][0]:
        shown = " and ".join(map(format_time, pauses[-1][1:]))
        return f"there was no backup between {shown}: runs were missed, or a clock was wrong"
    return "fewer backups are completed than expire"


def decide_now(witnesses: Mapping[str, datetime | None], begun: datetime | None) -> datetime:
    """Return the time by which ages are counted: the earliest of what the witnesses say.

    `witnesses` are times that were taken together, by where they come from; None: it says none. `begun` is when the
    run's own Job was created; None: it has none.

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

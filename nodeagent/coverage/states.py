"""The state of each volume: which backups are expected of it, and whether it has them. Pure."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum
from functools import cached_property
from typing import Final

from core.models.base import Time, WireModel
from core.models.names import BACKUP_INTERVAL_ANNOTATION, EXCLUDE_ANNOTATION, EXCLUDE_LABEL
from core.models.units import parse_positive_duration
from core.text import format_age
from nodeagent.coverage.cluster import ClusterVolumes, VolumeClaim, VolumeKey
from nodeagent.coverage.selection import BackupMethod, VolumeChoice

_UNSCHEDULED: Final = timedelta(days=7)
"""How old the newest backup of a volume may be if no schedule expects one: a copy of last year protects nothing."""

_LONGEST_RUN: Final = timedelta(hours=1)
"""How late a run may complete a volume before it counts as missed; a quarter of the interval, if that is shorter."""

_CLOCK_TOLERANCE: Final = timedelta(minutes=5)
"""How far in the future a backup may be: one that a wrong clock has dated would be the newest until then."""

_EARLIER: Final = "older backups do not count: they are of a deleted PVC of the same name"


class CoverageState(StrEnum):
    """How well a volume is protected, from worst to best."""

    NEVER_BACKED_UP = "never-backed-up"
    FAILING = "failing"
    SHRUNK = "shrunk"
    STALE = "stale"
    SNAPSHOT_ONLY = "snapshot-only"
    PROTECTED = "protected"
    LEFT_OUT = "left-out"

    @property
    def words(self) -> str:
        """The state as people read it."""
        return "left out on purpose" if self is CoverageState.LEFT_OUT else self.replace("-", " ")


@dataclass(frozen=True)
class BackupSource:
    """A schedule: what it does with which volumes, and how often; None: never, and `why`. `ran` is its last start."""

    name: str
    interval: timedelta | None
    choices: Mapping[VolumeKey, VolumeChoice]
    why: str = ""
    ran: datetime | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Expectation:
    """What the schedule `name` does with volumes, and how often; None: never, and `why`. `ran` is its last start."""

    name: str
    interval: timedelta | None
    choice: VolumeChoice
    why: str = ""
    ran: datetime | None = None

    @property
    def copies(self) -> bool:
        """Whether it is going to copy the data."""
        return self.choice.method.copies and self.interval is not None

    def does(self, method: BackupMethod) -> bool:
        """Return whether it runs, and uses this method."""
        return self.choice.method is method and self.interval is not None


@dataclass(frozen=True, eq=False)
class Expectations:
    """What all schedules do with a volume; one for all volumes with which they do the same.

    Unless `known`, schedules could not be read, or not be matched with the volume.
    """

    each: tuple[Expectation, ...] = ()
    known: bool = True

    @cached_property
    def interval(self) -> timedelta | None:
        """The shortest interval of those that copy it; None: none does."""
        return min((one.interval for one in self.each if one.copies and one.interval is not None), default=None)

    @cached_property
    def by(self) -> str:
        """The names of those that copy it."""
        return ", ".join(one.name for one in self.each if one.copies)

    def explain_last_run(self, now: datetime) -> str:
        """Return when one of those that copy it last ran, as the end of a text with their names."""
        ran = max((one.ran for one in self.each if one.copies and one.ran is not None), default=None)
        if not self.by:
            return ""
        return f"; last run {format_age(now - ran)} ago" if ran is not None else "; no run yet"


_UNEXPECTED: Final = Expectations()
_UNKNOWN: Final = Expectations(known=False)


@dataclass(frozen=True, slots=True)
class VolumePlan:
    """A volume and the backups that are expected of it.

    `created` is when its PVC or pod was. `left_out` is why it is not backed up on purpose. `interval` is what its
    annotation asks for. `note` is what its owner should know. `uid` is the PVC's, empty where there is none.
    """

    key: VolumeKey
    created: datetime | None = None
    left_out: str | None = None
    annotated: timedelta | None = None
    expected: Expectations = _UNEXPECTED
    note: str | None = None
    uid: str = ""

    @property
    def began(self) -> datetime | None:
        """When the PVC was created: an older backup is of another volume.

        None: not known; such as of a volume of a pod, which may be a share that is older than the pod.
        """
        return None if ":" in self.key[1] else self.created

    @property
    def interval(self) -> timedelta | None:
        """The shortest interval of schedules that copy it, else its annotation's; None: nothing expects one."""
        return self.expected.interval or self.annotated

    @property
    def by(self) -> str:
        """What expects its backups, as text."""
        return self.expected.by or (f"its annotation {BACKUP_INTERVAL_ANNOTATION}" if self.annotated else "")


def plan_volumes(
    cluster: ClusterVolumes,
    sources: Sequence[BackupSource],
    leave_out_namespaces: Collection[str] | None = (),
    *,
    all_sources: bool = True,
) -> tuple[VolumePlan, ...]:
    """Return all bound PVCs, and the volumes of pods that fs-backup covers, with the backups that are expected of them.

    `leave_out_namespaces` are those in which the annotation of a PVC counts; None: they are not known. Unless `sources`
    are all of them, it is not known what expects backups of the others.
    """
    expected, otherwise = _collect_expectations(sources), _UNEXPECTED if all_sources else _UNKNOWN
    claims = [claim for claim in cluster.claims.values() if claim.bound]
    plans = [_plan_claim(claim, cluster, expected.pop(claim.key, otherwise), leave_out_namespaces) for claim in claims]
    created = {
        pod.key_of(volume): pod.metadata.creation_timestamp for pod in cluster.pods for volume in pod.spec.volumes
    }
    others = [
        VolumePlan(key, created.get(key), expected=found)
        for key, found in expected.items()
        # What is left is of pods, or of PVCs that are named and do not exist, or are not bound.
        if ":" in key[1]
    ]
    return (*plans, *others)


def _collect_expectations(sources: Sequence[BackupSource]) -> dict[VolumeKey, Expectations]:
    """Return what is expected of each volume; the choices of the sources, one for each volume, are not kept."""
    found: dict[VolumeKey, list[Expectation]] = {}
    for source in sources:
        shared: dict[VolumeChoice, Expectation] = {}
        for key, choice in source.choices.items():
            if (one := shared.get(choice)) is None:
                one = shared[choice] = Expectation(source.name, source.interval, choice, source.why, source.ran)
            found.setdefault(key, []).append(one)
    groups: dict[tuple[Expectation, ...], Expectations] = {}
    return {key: groups.setdefault(tuple(each), Expectations(tuple(each))) for key, each in found.items()}


def _plan_claim(
    claim: VolumeClaim, cluster: ClusterVolumes, expected: Expectations, leave_out_namespaces: Collection[str] | None
) -> VolumePlan:
    namespace, meta = claim.metadata.namespace, claim.metadata
    reason, note = meta.annotations.left_out, None
    allowed = namespace in (leave_out_namespaces or ())
    if reason and leave_out_namespaces is None:
        note = f"whether its annotation {EXCLUDE_ANNOTATION} counts is not known: the configuration cannot be used"
    elif reason and not allowed:
        note = f"its annotation {EXCLUDE_ANNOTATION} does not count: leaveOutNamespaces does not name {namespace}"
    return VolumePlan(
        claim.key,
        meta.creation_timestamp,
        left_out=_left_out(claim, cluster, reason if allowed else "", expected.each),
        annotated=parse_annotated(meta.annotations.interval),
        expected=expected,
        note=note,
        uid=meta.uid,
    )


def _left_out(claim: VolumeClaim, cluster: ClusterVolumes, reason: str, expected: Sequence[Expectation]) -> str | None:
    namespace = cluster.namespaces.get(claim.metadata.namespace)
    if claim.metadata.left_out:
        return f"the PVC has the label {EXCLUDE_LABEL}"
    if namespace is not None and namespace.metadata.left_out:
        return f"its namespace has the label {EXCLUDE_LABEL}"
    if reason:
        return f"annotation of the PVC: {reason}"
    if namespace is not None and namespace.metadata.annotations.left_out:
        return f"annotation of its namespace: {namespace.metadata.annotations.left_out}"
    skipping = [one for one in expected if one.does(BackupMethod.SKIPPED)]
    # One that is to copy it, and does not run, may be broken.
    if skipping and not any(one.choice.method.copies for one in expected):
        return f"{skipping[0].name}: {skipping[0].choice.why}"
    return None


def parse_annotated(text: str) -> timedelta | None:
    """Return the interval that an annotation asks for; an invalid one counts as absent."""
    try:
        return parse_positive_duration(text) if text else None
    except ValueError:
        return None


@dataclass(frozen=True, slots=True)
class CompletedBackup:
    """A backup of a volume that has ended; `name` is its transfer's as text.

    `created` is when its transfer was created: the data is not newer. One whose verification failed is `failed`, one
    that is neither complete nor failed was canceled. `shrunk` is the reason to show if it is Shrunk, and not
    acknowledged. `claim_uid` is the UID of its PVC; empty: not known. `location` is the name of its storage location.
    """

    key: VolumeKey
    created: datetime
    name: str
    complete: bool
    failed: bool = False
    message: str | None = None
    bytes: int = 0
    shrunk: str | None = None
    claim_uid: str = ""
    location: str = ""


def is_of_another(backed_up: str, uid: str) -> bool:
    """Return whether a backup is of another PVC, such as of another cluster with the bucket; empty: not known."""
    return bool(backed_up and uid) and backed_up != uid


@dataclass(slots=True)
class _History:
    """The newest complete and the newest failed backup of a volume, and the newest complete one that does not count."""

    good: CompletedBackup | None = None
    bad: CompletedBackup | None = None
    unusable: CompletedBackup | None = None

    def add(self, copy: CompletedBackup, *, usable: bool) -> None:
        if not usable:
            if copy.complete and (self.unusable is None or copy.created >= self.unusable.created):
                self.unusable = copy
            return
        if copy.complete and (self.good is None or copy.created >= self.good.created):
            self.good = copy
        if copy.failed and (self.bad is None or copy.created >= self.bad.created):
            self.bad = copy

    def since(self, began: datetime | None) -> "_History":
        """Return the history of a volume that began then: without the backups of a deleted PVC of the same name."""
        every = (self.good, self.bad, self.unusable)
        return _History(*(one if one and (began is None or one.created >= began) else None for one in every))


class VolumeCoverage(WireModel):
    """One volume: its state and why.

    `interval_seconds` is how often a backup is expected, `expected_by` what expects it. `last_backup` is the creation
    of the newest complete backup, `bytes` its size. `due` is when the next one is expected; `overdue`: it was to be
    there by now.
    """

    namespace: str
    volume: str
    state: CoverageState
    reason: str
    note: str = ""
    expected_by: str = ""
    interval_seconds: float | None = None
    last_backup: Time | None = None
    bytes: int | None = None
    due: Time | None = None
    overdue: bool = False

    @property
    def shown(self) -> str:
        """Its name as commands take it."""
        return f"{self.namespace}/{self.volume}"

    @property
    def needs_attention(self) -> bool:
        """Whether someone has to act; a volume that is new, and whose first backup is not due, is in order."""
        if self.state is CoverageState.NEVER_BACKED_UP:
            return self.overdue
        return self.state not in {CoverageState.PROTECTED, CoverageState.LEFT_OUT}


class Coverage(WireModel):
    """All volumes, those that need attention first; `notes` are what could not be read.

    Unless it is `complete`, volumes that have no backup are missing.
    """

    volumes: tuple[VolumeCoverage, ...] = ()
    complete: bool = True
    notes: tuple[str, ...] = ()

    @property
    def counts(self) -> Mapping[CoverageState, int]:
        """How many volumes are in each state."""
        found = Counter(one.state for one in self.volumes)
        return {state: found[state] for state in CoverageState if found[state]}

    @property
    def sentence(self) -> str:
        """The answer in one sentence, such as `38 of 40 volumes protected; 1 stale, 1 never backed up`."""
        counts = dict(self.counts)
        left_out = counts.pop(CoverageState.LEFT_OUT, 0)
        protected, every = counts.pop(CoverageState.PROTECTED, 0), len(self.volumes) - left_out
        if not every:
            return "; ".join(["no volumes" if self.complete else "no volumes are known", *_left_out_words(left_out)])
        parts = [f"{protected} of {every} volume{'' if every == 1 else 's'} protected"]
        if counts:
            parts.append(", ".join(f"{number} {state.words}" for state, number in counts.items()))
        parts += _left_out_words(left_out)
        if not self.complete:
            parts.append("volumes without a backup are not known")
        return "; ".join(parts)


def _left_out_words(number: int) -> list[str]:
    return [f"{number} {CoverageState.LEFT_OUT.words}"] if number else []


_WITHOUT_COPY: Final = frozenset({CoverageState.NEVER_BACKED_UP, CoverageState.SNAPSHOT_ONLY})


def build_coverage(
    plans: Iterable[VolumePlan] | None,
    copies: Iterable[CompletedBackup],
    now: datetime,
    notes: Sequence[str] = (),
    *,
    all_copies: bool = True,
    locations: Collection[str] | None = None,
) -> Coverage:
    """Return the state of each volume at `now`, a time by the API server's clock, by the backups that have ended.

    Without `plans`, because no PVCs may be listed, or unless `copies` are all of them, only the volumes that have a
    backup are known. A backup does not count unless its storage location is one of `locations`; None: they are not
    known.
    """
    known = None if plans is None else {plan.key: plan for plan in plans}
    histories: dict[VolumeKey, _History] = {}
    none, unknown = _History(), VolumePlan(("", ""), expected=_UNKNOWN)
    for copy in copies:
        plan = (known or {}).get(copy.key, unknown)
        # An older one is of a deleted PVC, which is noted.
        if not is_of_another(copy.claim_uid, plan.uid) or (plan.created and copy.created < plan.created):
            gone = locations is not None and copy.location not in locations and not copy.failed
            usable = not gone and copy.created - now <= _CLOCK_TOLERANCE
            histories.setdefault(copy.key, _History()).add(copy, usable=usable)
    every = known.values() if known is not None else [replace(unknown, key=key) for key in histories]
    volumes = [decide_state(plan, histories.get(plan.key, none), now) for plan in every]
    complete = known is not None and all_copies
    if not complete:
        # Others would look as if they were never backed up.
        volumes = [one for one in volumes if one.state not in _WITHOUT_COPY]
    order = list(CoverageState)
    volumes.sort(key=lambda one: (not one.needs_attention, order.index(one.state), one.namespace, one.volume))
    return Coverage(volumes=tuple(volumes), complete=complete, notes=tuple(notes))


def decide_state(plan: VolumePlan, history: _History, now: datetime) -> VolumeCoverage:
    """Return the state of one volume, and why."""
    earlier, history = history.good, history.since(plan.began)
    good, interval = history.good, plan.interval
    last = good.created if good is not None else plan.created
    overdue, due = good is None, None
    if last is not None and interval is not None:
        overdue, due = now - last > interval + _lateness(interval), _add(last, interval)
    state, reason = _judge(plan, history, now)
    return VolumeCoverage(
        namespace=plan.key[0],
        volume=plan.key[1],
        state=state,
        reason=reason,
        note="; ".join(filter(None, (plan.note, _EARLIER if good is not earlier else None, _explain(history, now)))),
        expected_by=plan.by,
        interval_seconds=interval.total_seconds() if interval is not None else None,
        last_backup=good.created if good is not None else None,
        bytes=good.bytes if good is not None else None,
        due=due,
        overdue=overdue,
    )


def _explain(history: _History, now: datetime) -> str | None:
    """Return why a newer backup than the last one that counts does not; None: there is none."""
    one = history.unusable
    if one is None or (history.good is not None and history.good.created >= one.created):
        return None
    why = f"BackupStorageLocation {one.location} does not exist"
    if one.created - now > _CLOCK_TOLERANCE:
        why = "it is from the future"
    return f"{one.name} does not count: {why}"


def _add(moment: datetime, interval: timedelta) -> datetime | None:
    """Return when the interval after the moment ends; None: it has no date."""
    try:
        return moment + interval
    except OverflowError:
        return None


def _lateness(interval: timedelta) -> timedelta:
    return min(interval / 4, _LONGEST_RUN)


def _judge(plan: VolumePlan, history: _History, now: datetime) -> tuple[CoverageState, str]:
    good, bad, interval = history.good, history.bad, plan.interval
    if plan.left_out is not None:
        return CoverageState.LEFT_OUT, plan.left_out
    if bad is not None and (good is None or bad.created > good.created):
        why = f"{bad.name} failed {format_age(now - bad.created)} ago: {bad.message or 'no message'}"
        return CoverageState.FAILING, why
    if good is None:
        return _judge_without_copy(plan, now)
    if good.shrunk is not None:
        return CoverageState.SHRUNK, f"{good.name}: {good.shrunk}"
    age = now - good.created
    why = f"expected every {format_age(interval)} by {plan.by}" if interval is not None else _why_unexpected(plan)
    longest = 2 * interval + _lateness(interval) if interval is not None else _UNSCHEDULED
    if age > longest:
        why = f"the last backup is {format_age(age)} old: {why}{plan.expected.explain_last_run(now)}"
        return CoverageState.STALE, why
    return CoverageState.PROTECTED, why


def _judge_without_copy(plan: VolumePlan, now: datetime) -> tuple[CoverageState, str]:
    if (interval := plan.interval) is None:
        snapshots = [one for one in plan.expected.each if one.does(BackupMethod.SNAPSHOT)]
        if snapshots:
            return CoverageState.SNAPSHOT_ONLY, f"{snapshots[0].name}: {snapshots[0].choice.why}"
        return CoverageState.NEVER_BACKED_UP, _why_unexpected(plan)
    every = f"expected every {format_age(interval)} by {plan.by}"
    if plan.created is not None and now - plan.created <= interval + _lateness(interval):
        return CoverageState.NEVER_BACKED_UP, f"the volume is {format_age(now - plan.created)} old; {every}"
    return CoverageState.NEVER_BACKED_UP, f"{every}{plan.expected.explain_last_run(now)}"


def _why_unexpected(plan: VolumePlan) -> str:
    """Return why nothing is going to copy the volume."""
    expected = plan.expected.each
    if not expected:
        known = plan.expected.known
        return "no schedule backs it up" if known else "whether a schedule backs it up is not known"
    one = min(expected, key=lambda each: (each.choice.method is BackupMethod.SKIPPED, each.interval is None))
    if one.interval is None:
        return f"{one.name} does not run: {one.why}"
    return f"{one.name} copies no data: {one.choice.why}"

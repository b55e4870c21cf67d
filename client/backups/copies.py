"""The copies that backups have, as retention sees them, and which ones schedules keep by count and calendar. Pure.

Source: restic v0.18.0, internal/restic/snapshot_policy.go, ApplyPolicy.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, Final
from zoneinfo import ZoneInfo

from core.errors import ConfigError, Translated
from core.models import names as wire
from core.models.backups import is_shrunk
from core.models.base import ObjectMeta, parse_time
from core.models.phases import Phase
from core.models.transfers import DataUpload, PodVolumeBackup
from core.models.units import format_duration, parse_duration
from core.models.verification import Verification, is_damaged
from nodeagent.config.windows import parse_time_zone

UTC_ZONE: Final = "UTC"
_ZONE: Final = "zone"
_TTL: Final = "ttl"


class KeepRule(StrEnum):
    """What a count is about: the newest copies, or the newest copy of each period that has one."""

    LAST = "last"
    HOURLY = "hourly"
    DAILY = "daily"
    WEEKLY = "weekly"
    MONTHLY = "monthly"
    YEARLY = "yearly"

    @property
    def flag(self) -> str:
        """The option that sets its count."""
        return f"--keep-{self}"

    @property
    def help(self) -> str:
        """What the option says."""
        if self is KeepRule.LAST:
            return "how many of the newest backups stay"
        return f"of how many {_PERIODS[self][0]} with a backup the newest one stays"


_PERIODS: Final = {
    KeepRule.HOURLY: ("hours", "%Y-%m-%d %Hh"),
    KeepRule.DAILY: ("days", "%Y-%m-%d"),
    KeepRule.WEEKLY: ("weeks", "%G-W%V"),
    KeepRule.MONTHLY: ("months", "%Y-%m"),
    KeepRule.YEARLY: ("years", "%Y"),
}
"""Words for periods, and their names for `strftime`: an hour that occurs twice is one, weeks begin on Monday."""


@dataclass(frozen=True)
class KeepPolicy:
    """How many copies of each volume stay, by rule; periods begin and end in an IANA time zone."""

    counts: Mapping[KeepRule, int]
    zone: str = UTC_ZONE

    @classmethod
    def of(cls, given: Mapping[KeepRule, int | None], zone: str | None) -> "KeepPolicy | None":
        """Return the policy with these counts, as options have them; None: none is given.

        Raises:
            ConfigError: a count or the time zone is invalid; the message names the flag.
        """
        counts = {rule: count for rule, count in given.items() if count is not None}
        for rule, count in counts.items():
            if count < 1:
                raise ConfigError(f"{rule.flag}: must be at least 1: {count}")
        if not counts:
            return None
        with Translated(ValueError, ConfigError, "--time-zone"):
            parse_time_zone(zone or UTC_ZONE)
        return cls(counts, zone or UTC_ZONE)

    @property
    def by_name(self) -> dict[str, int]:
        """The counts by the names of their rules, in one order."""
        return {str(rule): self.counts[rule] for rule in KeepRule if rule in self.counts}

    @property
    def argv(self) -> list[str]:
        """The words of a command line that set it."""
        words = [f"{KeepRule(name).flag}={count}" for name, count in self.by_name.items()]
        return words if self.zone == UTC_ZONE else [*words, f"--time-zone={self.zone}"]


def format_keep(policy: KeepPolicy, ttl: timedelta | None) -> str:
    """Return a policy and a time to live as BACKUP_KEEP_ANNOTATION has them."""
    words = {name: str(count) for name, count in policy.by_name.items()} | {_ZONE: policy.zone}
    if ttl is not None:
        words[_TTL] = format_duration(ttl)
    return ",".join(f"{key}={value}" for key, value in words.items())


def parse_keep(text: str) -> KeepPolicy:
    """Return the policy in BACKUP_KEEP_ANNOTATION; ValueError, ConfigError: it is invalid, or has unknown rules."""
    words = _parse_words(text)
    words.pop(_TTL, None)
    zone = words.pop(_ZONE, UTC_ZONE)
    policy = KeepPolicy.of({KeepRule(key): int(value) for key, value in words.items()}, zone)
    if policy is None:
        raise ValueError("it has no count")
    return policy


def _parse_words(text: str) -> dict[str, str]:
    return dict(word.partition("=")[::2] for word in text.split(",") if word)


_OF_VELERO: Final = (
    wire.VELERO_BACKUP_LABEL,
    wire.ASYNC_OPERATION_ID_LABEL,
    wire.RESTORE_UID_LABEL,
    "velero.io/backup-uid",
    wire.VELERO_RESTORE_LABEL,
)
"""Labels of a transfer that a Velero server made, or that it restored from a backup of the namespace.

Source: Velero v1.18, pkg/apis/velero/v1/labels_annotations.go.
"""


Series = tuple[tuple[str, str], str]
"""A volume, and a location: its copies there are judged by themselves."""


@dataclass(frozen=True)
class Copy:
    """One volume of a backup: its transfer.

    `namespace` is the PVC's and the repository's, `claim` as in `name_volume`. A `ttl` of None: it never expires.
    `foreign` is why the transfer is not one of `nodeagent backup create`, or why that is not known; None: it is.
    `damaged`: its last verification failed. `shrunk`: it is Shrunk, and not acknowledged. `recorded`: a command has
    begun to delete it. `future`: a wrong clock has dated it in the future, and it does not count. `schedule` is the
    label of the schedule that made it, and `keep` its policy then, as the annotation has it.
    """

    backup: str
    kind: str
    transfer: str
    uid: str
    namespace: str
    claim: str
    location: str
    phase: Phase
    created: datetime | None
    ended: datetime | None = None
    snapshot_id: str | None = None
    bytes: int = 0
    ttl: timedelta | None = None
    foreign: str | None = None
    deleting: bool = False
    damaged: bool = False
    shrunk: bool = False
    recorded: bool = False
    future: bool = False
    schedule: str | None = None
    keep: str | None = None

    @property
    def has_data(self) -> bool:
        """Whether its deletion takes a copy of the volume away."""
        return self.phase is Phase.COMPLETED and bool(self.snapshot_id) and not (self.foreign or self.future)

    @property
    def complete(self) -> bool:
        """Whether the volume can be restored from it: what is being deleted counts as gone."""
        return self.has_data and not (self.deleting or self.recorded)

    @property
    def completed(self) -> datetime | None:
        """When it was completed, or else made; None: not known."""
        return self.ended or self.created

    @property
    def volume(self) -> tuple[str, str]:
        """Namespace and name of the volume."""
        return self.namespace, self.claim

    @property
    def series(self) -> Series:
        """The copies that it is judged among."""
        return self.volume, self.location

    @property
    def age_key(self) -> tuple[float, str, str]:
        """Orders copies, the oldest first: of copies of the same second the name decides, always alike."""
        return self.created.timestamp() if self.created is not None else 0.0, self.backup, self.uid

    @property
    def shown_volume(self) -> str:
        """Namespace and name of the PVC, as text."""
        return "/".join(self.volume)


def name_volume(transfer: DataUpload | PodVolumeBackup) -> str:
    """Return the name of the PVC that the transfer backs up; of a volume of a pod without one, `<pod>:<volume>`."""
    if isinstance(transfer, DataUpload):
        return transfer.spec.source_pvc
    return transfer.source_claim or f"{transfer.spec.pod.name}:{transfer.spec.volume}"


def build_copy(transfer: DataUpload | PodVolumeBackup) -> Copy | None:
    """Return the volume of a backup of ours that this transfer is; None: it names no such backup."""
    meta, status = transfer.metadata, transfer.status
    name = meta.annotations.get(wire.BACKUP_ANNOTATION, "")
    if not name or wire.BACKUP_LABEL not in meta.labels:
        return None
    return Copy(
        backup=name,
        kind=transfer.kind_name,
        transfer=transfer.name,
        uid=transfer.uid,
        namespace=transfer.repository_namespace,
        claim=name_volume(transfer),
        location=transfer.spec.backup_storage_location,
        phase=transfer.phase,
        created=meta.creation_timestamp,
        ended=status.completion_timestamp,
        snapshot_id=status.snapshot_id,
        bytes=status.progress.total_bytes,
        ttl=_read_ttl(meta.annotations),
        schedule=meta.labels.get(wire.SCHEDULE_LABEL) or None,
        keep=meta.annotations.get(wire.BACKUP_KEEP_ANNOTATION) or None,
        foreign=_foreign(meta, name) or _unnameable(transfer, name),
        deleting=transfer.deleting,
        damaged=is_damaged(Verification.from_annotations(meta.annotations)),
        shrunk=is_shrunk(meta.annotations),
    )


def build_unreadable_copy(kind: str, raw: Mapping[str, Any], why: str) -> Copy | None:
    """Return a volume whose transfer cannot be read: nothing of its backup may be deleted; None: of no backup."""
    meta = raw["metadata"]
    annotations = meta.get("annotations") or {}
    name = annotations.get(wire.BACKUP_ANNOTATION, "")
    if not name:
        return None
    return Copy(
        backup=name,
        kind=kind,
        transfer=meta["name"],
        uid=meta.get("uid") or "",
        namespace="",
        claim="",
        location="",
        phase=Phase.NEW,
        created=parse_time(meta["creationTimestamp"]),
        ttl=_read_ttl(annotations),
        foreign=f"cannot be read: {why}",
    )


def _read_ttl(annotations: Mapping[str, str]) -> timedelta | None:
    """Return how long a backup is kept whatever its schedule keeps; None: that is not said, or cannot be read."""
    kept = _parse_words(annotations.get(wire.BACKUP_KEEP_ANNOTATION, ""))
    text = annotations.get(wire.BACKUP_TTL_ANNOTATION) or kept.get(_TTL)
    try:
        ttl = parse_duration(text) if text else timedelta()
    except ValueError:
        return None
    return ttl if ttl > timedelta() else None


def _foreign(meta: ObjectMeta, backup: str) -> str | None:
    if meta.labels.get(wire.BACKUP_LABEL) != wire.label_value(backup):
        why = f"its label {wire.BACKUP_LABEL} is of another backup"
    elif meta.owner_references:
        why = f"{meta.owner_references[0].kind} {meta.owner_references[0].name} owns it"
    elif found := [label for label in _OF_VELERO if label in meta.labels]:
        why = f"it has Velero's label {found[0]}"
    else:
        return None
    return f"is not of nodeagent backup create alone: {why}"


def _unnameable(transfer: DataUpload | PodVolumeBackup, backup: str) -> str | None:
    """Return why a Job cannot be given the names of the transfer's snapshots; None: it can."""
    if not wire.OBJECT_NAME.fullmatch(backup):
        return f"names no backup: {backup}"
    if not wire.OBJECT_NAME.fullmatch(transfer.repository_namespace):
        return f"names no namespace of its volume: {transfer.repository_namespace}"
    return None if transfer.spec.backup_storage_location else "names no BackupStorageLocation"


CLOCK_TOLERANCE: Final = timedelta(minutes=5)
"""How far the witnesses of the time may be apart: less than any time to live that matters, more than clocks drift."""


def explain_scheduled(copies: Iterable[Copy], policies: Mapping[str, KeepPolicy | None]) -> dict[str, str | None]:
    """Return, by the UIDs of copies whose schedule has a policy, why it keeps them; None: it does not.

    `copies` are of all backups. Where `policies` do not have a schedule, its newest copy has its policy.
    """
    by_schedule: dict[str, list[Copy]] = {}
    for one in copies:
        if one.schedule and not (one.foreign or one.future):
            by_schedule.setdefault(one.schedule, []).append(one)
    found: dict[str, str | None] = {}
    for schedule, ones in by_schedule.items():
        newest = max(ones, key=lambda one: one.age_key)
        keep = newest.keep
        try:
            policy = policies[schedule] if schedule in policies else parse_keep(keep) if keep else None
        except (ValueError, ConfigError) as e:
            why = f"what schedule {schedule} keeps cannot be read in its newest backup: {e}"
            found |= dict.fromkeys((one.uid for one in ones), why)
            continue
        if policy is not None:
            found |= _explain_schedule(schedule, ones, policy)
        elif keep or newest.ttl is None:
            # Their time to live was said together with a count, and the schedule has neither now.
            why = f"schedule {schedule} had a count when it was made, and has no time to live without one"
            found |= dict.fromkeys((one.uid for one in ones if one.keep), why)
    return found


def _explain_schedule(schedule: str, copies: Sequence[Copy], policy: KeepPolicy) -> dict[str, str | None]:
    found: dict[str, str | None] = {one.uid: None for one in copies}
    by_series: dict[Series, list[Copy]] = {}
    for one in copies:
        by_series.setdefault(one.series, []).append(one)
    for ones in by_series.values():
        for uid, keeps in decide_kept(ones, policy).items():
            found[uid] = f"schedule {schedule} keeps it: {'; '.join(keeps)}"
    return found


def decide_kept(copies: Iterable[Copy], policy: KeepPolicy) -> dict[str, list[str]]:
    """Return why the policy keeps copies of one volume in one location, by their UIDs; one that is absent may go.

    The reasons are phrases, such as `daily 3 of 7, the newest of 2026-11-20`. A copy that failed, whose verification
    failed, or whose deletion a command has begun stays as long as if it counted, and takes no place of another one.
    What has not ended, is foreign, or is being deleted is not considered.
    """
    ended = [one for one in copies if one.phase.final and not (one.foreign or one.deleting)]
    sound = [one for one in ended if one.has_data and not one.damaged]
    kept: dict[str, list[str]] = {}
    for counted in (ended, sound, [one for one in sound if one.complete]):
        for one in counted:
            kept.pop(one.uid, None)
        kept |= _apply(counted, policy)
    return kept


def _apply(copies: Iterable[Copy], policy: KeepPolicy) -> dict[str, list[str]]:
    zone = parse_time_zone(policy.zone)
    ordered = sorted((one for one in copies if one.created is not None), key=lambda one: one.age_key, reverse=True)
    kept: dict[str, list[str]] = {}
    for rule in KeepRule:
        if count := policy.counts.get(rule):
            for uid, why in _apply_rule(ordered, rule, count, zone).items():
                kept.setdefault(uid, []).append(why)
    return kept


def _apply_rule(ordered: Sequence[Copy], rule: KeepRule, count: int, zone: ZoneInfo) -> dict[str, str]:
    kept: dict[str, str] = {}
    before = None
    for one in ordered:
        if len(kept) == count or one.created is None:
            break
        number = f"{rule} {len(kept) + 1} of {count}"
        if rule is KeepRule.LAST:
            kept[one.uid] = number
            continue
        period = one.created.astimezone(zone).strftime(_PERIODS[rule][1])
        if period != before:
            kept[one.uid] = f"{number}, the newest of {period}"
        elif one is ordered[-1]:
            # It stays until the rule has as many: so the history becomes as long as it may.
            kept[one.uid] = f"{number}, the oldest"
        before = period
    return kept

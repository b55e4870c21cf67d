"""The metrics of volumes and their backups, one set of series for each PVC.

They outlive every transfer and pod, so that no label names one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Final

from prometheus_client import CollectorRegistry, Gauge

from core.models.base import format_time
from core.models.retention import HeldBackup, RetentionReport

__all__ = ["MAX_VOLUMES", "RetentionMetrics", "VolumeMetrics", "VolumeState"]

MAX_VOLUMES: Final = 2000
"""Volumes with series of their own, of which each has at most eight: a scrape stays below 4 MiB."""


@dataclass(frozen=True, slots=True)
class VolumeState:
    """What is known of the backups of one PVC; times in seconds since 1970, None and 0 where something is not known.

    `backup_at` is the creation of the newest completed backup, `bytes` the size of its files. `backup_interval` is how
    often there is to be one, in seconds, and `backup_due_at` when the next one is due. `verified_at` is the end of the
    last verification of any of the backups, and `verified_ok` what it found.
    """

    namespace: str
    claim: str
    backup_at: float | None = None
    bytes: int | None = None
    backup_interval: float | None = None
    backup_due_at: float | None = None
    verified_at: float | None = None
    verified_ok: bool | None = None
    verification_interval: float | None = None
    verification_due_at: float | None = None


_GAUGES: Final = {
    "backup_at": (
        "last_backup_timestamp_seconds",
        "When the newest completed backup of a PVC was created, in seconds since 1970",
    ),
    "bytes": ("last_backup_bytes", "Size of the files in the newest completed backup of a PVC"),
    "backup_interval": ("backup_interval_seconds", "How often a PVC is to be backed up, where that is known"),
    "backup_due_at": (
        "backup_due_timestamp_seconds",
        "When a PVC is to have its next backup: one interval after the last complete one, or after its creation",
    ),
    "verified_at": (
        "last_verification_timestamp_seconds",
        "When the last verification of a backup of a PVC ended, in seconds since 1970",
    ),
    "verified_ok": ("last_verification_ok", "1 if that verification passed, 0 if it failed"),
    "verification_interval": (
        "verification_interval_seconds",
        "How often a backup of a PVC is to be verified, where that is known",
    ),
    "verification_due_at": (
        "verification_due_timestamp_seconds",
        "When a backup of a PVC is to be verified next: one interval after the last time, or after its first backup",
    ),
}
"""Name and text of each gauge, by the field that it shows."""


class VolumeMetrics:
    """The gauges of volumes."""

    def __init__(self, node: str, registry: CollectorRegistry) -> None:
        """Register them for the agent of `node`."""
        labels = ["node", "volume_namespace", "claim"]
        self._node = node
        self._gauges = {
            field: Gauge(f"nodeagent_volume_{name}", text, labels, registry=registry)
            for field, (name, text) in _GAUGES.items()
        }
        text = f"Volumes with a backup or an interval that have no series, because {MAX_VOLUMES} others have"
        self._omitted = Gauge("nodeagent_volumes_omitted", text, ["node"], registry=registry)
        self._shown: Sequence[VolumeState] = ()

    def show(self, states: Sequence[VolumeState]) -> None:
        """Show these volumes and no others; of too many, those due first, then those with the newest backup."""
        chosen = sorted(states, key=_rank)[:MAX_VOLUMES]
        if chosen == self._shown:
            return
        self._shown = chosen
        for field, gauge in self._gauges.items():
            gauge.clear()
            value_of = attrgetter(field)
            for state in chosen:
                value = value_of(state)
                if value is not None:
                    gauge.labels(self._node, state.namespace, state.claim).set(value)
        self._omitted.clear()
        if states:
            self._omitted.labels(self._node).set(len(states) - len(chosen))


def _rank(state: VolumeState) -> tuple[float, float, str, str]:
    """Return what sorts the volumes that alerts are about, and may soon be about, before all others."""
    due_at = [at for at in (state.backup_due_at, state.verification_due_at) if at is not None]
    return (min(due_at, default=math.inf), -(state.backup_at or 0.0), state.namespace, state.claim)


class RetentionMetrics:
    """The gauges of what retention keeps, by its last report, and of schedules with older rules."""

    def __init__(self, node: str, registry: CollectorRegistry) -> None:
        """Register them for the agent of `node`."""
        self._node = node
        labels = ["node", "volume_namespace", "claim", "rule", "backup", "created"]
        text = "Size of the files in expired backups of a PVC that a rule of retention keeps; backup is the oldest"
        self._held = Gauge("nodeagent_retention_held_bytes", text, labels, registry=registry)
        text = "Expired copies of volumes that wait for the limit of deletions"
        self._waiting = Gauge("nodeagent_retention_waiting_copies", text, ["node", "why"], registry=registry)
        text = "When the last of the expired copies that wait now will be deleted"
        self._until = Gauge("nodeagent_retention_waiting_until_timestamp_seconds", text, ["node"], registry=registry)
        text = "1 for each schedule that deletes expired backups by the rules of an older version"
        self._old_rules = Gauge("nodeagent_retention_old_rules", text, ["node", "schedule"], registry=registry)

    def show(self, report: RetentionReport | None, old_schedules: Sequence[str]) -> None:
        """Show this report, None if there is none, and these schedules; nothing else."""
        for gauge in (self._held, self._waiting, self._until, self._old_rules):
            gauge.clear()
        for schedule in old_schedules:
            self._old_rules.labels(self._node, schedule).set(1)
        if report is None:
            return
        self._waiting.labels(self._node, report.waiting_why).set(report.waiting)
        if report.through is not None:
            self._until.labels(self._node).set(report.through.timestamp())
        held: dict[tuple[str, str, str], list[HeldBackup]] = {}
        for one in sorted(report.held, key=lambda one: one.created or report.at):
            held.setdefault((one.namespace, one.claim, one.rule), []).append(one)
        for key, backups in held.items():
            oldest = backups[0]
            created = format_time(oldest.created) if oldest.created is not None else ""
            self._held.labels(self._node, *key, oldest.backup, created).set(sum(one.bytes for one in backups))

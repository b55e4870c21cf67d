"""What the backups of a repository have added to it, as far as their transfers still exist. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from client.status.kinds import TRANSFER_KINDS
from client.status.records import TransferRecord
from core.models.phases import Phase

__all__ = ["Growth", "GrowthDay", "sum_growth"]

_BACKUPS: Final = frozenset(kind.name for kind in TRANSFER_KINDS if not kind.restores)
_DAYS: Final = 366


@dataclass(frozen=True)
class GrowthDay:
    """One day in UTC: how many backups were completed, the size of their files, and what was new of it, in bytes.

    None: no backup of the day says what was new.
    """

    day: str
    moment: int
    backups: int
    total_bytes: int
    new_bytes: int | None


@dataclass(frozen=True)
class Growth:
    """The days with completed backups, the oldest first; at most a year of them."""

    days: list[GrowthDay]

    @property
    def backups(self) -> int:
        """How many backups there were."""
        return sum(day.backups for day in self.days)

    @property
    def total_bytes(self) -> int:
        """The size of the files of all of these backups."""
        return sum(day.total_bytes for day in self.days)

    @property
    def new_bytes(self) -> int | None:
        """What was not in the repository before; None: not known."""
        return _sum_known(day.new_bytes for day in self.days)

    @property
    def deduplication(self) -> float | None:
        """How many times more was backed up than was new; None: not known."""
        return self.total_bytes / self.new_bytes if self.new_bytes else None


def sum_growth(transfers: Iterable[TransferRecord], namespace: str, location: str) -> Growth:
    """Return what the completed backups of this volume namespace in this location have added, by day."""
    by_day: dict[str, list[TransferRecord]] = {}
    for one in transfers:
        if one.kind not in _BACKUPS or one.phase is not Phase.COMPLETED or one.completed is None:
            continue
        if (one.queue, one.location) == (namespace, location):
            by_day.setdefault(f"{one.completed:%Y-%m-%d}", []).append(one)
    return Growth([_sum(day, found) for day, found in sorted(by_day.items())[-_DAYS:]])


def _sum(day: str, found: list[TransferRecord]) -> GrowthDay:
    moment = int(datetime.fromisoformat(f"{day}T00:00:00+00:00").timestamp())
    new_bytes = _sum_known(one.new_bytes for one in found)
    return GrowthDay(day, moment, len(found), sum(one.total_bytes for one in found), new_bytes)


def _sum_known(values: Iterable[int | None]) -> int | None:
    known = [one for one in values if one is not None]
    return sum(known) if known else None

"""The rows of the pages: transfers filtered, sorted and paged, and the copies that each volume has. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final
from urllib.parse import urlencode

from core.models.phases import Phase
from core.models.verification import Verification
from nodeagent.operations.status.kinds import TRANSFER_KINDS
from nodeagent.operations.status.records import ClusterSnapshot, TransferRecord
from nodeagent.operations.status.view import ActiveRow, PendingRow, StatusView

__all__ = ["PAGE_ROWS", "TransferFilter", "TransferPage", "VolumeRow", "choose_transfers", "list_volumes"]

PAGE_ROWS: Final = 100
_BACKUPS: Final = frozenset(kind.name for kind in TRANSFER_KINDS if not kind.restores)
_SORTS: Final = ("created", "name", "phase", "node", "volume")
_STATES: Final = ("", "active", "pending", "running", "failed", "ended")


@dataclass(frozen=True)
class TransferFilter:
    """What a person asked for; `state` is one of the words of the page, `page` counts from 1."""

    state: str = ""
    kind: str = ""
    text: str = ""
    sort: str = "created"
    page: int = 1

    @classmethod
    def of(cls, query: Mapping[str, str]) -> "TransferFilter":
        """Return the filter in a query; an unknown value counts as absent."""
        state, kind, sort, page = (query.get(key, "") for key in ("state", "kind", "sort", "page"))
        return cls(
            state=state if state in _STATES else "",
            kind=kind if kind in {one.name for one in TRANSFER_KINDS} else "",
            text=query.get("q", "").strip(),
            sort=sort if sort in _SORTS else "created",
            page=int(page) if page.isascii() and page.isdecimal() and 0 < int(page) < 10**6 else 1,
        )

    def link(self, **changes: str | int) -> str:
        """Return the query of the same filter with some changes."""
        own = {"state": self.state, "kind": self.kind, "q": self.text, "sort": self.sort, "page": self.page} | changes
        defaults = {"state": "", "kind": "", "q": "", "sort": "created", "page": 1}
        query = urlencode({key: value for key, value in own.items() if value != defaults[key]})
        return f"?{query}" if query else ""


@dataclass(frozen=True)
class TransferPage:
    """The transfers of one page, and how many there are; `active` and `pending` have what is known of these."""

    rows: list[TransferRecord]
    total: int
    pages: int
    active: Mapping[tuple[str, str], ActiveRow]
    pending: Mapping[tuple[str, str], PendingRow]


def choose_transfers(snapshot: ClusterSnapshot, view: StatusView, chosen: TransferFilter) -> TransferPage:
    """Return the transfers that the filter chooses, in its order; a page that does not exist is the last one."""
    active = {(one.kind, one.name): one for one in view.transfers}
    pending = {(one.kind, one.name): one for one in view.pending}
    text = chosen.text.lower()
    found = [
        one
        for one in snapshot.transfers
        if chosen.kind in {"", one.kind}
        and _is_in(one, chosen.state, (one.kind, one.name) in pending)
        and text in f"{one.name} {one.queue}/{one.volume} {one.node} {one.location} {one.backup} {one.reason}".lower()
    ]
    found.sort(key=lambda one: (_sort_key(one, chosen.sort), one.name), reverse=chosen.sort == "created")
    pages = max(1, -(-len(found) // PAGE_ROWS))
    first = (min(chosen.page, pages) - 1) * PAGE_ROWS
    return TransferPage(found[first : first + PAGE_ROWS], len(found), pages, active, pending)


def _is_in(one: TransferRecord, state: str, waits: bool) -> bool:  # noqa: FBT001 - one of several conditions
    match state:
        case "active":
            return one.active
        case "pending":
            return waits
        case "running":
            return one.moving
        case "failed":
            return one.phase is Phase.FAILED or bool(one.fault)
        case "ended":
            return one.phase.final
    return True


def _sort_key(one: TransferRecord, sort: str) -> str:
    match sort:
        case "phase":
            return str(one.phase)
        case "node":
            return one.node
        case "volume":
            return f"{one.queue}/{one.volume}"
        case "name":
            return one.name
    return one.created


@dataclass(frozen=True)
class VolumeRow:
    """A volume that was backed up, or tried to be; `last` is its newest complete backup, None: it has none.

    `failed` is its newest backup if that failed after `last`; `verified` is the newest verification of any of them.
    """

    namespace: str
    volume: str
    last: TransferRecord | None
    failed: TransferRecord | None
    verified: Verification | None

    @property
    def completed(self) -> datetime | None:
        """When its newest complete backup ended."""
        return self.last.completed if self.last is not None else None


def list_volumes(transfers: Iterable[TransferRecord]) -> list[VolumeRow]:
    """Return the volumes of all backups: those without a complete one first, then the oldest one."""
    by_volume: dict[tuple[str, str], list[TransferRecord]] = {}
    for one in transfers:
        if one.kind in _BACKUPS and one.volume and not one.fault:
            by_volume.setdefault((one.queue, one.volume), []).append(one)
    rows = []
    for (namespace, volume), found in by_volume.items():
        found.sort(key=lambda one: one.created)
        last = next((one for one in reversed(found) if one.phase is Phase.COMPLETED), None)
        newest = found[-1]
        failed = newest if newest.phase is Phase.FAILED and newest is not last else None
        verified = max((one.verification for one in found if one.verification), key=lambda one: one.at, default=None)
        rows.append(VolumeRow(namespace, volume, last, failed, verified))
    return sorted(rows, key=lambda row: (_age_key(row), row.namespace, row.volume))


def _age_key(row: VolumeRow) -> float:
    return row.completed.timestamp() if row.completed is not None else 0.0

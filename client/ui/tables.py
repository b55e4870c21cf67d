"""The rows of the pages: transfers filtered, sorted and paged, the copies of each volume, what each node runs. Pure."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Generic, TypeVar
from urllib.parse import urlencode

from client.status.records import TRANSFER_KINDS, ClusterSnapshot, TransferRecord, UnreadPart
from client.status.view import ActiveRow, NodeRow, PendingRow, StatusView
from core.models.names import NO_CONFIG
from core.models.phases import Phase
from core.models.verification import Verification
from nodeagent.coverage.states import VolumeCoverage

_T = TypeVar("_T")

PAGE_ROWS: Final = 100
_SORTS: Final[Mapping[str, Callable[[TransferRecord], str]]] = {
    "created": lambda one: one.created,
    "name": lambda one: one.name,
    "phase": lambda one: str(one.phase),
    "node": lambda one: one.node,
    "volume": lambda one: f"{one.queue}/{one.volume}",
}
_STATES: Final[Mapping[str, Callable[[TransferRecord, bool], bool]]] = {
    "": lambda _one, _waits: True,
    "active": lambda one, _waits: one.active,
    "pending": lambda _one, waits: waits,
    "running": lambda one, _waits: one.moving,
    "failed": lambda one, _waits: one.phase is Phase.FAILED or bool(one.fault),
    "ended": lambda one, _waits: one.phase.final,
}
"""Whether a transfer is in the state, also by whether it is pending."""


@dataclass(frozen=True)
class Cut(Generic[_T]):
    """The rows of one page of a table, which counts from 1; of how many rows and pages."""

    rows: Sequence[_T]
    page: int
    pages: int
    total: int


def cut(rows: Sequence[_T], page: int) -> Cut[_T]:
    """Return the rows of that page; the last page, if there are fewer."""
    pages = max(1, -(-len(rows) // PAGE_ROWS))
    page = min(page, pages)
    return Cut(rows[(page - 1) * PAGE_ROWS : page * PAGE_ROWS], page, pages, len(rows))


def parse_page(text: str) -> int:
    """Return the number of a page in a query; an invalid one counts as the first."""
    # Python converts at most 4300 digits.
    return int(text) or 1 if text.isascii() and text.isdecimal() and not text[6:] else 1


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
        state, kind, sort = (query.get(key, "") for key in ("state", "kind", "sort"))
        return cls(
            state=state if state in _STATES else "",
            kind=kind if kind in {one.name for one in TRANSFER_KINDS} else "",
            text=query.get("q", "").strip(),
            sort=sort if sort in _SORTS else "created",
            page=parse_page(query.get("page", "")),
        )

    def link(self, **changes: str | int) -> str:
        """Return the query of the same filter with some changes."""
        own = {"state": self.state, "kind": self.kind, "q": self.text, "sort": self.sort, "page": self.page} | changes
        defaults = {"state": "", "kind": "", "q": "", "sort": "created", "page": 1}
        query = urlencode({key: value for key, value in own.items() if value != defaults[key]})
        return f"?{query}" if query else ""


@dataclass(frozen=True)
class TransferPage:
    """The transfers of one page; `active` and `pending` have what is known of these."""

    cut: Cut[TransferRecord]
    active: Mapping[tuple[str, str], ActiveRow]
    pending: Mapping[tuple[str, str], PendingRow]


def choose_transfers(snapshot: ClusterSnapshot, view: StatusView, chosen: TransferFilter) -> TransferPage:
    """Return the transfers that the filter chooses, in its order."""
    active = {(one.kind, one.name): one for one in view.transfers}
    pending = {(one.kind, one.name): one for one in view.pending}
    text = chosen.text.lower()
    is_in, sort_key = _STATES[chosen.state], _SORTS[chosen.sort]
    found = [
        one
        for one in snapshot.transfers
        if chosen.kind in {"", one.kind} and is_in(one, (one.kind, one.name) in pending) and text in _searched(one)
    ]
    found.sort(key=lambda one: (sort_key(one), one.name), reverse=chosen.sort == "created")
    return TransferPage(cut(found, chosen.page), active, pending)


def _searched(one: TransferRecord) -> str:
    volumes = f"{one.queue}/{one.volume} {one.queue}/{one.claim}"
    return f"{one.name} {volumes} {one.node} {one.location} {one.backup} {one.reason}".lower()


@dataclass(frozen=True)
class VolumeRow:
    """A volume that is there, or was backed up; `last` is its newest complete backup, None: it has none.

    `state` is how well it is protected; None: that is not known, or its PVC does not exist any more. `failed` is its
    newest backup if that failed after `last`. `verified` is the verification of `last`; `earlier` is the newest one of
    another backup, unless `last` has a newer one.
    """

    namespace: str
    volume: str
    last: TransferRecord | None
    failed: TransferRecord | None
    verified: Verification | None
    earlier: Verification | None
    state: VolumeCoverage | None = None

    @property
    def urgent(self) -> bool:
        """Whether someone has to act."""
        if any(not one.passed for one in (self.verified, self.earlier) if one is not None):
            return True
        return self.state.needs_attention if self.state is not None else self.last is None


def volume_of(one: TransferRecord) -> tuple[str, str]:
    """Return namespace and name of the volume of a backup: its PVC, else pod and volume."""
    return (one.queue, one.claim or one.volume)


def list_volumes(transfers: Iterable[TransferRecord], coverage: Sequence[VolumeCoverage] = ()) -> list[VolumeRow]:
    """Return all volumes, and the volumes of backups that are not there any more.

    Those that need attention come first, then by state; those whose state is not known by the age of the last copy, the
    oldest first.
    """
    by_volume: dict[tuple[str, str], list[TransferRecord]] = {}
    for one in transfers:
        if one.is_backup and one.volume and not one.fault:
            by_volume.setdefault(volume_of(one), []).append(one)
    states = {(one.namespace, one.volume): one for one in coverage}
    rows = [_build_row(key, by_volume.get(key, []), states.get(key)) for key in {**states, **by_volume}]
    order = {key: number for number, key in enumerate(states)}

    def rank(row: VolumeRow) -> tuple[bool, int, bool, bool, float, tuple[str, str]]:
        key, good = (row.namespace, row.volume), all(one.passed for one in (row.verified, row.earlier) if one)
        completed = row.last.completed.timestamp() if row.last and row.last.completed else 0.0
        return not row.urgent, order.get(key, len(order)), row.last is not None, good, completed, key

    return sorted(rows, key=rank)


def _build_row(key: tuple[str, str], found: list[TransferRecord], state: VolumeCoverage | None) -> VolumeRow:
    found.sort(key=lambda one: one.created)
    last = next((one for one in reversed(found) if one.phase is Phase.COMPLETED), None)
    newest = found[-1] if found else None
    failed = newest if newest is not None and newest.phase is Phase.FAILED else None
    verified = last.verification if last is not None else None
    others = [one.verification for one in found if one.verification and one is not last]
    earlier = max(others, key=lambda one: one.rank, default=None)
    if earlier and verified and earlier.rank <= verified.rank:
        earlier = None
    return VolumeRow(*key, last, failed, verified, earlier, state)


_GRID_NODES: Final = 50
"""Of a grid: each page has all of its cells."""

_GRID_SLOTS: Final = 16


@dataclass(frozen=True)
class GridRow:
    """A node, what runs in its slots, and what is prepared for it.

    `waiting` have not been admitted: those that can run on this node alone, in the order of the queue.
    """

    row: NodeRow
    running: list[ActiveRow]
    preparing: list[ActiveRow]
    waiting: list[PendingRow]


@dataclass(frozen=True)
class SlotGrid:
    """Some nodes, those that run most first; `columns` slots are shown of each. `others` run nothing, or do not fit."""

    nodes: list[GridRow]
    columns: int
    others: int


def build_grid(view: StatusView, moving: Collection[tuple[str, str]]) -> SlotGrid:
    """Return the nodes that run or prepare something, and as many others as fit.

    `moving` are the transfers that have slots, by kind and name.
    """
    by_node = _by_node(view)
    nodes = [GridRow(row, *divide(by_node.get(row.node, []), moving), []) for row in view.nodes]
    nodes.sort(key=lambda one: (-len(one.running), -len(one.preparing), one.row.node))
    shown = nodes[:_GRID_NODES]
    columns = max((max(one.row.slots or 0, len(one.running)) for one in shown), default=0)
    return SlotGrid(shown, min(columns, _GRID_SLOTS), len(nodes) - len(shown))


def find_node(view: StatusView, transfers: Iterable[TransferRecord], name: str) -> GridRow | None:
    """Return the node of that name, with what is prepared in the order in which it gets slots.

    `row.pod` is empty where no agent is known on it, but transfers are. None: nothing is known of such a node.
    """
    here = {(one.kind, one.name): one for one in transfers if one.node == name and one.active}
    row = next((row for row in view.nodes if row.node == name), None)
    if row is None:
        if not here and UnreadPart.AGENTS not in view.unread:
            return None
        row = NodeRow(
            node=name, pod="", ready=False, leader=False, running=0, slots=None, preparing=0, config="", restarts=0
        )
    waiting = [one for one in view.pending if (one.kind, one.name) in here]
    moving = {key for key, one in here.items() if one.moving}
    found = GridRow(row, *divide(_by_node(view).get(name, []), moving), waiting)

    def turn(one: ActiveRow) -> tuple[bool, datetime, str]:
        # Those that wait for a slot get one in the order in which they were accepted.
        accepted = here[one.kind, one.name].accepted
        return one.phase is Phase.ACCEPTED, accepted or datetime.max.replace(tzinfo=UTC), one.name

    found.preparing.sort(key=turn)
    return found


def describe_configuration(row: NodeRow, view: StatusView) -> tuple[str, bool]:
    """Return which configuration the agent uses, and whether that is as it should be; not known is not."""
    config = view.configuration
    wanted = config.hash or NO_CONFIG
    if not row.config:
        return "not known", False
    if UnreadPart.CONFIG in view.unread:
        return f"{row.config}; whether it is current is not known", False
    if config.errors:
        return f"{row.config}, since the ConfigMap cannot be used", False
    return (row.config, True) if row.config == wanted else (f"{row.config}, not yet {wanted}", False)


def _by_node(view: StatusView) -> dict[str, list[ActiveRow]]:
    found: dict[str, list[ActiveRow]] = {}
    for one in view.transfers:
        found.setdefault(one.node, []).append(one)
    return found


def divide(rows: Iterable[ActiveRow], moving: Collection[tuple[str, str]]) -> tuple[list[ActiveRow], list[ActiveRow]]:
    """Return the transfers that have slots, and the others: also another attempt of one in progress waits for one."""
    found: tuple[list[ActiveRow], list[ActiveRow]] = ([], [])
    for one in rows:
        found[(one.kind, one.name) not in moving].append(one)
    return found

"""What each node runs: its slots, what comes next on it, and the configuration of its agent. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from client.status.records import TransferRecord, UnreadPart
from client.status.view import ActiveRow, NodeRow, PendingRow, StatusView
from core.models.names import NO_CONFIG
from core.models.phases import HOLDING_PHASES, Phase

__all__ = ["GridRow", "SlotGrid", "build_grid", "describe_configuration", "find_node"]

_GRID_NODES: Final = 50
"""Of a grid: each page has all of its cells."""

_GRID_SLOTS: Final = 16


@dataclass(frozen=True)
class GridRow:
    """A node, what runs in its slots, and what is prepared for it; `free` None: not known.

    `waiting` have not been admitted: those that can run on this node alone, in the order of the queue.
    """

    row: NodeRow
    running: list[ActiveRow]
    preparing: list[ActiveRow]
    waiting: list[PendingRow]

    @property
    def free(self) -> int | None:
        """How many slots are free; None: not known."""
        return max(0, self.row.slots - len(self.running)) if self.row.slots is not None else None


@dataclass(frozen=True)
class SlotGrid:
    """Some nodes, those that run most first; `columns` slots are shown of each. `others` run nothing, or do not fit."""

    nodes: list[GridRow]
    columns: int
    others: int


def build_grid(view: StatusView) -> SlotGrid:
    """Return the nodes that run or prepare something, and as many others as fit."""
    by_node = _by_node(view)
    nodes = [_slots_of(row, by_node.get(row.node, []), []) for row in view.nodes]
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
    found = _slots_of(row, _by_node(view).get(name, []), waiting)

    def turn(one: ActiveRow) -> tuple[bool, datetime, str]:
        # Those that wait for a slot get one in the order in which they were accepted.
        accepted = here[one.kind, one.name].accepted
        return one.phase is not Phase.PREPARED, accepted or datetime.max.replace(tzinfo=UTC), one.name

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


def _slots_of(row: NodeRow, rows: list[ActiveRow], waiting: list[PendingRow]) -> GridRow:
    preparing = [one for one in rows if one.phase in HOLDING_PHASES]
    running = [one for one in rows if one.phase not in HOLDING_PHASES]
    return GridRow(row, running, preparing, waiting)

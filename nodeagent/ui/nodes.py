"""What each node runs: its slots, and what comes next on it. Pure."""

from dataclasses import dataclass
from typing import Final

from core.models.phases import HOLDING_PHASES
from nodeagent.operations.status.view import ActiveRow, NodeRow, PendingRow, StatusView

__all__ = ["NodeSlots", "SlotGrid", "build_grid", "find_node"]

_GRID_NODES: Final = 50
"""Of a grid: each page has all of its cells."""

_GRID_SLOTS: Final = 16


@dataclass(frozen=True)
class NodeSlots:
    """A node, what runs in its slots, and what is prepared for it, the oldest first; `free` None: not known.

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

    nodes: list[NodeSlots]
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


def find_node(view: StatusView, name: str, bound: frozenset[tuple[str, str]]) -> NodeSlots | None:
    """Return the node of that name; `bound` are the pending transfers that can run on it alone. None: no such node."""
    row = next((row for row in view.nodes if row.node == name), None)
    if row is None:
        return None
    waiting = [one for one in view.pending if (one.kind, one.name) in bound]
    return _slots_of(row, _by_node(view).get(name, []), waiting)


def _by_node(view: StatusView) -> dict[str, list[ActiveRow]]:
    found: dict[str, list[ActiveRow]] = {}
    for one in view.transfers:
        found.setdefault(one.node, []).append(one)
    return found


def _slots_of(row: NodeRow, rows: list[ActiveRow], waiting: list[PendingRow]) -> NodeSlots:
    preparing = [one for one in rows if one.phase in HOLDING_PHASES]
    running = [one for one in rows if one.phase not in HOLDING_PHASES]
    return NodeSlots(row, running, preparing, waiting)

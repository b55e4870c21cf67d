"""The rules of resumption: which interrupted transfers begin their next attempt, and what the others wait for.

They come before New transfers, the oldest first, and each agent prepares one at a time: a node that returns with many
of them must not keep the quota from all others. Reads and writes nothing.
"""

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Self

from core.models.attempts import AttemptStage, InterruptionCause
from core.models.reasons import PendingReason
from exposer.model import Pending
from nodeagent.leader.admission.ledger import free_quota
from nodeagent.leader.index import Entry
from nodeagent.leader.live_agents import choose_node, count_idle

__all__ = ["Conditions", "Resumptions", "awaited_locations", "plan_resumptions"]


@dataclass
class Resumptions:
    """What is done about the transfers whose next attempt may begin.

    `start` begin now, in this order, with a reservation each, on the nodes of their labels, which may be other ones
    than before. `release` have a reservation that they cannot use. `waiting` is what the next attempt of each of the
    others waits for, by uid.
    """

    start: list[Entry] = field(default_factory=list)
    release: list[Entry] = field(default_factory=list)
    waiting: dict[str, Pending] = field(default_factory=dict)


@dataclass(frozen=True)
class Conditions:
    """What resumptions depend on.

    `limit` is the `prepareQueueLength`; None: there is none. `agents` are the live agents' nodes by node label: a
    transfer of any other is left to recovery. `answering` are the backup storage locations of `awaited_locations` that
    answer. `passed_over` are the node labels that no transfer is moved to.
    """

    limit: int | None
    agents: Mapping[str, str]
    answering: AbstractSet[str]
    passed_over: AbstractSet[str] = frozenset()


def awaited_locations(entries: Iterable[Entry]) -> set[str]:
    """Return the backup storage locations whose answer interrupted transfers wait for."""
    return {entry.location for entry in entries if _waits_for_location(entry) and not entry.stop}


def plan_resumptions(entries: Iterable[Entry], reserved: AbstractSet[str], conditions: Conditions) -> Resumptions:
    """Return what is done about interrupted transfers.

    Args:
        entries: all transfers.
        reserved: the uids that use the quota.
        conditions: what they depend on.
    """
    known = [entry for entry in entries if entry.managed]
    limit = conditions.limit
    free = free_quota(reserved, limit)
    nodes = _Nodes.of(known, conditions)
    plan = Resumptions()
    # A reservation comes first: its attempt may have begun.
    ready = (entry for entry in known if entry.stage is AttemptStage.READY)
    for entry in sorted(ready, key=lambda entry: (entry.uid not in reserved, entry.created, entry.name)):
        held = entry.uid in reserved
        node = conditions.agents.get(entry.node_label, "")
        # A canceled transfer is ended by its agent.
        usable = bool(node) and not entry.stop
        label = nodes.place(entry) if usable else ""
        if not usable:
            message = ""
        elif not label:
            message = f"begins after another transfer's on node {node}"
        elif not held and free <= 0:
            message = f"is queued before all New transfers: prepareQueueLength ({limit}) reached"
        elif _waits_for_location(entry) and entry.location not in conditions.answering:
            message = f"begins once BackupStorageLocation {entry.location} answers"
        else:
            plan.start.append(replace(entry, node_label=label))
            nodes.busy.add(label)
            free -= not held
            continue
        if held:
            plan.release.append(entry)
        if message:
            plan.waiting[entry.uid] = Pending(PendingReason.RESUMING, message)
    return plan


@dataclass
class _Nodes:
    """Where attempts can begin: `busy` are the node labels of agents that expose one.

    `full` are the nodes on which an exposed one waits for a slot.
    """

    conditions: Conditions
    idle: Mapping[str, int]
    busy: set[str]
    full: AbstractSet[str]

    @classmethod
    def of(cls, known: Iterable[Entry], conditions: Conditions) -> Self:
        """Return the state of the nodes, given all transfers."""
        exposing = [entry for entry in known if entry.stage is AttemptStage.EXPOSING]
        full = {entry.node_label for entry in exposing if entry.reason == PendingReason.WAITING_FOR_SLOT}
        busy = {entry.node_label for entry in exposing if entry.reason != PendingReason.WAITING_FOR_SLOT}
        return cls(conditions, count_idle(known), busy, full)

    def place(self, entry: Entry) -> str:
        """Return the node label of the agent that can prepare the next attempt now; empty where none can.

        What can run on any node does not wait for its own agent, which may have one that finds no place.
        """
        label = entry.node_label
        if entry.bound:
            # Only a slot of this node helps, and the one before waits for that already.
            return "" if label in self.busy | self.full else label
        if label not in self.busy:
            return label
        free = self.conditions.agents.keys() - self.busy - self.conditions.passed_over
        return choose_node({other: self.conditions.agents[other] for other in free}, self.idle) or ""


def _waits_for_location(entry: Entry) -> bool:
    outage = entry.interrupted_by is InterruptionCause.STORAGE_UNAVAILABLE
    return entry.stage is AttemptStage.READY and outage

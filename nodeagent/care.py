"""What a load needs whose agent does not look after it, as one pure function.

Knows every state that a load without a working owner can be seen in. Does not know how that
was seen, nor how it is done (`nodeagent.orphans`).
"""

from dataclasses import dataclass
from enum import Enum, auto

from core.models.phases import Phase
from nodeagent.load_index import AGENT_AWAY, Entry

__all__ = ["Care", "Owner", "decide_care"]


class Care(Enum):
    """What a load needs from the dispatcher."""

    NOTHING = auto()
    ADOPT = auto()
    """It was accepted, but not by one of ours: give it the label of the node that has it."""
    REASSIGN = auto()
    """Its accepting agent is gone: give it to another."""
    END = auto()
    """The node that has it is lost: end it, unless there is a result that another agent can take."""
    AWAIT = auto()
    """Only the agent that is away can go on with it: say so, and heed cancel and timeout."""
    WELCOME = auto()
    """Its agent is back: take back what was said."""
    EXPLAIN = auto()
    """It cannot be read: say which fields are wrong."""
    CLEAN_UP = auto()
    """It is final and nobody else removes what was made for it."""


@dataclass(frozen=True)
class Owner:
    """The state of a load's owner.

    `away`: the agent under its label is gone for long enough. `node_lost`: its node counts as
    lost. `bound`: only that node can carry it out, from the beginning.
    """

    away: bool
    node_lost: bool
    bound: bool


def decide_care(entry: Entry, owner: Owner) -> Care:
    """Return what a load needs."""
    if entry.fault and not entry.node_label:
        return Care.EXPLAIN
    if not entry.managed or entry.phase is Phase.NEW:
        return Care.NOTHING
    ownerless = not entry.node_label or owner.away or owner.node_lost
    if entry.phase.final:
        return Care.CLEAN_UP if entry.finalizer and ownerless else Care.NOTHING
    if not entry.node_label:
        return Care.ADOPT
    if not ownerless:
        return Care.WELCOME if entry.message.startswith(AGENT_AWAY) else Care.NOTHING
    if entry.phase is Phase.ACCEPTED and not owner.bound:
        return Care.REASSIGN
    return Care.END if owner.node_lost else Care.AWAIT

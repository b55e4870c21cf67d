"""The rules of resumption: which interrupted transfers begin their next attempt, and what the others wait for.

They come before New transfers, the oldest first, and one of each node at a time: a node that returns with many of them
must not keep the quota from all others. Reads and writes nothing.
"""

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from core.models.attempts import AttemptStage, InterruptionCause
from core.models.reasons import PendingReason
from exposer.model import Pending
from nodeagent.leader.admission.ledger import free_quota
from nodeagent.leader.index import Entry

__all__ = ["Resumptions", "awaited_locations", "plan_resumptions"]


@dataclass
class Resumptions:
    """What is done about the transfers whose next attempt may begin.

    `start` begin now, in this order, with a reservation each. `release` have a reservation that they cannot use.
    `waiting` is what the next attempt of each of the others waits for, by uid.
    """

    start: list[Entry] = field(default_factory=list)
    release: list[Entry] = field(default_factory=list)
    waiting: dict[str, Pending] = field(default_factory=dict)


def awaited_locations(entries: Iterable[Entry]) -> set[str]:
    """Return the backup storage locations whose answer interrupted transfers wait for."""
    return {entry.location for entry in entries if _waits_for_location(entry) and not entry.stop}


def plan_resumptions(
    entries: Iterable[Entry],
    reserved: AbstractSet[str],
    *,
    limit: int | None,
    agents: Mapping[str, str],
    answering: AbstractSet[str],
) -> Resumptions:
    """Return what is done about interrupted transfers.

    Args:
        entries: all transfers.
        reserved: the uids that use the quota.
        limit: the `prepareQueueLength`; None: there is none.
        agents: the live agents' nodes by node label. A transfer of any other is left to recovery.
        answering: the backup storage locations of `awaited_locations` that answer.
    """
    known = [entry for entry in entries if entry.managed]
    free = free_quota(reserved, limit)
    busy = {entry.node_label for entry in known if entry.stage is AttemptStage.EXPOSING}
    plan = Resumptions()
    # A reservation comes first: its attempt may have begun.
    ready = (entry for entry in known if entry.stage is AttemptStage.READY)
    for entry in sorted(ready, key=lambda entry: (entry.uid not in reserved, entry.created, entry.name)):
        held = entry.uid in reserved
        node = agents.get(entry.node_label, "")
        # A canceled transfer is ended by its agent.
        usable = bool(node) and not entry.stop
        if usable and _waits_for_location(entry) and entry.location not in answering:
            message = f"begins once BackupStorageLocation {entry.location} answers"
        elif usable and entry.node_label in busy:
            message = f"begins after that of another transfer on node {node}"
        elif usable and not held and free <= 0:
            message = f"is queued before all New transfers: prepareQueueLength ({limit}) reached"
        elif usable:
            plan.start.append(entry)
            busy.add(entry.node_label)
            free -= not held
            continue
        else:
            message = ""
        if held:
            plan.release.append(entry)
        if message:
            plan.waiting[entry.uid] = Pending(PendingReason.RESUMING, message)
    return plan


def _waits_for_location(entry: Entry) -> bool:
    outage = entry.interrupted_by is InterruptionCause.STORAGE_UNAVAILABLE
    return entry.stage is AttemptStage.READY and outage

"""Interruptions that the leader announces, because no agent can: the mover of a transfer is lost, and its agent too.

The announcement is one patch, which also gives the transfer to another agent where that is possible. What follows is
the owning agent's.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from core.errors import ExposeError
from core.models.attempts import InterruptionCause
from core.models.names import NODE_LABEL
from core.models.reasons import PendingReason
from core.models.transfers import Transfer
from nodeagent.leader.context import DispatchRules, DispatchTools
from nodeagent.transfers.interruptions import announce_next, build_interruption
from nodeagent.transfers.kinds.base import Admits
from nodeagent.transfers.owners import read_owner_refusal
from nodeagent.transfers.retries import Ending, explain_deadline, refusal

__all__ = ["Interruptions"]


@dataclass(frozen=True)
class Interruptions:
    """Announces interruptions.

    Attributes:
        choose: returns node label and node name of a live agent for a transfer, or None if there is none.
    """

    tools: DispatchTools
    rules: DispatchRules
    choose: Callable[[Transfer], tuple[str, str] | None]

    async def refuse(self, kind: Admits[Any], cr: Transfer, cause: InterruptionCause | None) -> str:
        """Return why the transfer cannot continue; empty: it can.

        Args:
            kind: the transfer's kind.
            cr: the transfer, InProgress.
            cause: why its attempt ended; None: it has not begun, so only its age counts.

        Raises:
            KubeError: what it depends on could not be read.
        """
        rules, age_seconds = self.rules.retry_rules(cr), cr.age_seconds(self.tools.now())
        if cause is None:
            why = explain_deadline(rules, age_seconds=age_seconds)
        else:
            why = refusal(rules, cr.attempts, cause, age_seconds=age_seconds)
        if why:
            return why
        try:
            await kind.confirm_volume(cr)
        except ExposeError as e:
            return str(e)
        return await read_owner_refusal(self.tools.client, cr)

    async def announce(self, kind: Admits[Any], cr: Transfer, ending: Ending, *, node: str) -> bool:
        """Write that the attempt is interrupted; return False if there is no agent for the next one.

        Args:
            kind: the transfer's kind.
            cr: the transfer, InProgress.
            ending: how the attempt ended.
            node: the node that it ran on, which also gets the next one if the kind is bound to it.

        Raises:
            AgentError: it could not be written.
        """
        chosen = (cr.metadata.labels[NODE_LABEL], node) if kind.spec.bound_to_node else self.choose(cr)
        if chosen is None:
            return False
        label, _ = chosen
        interruption = build_interruption(ending, node=node, at=self.tools.now())
        rules, restores = self.rules.retry_rules(cr), kind.spec.restores
        announced = announce_next(cr, interruption, rules, restores=restores, label=label)
        self.tools.check_leading()
        stored = await self.tools.status.annotate(kind, cr, announced.change)
        self.tools.metrics.retried(kind.spec.name, ending.cause)
        await self.tools.events.record(stored, PendingReason.INTERRUPTED, announced.message, warning=True)
        return True

"""Interruptions that the leader announces, because no agent can: the mover of a transfer is lost, and its agent too.

The announcement is one patch, which also gives the transfer to another agent where that is possible. What follows is
the owning agent's.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from core.errors import ExposeError
from core.models.attempts import Interruption, InterruptionCause
from core.models.names import ATTEMPTS_ANNOTATION, NODE_LABEL
from core.models.reasons import PendingReason
from core.models.transfers import Transfer
from nodeagent.leader.context import DispatchRules, DispatchTools
from nodeagent.transfers.kinds.base import Admits
from nodeagent.transfers.owners import read_owner_refusal
from nodeagent.transfers.retries import Ending, explain_deadline, refusal
from nodeagent.transfers.status import Change

__all__ = ["Interruptions"]


@dataclass(frozen=True)
class Interruptions:
    """Announces interruptions.

    Attributes:
        choose: returns node label and node name of a live agent, or None if there is none.
    """

    tools: DispatchTools
    rules: DispatchRules
    choose: Callable[[], tuple[str, str] | None]

    async def refuse(self, kind: Admits[Any], cr: Transfer, cause: InterruptionCause | None) -> str:
        """Return why the transfer cannot continue; empty: it can.

        Args:
            kind: the transfer's kind.
            cr: the transfer, InProgress.
            cause: why its attempt ended; None: it has not begun, so only its age counts.

        Raises:
            KubeError: what it depends on could not be read.
        """
        rules, created = self.rules.retry_rules(kind.spec.name), cr.metadata.creation_timestamp
        age_seconds = 0.0 if created is None else (self.tools.now() - created).total_seconds()
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
        chosen = (cr.metadata.labels[NODE_LABEL], node) if kind.spec.bound_to_node else self.choose()
        if chosen is None:
            return False
        label, next_node = chosen
        before = cr.attempts
        interruption = Interruption(
            at=self.tools.now(),
            cause=ending.cause,
            message=ending.message,
            node=node,
            terminated=ending.terminated,
        )
        attempts = before.interrupt(interruption)
        message = (
            f"attempt {before.number} was interrupted: {ending.message};"
            f" attempt {attempts.number} follows on node {next_node}"
        )
        change = Change(
            {"message": message},
            labels={NODE_LABEL: label},
            annotations={ATTEMPTS_ANNOTATION: attempts.to_json()},
            reason=PendingReason.INTERRUPTED,
        )
        self.tools.check_leading()
        stored = await self.tools.status.annotate(kind, cr, change)
        await self.tools.events.record(stored, PendingReason.INTERRUPTED, message, warning=True)
        return True

"""The answers of a kind that has nothing of its own to say.

Knows what each step does where there is nothing to do. Does not know which kinds that holds for:
they inherit from here, and answer the rest themselves.
"""

from core.models.transfers import Load
from exposer.model import Waiting
from nodeagent.outcome import Outcome
from nodeagent.runtime.metrics import Metrics

__all__ = ["PlainKind"]


class PlainKind:
    """A kind whose loads go to any node, and that is done once the mover is."""

    async def read_node(self, cr: Load) -> str:  # noqa: ARG002 - as the protocol has it
        """Return nothing: any node will do."""
        return ""

    async def confirm_volume(self, cr: Load) -> None:
        """Return at once: the mover's claim keeps the volume in its place."""

    async def keep(self, cr: Load, outcome: Outcome) -> Outcome:  # noqa: ARG002 - as the protocol has it
        """Return `outcome`: there is nothing beside it to keep."""
        return outcome

    async def complete(self, cr: Load, outcome: Outcome) -> Waiting | None:  # noqa: ARG002 - as the protocol has it
        """Return None: the data is where it belongs."""
        return None

    def count(self, cr: Load, metrics: Metrics) -> None:
        """Count nothing: the peer has no such metrics of this kind."""

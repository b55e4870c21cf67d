"""The announcement of an interruption: one write, from which the next attempt of a transfer is known.

Knows what it says. Does not know who writes it: the owning agent, or the leader for an agent that is unavailable.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta

from core.models.attempts import Interruption, RetryRules
from core.models.names import ATTEMPTS_ANNOTATION, MOVER_LOST_ANNOTATION, NODE_LABEL
from core.models.reasons import PendingReason
from core.models.transfers import Transfer
from core.models.units import format_duration
from core.redact import redact
from nodeagent.transfers.retries import Ending, backoff_seconds, fence_seconds
from nodeagent.transfers.status import Change

__all__ = ["Announcement", "announce_next", "build_interruption"]


@dataclass(frozen=True)
class Announcement:
    """What is written, and the message that is also recorded as an Event."""

    change: Change
    message: str


def announce_next(
    cr: Transfer, interruption: Interruption, rules: RetryRules, *, restores: bool, label: str = ""
) -> Announcement:
    """Return the announcement that an attempt of `cr` was interrupted, and when the next one begins.

    Args:
        cr: the transfer, InProgress.
        interruption: how its attempt ended.
        rules: the limits of retries.
        restores: whether it writes to its volume.
        label: the node label of the agent that continues with it; empty: the one that it has.
    """
    attempts = cr.attempts.interrupt(interruption)
    seconds = max(backoff_seconds(rules, attempts), fence_seconds(attempts, restores))
    number, delay = attempts.number, format_duration(timedelta(seconds=round(seconds)))
    message = f"{attempts.explain_last(interruption.message)}; attempt {number} begins in {delay}"
    lost = {MOVER_LOST_ANNOTATION: None} if MOVER_LOST_ANNOTATION in cr.metadata.annotations else {}
    change = Change(
        {"message": message},
        labels={NODE_LABEL: label} if label else {},
        annotations={ATTEMPTS_ANNOTATION: attempts.to_json(), **lost},
        reason=PendingReason.INTERRUPTED,
    )
    return Announcement(change, message)


def build_interruption(ending: Ending, *, node: str, at: datetime) -> Interruption:
    """Return `ending`, of an attempt on that node, as it is recorded."""
    message = redact(ending.message)
    return Interruption(at=at, cause=ending.cause, message=message, node=node, terminated=ending.terminated)

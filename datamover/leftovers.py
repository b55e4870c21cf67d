"""Incomplete snapshots: what kopia saves of a long upload every 45 minutes, and nobody removes if that one breaks.

Knows how one is told from all others and taken away. Does not know why an upload broke.
Source: kopia 0.23.1, snapshot/upload/upload.go (checkpointRoot), snapshot/policy/retention_policy.go.
"""

import logging
from datetime import UTC, datetime, timedelta
from typing import Final

from core.aio import run_shielded
from core.clock import Deadline, SystemClock
from core.errors import KopiaError
from core.models.base import JsonDict
from datamover.kopia import Kopia

__all__ = ["CHECKPOINT_INTERVAL", "remove_incomplete", "remove_own_incomplete"]

_logger = logging.getLogger(__name__)

CHECKPOINT_INTERVAL: Final = timedelta(minutes=45)
"""kopia's own, and the longest that it takes. What it saves then keeps the data of an upload of days from
being taken for garbage."""

_NEWEST: Final = "--max-results=100"
"""Where a source has thousands, this process need not hold them all: kopia itself removes an incomplete one
as soon as a complete one is newer."""


async def remove_incomplete(kopia: Kopia, target: str, *, since: datetime | None = None) -> int:
    """Take the incomplete snapshots of a source away; return how many.

    kopia would take one for a parent, and then tell less than what has changed since the last
    complete one. Where another upload of the same source is still at work, its next checkpoint
    replaces what is removed here.

    Args:
        target: the source as kopia spells it: `user@host:path`.
        since: only those whose upload began then or later.

    Raises:
        KopiaError: they cannot be found, or are still there.
    """
    listed = await kopia.call(f"incomplete snapshots of {target}", "snapshot", "list", target, "--json", _NEWEST)
    found = [one["id"] for one in listed.check().json() or [] if _is_incomplete(one, target, since)]
    if found:
        # Whoever deletes one that is gone already fails, and two movers may be about it.
        removed = await kopia.call(f"delete incomplete snapshots of {target}", "snapshot", "delete", *found, "--delete")
        if not removed.said("no snapshots matched"):
            removed.check()
    return len(found)


async def remove_own_incomplete(kopia: Kopia, target: str, *, since: datetime, span: timedelta) -> None:
    """Take away what an upload that has just broken left, as far as `span` allows; the next one looks again."""

    async def remove() -> int:
        return await remove_incomplete(kopia, target, since=since)

    try:
        await run_shielded(remove, name="incomplete", deadline=Deadline.after(SystemClock(), span))
    except TimeoutError:
        _logger.warning("what kopia saved of this upload stays until the next one: there is no time to look for it")
    except KopiaError as e:
        _logger.warning("what kopia saved of this upload stays until the next one: %s", e)


def _is_incomplete(one: JsonDict, target: str, since: datetime | None) -> bool:
    """Whether it is incomplete, of this very source (kopia lists a folder's parents too), and not older."""
    source = one.get("source") or {}
    if f"{source.get('userName')}@{source.get('host')}:{source.get('path')}" != target:
        return False
    return bool(one.get("incomplete")) and (since is None or _started(one) >= since)


def _started(one: JsonDict) -> datetime:
    # kopia tells nanoseconds, which Python does not read.
    text = str(one.get("startTime", ""))[:19]
    return datetime.fromisoformat(text).replace(tzinfo=UTC)

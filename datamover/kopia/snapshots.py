"""Snapshots: what kopia tells of one, how one is taken away.

Knows the manifest's form and what makes a snapshot complete. Does not know volumes.
Source: kopia 0.23.1, snapshot/manifest.go.

Incomplete snapshots: what kopia saves of a long upload every 45 minutes, and nobody removes if that one breaks.

Knows how one is told from all others and taken away. Does not know why an upload broke.
Source: kopia 0.23.1, snapshot/upload/upload.go (checkpointRoot), snapshot/policy/retention_policy.go.
"""

import logging
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from core.aio import run_shielded
from core.clock import Deadline, SystemClock
from core.errors import KopiaError
from core.models.base import JsonDict
from datamover.kopia.process import Kopia, KopiaAnswer

__all__ = [
    "CHECKPOINT_INTERVAL",
    "Snapshot",
    "delete_snapshot",
    "list_snapshots",
    "parse_snapshot",
    "read_snapshot",
    "remove_incomplete",
    "remove_own_incomplete",
]


_DELETE_TIME: Final = timedelta(seconds=20)


@dataclass(frozen=True)
class Snapshot:
    """A snapshot's manifest; `size_bytes` counts the files, `fault` says why it cannot be trusted."""

    snapshot_id: str
    source: str
    started: str
    root_object: str
    size_bytes: int
    entries: int
    fault: str = ""


def parse_snapshot(document: JsonDict, snapshot_id: str = "") -> Snapshot:
    """Return the snapshot that a manifest describes.

    Raises:
        KopiaError: it is no manifest of a snapshot.
    """
    try:
        root = document["rootEntry"]
        summary = root["summ"]
        return Snapshot(
            snapshot_id=document["id"] or snapshot_id,
            source=document["source"]["path"],
            started=document.get("startTime", ""),
            root_object=root["obj"],
            size_bytes=int(summary.get("size", 0)),
            # The root counts as a folder.
            entries=int(summary.get("files", 0)) + int(summary.get("symlinks", 0)) + int(summary.get("dirs", 1)) - 1,
            fault=_fault(document, summary),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise KopiaError(f"snapshot {document.get('id') or snapshot_id}: its manifest cannot be read") from e


def _fault(document: JsonDict, summary: JsonDict) -> str:
    errors = [f"{one.get('path', '')}: {one.get('error', '')}" for one in summary.get("errors") or []]
    failed = int(summary.get("numFailed", 0))
    if failed:
        return f"{failed} entries could not be read, the first: {errors[0] if errors else 'not named'}"
    if "incomplete" in document or "incomplete" in summary:
        return f"it is incomplete ({document.get('incomplete') or summary.get('incomplete')})"
    return ""


async def read_snapshot(kopia: Kopia, snapshot_id: str) -> Snapshot:
    """Return the snapshot of that ID, complete or not.

    Raises:
        KopiaError: there is none in the repository, or it is no ID.
    """
    # kopia would take one that begins with a dash for a flag.
    if not snapshot_id.isalnum():
        raise KopiaError(f"snapshot {snapshot_id!r}: that is no ID of a snapshot")
    answer = await kopia.call(f"snapshot {snapshot_id}", "manifest", "show", snapshot_id)
    if not answer.succeeded and answer.said("not found"):
        raise KopiaError(f"snapshot {snapshot_id}: it is not in the repository")
    return parse_snapshot(answer.check().document(), snapshot_id)


async def list_snapshots(kopia: Kopia) -> list[Snapshot]:
    """Return all snapshots of the repository, of every source, the oldest first."""
    answer = await kopia.call("list snapshots", "snapshot", "list", "--all", "--json")
    found = answer.check().json()
    return sorted((parse_snapshot(one) for one in found or []), key=lambda snapshot: snapshot.started)


async def delete_snapshot(kopia: Kopia, snapshot_id: str) -> None:
    """Take a snapshot away that must not stay, even if the caller is canceled meanwhile.

    Raises:
        KopiaError: it is still there.
    """

    async def delete() -> KopiaAnswer:
        attempted = f"delete incomplete snapshot {snapshot_id}"
        return await kopia.call(attempted, "snapshot", "delete", snapshot_id, "--delete")

    deadline = Deadline.after(SystemClock(), _DELETE_TIME)
    try:
        answer = await run_shielded(delete, name="delete-snapshot", deadline=deadline)
    except TimeoutError as e:
        raise KopiaError(f"delete incomplete snapshot {snapshot_id}: no end within {_DELETE_TIME.seconds} s") from e
    # kopia that was killed may have told of a snapshot that it had not yet written.
    if not answer.said("no snapshots matched"):
        answer.check()


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

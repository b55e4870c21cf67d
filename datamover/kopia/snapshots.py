"""kopia snapshots: reading, listing and deleting them, and what makes one complete.

An incomplete snapshot is what kopia saves of a long backup every 45 minutes, and when it gets SIGTERM; it remains if
that backup fails, unless it is deleted here.
Source: kopia 0.23.1, snapshot/manifest.go, snapshot/upload/upload.go (checkpointRoot),
snapshot/policy/retention_policy.go.
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
from datamover.kopia.storage_calls import KopiaCaller

__all__ = [
    "CHECKPOINT_INTERVAL",
    "PIN",
    "Snapshot",
    "delete_snapshot",
    "find_latest",
    "list_snapshots",
    "parse_snapshot",
    "read_snapshot",
    "remove_incomplete",
    "remove_own_incomplete",
    "unpin_snapshot",
]

_logger = logging.getLogger(__name__)

_DELETE_TIMEOUT: Final = timedelta(seconds=20)

CHECKPOINT_INTERVAL: Final = timedelta(minutes=45)
"""kopia's default and maximum. A checkpoint protects the data of a backup that takes days from garbage collection."""

PIN: Final = "velero-pin"
"""kopia's retention never expires a pinned snapshot; Velero deletes it with the backup."""

_NEWEST: Final = "--max-results=100"
"""Enough even if a source has thousands: kopia itself removes an incomplete snapshot once a newer one is complete."""


@dataclass(frozen=True)
class Snapshot:
    """A snapshot's manifest; `size_bytes` is the size of its files, `fault` why it is incomplete, or empty.

    `links` is the number of its symbolic links, which count as entries.
    """

    snapshot_id: str
    source: str
    started: str
    root_object: str
    size_bytes: int
    entries: int
    links: int = 0
    fault: str = ""


def parse_snapshot(document: JsonDict, snapshot_id: str = "") -> Snapshot:
    """Return the snapshot that a manifest describes.

    Raises:
        KopiaError: it is not the manifest of a snapshot.
    """
    try:
        root = document["rootEntry"]
        summary = root["summ"]
        links = int(summary.get("symlinks", 0))
        return Snapshot(
            snapshot_id=document["id"] or snapshot_id,
            source=document["source"]["path"],
            started=document.get("startTime", ""),
            root_object=root["obj"],
            size_bytes=int(summary.get("size", 0)),
            # The root counts as a directory.
            entries=int(summary.get("files", 0)) + links + int(summary.get("dirs", 1)) - 1,
            links=links,
            fault=_fault(document, summary),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise KopiaError(f"snapshot {document.get('id') or snapshot_id}: invalid manifest") from e


def _fault(document: JsonDict, summary: JsonDict) -> str:
    errors = [f"{one.get('path', '')}: {one.get('error', '')}" for one in summary.get("errors") or []]
    failed = int(summary.get("numFailed", 0))
    if failed:
        return f"{failed} entries could not be read, the first: {errors[0] if errors else 'unknown'}"
    if "incomplete" in document or "incomplete" in summary:
        return f"it is incomplete ({document.get('incomplete') or summary.get('incomplete')})"
    return ""


async def read_snapshot(kopia: KopiaCaller, snapshot_id: str) -> Snapshot:
    """Return the snapshot with that ID, complete or not.

    Raises:
        KopiaError: it is not in the repository, or the ID is invalid.
    """
    # kopia would parse an ID that starts with a dash as a flag.
    if not snapshot_id.isalnum():
        raise KopiaError(f'invalid snapshot ID: "{snapshot_id}"')
    answer = await kopia.call(f"snapshot {snapshot_id}", "manifest", "show", snapshot_id)
    if not answer.succeeded and answer.mentions("not found"):
        raise KopiaError(f"snapshot {snapshot_id}: it is not in the repository")
    return parse_snapshot(answer.check().document(), snapshot_id)


async def list_snapshots(kopia: KopiaCaller) -> list[Snapshot]:
    """Return all snapshots of the repository, of all sources, oldest first."""
    answer = await kopia.call("list snapshots", "snapshot", "list", "--all", "--json")
    found = answer.check().json()
    return sorted((parse_snapshot(one) for one in found or []), key=lambda snapshot: snapshot.started)


async def find_latest(kopia: KopiaCaller, target: str) -> Snapshot | None:
    """Return the last complete snapshot of a source, in kopia's format `user@host:path`; None without one.

    Raises:
        KopiaError: they could not be listed.
    """
    listed = await kopia.call(f"snapshots of {target}", "snapshot", "list", target, "--json", _NEWEST)
    # kopia lists the oldest first.
    found = [one for one in listed.check().json() or [] if _is_of(one, target) and not one.get("incomplete")]
    return parse_snapshot(found[-1]) if found else None


async def delete_snapshot(kopia: Kopia, snapshot_id: str) -> None:
    """Delete an incomplete snapshot, even if the caller is canceled meanwhile.

    Raises:
        KopiaError: it could not be deleted.
    """

    async def delete() -> KopiaAnswer:
        attempted = f"delete incomplete snapshot {snapshot_id}"
        return await kopia.call(attempted, "snapshot", "delete", snapshot_id, "--delete")

    deadline = Deadline.after(SystemClock(), _DELETE_TIMEOUT)
    try:
        answer = await run_shielded(delete, name="delete-snapshot", deadline=deadline)
    except TimeoutError as e:
        raise KopiaError(
            f"delete incomplete snapshot {snapshot_id}: timed out after {_DELETE_TIMEOUT.seconds} s"
        ) from e
    # A killed kopia may have reported a snapshot that it had not written yet.
    if not answer.mentions("no snapshots matched"):
        answer.check()


async def unpin_snapshot(kopia: KopiaCaller, snapshot_id: str) -> None:
    """Remove the pin of an incomplete snapshot, which gets another ID; kopia's retention may then expire it.

    Raises:
        KopiaError: it could not be removed.
    """
    attempted = f"unpin incomplete snapshot {snapshot_id}"
    (await kopia.call(attempted, "snapshot", "pin", snapshot_id, f"--remove={PIN}")).check()


async def remove_incomplete(kopia: KopiaCaller, target: str, *, since: datetime | None = None) -> int:
    """Delete the incomplete snapshots of a source; return how many.

    kopia would use one as parent, and report less than what has changed since the last complete
    one. If another backup of the same source is in progress, its next checkpoint replaces what
    is deleted here.

    Args:
        target: the source in kopia's format: `user@host:path`.
        since: delete only those whose backup started then or later.

    Raises:
        KopiaError: they could not be listed or deleted.
    """
    listed = await kopia.call(f"incomplete snapshots of {target}", "snapshot", "list", target, "--json", _NEWEST)
    found = [one["id"] for one in listed.check().json() or [] if _is_incomplete(one, target, since)]
    if found:
        # Two movers may delete the same snapshot; the second one fails.
        removed = await kopia.call(f"delete incomplete snapshots of {target}", "snapshot", "delete", *found, "--delete")
        if not removed.mentions("no snapshots matched"):
            removed.check()
    return len(found)


async def remove_own_incomplete(kopia: Kopia, target: str, *, since: datetime, within: timedelta) -> None:
    """Delete the incomplete snapshots of a failed backup; what remains, the next backup deletes."""

    async def remove() -> int:
        return await remove_incomplete(kopia, target, since=since)

    try:
        await run_shielded(remove, name="incomplete", deadline=Deadline.after(SystemClock(), within))
    except TimeoutError:
        _logger.warning("could not remove incomplete snapshots of this backup in time, the next backup will")
    except KopiaError as e:
        _logger.warning("could not remove incomplete snapshots of this backup, the next backup will: %s", e)


def _is_incomplete(one: JsonDict, target: str, since: datetime | None) -> bool:
    """Return whether it is incomplete, of this source, and not older."""
    return _is_of(one, target) and bool(one.get("incomplete")) and (since is None or _started(one) >= since)


def _is_of(one: JsonDict, target: str) -> bool:
    """Return whether it is of this source: kopia lists parent directories too."""
    source = one.get("source") or {}
    return f"{source.get('userName')}@{source.get('host')}:{source.get('path')}" == target


def _started(one: JsonDict) -> datetime:
    # kopia writes nanoseconds, which Python cannot parse.
    text = str(one.get("startTime", ""))[:19]
    return datetime.fromisoformat(text).replace(tzinfo=UTC)

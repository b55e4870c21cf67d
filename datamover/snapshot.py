"""Snapshots: what kopia tells of one, how one is taken away.

Knows the manifest's form and what makes a snapshot complete. Does not know volumes.
Source: kopia 0.23.1, snapshot/manifest.go.
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from core.aio import run_shielded
from core.clock import Deadline, SystemClock
from core.errors import KopiaError
from core.models.base import JsonDict
from datamover.kopia import Kopia, KopiaAnswer

__all__ = ["Snapshot", "delete_snapshot", "list_snapshots", "parse_snapshot", "read_snapshot"]

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

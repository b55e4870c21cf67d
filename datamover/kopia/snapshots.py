"""kopia snapshots: reading, listing and deleting them, and what makes one complete.

An incomplete snapshot (a checkpoint) is what kopia saves of a long backup at an interval, and when it gets SIGTERM; it
remains if that backup fails, unless it is deleted here.
Source: kopia 0.23.1, snapshot/manifest.go, snapshot/upload/upload.go (checkpointRoot),
snapshot/policy/retention_policy.go.
"""

import logging
import math
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from functools import partial
from typing import Any, Final

from core.aio import run_shielded
from core.clock import Deadline, SystemClock
from core.errors import KopiaError
from core.models.backups import SavedSize
from core.models.base import JsonDict
from core.models.names import BLOCK_DATA_MOVER, EXCLUDE_DIGEST_TAG, EXCLUDE_TAG, UPLOADER_TAG
from core.models.transfer_settings import Exclusions
from datamover.kopia.process import Kopia
from datamover.kopia.stalls import read_duration
from datamover.kopia.storage_calls import KopiaCaller

_logger = logging.getLogger(__name__)

_DELETE_TIMEOUT: Final = timedelta(seconds=20)

CHECKPOINT_INTERVAL: Final = timedelta(minutes=10)
"""The default: of what was sent, a crash loses at most what one interval sends. kopia writes its indexes every 10
minutes anyway; a checkpoint adds the directories that are being read."""

_INTERVAL_VARIABLE: Final = "DATA_MOVER_CHECKPOINT_INTERVAL"
"""Inherited by mover pods from the node agent's DaemonSet."""

_SHORTEST: Final = timedelta(seconds=10)
"""Each checkpoint leaves some blobs in the storage until maintenance compacts them."""

_SHORTEST_DEFAULT: Final = timedelta(seconds=5)
"""Only millions of tiny files within a small memory limit need it."""

_LONGEST: Final = timedelta(minutes=45)
"""kopia accepts no longer one. Source: kopia 0.23.1, snapshot/upload/upload.go (DefaultCheckpointInterval)."""

START_TOLERANCE: Final = timedelta(seconds=10)
"""The mover's reading of the start, and kopia's own, are some milliseconds apart by the same clock."""

_SOURCE_SIZE_TAG: Final = "bdev-source-size"
"""The size of a device in bytes. Source: Velero main at d2241adba, pkg/uploader/block/uploader.go."""

PIN: Final = "velero-pin"
"""kopia's retention never expires a pinned snapshot; Velero deletes it with the backup."""

_NEWEST: Final = "--max-results=20000"
"""kopia itself removes an incomplete snapshot once a newer one is complete. A backup that is killed leaves 1000 in a
week with the default interval, and with the shortest one as many as these in a day."""


class SnapshotMissingError(KopiaError):
    """The repository does not have the snapshot."""


class EntryType(StrEnum):
    """What an entry of a directory is to kopia. Source: kopia 0.23.1, snapshot/manifest.go (EntryType)."""

    DIRECTORY = "d"
    FILE = "f"
    LINK = "s"


@dataclass(frozen=True)
class Snapshot:
    """A snapshot's manifest; `size_bytes` is the size of its files, `fault` why it is incomplete, or None.

    `links` is the number of its symbolic links, which count as entries, and `files` of its files; None: not known.
    `root_entry` is kopia's entry of its root. `excluded` is how many entries rules have left out: of a directory, those
    in it are not counted; `ignored` how many that cannot be read. `exclude` are the exclusions of the backup, as the
    tag has them, and `rules` is their digest; None: there were none. `by_block`: it is a device in the format of
    BLOCK_DATA_MOVER, whose size is the device's.
    """

    snapshot_id: str
    source: str
    started: str
    root_object: str
    size_bytes: int
    entries: int
    links: int = 0
    files: int | None = None
    excluded: int = 0
    ignored: int = 0
    fault: str | None = None
    rules: str | None = None
    exclude: str | None = None
    root_entry: JsonDict = field(default_factory=dict)
    by_block: bool = False

    @property
    def size(self) -> SavedSize:
        """What it has."""
        return SavedSize(self.snapshot_id, self.files, self.size_bytes, self.rules)

    @property
    def exclusions(self) -> Exclusions:
        """The exclusions of its backup. Raises ConfigError if the tag is invalid."""
        return Exclusions.parse(self.exclude) if self.exclude else Exclusions()


def parse_snapshot(document: JsonDict, snapshot_id: str | None = None) -> Snapshot:
    """Return the snapshot that a manifest describes. Raises KopiaError if it is not the manifest of a snapshot."""
    try:
        root = document["rootEntry"]
        summary, stats, tags = root["summ"], document.get("stats") or {}, document.get("tags") or {}
        if by_block := tags.get(UPLOADER_TAG) == BLOCK_DATA_MOVER:
            # Velero counts no entries, and the size is of whole blocks.
            summary = summary | {"files": 1, "dirs": 1, "size": tags.get(_SOURCE_SIZE_TAG) or summary.get("size", 0)}
        links = int(summary.get("symlinks", 0))
        return Snapshot(
            snapshot_id=document["id"] or snapshot_id or "",
            source=document["source"]["path"],
            started=document.get("startTime", ""),
            root_object=root["obj"],
            size_bytes=int(summary.get("size", 0)),
            # The root counts as a directory.
            entries=int(summary.get("files", 0)) + links + int(summary.get("dirs", 1)) - 1,
            links=links,
            files=int(summary["files"]) if "files" in summary else None,
            excluded=sum(int(stats.get(f"excluded{kind}Count", 0)) for kind in ("File", "Dir")),
            ignored=int(summary.get("numIgnoredErrors", 0)),
            fault=_fault(document, summary),
            rules=read_tag(document, EXCLUDE_DIGEST_TAG),
            exclude=read_tag(document, EXCLUDE_TAG),
            root_entry=root,
            by_block=by_block,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise KopiaError(f"snapshot {document.get('id') or snapshot_id}: invalid manifest") from e


def _fault(document: JsonDict, summary: JsonDict) -> str | None:
    errors = [f"{one.get('path', '')}: {one.get('error', '')}" for one in summary.get("errors") or []]
    failed = int(summary.get("numFailed", 0))
    if failed:
        return f"{failed} entries could not be backed up, the first: {errors[0] if errors else 'unknown'}"
    if "incomplete" in document or "incomplete" in summary:
        return f"it is incomplete ({document.get('incomplete') or summary.get('incomplete')})"
    return None


async def read_snapshot(kopia: KopiaCaller, snapshot_id: str) -> Snapshot:
    """Return the snapshot with that ID, complete or not.

    Raises:
        SnapshotMissingError: it is not in the repository.
        KopiaError: it cannot be read, or the ID is invalid.
    """
    # kopia would parse an ID that starts with a dash as a flag.
    if not snapshot_id.isalnum():
        raise KopiaError(f'invalid snapshot ID: "{snapshot_id}"')
    answer = await kopia.call(f"snapshot {snapshot_id}", "manifest", "show", snapshot_id)
    # Not of a blob, which is not found either if the data of a snapshot is lost.
    if not answer.succeeded and answer.mentions(f"manifest {snapshot_id}: not found"):
        raise SnapshotMissingError(f"snapshot {snapshot_id}: it is not in the repository")
    return parse_snapshot(answer.check().document(), snapshot_id)


async def list_snapshots(kopia: KopiaCaller) -> list[Snapshot]:
    """Return all snapshots of the repository, of all sources, oldest first."""
    answer = await kopia.call("list snapshots", "snapshot", "list", "--all", "--json")
    found = answer.check().json()
    return sorted((parse_snapshot(one) for one in found or []), key=lambda snapshot: snapshot.started)


@dataclass(frozen=True)
class Checkpoint:
    """An incomplete snapshot: when its backup began, and when it was saved."""

    snapshot_id: str
    started: datetime
    saved: datetime

    def began_at(self, start: datetime) -> bool:
        """Return whether this may be of the backup that began at `start`, as its mover reported."""
        return abs(self.started - start) <= START_TOLERANCE


async def list_source(kopia: KopiaCaller, target: str) -> list[JsonDict]:
    """Return the snapshots of a source `user@host:path` as kopia lists them, the oldest first; raises KopiaError."""
    return await _list(kopia, target, _NEWEST)


def find_checkpoints(listed: Iterable[JsonDict]) -> list[Checkpoint]:
    """Return the incomplete ones of the snapshots that kopia has listed."""
    incomplete = (one for one in listed if one.get("incomplete"))
    return [Checkpoint(one["id"], _time(one, "startTime"), _time(one, "endTime")) for one in incomplete]


async def find_tagged(kopia: KopiaCaller, target: str, tags: Mapping[str, str]) -> list[JsonDict]:
    """Return the complete snapshots of a source with these tags, as kopia lists them; raises KopiaError."""
    found = await _list(kopia, target, *(f"--tags={key}:{value}" for key, value in tags.items()))
    return [one for one in found if not one.get("incomplete")]


async def _list(kopia: KopiaCaller, target: str, *flags: str) -> list[JsonDict]:
    listed = await kopia.call(f"snapshots of {target}", "snapshot", "list", target, "--json", *flags)
    # kopia lists parent directories too.
    return [one for one in listed.check().json() or [] if _source(one) == target]


def _source(one: JsonDict) -> str:
    source = one.get("source") or {}
    return f"{source.get('userName')}@{source.get('host')}:{source.get('path')}"


async def delete_snapshots(kopia: KopiaCaller, attempted: str, snapshot_ids: Collection[str]) -> None:
    """Delete snapshots, as another mover may at the same time. Raises KopiaError if one could not be deleted."""
    left = list(snapshot_ids)
    while left:
        removed = await kopia.call(attempted, "snapshot", "delete", *left, "--delete")
        gone = {one for one in left if removed.mentions(f"no snapshots matched {one}")}
        if not gone:
            removed.check()
        # kopia deletes none if one is gone.
        left = [one for one in left if gone and one not in gone]


async def delete_snapshot(kopia: Kopia, snapshot_id: str) -> None:
    """Delete an incomplete snapshot, which need not exist, even if the caller is canceled; raises KopiaError."""
    attempted = f"delete incomplete snapshot {snapshot_id}"
    delete = partial(delete_snapshots, kopia, attempted, [snapshot_id])
    try:
        await run_shielded(delete, name="delete-snapshot", deadline=Deadline.after(SystemClock(), _DELETE_TIMEOUT))
    except TimeoutError as e:
        raise KopiaError(f"{attempted}: timed out after {_DELETE_TIMEOUT.seconds} s") from e


async def unpin_snapshot(kopia: KopiaCaller, snapshot_id: str) -> None:
    """Remove the pin of an incomplete snapshot, which gets another ID and may expire; raises KopiaError."""
    attempted = f"unpin incomplete snapshot {snapshot_id}"
    (await kopia.call(attempted, "snapshot", "pin", snapshot_id, f"--remove={PIN}")).check()


async def remove_own_incomplete(kopia: Kopia, target: str, *, start: datetime, within: timedelta) -> None:
    """Delete incomplete snapshots of the failed backup that began at `start`; others may be continued from."""

    async def remove() -> None:
        found = find_checkpoints(await list_source(kopia, target))
        own = [one.snapshot_id for one in found if one.began_at(start)]
        await delete_snapshots(kopia, f"delete incomplete snapshots of {target}", own)

    await _remove_incomplete(remove, within)


async def remove_source(kopia: Kopia, target: str, *, within: timedelta) -> None:
    """Delete all snapshots of a source, which has none but incomplete ones of a failed backup."""

    async def remove() -> None:
        arguments = ("snapshot", "delete", "--all-snapshots-for-source", target, "--delete")
        removed = await kopia.call(f"delete incomplete snapshots of {target}", *arguments)
        if not removed.mentions("no snapshots for source"):
            removed.check()

    await _remove_incomplete(remove, within)


async def _remove_incomplete(remove: Callable[[], Coroutine[Any, Any, None]], within: timedelta) -> None:
    try:
        await run_shielded(remove, name="incomplete", deadline=Deadline.after(SystemClock(), within))
    except TimeoutError:
        _logger.warning("could not remove incomplete snapshots of this backup in time, the next backup will")
    except KopiaError as e:
        _logger.warning("could not remove incomplete snapshots of this backup, the next backup will: %s", e)


def fit_checkpoint_interval(index_seconds: float) -> timedelta:
    """Return the interval of checkpoints, which write the index, if the memory suffices for it that long."""
    least, most = (each.total_seconds() for each in (_SHORTEST_DEFAULT, CHECKPOINT_INTERVAL))
    return timedelta(seconds=math.floor(min(most, max(least, index_seconds))))


def read_checkpoint_interval(environment: Mapping[str, str]) -> timedelta | None:
    """Return how often kopia saves a checkpoint, from `DATA_MOVER_CHECKPOINT_INTERVAL`, such as 5m; None: it is unset.

    Raises:
        ConfigError: its value is not a duration, or kopia does not accept it.
    """
    if not environment.get(_INTERVAL_VARIABLE):
        return None
    return read_duration(environment, _INTERVAL_VARIABLE, CHECKPOINT_INTERVAL, (_SHORTEST, _LONGEST))


def read_tag(one: JsonDict, name: str) -> str | None:
    """Return a tag of a snapshot, as kopia lists it; None: it has none of this name."""
    return (one.get("tags") or {}).get(f"tag:{name}") or None


def _time(one: JsonDict, name: str) -> datetime:
    found = datetime.fromisoformat(str(one.get(name) or "1970-01-01T00:00:00Z"))
    return found if found.tzinfo else found.replace(tzinfo=UTC)

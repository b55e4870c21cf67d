"""What the attempts of one backup leave in its repository: checkpoints to continue from, and overtaken snapshots.

kopia takes the files that a checkpoint has from it, as from the last complete snapshot, and removes checkpoints once a
newer snapshot is complete. It gives checkpoints no tags, so an earlier attempt's is known by the time it began.
Source: kopia 0.23.1, snapshot/manager.go (FindPreviousManifests), snapshot/upload/upload.go (checkpointRoot).
"""

import logging
import sys
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from core.errors import DataPathError, KopiaError
from core.models.backups import SavedSize
from core.models.base import JsonDict
from core.models.names import ATTEMPT_TAG, TRANSFER_UID_TAG
from datamover.kopia import snapshots
from datamover.kopia.storage_calls import KopiaCaller

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BackupAttempt:
    """One attempt of a transfer.

    `uid` is the transfer's. `starts` are the times at which kopia began the snapshots of its earlier attempts, by the
    clocks of their movers. `is_alone` returns whether no other transfer backs up the same source at present.
    `check` raises a DataPathError if another attempt has begun; it raises none if that cannot be found out.
    `acknowledged` returns the IDs of acknowledged Shrunk snapshots of the source.
    """

    uid: str
    number: int
    is_alone: Callable[[], Awaitable[bool]]
    check: Callable[[], Awaitable[None]]
    starts: tuple[datetime, ...] = ()
    acknowledged: Callable[[], Awaitable[Collection[str]]] | None = None

    @property
    def tags(self) -> dict[str, str]:
        """The tags by which a snapshot is known as this attempt's; the first attempt has them too."""
        return {TRANSFER_UID_TAG: self.uid, ATTEMPT_TAG: str(self.number)}


@dataclass(frozen=True)
class Inheritance:
    """What a backup finds of its source: the last complete snapshot of another transfer.

    `continued`: kopia takes files also from what an earlier attempt has read, in checkpoints or a complete snapshot.
    `warning` is about incomplete snapshots of other backups. `sizes` are of all complete ones of other transfers, the
    oldest first. `own` are the IDs of the checkpoints to continue from, `others` the other incomplete ones.
    """

    latest: snapshots.Snapshot | None = None
    continued: bool = False
    warning: str | None = None
    sizes: tuple[SavedSize, ...] = ()
    own: frozenset[str] = frozenset()
    others: tuple[str, ...] = ()


def choose_checkpoints(checkpoints: Iterable[snapshots.Checkpoint], starts: Collection[datetime]) -> set[str]:
    """Return the IDs of the checkpoints to continue from: the last one of each backup that began at one of `starts`.

    It has all that the earlier ones of its attempt have, and kopia looks for each file in each of its parents.
    """
    own: dict[datetime, snapshots.Checkpoint] = {}
    for one in sorted(checkpoints, key=lambda checkpoint: checkpoint.saved):
        if any(one.began_at(start) for start in starts):
            own[one.started] = one
    return {one.snapshot_id for one in own.values()}


async def inherit(kopia: KopiaCaller, target: str, attempt: BackupAttempt | None) -> Inheritance:
    """Delete the incomplete snapshots of a source, in kopia's format, that `attempt` does not continue from.

    kopia would take files from another backup's too, and the result would depend on what that backup has read. If that
    one is in progress, its next checkpoint replaces what is deleted here. The result has a warning if they could not be
    deleted.

    Raises:
        KopiaError: they could not be listed.
    """
    inheritance = await build_inheritance(await snapshots.list_source(kopia, target), target, attempt)
    try:
        await snapshots.delete_snapshots(kopia, f"delete incomplete snapshots of {target}", inheritance.others)
    except KopiaError as e:
        # It only makes `incrementalBytes` of the next backups less precise.
        return replace(inheritance, warning=f"could not remove incomplete snapshots of earlier backups: {e}")
    return inheritance


async def build_inheritance(listed: Sequence[JsonDict], target: str, attempt: BackupAttempt | None) -> Inheritance:
    """Return what `attempt` finds of its source, once the incomplete snapshots that it does not use are deleted.

    `listed` are all of the source as kopia lists them, the oldest first.
    """
    uid, checkpoints = attempt.uid if attempt and attempt.number > 1 else None, snapshots.find_checkpoints(listed)
    complete = [one for one in listed if not one.get("incomplete")]
    foreign = [
        snapshots.parse_snapshot(one)
        for one in complete
        if uid is None or snapshots.read_tag(one, TRANSFER_UID_TAG) != uid
    ]
    own = choose_checkpoints(checkpoints, attempt.starts) if attempt else set()
    if attempt and own and not await attempt.is_alone():
        _logger.info("another transfer backs up %s: not continuing from a checkpoint", target)
        own = set()
    if own:
        _logger.info("continuing from %d checkpoints of earlier attempts", len(own))
    others = tuple(one.snapshot_id for one in checkpoints if one.snapshot_id not in own)
    warning = f"removed {len(others)} incomplete snapshots of earlier backups" if others and not own else None
    continued, sizes = bool(own) or len(foreign) < len(complete), tuple(one.size for one in foreign)
    return Inheritance(foreign[-1] if foreign else None, continued, warning, sizes, frozenset(own), others)


async def remove_overtaken(kopia: KopiaCaller, target: str, attempt: BackupAttempt) -> str | None:
    """Delete the complete snapshots of the transfer's earlier attempts, which nothing will know of; return a warning.

    A later attempt's may be the transfer's result. A mover that completes its snapshot even later leaves it: the
    snapshot report finds that it was overtaken.

    Raises:
        DataPathError: another attempt has begun; nothing is deleted.
    """
    await attempt.check()
    tags = {TRANSFER_UID_TAG: attempt.uid}
    try:
        found = await snapshots.find_tagged(kopia, target, tags)
        others = [one["id"] for one in found if _number(one) < attempt.number]
        await snapshots.delete_snapshots(kopia, f"delete snapshots of earlier attempts of {target}", others)
    except DataPathError as e:
        return f"could not remove the snapshots of overtaken attempts: {e}"
    if others:
        _logger.info("removed %d snapshots of overtaken attempts", len(others))
    return None


def _number(listed: JsonDict) -> int:
    """Return the attempt in the tags of a snapshot as kopia lists it; without a valid one it counts as a later one."""
    text = snapshots.read_tag(listed, ATTEMPT_TAG) or ""
    return int(text) if text.isdecimal() else sys.maxsize

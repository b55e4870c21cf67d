"""What a backup takes from the snapshots before it, and what of a device its storage says has changed.

Another attempt takes the first blocks of a device from a checkpoint (tools/kopia/program/block_checkpoint.go).
Source: Velero main at d2241adba, pkg/uploader/block/snapshot.go (getParentBackupInfo), pkg/uploader/cbt/set.go.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from core.models import names
from core.models.base import JsonDict
from datamover.kopia.snapshots import read_tag

_CHANGE_TAG: Final = "cbt-change-id"
_VOLUME_TAG: Final = "cbt-volume-id"
_VELERO_TAGS: Final = (names.SNAPSHOT_REQUESTER_TAG, names.UPLOADER_TAG, names.ASYNC_OPERATION_ID_LABEL)


@dataclass(frozen=True)
class BlockChanges:
    """A storage's handles of a backup's device; `query` asks it what has changed, None: it does not say."""

    change_id: str
    volume_id: str
    query: Callable[[], JsonDict] | None = None


@dataclass(frozen=True)
class BlockChoice:
    """What kopia asks the storage, None: nothing, so that all is read. `cause` is why nothing is taken from the parent.

    `expected`: the storage usually knows them.
    """

    query: JsonDict | None = None
    cause: str | None = "the changed blocks are not known"
    expected: bool = False

    @property
    def described(self) -> str:
        """What kopia asks for, as a part of a sentence."""
        return "what has changed is" if self.query and self.query.get("base") else "what is allocated is"


def choose_blocks(
    parent: JsonDict | None, own: BlockChanges | None, requested_at: datetime | None = None
) -> BlockChoice:
    """Return what the storage is asked: what has changed since `parent`, a manifest, or what is allocated at all.

    The backup was created at `requested_at`; None: that is not known.

    What a parent has is taken only if its own handle is the base, its volume is this one, and it is no later one:
    what a storage says has changed since a later snapshot need not be all that differs. An answer that breaks off is
    an error of gRPC; one that a driver ends early is not, and only seen by the blocks that are compared each time.
    """
    if own is None or own.query is None:
        return BlockChoice()
    cause = None if parent is None else _find_fault(parent, own, requested_at)
    base = "" if parent is None or cause else str(parent["tags"][_CHANGE_TAG])
    return BlockChoice({**own.query(), "base": base}, cause, expected=True)


def _find_fault(parent: JsonDict, own: BlockChanges, requested_at: datetime | None) -> str | None:
    tags, name = parent.get("tags") or {}, f"snapshot {parent['id']}"
    if not tags.get(_CHANGE_TAG):
        return f"{name} does not say from which snapshot of the storage it is"
    if tags.get(_VOLUME_TAG) != own.volume_id:
        return f"{name} is of the volume {tags.get(_VOLUME_TAG) or 'unknown'}, not {own.volume_id}"
    if tags[_CHANGE_TAG] == own.change_id:
        return f"{name} is of the same snapshot of the storage"
    if _is_later(parent, requested_at):
        return f"{name} was begun after this backup was created, and may be of a later state"
    return None


def build_block_tags(tags: Mapping[str, str], changes: BlockChanges | None = None) -> dict[str, str]:
    """Return the tags of a snapshot by block: all of them as kopia stores tags, and Velero's as its data mover does.

    Without the handles, Velero takes nothing from the snapshot by its list of changed blocks.
    """
    ours = {f"tag:{key}": value for key, value in tags.items()}
    shared = {key: tags.get(key, "") for key in _VELERO_TAGS}
    handles = (changes.change_id, changes.volume_id) if changes else ("", "")
    return ours | shared | dict(zip((_CHANGE_TAG, _VOLUME_TAG), handles, strict=True))


def checkpoint_path(transfer_uid: str) -> str:
    """Return the source path of the checkpoints of a transfer: Velero looks for parents at the volume's own."""
    return f"nodeagent-checkpoints/{transfer_uid}"


def describe_device(changes: BlockChanges, size_bytes: int) -> str:
    """Return which device is backed up: one that is described alike has the same bytes."""
    return json.dumps([changes.volume_id, changes.change_id, size_bytes])


def build_checkpoint_tags(tags: Mapping[str, str], device: str) -> dict[str, str]:
    """Return the tags of a checkpoint: the snapshot's, without those by which Velero knows a snapshot."""
    ours = {key: value for key, value in tags.items() if key not in _VELERO_TAGS}
    return {f"tag:{key}": value for key, value in (ours | {names.CHECKPOINT_DEVICE_TAG: device}).items()}


@dataclass(frozen=True)
class CheckpointChoice:
    """Which checkpoint a backup continues from, by its ID, or none.

    `own` are all of its transfer, and `replaced` all that go once there is another one, or a snapshot. `fault` is why
    the own ones are of no use; None: one is, or there is none.
    """

    resume: str | None = None
    own: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()
    fault: str | None = None


def choose_checkpoint(
    saved: Sequence[JsonDict], transfer_uid: str, device: str | None, *, alone: bool
) -> CheckpointChoice:
    """Return the checkpoint with the most blocks that a transfer has saved of a device; None: it is not known.

    With `alone`, no other transfer backs up the source, so what others have saved is of no use.
    """
    own = [one for one in saved if read_tag(one, names.TRANSFER_UID_TAG) == transfer_uid]
    fitting = [one for one in own if read_tag(one, names.CHECKPOINT_DEVICE_TAG) == device]
    best = max(fitting, key=lambda one: int((one.get("stats") or {}).get("totalSize", 0)), default=None)
    return CheckpointChoice(
        resume=best["id"] if best else None,
        own=tuple(one["id"] for one in own),
        replaced=tuple(one["id"] for one in (saved if alone else own)),
        fault="it is of another device" if own and best is None else None,
    )


def decide_parents(
    snapshots: Iterable[JsonDict],
    own: frozenset[str],
    *,
    in_use: bool,
    requested_at: datetime | None = None,
    transfer_uid: str = "",
) -> list[JsonDict]:
    """Return the snapshots that files are taken from, each with the time up to which it has all changes.

    As with kopia: the last complete one of the source, and checkpoints after it, here of `own` with our tag.
    Others have of a file what kopia has taken from an older snapshot, by its size and time.

    What another transfer began since `requested_at` may be of a later state than a volume that is not in use: a file
    may have changed in between, which its time does not show.
    """
    requested_at = None if in_use else requested_at
    listed = sorted(snapshots, key=_started)
    complete = [
        one
        for one in listed
        if not one.get("incomplete")
        and (not _is_later(one, requested_at) or transfer_uid == read_tag(one, names.TRANSFER_UID_TAG))
    ]
    parents = [{"id": complete[-1]["id"], "until": _changes_until(complete, in_use=in_use)}] if complete else []
    checkpoints = [
        {"id": one["id"], "until": until}
        for one in listed
        if one["id"] in own and (until := _read_until(one)) and (not complete or _started(one) > _started(complete[-1]))
    ]
    return [*parents, *checkpoints]


def _changes_until(complete: Sequence[JsonDict], *, in_use: bool) -> str:
    """Return the time up to which the last of these snapshots has all changes of its volume.

    That is its tag. One without it has what kopia has taken, by size and time, from those before it, so the last tag
    counts. Without any that is its start; for a volume that is itself a snapshot, taken some time before, the last
    time of a file in it.
    """
    if tags := [tag for one in complete if (tag := _read_until(one))]:
        return tags[-1]
    last = complete[-1]
    start = str(last["startTime"])
    newest = str(((last.get("rootEntry") or {}).get("summ") or {}).get("maxTime", ""))
    at = None if in_use else _parse_time(newest)
    return newest if at is not None and at < _started(last) else start


def _read_until(listed: JsonDict) -> str | None:
    """Return the time in our tag, or None."""
    tag = read_tag(listed, names.CHANGES_TAG)
    return tag if tag and _parse_time(tag) else None


def _is_later(listed: JsonDict, requested_at: datetime | None) -> bool:
    return requested_at is not None and _started(listed) >= requested_at


def _started(listed: JsonDict) -> datetime:
    return datetime.fromisoformat(str(listed["startTime"]))


def _parse_time(text: str) -> datetime | None:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        return None

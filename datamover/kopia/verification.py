"""Verification of a kopia snapshot: kopia reads its directories and a share of its files back from the storage.

A repository is verified in shares of its contents: each content is stored once, however many snapshots have it. An
error may be a fault of the data, or say that nothing was found out: no answer of the storage, no access.
Source: kopia 0.23.1, cli/command_snapshot_verify.go, snapshot/snapshotfs/snapshot_verifier.go and
snapshot_tree_walker.go; for shares cli/command_content_verify.go and repo/content/verify.go.
"""

import re
from collections.abc import Sequence
from functools import partial
from typing import Final

from msgspec import field

from core.errors import AgentError, ContractError, DataPathError, KopiaCrashError, StorageOutageError
from core.models.base import Int64, WireModel
from core.models.verification import WHOLE_PERCENT, VerificationOutcome, VerifiedSnapshot
from datamover.kopia.causes import DAMAGED, find_cause
from datamover.kopia.client_config import IDENTITY
from datamover.kopia.process import KopiaAnswer
from datamover.kopia.repository import NotInitializedError, Repository
from datamover.kopia.snapshots import Snapshot, SnapshotMissingError

SHOWN_FAULTS: Final = 10

_MOST_ERRORS: Final = SHOWN_FAULTS + 1
"""kopia stops then: without a limit it would name each file of a repository that lost its packs."""

_FAULT_CHARACTERS: Final = 600

_QUEUE: Final = 1000
"""Files that wait to be read; kopia's own 20,000 take tens of megabytes with long paths."""

_PREFIX: Final = "error processing "
_ROOT: Final = r"@\d{4}-\d\d-\d\d \d\d:\d\d:\d\d [^\s/]+/?"
"""What follows the source in kopia's name of a snapshot's root. Source: kopia 0.23.1, formatTimestamp in cli/app.go."""

_COUNTERS: Final = re.compile(r'^verifyCounters:.*"verifiedContents":(\d+)')
_DAMAGED_CONTENTS: Final = "missing pack blobs with index-referenced content"
"""How kopia ends if contents are missing or damaged, or could not be read."""

_PARALLEL: Final = 8
"""Contents that are read at a time; each has a few megabytes."""


class DamagedSnapshotError(DataPathError):
    """The snapshot is not one that can be restored as a whole."""


class _Stats(WireModel):
    processed_object_count: Int64 = 0
    read_file_count: Int64 = 0
    read_bytes: Int64 = 0


class _Result(WireModel):
    """kopia's output with `--json`; the strings name objects and blobs, and no file."""

    stats: _Stats
    error_count: Int64 = 0
    error_strings: list[str] = field(default_factory=list)


def choose_share(snapshot: Snapshot, percent: float) -> float:
    """Return the share of its files to read: all, if `percent` of them are less than one; so of a block device."""
    return WHOLE_PERCENT if snapshot.entries * percent < WHOLE_PERCENT else percent


async def verify_snapshot(repository: Repository, snapshot: Snapshot, percent: float) -> VerifiedSnapshot:
    """Read all directories of the snapshot and `percent` of its files, and look for the blobs of all of them.

    The repository is connected. What was read before by this client may be in its cache.

    Raises:
        StorageOutageError: the storage does not answer.
        DataPathError: kopia could not verify it, for a cause that is no fault of the data.
    """
    attempted = f"{repository.description}: verify snapshot {snapshot.snapshot_id}"
    percent = choose_share(snapshot, percent)
    answer = await _verify(repository, attempted, percent, snapshot.snapshot_id)
    result = _parse(answer)
    faults = [_name_fault(one, answer.lines, snapshot) for one in result.error_strings if _is_fault(one)]
    if not result.error_strings and not result.stats.processed_object_count:
        faults = ["kopia found nothing in it"]
    outcome = VerificationOutcome.FAILED if faults else VerificationOutcome.PASSED
    return VerifiedSnapshot(
        id=snapshot.snapshot_id,
        outcome=outcome,
        percent=percent,
        files=result.stats.read_file_count,
        bytes=result.stats.read_bytes,
        faults=faults[:SHOWN_FAULTS],
        fault_count=max(result.error_count, len(faults)),
    )


async def has_sound_directories(repository: Repository) -> bool:
    """Read the directories of all snapshots, and look for the blobs of all files; return whether none is damaged.

    It raises what `verify_snapshot` does.
    """
    attempted = f"{repository.description}: verify the directories of all snapshots"
    return not _parse(await _verify(repository, attempted, 0.0)).error_strings


async def count_contents(repository: Repository, share: int) -> int | None:
    """Read the contents of a share, and return their number; None: some cannot be read, for whatever cause.

    The share is all contents whose ID begins with that digit: they are hashes, so the shares are alike, and what is
    stored later changes no share of a content that is there. It raises what `verify_snapshot` does.
    """
    attempted = f"{repository.description}: verify share {share}"
    flags = ("--full", f"--prefix={share:x}", f"--parallel={_PARALLEL}")
    arguments = ("--log-level=info", "content", "verify", *flags)
    answer = await repository.run(partial(repository.call_guarded, attempted, *arguments))
    if not answer.succeeded and answer.mentions(_DAMAGED_CONTENTS):
        return None
    counted = next(filter(None, map(_COUNTERS.match, answer.check().lines)), None)
    if counted is None:
        raise answer.error("kopia exited with code 0, without a word about contents")
    return int(counted[1])


async def _verify(repository: Repository, attempted: str, percent: float, *snapshots: str) -> KopiaAnswer:
    """Have kopia verify these snapshots; without any, all of them."""
    flags = (f"--verify-files-percent={percent:g}", f"--max-errors={_MOST_ERRORS}", f"--file-queue-length={_QUEUE}")
    # kopia writes statistics each second: with them, errors would leave the lines that are kept.
    arguments = ("--log-level=error", "snapshot", "verify", *snapshots, "--json", *flags)
    return await repository.run(partial(repository.call_guarded, attempted, *arguments))


def _parse(answer: KopiaAnswer) -> _Result:
    """Return what kopia found out. Raises KopiaError if that is nothing, or its errors are none of the data."""
    try:
        result = _Result.from_json(answer.output.decode(errors="replace"))
    except ContractError as e:
        raise answer.error("" if not answer.succeeded else f"kopia's output is invalid: {e}") from e
    errors = result.error_strings
    if (errors or not answer.succeeded) and not any(map(_is_fault, errors)):
        raise answer.error((find_cause(errors[:1]) or errors[0][:_FAULT_CHARACTERS]) if errors else "")
    return result


def _is_fault(error: str) -> bool:
    """Return whether the error is one of the data; an unknown one says nothing about it."""
    return find_cause(error.splitlines()) in DAMAGED


def _name_fault(error: str, lines: Sequence[str], snapshot: Snapshot) -> str:
    """Return the error with the file that it is of, which kopia logs beside it; the file's name may have line ends."""
    line = next((one for one in lines if one.endswith(f": {error}")), "")
    path = line.removesuffix(f": {error}")
    if not path:
        return shorten_fault("", error)
    if not path.startswith(_PREFIX):
        return shorten_fault(f"…{path}", error)
    path = re.sub(re.escape(f"{IDENTITY}:{snapshot.source}") + _ROOT, "", path.removeprefix(_PREFIX), count=1)
    return shorten_fault(path or "/", error)


def shorten_fault(path: str, error: str) -> str:
    """Return a fault of a file as one text, whose path is shortened first, at its start."""
    error = error[:_FAULT_CHARACTERS]
    room = max(_FAULT_CHARACTERS - len(error), _FAULT_CHARACTERS // 3)
    shown = path if len(path) <= room else f"…{path[1 - room :]}"
    return f"{shown}: {error}" if shown else error


def is_damage(error: AgentError) -> bool:
    """Return whether the error shows that data is missing or damaged, and not that it could not be looked at."""
    if isinstance(error, StorageOutageError | KopiaCrashError):
        return False
    if isinstance(error, SnapshotMissingError | NotInitializedError | DamagedSnapshotError):
        return True
    return isinstance(error, DataPathError) and _is_fault(str(error))

"""How a snapshot differs from those before: `incrementalBytes`, and whether it is Shrunk.

kopia counts the files that it read. One that continues from an earlier attempt's checkpoint or complete snapshot takes
those from it that the attempt has read, so the snapshots are compared then.
Source: kopia 0.23.1, internal/diff/diff.go.
"""

import logging
import re
from typing import Final

from core.errors import DataPathError
from core.models.shrinkage import SavedSize, Shrinkage, find_full
from datamover.data_path.attempts import BackupAttempt, Inheritance
from datamover.kopia.long_lists import open_output
from datamover.kopia.progress import Meter
from datamover.kopia.repository import Repository
from datamover.kopia.snapshots import Snapshot

__all__ = ["count_incremental", "find_shrinkage"]

_logger = logging.getLogger(__name__)

_CHANGED: Final = re.compile(rb"(?:added file \./.* \(|changed \./.* at .* \(size \d+ -> )(\d+)(?: bytes)?\)$")
"""A line about one file, with its size now."""


async def count_incremental(
    repository: Repository, snapshot: Snapshot, inheritance: Inheritance, meter: Meter
) -> int | None:
    """Return the size of the files that changed since the last complete snapshot, within half a percent; None: unknown.

    Of a backup that continued from an earlier attempt, it does not include files that this one read only because their
    owner, mode or time had changed.
    """
    if meter.cached_bytes == 0 or (inheritance.continued and inheritance.latest is None):
        return snapshot.size_bytes
    read_bytes = meter.hashed_bytes
    if inheritance.continued and inheritance.latest is not None:
        compared_bytes = await _compare(repository, inheritance.latest, snapshot)
        if compared_bytes is None:
            return None
        read_bytes = max(read_bytes, compared_bytes)
    return min(read_bytes, snapshot.size_bytes)


async def _compare(repository: Repository, old: Snapshot, new: Snapshot) -> int | None:
    """Return the size of the files in `new` whose content `old` does not have there; None: unknown.

    kopia reads only directories that differ.
    """
    with open_output(repository.work_dir) as file:
        attempted = f"compare with snapshot {old.snapshot_id}"
        try:
            answer = await repository.call(attempted, "diff", old.root_object, new.root_object, output_fd=file.fileno())
            answer.check()
        except DataPathError as e:
            _logger.warning("incrementalBytes is not known: %s", e)
            return None
        file.seek(0)
        return sum(int(found[1]) for line in file if (found := _CHANGED.match(line.rstrip(b"\n"))))


async def find_shrinkage(size: SavedSize, inheritance: Inheritance, attempt: BackupAttempt | None) -> Shrinkage | None:
    """Return from what the backup of a file system has shrunk; None: it has not.

    What somebody has acknowledged is only asked for if it matters: that lists transfers.
    """
    found = find_full(inheritance.sizes, size)
    if found is None or attempt is None or not (acknowledged := await attempt.acknowledged()):
        return found
    return find_full(inheritance.sizes, size, acknowledged)

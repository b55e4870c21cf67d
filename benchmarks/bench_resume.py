"""`python -m benchmarks.bench_resume`: what an interruption of a transfer costs, on one machine.

A backup and a restore are killed at half of their data over a limited line.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from benchmarks.attempts import ResumedMover
from benchmarks.bed import Bed, Report, run_alone
from benchmarks.cluster import BUCKET, PREFIX
from benchmarks.figures import Summary, table
from benchmarks.line import run_line
from benchmarks.processes import BenchmarkError
from benchmarks.tree import TreeShape
from core.contract import BackupResult, parse_result

_SETTINGS: Final = {"DATA_MOVER_CHECKPOINT_INTERVAL": "10s", "DATA_MOVER_RESTORE_LIST_INTERVAL": "1s"}
"""The defaults, shortened in the proportion in which the transfer is shorter than a large one."""

_INDEX: Final = "x"
"""kopia's index blobs begin with it; what no index names is as if it had not been sent."""

_OLD_NS: Final = 1_600_000_000 * 10**9
"""A file that is restored within a minute after its last change looks like one that is being written."""

_FULL: Final = (TreeShape(8, 250_000_000, 20_000, 100_000), 25e6)
_QUICK: Final = (TreeShape(4, 50_000_000, 500, 100_000), 10e6)
"""What is moved, and how many bytes pass in a second."""


@dataclass(frozen=True)
class Interrupted:
    """Seconds of an uninterrupted transfer and of the two attempts of a killed one; the share of all data moved again.

    Again: sent although an index named it, or written although the file was finished.
    """

    seconds: float
    killed_seconds: float
    resumed_seconds: float
    again_share: float

    @property
    def ratio(self) -> float:
        """The time of both attempts compared with the uninterrupted transfer."""
        return (self.killed_seconds + self.resumed_seconds) / self.seconds

    @property
    def figures(self) -> list[str]:
        """The figures for people."""
        seconds = (self.seconds, self.killed_seconds, self.resumed_seconds)
        return [*(f"{one:.1f}" for one in seconds), f"{self.again_share:.4f}"]


async def _interrupt_backup(bed: Bed, tree: Path, size_bytes: int) -> Interrupted:
    mover = ResumedMover(bed, _SETTINGS)
    bed.fresh_bucket()
    began = time.time()
    mover.begin("DataUpload")
    seconds, _ = await mover.run(tree)
    sent_bytes = _size(_blobs(bed, began))
    bed.fresh_bucket()
    half_bytes, began = _size(_blobs(bed)) + size_bytes // 2, time.time()
    mover.begin("DataUpload")
    killed = await mover.interrupt(tree, lambda: _size(_blobs(bed)) >= half_bytes)
    first, resumed_at = _blobs(bed, began), time.time()
    resumed, message = await mover.run(tree)
    if (found := parse_result(BackupResult, message).total_bytes) != size_bytes:
        raise BenchmarkError(f"the backup has {found} of {size_bytes} bytes")
    last_index = max((at for _, at, is_index in first if is_index), default=0.0)
    kept_bytes = _size(blob for blob in first if blob[1] <= last_index)
    again_bytes = max(0, kept_bytes + _size(_blobs(bed, resumed_at)) - sent_bytes)
    return Interrupted(seconds, killed, resumed, again_bytes / sent_bytes)


async def _interrupt_restore(bed: Bed, tree: Path, size_bytes: int, snapshot_id: str) -> Interrupted:
    mover = ResumedMover(bed, _SETTINGS)
    with bed.disks.volume() as target:
        mover.begin("DataDownload", snapshotID=snapshot_id)
        seconds, _ = await mover.run(target)
    with bed.disks.volume() as target:
        mover.begin("DataDownload", snapshotID=snapshot_id)
        killed = await mover.interrupt(target, lambda: mover.reported_bytes() >= size_bytes // 2)
        finished = [(path, path.stat()) for path in _files(target) if path.stat().st_mtime_ns == _OLD_NS]
        resumed, _ = await mover.run(target)
        if not bed.is_same(tree, target):
            raise BenchmarkError("the restore that was killed and continued has other content")
        # One of both changes when a file is written again.
        states = [(path.stat(), before) for path, before in finished]
    again = sum(old.st_size for now, old in states if (now.st_ino, now.st_ctime_ns) != (old.st_ino, old.st_ctime_ns))
    return Interrupted(seconds, killed, resumed, again / size_bytes)


async def _back_up(bed: Bed, tree: Path) -> str:
    """Back up a tree, as one that has not changed lately, into an empty repository; return the snapshot."""
    for path in _files(tree):
        os.utime(path, ns=(_OLD_NS, _OLD_NS))
    bed.fresh_bucket()
    _, result = await bed.mover.back_up(tree)
    return result.snapshot_id


def _blobs(bed: Bed, since: float = 0.0) -> list[tuple[int, float, bool]]:
    """Return size, time of writing and whether it is an index, of each blob of the repository since then."""
    files = [(file, file.stat()) for file in (bed.s3.folder / BUCKET / PREFIX).iterdir() if file.is_file()]
    blobs = [(state.st_size, state.st_mtime, file.name.startswith(_INDEX)) for file, state in files]
    return [blob for blob in blobs if blob[1] >= since]


def _size(blobs: Iterable[tuple[int, float, bool]]) -> int:
    return sum(size for size, *_ in blobs)


def _files(root: Path) -> Iterator[Path]:
    for folder, _, names in os.walk(root):
        yield from (Path(folder, name) for name in names)


async def _measure(arguments: argparse.Namespace, bed: Bed) -> Report:
    shape, bytes_per_second = _QUICK if arguments.quick else _FULL
    with bed.tree(shape) as tree:
        snapshot_id = await _back_up(bed, tree)
        async with run_line(bed.s3.url, bytes_per_second=bytes_per_second) as url:
            bed.cluster.put_location(replace(bed.s3, url=url))
            restore = await _interrupt_restore(bed, tree, shape.total_bytes, snapshot_id)
            backup = await _interrupt_backup(bed, tree, shape.total_bytes)
    columns = ["transfer", "seconds without an interruption", "until it was killed at half", "of its next attempt"]
    rows = [["backup", *backup.figures], ["restore", *restore.figures]]
    lines = table([*columns, "moved again, share"], rows)
    summary: Summary = {
        "upload_resent_share": round(backup.again_share, 4),
        "restore_rewritten_share": round(restore.again_share, 4),
        "total_time_ratio": round(max(backup.ratio, restore.ratio), 3),
    }
    return Report(f"Tree: {shape.describe()}, by a line of {bytes_per_second / 1e6:.0f} MB/s", lines, summary)


def main() -> int:
    """Measure, and print the table and the summary; return the exit code."""
    parser = argparse.ArgumentParser(prog="bench_resume", description="The cost of an interruption of a transfer.")
    return run_alone(parser, _measure)


if __name__ == "__main__":
    sys.exit(main())

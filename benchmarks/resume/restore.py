"""Restores that are killed in the middle: what the next attempt writes again, how long both take, whether one is lost.

A file was finished when it has the time of the snapshot's, and was written again if its inode or its ctime has changed
by the end. The files that were in flight are not counted: no attempt can continue in the middle of one.
"""

import os
import random
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from benchmarks.processes import BenchmarkError
from benchmarks.resume.bed import ResumeBed
from benchmarks.tree import TreeShape
from core.contract import BackupResult, DataPathReason, parse_progress, parse_result

__all__ = ["RestoreFigures", "back_up", "measure_restores"]

_OLD_NS: Final = 1_600_000_000 * 10**9
"""A file that is restored within a minute after its last change looks like one that is being written."""

_KILLED_WITHIN: Final = 0.7
"""Of the time of an uninterrupted restore; one that ends before it is killed would show nothing."""

_KILLED_SETTINGS: Final = {"DATA_MOVER_RESTORE_LIST_INTERVAL": "200ms"}
"""Restores that are killed at a random moment take seconds, and the first record comes after six intervals."""

_BLOCK_BYTES: Final = 512


@dataclass(frozen=True)
class RestoreFigures:
    """Seconds of an uninterrupted restore and of the two attempts of a killed one; bytes; random kills.

    `finished_bytes` are those of the files that were finished when the first attempt was killed, `flight_bytes` what it
    had written of others, `again_bytes` those of finished files that the next attempt wrote again.
    """

    seconds: float
    killed_seconds: float
    resumed_seconds: float
    total_bytes: int
    finished_bytes: int
    flight_bytes: int
    again_bytes: int
    kills: int
    lost: int

    @property
    def rewritten_share(self) -> float:
        """What was written again although it was finished, as a share of all."""
        return self.again_bytes / self.total_bytes

    @property
    def time_ratio(self) -> float:
        """The time of both attempts compared with the uninterrupted restore."""
        return (self.killed_seconds + self.resumed_seconds) / self.seconds


async def measure_restores(bed: ResumeBed) -> RestoreFigures:
    """Restore without an interruption, then with one at half of the data, then some with a kill at a random moment."""
    total_bytes = bed.plan.tree.total_bytes
    with bed.tree(bed.plan.tree) as tree:
        snapshot_id = await back_up(bed, tree)
        bed.use_line(limited=True)
        bed.stages.say("restore without an interruption")
        with bed.disks.volume() as target, bed.stages.stage("restores"):
            bed.mover.begin("DataDownload", snapshotID=snapshot_id)
            seconds, _ = await bed.mover.run(target)
        bed.stages.say("restore that is killed at half of the data")
        with bed.disks.volume() as target:
            with bed.stages.stage("interrupted restores"):
                bed.mover.begin("DataDownload", snapshotID=snapshot_id)
                before = len(bed.mover.cluster.objects.events())

                def half_done() -> bool:
                    return _reported_bytes(bed.mover.cluster.objects.events()[before:]) >= total_bytes // 2

                killed = await bed.mover.interrupt(target, half_done)
                finished, flight_bytes = _finished(target), _written(target)
                resumed_seconds, _ = await bed.mover.run(target)
            again = sum(size for path, (size, state) in finished.items() if _state(path) != state)
            if not bed.is_same(tree, target):
                raise BenchmarkError("the restore that was killed and continued has other content")
    finished_bytes = sum(size for size, _ in finished.values())
    lost = await _kill_often(bed)
    return RestoreFigures(
        seconds=seconds,
        killed_seconds=killed.seconds,
        resumed_seconds=resumed_seconds,
        total_bytes=total_bytes,
        finished_bytes=finished_bytes,
        flight_bytes=max(0, flight_bytes - finished_bytes),
        again_bytes=again,
        kills=bed.plan.kills_a_way,
        lost=lost,
    )


async def back_up(bed: ResumeBed, tree: Path) -> str:
    """Back up the tree, as one that has not changed lately, into an empty repository; return the snapshot's ID."""
    for path in _files(tree):
        os.utime(path, ns=(_OLD_NS, _OLD_NS))
    bed.use_line(limited=False)
    bed.fresh_bucket()
    bed.mover.begin("DataUpload")
    with bed.stages.stage("backups to restore"):
        _, message = await bed.mover.run(tree)
    return parse_result(BackupResult, message).snapshot_id


async def _kill_often(bed: ResumeBed) -> int:
    """Kill some restores at a random moment each; return how many were lost: failed, or with other content."""
    shape: TreeShape = bed.plan.kill_tree
    bed = replace(bed, mover=replace(bed.mover, settings={**bed.plan.settings, **_KILLED_SETTINGS}))
    lost, chance = 0, random.Random(5)  # noqa: S311 - moments, no secret
    with bed.tree(shape) as tree:
        snapshot_id = await back_up(bed, tree)
        with bed.disks.volume() as target:
            bed.mover.begin("DataDownload", snapshotID=snapshot_id)
            seconds, _ = await bed.mover.run(target)
        for number in range(bed.plan.kills_a_way):
            # The first one takes longest.
            after = chance.uniform(0.0, _KILLED_WITHIN * seconds)
            bed.stages.say(f"kill {number + 1} of {bed.plan.kills_a_way}, after {after:.1f} s")
            with bed.stages.stage("random kills of restores"), bed.disks.volume() as target:
                lost += not await _survives(bed, tree, snapshot_id, target, after)
    return lost


async def _survives(bed: ResumeBed, tree: Path, snapshot_id: str, target: Path, seconds: float) -> bool:
    """Return whether a restore that is killed after so many seconds is completed by its next attempt."""
    bed.mover.begin("DataDownload", snapshotID=snapshot_id)
    until = time.monotonic() + seconds
    try:
        await bed.mover.interrupt(target, lambda: time.monotonic() >= until)
        await bed.mover.run(target)
    except BenchmarkError as e:
        bed.stages.say(str(e))
        return False
    return bed.is_same(tree, target)


def _reported_bytes(events: Iterable[tuple[str, str]]) -> int:
    """Return how many bytes a mover has reported as done."""
    return max(
        (parse_progress(text).done_bytes for reason, text in events if reason == DataPathReason.PROGRESS), default=0
    )


def _files(root: Path) -> Iterator[Path]:
    for folder, _, names in os.walk(root):
        yield from (Path(folder, name) for name in names)


def _written(target: Path) -> int:
    """Return how many bytes of files the target has; kopia sets the size of a file before it writes it."""
    states = (path.stat() for path in _files(target))
    return sum(min(state.st_size, state.st_blocks * _BLOCK_BYTES) for state in states)


def _finished(target: Path) -> dict[Path, tuple[int, tuple[int, int]]]:
    """Return size and state of each file that is finished."""
    states = ((path, path.stat()) for path in _files(target))
    return {path: (state.st_size, _state(path)) for path, state in states if state.st_mtime_ns == _OLD_NS}


def _state(path: Path) -> tuple[int, int]:
    """Return inode and ctime, of which one changes when a file is written again."""
    state = path.stat()
    return state.st_ino, state.st_ctime_ns

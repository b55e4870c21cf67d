"""Backups that are killed in the middle: what the next attempt sends again, how long both take, whether one is lost."""

import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.processes import BenchmarkError
from benchmarks.resume.bed import ResumeBed, Stored
from benchmarks.resume.movers import EndedError
from core.contract import BackupResult, parse_result

__all__ = ["UploadFigures", "measure_uploads"]

_EARLIER: Final = 0.8
"""A backup that ended before its kill is repeated, with the kill at this part of the time."""


@dataclass(frozen=True)
class UploadFigures:
    """Seconds of an uninterrupted backup and of the two attempts of a killed one; bytes in the storage; random kills.

    `sent_bytes` is what the uninterrupted one sent, `kept_bytes` what the indexes of the killed attempt name,
    `lost_bytes` what it sent after them, and `second_bytes` what the next attempt sent.
    """

    seconds: float
    killed_seconds: float
    resumed_seconds: float
    sent_bytes: int
    kept_bytes: int
    lost_bytes: int
    second_bytes: int
    kills: int
    lost: int

    @property
    def resent_share(self) -> float:
        """What was sent again although an index named it, as a share of all."""
        return max(0, self.kept_bytes + self.second_bytes - self.sent_bytes) / self.sent_bytes

    @property
    def time_ratio(self) -> float:
        """The time of both attempts compared with the uninterrupted backup."""
        return (self.killed_seconds + self.resumed_seconds) / self.seconds


async def measure_uploads(bed: ResumeBed) -> UploadFigures:
    """Back up without an interruption, then with one at half of the data, then some with a kill at a random moment."""
    with bed.tree(bed.plan.tree) as tree:
        bed.use_line(limited=True)
        bed.stages.say("upload without an interruption")
        seconds, _, before = await _back_up(bed, tree)
        bed.stages.say("upload that is killed at half of the data")
        bed.fresh_bucket()
        empty_bytes = _size(bed.blobs())
        half_bytes = bed.plan.tree.total_bytes // 2
        with bed.stages.stage("interrupted uploads"):
            bed.mover.begin("DataUpload")
            killed = await bed.mover.interrupt(tree, lambda: _size(bed.blobs()) - empty_bytes >= half_bytes)
            first = bed.blobs(killed.began)
            resumed_at = time.time()
            resumed_seconds, message = await bed.mover.run(tree)
        _check(message, bed.plan.tree.total_bytes)
        last_index = max((blob.at for blob in first if blob.is_index), default=0.0)
        kept_bytes = _size([blob for blob in first if blob.at <= last_index])
        second_bytes = _size(bed.blobs(resumed_at))
    lost = await _kill_often(bed)
    return UploadFigures(
        seconds=seconds,
        killed_seconds=killed.seconds,
        resumed_seconds=resumed_seconds,
        sent_bytes=before,
        kept_bytes=kept_bytes,
        lost_bytes=_size(first) - kept_bytes,
        second_bytes=second_bytes,
        kills=bed.plan.kills_a_way,
        lost=lost,
    )


async def _back_up(bed: ResumeBed, tree: Path) -> tuple[float, BackupResult, int]:
    """Return the seconds of an uninterrupted backup into an empty repository, its result, and the bytes it sent."""
    bed.fresh_bucket()
    began = time.time()
    with bed.stages.stage("uploads"):
        bed.mover.begin("DataUpload")
        seconds, message = await bed.mover.run(tree)
    return seconds, parse_result(BackupResult, message), _size(bed.blobs(began))


async def _kill_often(bed: ResumeBed) -> int:
    """Kill some backups at a random moment each; return how many were lost: failed, or with other content."""
    lost, chance = 0, random.Random(4)  # noqa: S311 - moments, no secret
    with bed.tree(bed.plan.kill_tree) as tree:
        bed.use_line(limited=False)
        seconds, _, _ = await _back_up(bed, tree)
        for number in range(bed.plan.kills_a_way):
            after = chance.uniform(0.0, seconds)
            with bed.stages.stage("random kills of uploads"):
                while (survived := await _survives(bed, tree, after)) is None:
                    after *= _EARLIER
            bed.stages.say(f"killed {number + 1} of {bed.plan.kills_a_way}, after {after:.1f} s")
            lost += not survived
    return lost


async def _survives(bed: ResumeBed, tree: Path, seconds: float) -> bool | None:
    """Return whether a backup that is killed after so many seconds is completed by its next attempt.

    None: it ended before. The machine is not always equally fast.
    """
    bed.fresh_bucket()
    bed.mover.begin("DataUpload")
    until = time.monotonic() + seconds
    try:
        await bed.mover.interrupt(tree, lambda: time.monotonic() >= until)
    except EndedError:
        return None
    try:
        _, message = await bed.mover.run(tree)
        result = _check(message, bed.plan.kill_tree.total_bytes)
        with bed.disks.volume() as target:
            bed.mover.begin("DataDownload", snapshotID=result.snapshot_id)
            await bed.mover.run(target)
            return bed.is_same(tree, target)
    except BenchmarkError as e:
        bed.stages.say(str(e))
        return False


def _check(message: str, total_bytes: int) -> BackupResult:
    result = parse_result(BackupResult, message)
    if result.total_bytes != total_bytes:
        raise BenchmarkError(f"the backup has {result.total_bytes} of {total_bytes} bytes")
    return result


def _size(blobs: list[Stored]) -> int:
    return sum(blob.size_bytes for blob in blobs)

"""What the benchmark of interrupted transfers shows: a table for people, one line of JSON for programs.

Knows the names of the figures. Does not know how anything was measured.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.resume.lost import LostFigures
from benchmarks.resume.restore import RestoreFigures
from benchmarks.resume.upload import UploadFigures

__all__ = ["ResumeFigures"]

_MB = 1e6


@dataclass(frozen=True)
class ResumeFigures:
    """The figures of backups, of restores, and of restores whose node is lost; None: not measured."""

    upload: UploadFigures | None
    restore: RestoreFigures | None
    lost: LostFigures | None

    def summary(self) -> dict[str, float | int]:
        """Return the last line's object."""
        found: dict[str, float | int] = {}
        if self.upload:
            found["upload_resent_share"] = round(self.upload.resent_share, 4)
        if self.restore:
            found["restore_rewritten_share"] = round(self.restore.rewritten_share, 4)
        if measured := [each for each in (self.upload, self.restore) if each]:
            found["total_time_ratio"] = round(max(each.time_ratio for each in measured), 3)
            found["kills"] = sum(each.kills for each in measured)
            found["lost_transfers"] = sum(each.lost for each in measured)
        if self.lost:
            found["lost_node_time_ratio"] = round(self.lost.time_ratio, 3)
            found["double_writers"] = self.lost.double_writers
        return found

    def lines(self) -> Iterator[str]:
        """Yield the tables."""
        tables = (
            _upload_lines(self.upload) if self.upload else (),
            _restore_lines(self.restore) if self.restore else (),
            _lost_lines(self.lost) if self.lost else (),
        )
        for number, lines in enumerate(filter(None, tables)):
            yield from ("",) if number else ()
            yield from lines

    def last_line(self) -> str:
        """Return the summary as one line of JSON."""
        return json.dumps(self.summary())


def _upload_lines(upload: UploadFigures) -> Iterator[str]:
    yield "| backup | seconds | MB sent |"
    yield "| --- | --- | --- |"
    yield f"| without an interruption | {upload.seconds:.1f} | {upload.sent_bytes / _MB:.1f} |"
    sent = f"{(upload.kept_bytes + upload.lost_bytes) / _MB:.1f}, of which {upload.lost_bytes / _MB:.1f} in no index"
    yield f"| killed at half of the data | {upload.killed_seconds:.1f} | {sent} |"
    yield f"| its next attempt | {upload.resumed_seconds:.1f} | {upload.second_bytes / _MB:.1f} |"


def _restore_lines(restore: RestoreFigures) -> Iterator[str]:
    yield "| restore | seconds | MB |"
    yield "| --- | --- | --- |"
    yield f"| without an interruption | {restore.seconds:.1f} | {restore.total_bytes / _MB:.1f} |"
    done = f"{restore.finished_bytes / _MB:.1f} in finished files, {restore.flight_bytes / _MB:.1f} in others"
    yield f"| killed at half of the data | {restore.killed_seconds:.1f} | {done} |"
    again = f"{restore.again_bytes / _MB:.1f} of finished files written again"
    yield f"| its next attempt | {restore.resumed_seconds:.1f} | {again} |"


def _lost_lines(lost: LostFigures) -> Iterator[str]:
    yield "| restore of a lost node | seconds: first attempt | wait | next attempt | old attempt beside the next one |"
    yield "| --- | --- | --- | --- | --- |"
    yield f"| without an interruption | {lost.seconds:.1f} | | | |"
    for node in lost.nodes:
        late = f"ran for {node.late_seconds:.2f} s, changed the target {node.late_writes} times"
        late += f", wrote {node.late_bytes / _MB:.1f} MB at most"
        seconds = f"{node.lost_seconds:.1f} | {node.wait_seconds:.0f} | {node.resumed_seconds:.1f}"
        yield f"| {node.way} at half of the data | {seconds} | {late} |"

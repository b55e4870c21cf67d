"""What the benchmark of interrupted transfers shows: a table for people, one line of JSON for programs.

Knows the names of the figures. Does not know how anything was measured.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.resume.restore import RestoreFigures
from benchmarks.resume.upload import UploadFigures

__all__ = ["ResumeFigures"]

_MB = 1e6


@dataclass(frozen=True)
class ResumeFigures:
    """The figures of backups and of restores; None: not measured."""

    upload: UploadFigures | None
    restore: RestoreFigures | None

    def summary(self) -> dict[str, float | int]:
        """Return the last line's object."""
        measured = [each for each in (self.upload, self.restore) if each]
        shares: dict[str, float | int] = {}
        if self.upload:
            shares["upload_resent_share"] = round(self.upload.resent_share, 4)
        if self.restore:
            shares["restore_rewritten_share"] = round(self.restore.rewritten_share, 4)
        return {
            **shares,
            "total_time_ratio": round(max(each.time_ratio for each in measured), 3),
            "kills": sum(each.kills for each in measured),
            "lost_transfers": sum(each.lost for each in measured),
        }

    def lines(self) -> Iterator[str]:
        """Yield the tables."""
        if self.upload:
            yield from _upload_lines(self.upload)
        if self.upload and self.restore:
            yield ""
        if self.restore:
            yield from _restore_lines(self.restore)

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

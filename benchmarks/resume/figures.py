"""What the benchmark of interrupted transfers shows: a table for people, one line of JSON for programs.

Knows the names of the figures. Does not know how anything was measured.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.resume.upload import UploadFigures

__all__ = ["ResumeFigures"]

_MB = 1e6


@dataclass(frozen=True)
class ResumeFigures:
    """The figures of backups."""

    upload: UploadFigures

    def summary(self) -> dict[str, float | int]:
        """Return the last line's object."""
        return {
            "upload_resent_share": round(self.upload.resent_share, 4),
            "total_time_ratio": round(self.upload.time_ratio, 3),
            "kills": self.upload.kills,
            "lost_transfers": self.upload.lost,
        }

    def lines(self) -> Iterator[str]:
        """Yield the table."""
        upload = self.upload
        yield "| backup | seconds | MB sent |"
        yield "| --- | --- | --- |"
        yield f"| without an interruption | {upload.seconds:.1f} | {upload.sent_bytes / _MB:.1f} |"
        sent = (
            f"{(upload.kept_bytes + upload.lost_bytes) / _MB:.1f}, of which {upload.lost_bytes / _MB:.1f} in no index"
        )
        yield f"| killed at half of the data | {upload.killed_seconds:.1f} | {sent} |"
        yield f"| its next attempt | {upload.resumed_seconds:.1f} | {upload.second_bytes / _MB:.1f} |"

    def last_line(self) -> str:
        """Return the summary as one line of JSON."""
        return json.dumps(self.summary())

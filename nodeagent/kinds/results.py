"""What movers leave behind, and what becomes of it in a status.

Knows the results of backups and of restores, which two kinds each share. Does not know the kinds.
"""

from core.contract import BackupResult, RestoreResult, parse_result
from core.models.base import JsonDict
from nodeagent.outcome import Outcome

__all__ = ["BackupResults", "RestoreResults"]


class BackupResults:
    """How a kind of backup reads and tells its result."""

    def parse_result(self, message: str) -> JsonDict:
        """Return the result a mover that exited with 0 left as termination message.

        Raises:
            ResultError: it cannot be read.
        """
        return parse_result(BackupResult, message).to_wire()

    def final_status(self, outcome: Outcome) -> JsonDict:
        """Return where the data is and how much of it there is, as status fields."""
        result = BackupResult.from_wire(outcome.result)
        return {
            "path": result.source.by_path,
            "snapshotID": result.snapshot_id,
            "incrementalBytes": result.incremental_bytes,
            "progress": _all_of(result.total_bytes),
        }


class RestoreResults:
    """How a kind of restore reads and tells its result."""

    def parse_result(self, message: str) -> JsonDict:
        """Return the result a mover that exited with 0 left as termination message.

        Raises:
            ResultError: it cannot be read.
        """
        return parse_result(RestoreResult, message).to_wire()

    def final_status(self, outcome: Outcome) -> JsonDict:
        """Return how much data there is, as status fields."""
        return {"progress": _all_of(RestoreResult.from_wire(outcome.result).total_bytes)}


def _all_of(total_bytes: int) -> JsonDict:
    return {"totalBytes": total_bytes, "bytesDone": total_bytes}

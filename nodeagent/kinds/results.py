"""What movers leave behind, and what becomes of it in a status.

Knows the results of backups and of restores, which two kinds each share. Does not know the kinds.
"""

from core.contract import BackupResult, RestoreResult, parse_result
from core.models.base import JsonDict
from nodeagent.outcome import Outcome

__all__ = ["backup_status", "parse_backup", "parse_restore", "restore_status"]


def parse_backup(message: str) -> JsonDict:
    """Return the result a backup's mover left as termination message.

    Raises:
        ResultError: it cannot be read.
    """
    return parse_result(BackupResult, message).to_wire()


def backup_status(outcome: Outcome) -> JsonDict:
    """Return where the data is and how much of it there is, as status fields."""
    result = BackupResult.model_validate(outcome.result)
    return {
        "path": result.source.by_path,
        "snapshotID": result.snapshot_id,
        "incrementalBytes": result.incremental_bytes,
        "progress": _all_of(result.total_bytes),
    }


def parse_restore(message: str) -> JsonDict:
    """Return the result a restore's mover left as termination message.

    Raises:
        ResultError: it cannot be read.
    """
    return parse_result(RestoreResult, message).to_wire()


def restore_status(outcome: Outcome) -> JsonDict:
    """Return how much data there is, as status fields."""
    return {"progress": _all_of(RestoreResult.model_validate(outcome.result).total_bytes)}


def _all_of(total_bytes: int) -> JsonDict:
    return {"totalBytes": total_bytes, "bytesDone": total_bytes}

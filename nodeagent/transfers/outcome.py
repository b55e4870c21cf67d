"""How a load ended, kept on its custom resource before anything that produced it is touched.

Knows what a mover pod's end means for its load, and the form of the annotation
`nodeagent.io/outcome`. Does not know the cluster, nor what is done about an outcome.

What movers leave behind, and what becomes of it in a status.

Knows the results of backups and of restores, which two kinds each share. Does not know the kinds.
"""

import logging
from collections.abc import Callable
from datetime import datetime

from msgspec import field

from core.contract import CANCELED_ENDING, BackupResult, RestoreResult, parse_result
from core.errors import ContractError, ResultError
from core.logs import fields
from core.models.base import JsonDict, WireModel
from core.models.names import OUTCOME_ANNOTATION
from core.models.phases import Phase
from core.models.transfers import Transfer
from exposer.pod_status import PodEnd, explain_exit, signal_of

__all__ = ["BackupResults", "Outcome", "RestoreResults", "decide_outcome", "has_last_words", "read_outcome"]


_log = logging.getLogger(__name__)


class Outcome(WireModel, omit_defaults=True):
    """The end of a load: its final phase, and what is needed to get there.

    `kept_at` is when it was written down. `result` is the mover's termination message as
    JSON, empty unless Completed. `pv_name` and `reclaim_policy` are a DataDownload's volume
    as it was before `Retain`.
    """

    phase: Phase
    kept_at: datetime | None = None
    message: str = ""
    result: JsonDict = field(default_factory=dict)
    pv_name: str = ""
    reclaim_policy: str = ""

    @property
    def total_bytes(self) -> int:
        """How much the mover says it moved."""
        return int(self.result.get("totalBytes", 0))


def read_outcome(cr: Transfer) -> Outcome | None:
    """Return the outcome that is kept on `cr`, None where there is none.

    One that somebody made unreadable counts as lost: as long as the mover pod is there it is
    written anew.
    """
    text = cr.metadata.annotations.get(OUTCOME_ANNOTATION)
    if not text:
        return None
    try:
        return Outcome.from_json(text)
    except ContractError:
        told = fields(kind=cr.kind_name, namespace=cr.metadata.namespace, name=cr.name, uid=cr.uid)
        _log.warning("annotation %s cannot be read", OUTCOME_ANNOTATION, extra=told)
        return None


def decide_outcome(end: PodEnd, parse_result: Callable[[str], JsonDict], *, cancel_asked: bool) -> Outcome:
    """Return what a mover pod's end means for its load.

    A mover that was stopped by anybody but the load's owner says "canceled" too; that load
    is Failed, because a server takes an unasked Canceled for work it must wait for.

    Args:
        end: how the mover's container ended.
        parse_result: reads a good end's message; raises ResultError.
        cancel_asked: somebody set `spec.cancel` or deletes the custom resource.
    """
    said = end.message.strip()
    if end.exit_code == 0:
        try:
            return Outcome(phase=Phase.COMPLETED, result=parse_result(said))
        except ResultError as e:
            return Outcome(phase=Phase.FAILED, message=str(e))
    if said.endswith(CANCELED_ENDING):
        if cancel_asked:
            return Outcome(phase=Phase.CANCELED, message=said)
        return Outcome(phase=Phase.FAILED, message=f"the data mover was stopped: {said}")
    return Outcome(phase=Phase.FAILED, message=_name_cause(end, said))


def has_last_words(end: PodEnd) -> bool:
    """Whether the mover itself said why it ended; its log then tells the same in more words.

    One that was killed leaves no words of its own: what stands in their place is the end of its log.
    """
    return bool(end.message.strip()) and end.plain and not signal_of(end)


def _name_cause(end: PodEnd, said: str) -> str:
    """Return why a mover failed: what the kubelet says, then what the mover said."""
    cause = "" if has_last_words(end) else f"data mover pod ended: {explain_exit(end)}"
    return ": ".join(part for part in (cause, said) if part)


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

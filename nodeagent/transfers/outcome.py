"""The outcome of a transfer, stored on its custom resource before the mover pod is deleted.

Two kinds share each result.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Self

from msgspec import UNSET, field

from core.contract import CANCELED_ENDING, BackupResult, RestoreResult, parse_result
from core.errors import ContractError, IncompleteRestoreError, ResultError, UnsetAttributesError
from core.logs import fields
from core.models.base import JsonDict, WireModel
from core.models.names import FILES_ANNOTATION, LEFT_OUT_ANNOTATION, OUTCOME_ANNOTATION, SHRUNK_ANNOTATION
from core.models.phases import Phase
from core.models.transfers import Transfer
from core.redact import redact
from exposer.pod_status import PodEnd, explain_exit, signal_of

_log = logging.getLogger(__name__)

_REFUSALS: Final = {IncompleteRestoreError.exit_code: "missing", UnsetAttributesError.exit_code: "unset"}

MoverResult = BackupResult | RestoreResult
"""What a data mover that succeeded returned."""


@dataclass(frozen=True)
class Outcome:
    """The final phase of a transfer, and what is needed to get there.

    `result` is what the mover returned, None unless Completed. `pv_name` and `reclaim_policy`
    describe the volume of a DataDownload as it was before `Retain`, and `provisioned` whether it was
    created for it: false where an earlier version recorded the outcome.
    """

    phase: Phase
    message: str = ""
    result: MoverResult | None = None
    pv_name: str = ""
    reclaim_policy: str = ""
    provisioned: bool = False

    @property
    def total_bytes(self) -> int:
        """The number of bytes that the mover moved."""
        return self.result.total_bytes if self.result is not None else 0

    @property
    def fallback_cause(self) -> str | None:
        """Why everything was read; None: it was not, or the mover does not say why."""
        return self.result.fallback_cause or None if isinstance(self.result, BackupResult) else None

    @property
    def restart_cause(self) -> str | None:
        """Why a device was read again from its start, although a checkpoint was saved; None: it was not."""
        return self.result.restart_cause or None if isinstance(self.result, BackupResult) else None

    @property
    def annotations(self) -> dict[str, str]:
        """What stays on the custom resource of a completed backup, and has no field in its status."""
        result, found = self.result, dict[str, str]()
        if isinstance(result, BackupResult):
            if result.files is not UNSET:
                found[FILES_ANNOTATION] = str(result.files)
            if result.left_out is not UNSET:
                found[LEFT_OUT_ANNOTATION] = result.left_out.to_json()
            if result.shrunk is not UNSET:
                found[SHRUNK_ANNOTATION] = result.shrunk.to_json()
        return found

    def to_json(self) -> str:
        """Return the annotation's value."""
        result = {} if self.result is None else self.result.to_wire()
        return _Annotation.like(self, message=redact(self.message), result=result).to_json()

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the outcome that the annotation's value holds; raise ContractError if it is invalid."""
        stored = _Annotation.from_json(text)
        result = _read_result(stored.result)
        if not stored.phase.final or (stored.phase is Phase.FAILED and not stored.message):
            raise ContractError(f"phase {stored.phase} is not final, or has no message")
        if stored.phase is Phase.COMPLETED and result is None:
            raise ContractError("phase Completed without a result")
        return cls(
            stored.phase, stored.message, result, stored.pv_name, stored.reclaim_policy, provisioned=stored.provisioned
        )


class _Annotation(WireModel, omit_defaults=True):
    """An outcome as agents of all versions store it; `result` is the mover's termination message."""

    phase: Phase
    message: str = ""
    result: JsonDict = field(default_factory=dict)
    pv_name: str = ""
    reclaim_policy: str = ""
    provisioned: bool = False


def _read_result(raw: JsonDict) -> MoverResult | None:
    """Return a stored result; a backup's names its kopia snapshot, a restore's its target."""
    if not raw:
        return None
    return BackupResult.from_wire(raw) if "snapshotID" in raw else RestoreResult.from_wire(raw)


def read_outcome(cr: Transfer) -> Outcome | None:
    """Return the outcome that is stored on `cr`, None if there is none.

    An invalid one counts as missing: it is recorded again as long as the mover pod exists.
    """
    text = cr.metadata.annotations.get(OUTCOME_ANNOTATION)
    if not text:
        return None
    try:
        return Outcome.from_json(text)
    except ContractError as e:
        _log.warning("invalid annotation %s: %s", OUTCOME_ANNOTATION, e, extra=fields(**cr.identity))
        return None


def decide_outcome(end: PodEnd, parse_result: Callable[[str], MoverResult], *, cancel_requested: bool) -> Outcome:
    """Return what the end of a mover pod means for its transfer.

    A mover that was stopped without a cancel request reports "canceled" as well; that transfer is Failed: a Velero
    server does not show why one is Canceled. `parse_result` may raise ResultError.

    Source: Velero v1.18, Progress in pkg/backup/actions/csi/pvc_action.go.
    """
    message = end.message.strip()
    if end.exit_code == 0:
        try:
            return Outcome(phase=Phase.COMPLETED, result=parse_result(message))
        except ResultError as e:
            return Outcome(phase=Phase.FAILED, message=str(e))
    if message.endswith(CANCELED_ENDING):
        if cancel_requested:
            return Outcome(phase=Phase.CANCELED, message=message)
        return Outcome(phase=Phase.FAILED, message=f"data mover was stopped without a cancel request: {message}")
    return Outcome(phase=Phase.FAILED, message=_explain_failure(end, message))


def has_final_message(end: PodEnd) -> bool:
    """Return whether the mover itself reported why it ended: one that was killed leaves the end of its log instead."""
    return bool(end.message.strip()) and end.plain and not signal_of(end)


def find_refusal(outcome: Outcome, end: PodEnd | None) -> str | None:
    """Return what the target of a restore refused, as metrics name it: `missing` files, or `unset` attributes alone."""
    if isinstance(outcome.result, RestoreResult):
        return "unset" if outcome.result.unset else None
    return _REFUSALS.get(end.exit_code) if end is not None and end.exit_code is not None else None


def _explain_failure(end: PodEnd, message: str) -> str:
    cause = None if has_final_message(end) else f"data mover pod ended: {explain_exit(end)}"
    return ": ".join(part for part in (cause, message) if part)


class BackupResults:
    """The part of a kind that handles the results of backups."""

    def parse_result(self, message: str) -> BackupResult:
        """Return the result that a mover with exit code 0 left as termination message, or raise ResultError."""
        return parse_result(BackupResult, message)

    def final_status(self, cr: Transfer, outcome: Outcome) -> JsonDict:
        """Return the location and the size of the data as status fields, and the mover's note as message.

        The path is where a data mover of Velero mounts the volume, wherever ours has it.
        Source: tests/recordings/velero-1.18.2, status of DataUpload and PodVolumeBackup.
        """
        result = outcome.result
        if not isinstance(result, BackupResult):
            raise ContractError("the stored outcome has no backup result")
        return {
            "path": f"/{cr.uid}",
            "snapshotID": result.snapshot_id,
            "progress": _all_of(result.total_bytes),
            **({} if result.incremental_bytes is UNSET else {"incrementalBytes": result.incremental_bytes}),
            # A data mover of Velero leaves out a size of 0.
            **({"sourceSize": result.total_bytes} if result.total_bytes or result.empty_snapshot else {}),
            **({"fallbackFull": True} if result.fallback_full is True else {}),
            **_note(result),
        }


class RestoreResults:
    """The part of a kind that handles the results of restores."""

    def parse_result(self, message: str) -> RestoreResult:
        """Return the result that a mover with exit code 0 left as termination message, or raise ResultError."""
        return parse_result(RestoreResult, message)

    def final_status(self, cr: Transfer, outcome: Outcome) -> JsonDict:
        """Return the size of the data as status fields, and the mover's note as message."""
        result = outcome.result
        if not isinstance(result, RestoreResult):
            raise ContractError("the stored outcome has no restore result")
        written, in_place = result.incremental_bytes, cr.valid_in_place
        # A mover of an earlier version writes what is equal too.
        silent = in_place is not None and in_place.incremental and written is UNSET
        return {
            "progress": _all_of(result.total_bytes),
            **({} if written is UNSET else {"incrementalBytes": written}),
            **({"fallbackFull": True} if silent or result.fallback_full is True else {}),
            **_note(result),
        }


def _note(result: MoverResult) -> JsonDict:
    return {"message": result.note} if result.note else {}


def _all_of(total_bytes: int) -> JsonDict:
    return {"totalBytes": total_bytes, "bytesDone": total_bytes}

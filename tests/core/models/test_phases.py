"""The table of phase transitions, and the attempts of a transfer, as its annotation has them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from msgspec.structs import replace

from core.models.names import ATTEMPTS_ANNOTATION
from core.models.phases import (
    FINAL_PHASES,
    HOLDING_PHASES,
    TRANSITIONS,
    Attempts,
    AttemptStage,
    Interruption,
    InterruptionCause,
    Phase,
)
from core.models.transfers import DataUpload


def test_phases_never_go_back() -> None:
    order = [Phase.NEW, Phase.ACCEPTED, Phase.PREPARED, Phase.IN_PROGRESS, Phase.CANCELING]
    assert TRANSITIONS.keys() == {*order} | FINAL_PHASES
    for phase, targets in TRANSITIONS.items():
        assert phase.final is (phase in FINAL_PHASES)
        if phase.final:
            assert targets == frozenset()
            continue
        assert {Phase.FAILED, Phase.CANCELED} <= targets
        assert {order.index(target) for target in targets - FINAL_PHASES} <= {order.index(phase) + 1}
    assert {Phase.ACCEPTED, Phase.PREPARED} == HOLDING_PHASES, "only these count toward the quota"


_AT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def _interruption(cause: InterruptionCause = InterruptionCause.KILLED, message: str = "killed") -> Interruption:
    return Interruption(at=_AT, cause=cause, message=message, node="node-1", terminated=True)


def _upload(attempts: str, phase: Phase = Phase.IN_PROGRESS) -> DataUpload:
    marks = {ATTEMPTS_ANNOTATION: attempts}
    return DataUpload.parse(
        {
            "apiVersion": "velero.io/v2alpha1",
            "kind": "DataUpload",
            "metadata": {"name": "a", "namespace": "velero", "uid": "1", "annotations": marks},
            "spec": {"backupStorageLocation": "x", "sourceNamespace": "n", "snapshotType": "CSI", "sourcePVC": "p"},
            "status": {"phase": str(phase)},
        }
    )


def test_an_interruption_begins_the_next_attempt_which_waits() -> None:
    attempts = Attempts().interrupt(_interruption())
    assert (attempts.number, attempts.stage, attempts.retries) == (2, AttemptStage.WAITING, 1)
    assert attempts.last == _interruption()
    # The end of a fenced mover does not count as a retry.
    attempts = Attempts().interrupt(_interruption(InterruptionCause.FENCED)).interrupt(_interruption())
    assert (attempts.number, attempts.retries) == (3, 1)


def test_the_last_interruptions_are_told_with_their_numbers() -> None:
    attempts = Attempts()
    assert attempts.describe() == []
    for number in range(12):
        attempts = attempts.interrupt(_interruption(message="" if number else "killed by the kernel"))
    lines = attempts.describe()
    assert (len(lines), lines[-1]) == (10, "attempt 12 was interrupted on node node-1: Killed")
    assert Attempts().interrupt(_interruption()).describe() == ["attempt 1 was interrupted on node node-1: killed"]


@pytest.mark.parametrize(
    ("terminated", "how"), [(True, "the same volume"), (False, "its volume exposed again")], ids=["mover", "node"]
)
def test_an_attempt_that_runs_tells_how_it_was_resumed(terminated: bool, how: str) -> None:
    attempts = Attempts().interrupt(replace(_interruption(), terminated=terminated))
    assert len(attempts.describe()) == 1
    assert attempts.move(AttemptStage.RUNNING).describe()[1:] == [f"attempt 2 resumed with {how}"]


def test_attempts_survive_the_annotation_and_a_start_is_recorded_once() -> None:
    attempts = Attempts().interrupt(_interruption()).move(AttemptStage.EXPOSING).with_start(_AT).with_start(_AT)
    assert attempts.starts == (_AT,)
    assert Attempts.from_json(attempts.to_json()) == attempts


def test_the_annotation_stays_small_however_often_a_transfer_is_interrupted() -> None:
    attempts = Attempts()
    for number in range(100):
        attempts = attempts.with_start(_AT + timedelta(seconds=number)).interrupt(_interruption(message="x" * 5000))
    assert attempts.number == 101
    assert len(attempts.to_json()) < 8192
    assert attempts.starts[-1] == _AT + timedelta(seconds=99)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"number": 0}', '{"stage": "Other"}'])
def test_a_transfer_without_a_valid_annotation_is_in_its_first_attempt(text: str) -> None:
    assert _upload(text).attempts == Attempts()


def test_only_a_transfer_in_progress_has_a_stage() -> None:
    waiting = Attempts().interrupt(_interruption()).to_json()
    assert _upload(waiting).stage is AttemptStage.WAITING
    assert _upload(waiting, Phase.CANCELING).stage is None

"""What a mover pod's end means for its load."""

import json

import pytest

from core.contract import BackupResult, parse_result
from core.models.base import JsonDict
from core.models.names import OUTCOME_ANNOTATION
from core.models.phases import Phase
from core.models.transfers import DataUpload
from exposer.pod_status import PodEnd
from nodeagent.transfers.outcome import Outcome, decide_outcome, read_outcome
from tests.nodeagent.support.transfers import data_upload

RESULT = '{"snapshotID":"s1","source":{"byPath":"/x","volumeMode":"Filesystem"},"totalBytes":5,"incrementalBytes":3}'


def parse(message: str) -> JsonDict:
    return parse_result(BackupResult, message).to_wire()


def test_a_good_end_is_completed_with_its_result() -> None:
    outcome = decide_outcome(PodEnd(0, RESULT + "\n", "Completed"), parse, cancel_asked=False)
    assert (outcome.phase, outcome.result) == (Phase.COMPLETED, json.loads(RESULT) | {"emptySnapshot": False})
    assert outcome.total_bytes == 5


def test_a_good_end_counts_although_a_cancel_was_asked_for() -> None:
    assert decide_outcome(PodEnd(0, RESULT, ""), parse, cancel_asked=True).phase is Phase.COMPLETED


@pytest.mark.parametrize("said", ["", "{}", '{"snapshotID":""}', "done"], ids=["nothing", "empty", "no id", "text"])
def test_a_result_that_cannot_be_read_is_failed(said: str) -> None:
    outcome = decide_outcome(PodEnd(0, said, "Completed"), parse, cancel_asked=False)
    assert outcome.phase is Phase.FAILED
    assert "cannot be read" in outcome.message


@pytest.mark.parametrize(("asked", "phase"), [(True, Phase.CANCELED), (False, Phase.FAILED)], ids=["asked", "unasked"])
def test_a_stopped_mover_is_canceled_only_if_somebody_asked(asked: bool, phase: Phase) -> None:
    end = PodEnd(14, "got SIGTERM: data path is canceled", "Error")
    outcome = decide_outcome(end, parse, cancel_asked=asked)
    assert outcome.phase is phase
    assert outcome.message.endswith("data path is canceled")


@pytest.mark.parametrize(
    ("end", "message"),
    [
        pytest.param(PodEnd(11, "no space left", "Error"), "no space left", id="mover's words"),
        pytest.param(PodEnd(11, "", "Error"), "data mover pod ended: Error (exit code 11)", id="no words"),
        pytest.param(
            PodEnd(137, "the end of its log", "OOMKilled"),
            "data mover pod ended: OOMKilled (exit code 137): the end of its log",
            id="OOM",
        ),
        pytest.param(
            PodEnd(137, "the end of its log", "Error"),
            "data mover pod ended: killed by signal 9 (exit code 137): the end of its log",
            id="killed",
        ),
        pytest.param(
            PodEnd(137, "", "Error", "64Mi"),
            "data mover pod ended: killed by signal 9 (exit code 137), probably for lack of memory (its limit is 64Mi)",
            id="killed at its limit",
        ),
        pytest.param(
            PodEnd(137, "", "OOMKilled", "64Mi"),
            "data mover pod ended: OOMKilled (exit code 137)",
            id="OOM at its limit",
        ),
        pytest.param(
            PodEnd(None, "low on memory", "Evicted"), "data mover pod ended: Evicted: low on memory", id="evicted"
        ),
        pytest.param(PodEnd(None, "", ""), "data mover pod ended: Error", id="nothing known"),
    ],
)
def test_a_bad_end_is_failed_and_named(end: PodEnd, message: str) -> None:
    assert decide_outcome(end, parse, cancel_asked=False) == Outcome(phase=Phase.FAILED, message=message)


def test_an_outcome_is_read_as_it_was_kept() -> None:
    outcome = Outcome(phase=Phase.COMPLETED, result={"totalBytes": 5}, pv_name="pv-1", reclaim_policy="Delete")
    cr = DataUpload.parse(data_upload(annotations={OUTCOME_ANNOTATION: outcome.to_json()}))
    assert read_outcome(cr) == outcome


@pytest.mark.parametrize("text", ["", "{", '{"phase":"Nonsense"}'], ids=["empty", "cut", "unknown phase"])
def test_an_unreadable_outcome_counts_as_none(text: str) -> None:
    assert read_outcome(DataUpload.parse(data_upload(annotations={OUTCOME_ANNOTATION: text}))) is None

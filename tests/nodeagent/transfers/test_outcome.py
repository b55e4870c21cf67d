"""The outcome of a transfer: decided from the end of its mover pod, stored, and read again."""

import json

import pytest
from msgspec import UNSET
from msgspec.structs import replace

from core.contract import BackupResult, RestoreResult, parse_result
from core.errors import ContractError
from core.models.names import OUTCOME_ANNOTATION
from core.models.phases import Phase
from core.models.transfers import DataDownload, DataUpload, PodVolumeRestore
from exposer.pod_status import PodEnd
from nodeagent.transfers.outcome import (
    BackupResults,
    MoverResult,
    Outcome,
    RestoreResults,
    decide_outcome,
    find_refusal,
    read_outcome,
)
from tests.nodeagent.support.transfers import data_download, data_upload, pod_volume_restore
from tests.support.fakeobjects import merge_patch

RESULT = '{"snapshotID":"s1","source":{"byPath":"/x","volumeMode":"Filesystem"},"totalBytes":5,"incrementalBytes":3}'


_ENDED = "data mover pod ended: "
BACKUP = parse_result(BackupResult, RESULT)
RESTORE = parse_result(RestoreResult, '{"target":{"byPath":"/x","volumeMode":"Block"},"totalBytes":7}')


def parse(message: str) -> BackupResult:
    return parse_result(BackupResult, message)


@pytest.mark.parametrize("requested", [False, True])
def test_exit_code_zero_is_completed_with_the_result_despite_a_cancel_request(*, requested: bool) -> None:
    outcome = decide_outcome(PodEnd(0, RESULT + "\n", "Completed"), parse, cancel_requested=requested)
    assert (outcome.phase, outcome.result, outcome.total_bytes) == (Phase.COMPLETED, BACKUP, 5)


@pytest.mark.parametrize("message", ["", "{}", '{"snapshotID":""}', "done"], ids=["none", "empty", "no id", "text"])
def test_an_invalid_result_is_failed(message: str) -> None:
    outcome = decide_outcome(PodEnd(0, message, "Completed"), parse, cancel_requested=False)
    assert outcome.phase is Phase.FAILED
    assert "its result is invalid" in outcome.message


@pytest.mark.parametrize(
    ("requested", "phase"), [(True, Phase.CANCELED), (False, Phase.FAILED)], ids=["requested", "not requested"]
)
@pytest.mark.parametrize("exit_code", [14, 137], ids=["ended", "killed"])
def test_a_stopped_mover_is_canceled_only_after_a_cancel_request(exit_code: int, requested: bool, phase: Phase) -> None:
    """It leaves its message before it saves a checkpoint, in case that it is killed meanwhile."""
    end = PodEnd(exit_code, "got SIGTERM: data path is canceled", "Error")
    outcome = decide_outcome(end, parse, cancel_requested=requested)
    assert outcome.phase is phase
    assert outcome.message.endswith("data path is canceled")


@pytest.mark.parametrize(
    ("end", "message"),
    [
        pytest.param(PodEnd(11, "no space left", "Error"), "no space left", id="with a message"),
        pytest.param(PodEnd(11, "", "Error"), f"{_ENDED}Error (exit code 11)", id="without a message"),
        pytest.param(PodEnd(137, "its log", "OOMKilled"), f"{_ENDED}OOMKilled (exit code 137): its log", id="OOM"),
        pytest.param(
            PodEnd(137, "its log", "Error"), f"{_ENDED}killed by signal 9 (exit code 137): its log", id="killed"
        ),
        pytest.param(
            PodEnd(137, "", "Error", "64Mi"),
            f"{_ENDED}killed by signal 9 (exit code 137), probably out of memory (limit 64Mi)",
            id="killed at its limit",
        ),
        pytest.param(PodEnd(137, "", "OOMKilled", "64Mi"), f"{_ENDED}OOMKilled (exit code 137)", id="OOM at its limit"),
        pytest.param(PodEnd(None, "low on memory", "Evicted"), f"{_ENDED}Evicted: low on memory", id="evicted"),
        pytest.param(PodEnd(None, "", ""), f"{_ENDED}Error", id="unknown"),
    ],
)
def test_any_other_end_is_failed_with_its_cause(end: PodEnd, message: str) -> None:
    assert decide_outcome(end, parse, cancel_requested=False) == Outcome(phase=Phase.FAILED, message=message)


def test_a_size_that_is_not_known_is_absent_and_an_increment_of_nothing_is_written() -> None:
    def shown(**result: object) -> list[object]:
        outcome = Outcome(Phase.COMPLETED, result=replace(BACKUP, **result))
        status = BackupResults().final_status(DataUpload.parse(data_upload()), outcome)
        return [status.get("sourceSize"), status.get("incrementalBytes")]

    assert shown(total_bytes=0, incremental_bytes=UNSET) == [None, None]
    assert shown(total_bytes=0, empty_snapshot=True, incremental_bytes=0) == [0, 0]
    assert shown(total_bytes=5) == [5, 3]


def test_a_transfer_that_became_a_full_one_says_so() -> None:
    backup = BackupResults().final_status(
        DataUpload.parse(data_upload()),
        Outcome(Phase.COMPLETED, result=replace(BACKUP, fallback_full=True, note="read everything")),
    )
    assert backup["message"] == "read everything"
    found = []
    for kind in ("", "full", "Incremental"):
        cr = PodVolumeRestore.parse(merge_patch(pod_volume_restore(), {"spec": {"restoreType": kind}}))
        found.append(RestoreResults().final_status(cr, Outcome(Phase.COMPLETED, result=RESTORE)).get("fallbackFull"))
    assert (backup["fallbackFull"], found) == (True, [None, None, True])


def test_what_the_target_did_not_take_is_the_message_of_a_completed_restore() -> None:
    cr, result = DataUpload.parse(data_upload()), replace(RESTORE, note="the target did not take the owner", unset=2)
    outcome = Outcome(Phase.COMPLETED, result=result)
    assert RestoreResults().final_status(cr, outcome)["message"] == "the target did not take the owner"
    assert stored(outcome.to_json()) == outcome
    assert find_refusal(outcome, None) == "unset"


@pytest.mark.parametrize(
    ("outcome", "end", "refused"),
    [
        (Outcome(Phase.COMPLETED, result=RESTORE), PodEnd(0, "", "Completed"), None),
        (Outcome(Phase.COMPLETED, result=BACKUP), PodEnd(0, "", "Completed"), None),
        (Outcome(Phase.FAILED, "m"), PodEnd(18, "m", "Error"), "missing"),
        (Outcome(Phase.FAILED, "m"), PodEnd(19, "m", "Error"), "unset"),
        (Outcome(Phase.FAILED, "m"), PodEnd(11, "m", "Error"), None),
        (Outcome(Phase.FAILED, "m"), None, None),
    ],
    ids=["restored", "backup", "missing", "required", "failed", "no pod"],
)
def test_what_a_target_refused_is_known_by_its_end(outcome: Outcome, end: PodEnd | None, refused: str | None) -> None:
    assert find_refusal(outcome, end) == refused


def stored(text: str) -> Outcome | None:
    return read_outcome(DataUpload.parse(data_upload(annotations={OUTCOME_ANNOTATION: text})))


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        pytest.param(
            '{"phase":"Completed","keptAt":"2026-11-21T12:00:00Z","result":{"snapshotID":"s1","emptySnapshot":false,'
            '"source":{"byPath":"/x","volumeMode":"Filesystem"},"totalBytes":5,"incrementalBytes":3}}',
            Outcome(Phase.COMPLETED, result=BACKUP),
            id="backup",
        ),
        pytest.param(
            '{"phase":"Completed","keptAt":"2026-11-21T12:00:00Z","result":{"target":{"byPath":"/x",'
            '"volumeMode":"Block"},"totalBytes":7},"pvName":"pv-1","reclaimPolicy":"Delete"}',
            Outcome(Phase.COMPLETED, result=RESTORE, pv_name="pv-1", reclaim_policy="Delete"),
            id="restore",
        ),
        pytest.param('{"phase":"Failed","message":"m"}', Outcome(Phase.FAILED, message="m"), id="failure"),
    ],
)
def test_the_annotation_has_the_form_of_earlier_agents(text: str, outcome: Outcome) -> None:
    """Agents of two versions may alternate on one transfer."""
    assert stored(text) == outcome
    # The time of the record decides nothing any more.
    assert json.loads(outcome.to_json()) == {key: value for key, value in json.loads(text).items() if key != "keptAt"}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        '{"phase":"Nonsense"}',
        '{"phase":"Completed","result":{"snapshotID":""}}',
        '{"phase":"Failed","message":"m","result":' + '{"a":' * 2000 + "1" + "}" * 2001,
        '{"phase":"InProgress","message":"m"}',
        '{"phase":"Failed"}',
        '{"phase":"Completed"}',
    ],
    ids=["empty", "cut", "phase", "result", "deep", "not final", "no message", "no result"],
)
def test_an_invalid_outcome_counts_as_missing(text: str) -> None:
    assert stored(text) is None


@pytest.mark.parametrize(
    ("results", "result"),
    [(BackupResults(), None), (BackupResults(), RESTORE), (RestoreResults(), None), (RestoreResults(), BACKUP)],
)
def test_nothing_is_completed_without_its_result(
    results: BackupResults | RestoreResults, result: MoverResult | None
) -> None:
    with pytest.raises(ContractError, match=r"no (backup|restore) result"):
        results.final_status(DataUpload.parse(data_upload()), Outcome(Phase.COMPLETED, result=result))


def test_a_stored_outcome_has_no_secrets() -> None:
    message = "PUT https://a.test/b?sig=0123456789abc: 403, -----BEGIN PRIVATE KEY-----\nMIIE"
    stored = Outcome.from_json(Outcome(phase=Phase.FAILED, message=message).to_json())
    assert stored.message == "PUT https://a.test/b?sig=***: 403, -----BEGIN PRIVATE KEY-----***"


@pytest.mark.parametrize(("volume", "full"), [("", None), ("pv-7", True)], ids=["new volume", "existing volume"])
def test_an_earlier_mover_that_wrote_what_is_equal_says_nothing(volume: str, full: bool | None) -> None:
    spec = {"restoreType": "incremental", "targetVolume": {"pv": volume}}
    cr = DataDownload.parse(merge_patch(data_download(), {"spec": spec}))
    status = RestoreResults().final_status(cr, Outcome(Phase.COMPLETED, result=RESTORE))
    assert status.get("fallbackFull") is full

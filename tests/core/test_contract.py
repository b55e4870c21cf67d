"""The contract between agent and mover."""

import json
from datetime import timedelta
from pathlib import Path

import pytest

from core.contract import (
    TERMINATION_MESSAGE_LIMIT_BYTES,
    BackupResult,
    DataPathReason,
    InitResult,
    MaintenanceMode,
    MaintenanceResult,
    MoverArgs,
    MoverVerb,
    ProgressMessage,
    RestoreResult,
    VolumeMode,
    VolumePath,
    parse_progress,
    parse_result,
    shorten_message,
)
from core.errors import ContractError, ResultError
from core.snapshot_contract import SnapshotReport, SnapshotTotal

_EVENTS = Path(__file__).parents[1] / "recordings" / "velero-1.18.2" / "events-on-custom-resources.json"


def test_arguments_are_one_verb_and_flags_with_values() -> None:
    args = MoverArgs(
        MoverVerb.RESTORE,
        "data-download",
        "r1",
        volume_path="/uid",
        volume_mode=VolumeMode.BLOCK,
        cache_volume_path="/cache",
        cache_limit_mib=100,
        attempt=2,
        compression="zstd",
        resource_timeout=timedelta(minutes=3),
    )
    assert args.argv == [
        "restore",
        "--data-download=r1",
        "--volume-path=/uid",
        "--volume-mode=Block",
        "--cache-volume-path=/cache",
        "--cache-limit-mib=100",
        "--attempt=2",
        "--compression=zstd",
        "--resource-timeout=3m0s",
        "--log-level=info",
        "--log-format=text",
    ]


def test_recorded_results_and_progress_are_parsed() -> None:
    events = json.loads(_EVENTS.read_text())
    completed = [event for event in events if event["reason"] == DataPathReason.COMPLETED]
    progress = [event["message"] for event in events if event["reason"] == DataPathReason.PROGRESS]
    assert completed
    assert progress
    for event in completed:
        if event["involvedObject"]["kind"] in {"DataUpload", "PodVolumeBackup"}:
            assert parse_result(BackupResult, event["message"]).total_bytes > 0
        else:
            assert parse_result(RestoreResult, event["message"]).total_bytes > 0
    for message in progress:
        parse_progress(message)


def test_results_are_read_as_they_were_written() -> None:
    source = VolumePath(by_path="/uid", volume_mode="Filesystem")
    result = BackupResult(snapshot_id="k1", source=source, total_bytes=5, incremental_bytes=2)
    wire = json.dumps(result.to_wire())
    assert '"snapshotID": "k1"' in wire
    assert parse_result(BackupResult, wire) == result
    report = SnapshotReport(unreferenced=SnapshotTotal(count=2, bytes=7), bucket_read=True)
    assert parse_result(SnapshotReport, report.to_json()) == report
    maintenance = MaintenanceResult(mode=MaintenanceMode.FULL, report=report)
    assert parse_result(MaintenanceResult, maintenance.to_json()) == maintenance
    # What was not found is omitted.
    maintenance = MaintenanceResult(mode=MaintenanceMode.NONE, reason="nothing is due", repository_id="ab")
    assert maintenance.to_json() == '{"mode":"none","reason":"nothing is due","repositoryID":"ab"}'
    assert parse_result(MaintenanceResult, maintenance.to_json()) == maintenance


@pytest.mark.parametrize(
    "message",
    ["", "out of memory", "{}", '{"snapshotID":"","source":{"byPath":"/x"}}', '{"snapshotID":"k1"}', "null", "[1]"],
)
def test_an_invalid_result_is_never_an_empty_success(message: str) -> None:
    with pytest.raises(ResultError, match="invalid"):
        parse_result(BackupResult, message)


def test_a_result_needs_an_id_or_a_mode() -> None:
    assert parse_result(InitResult, '{"uniqueID":"ab"}').unique_id == "ab"
    with pytest.raises(ResultError):
        parse_result(InitResult, '{"uniqueID":""}')
    with pytest.raises(ResultError):
        parse_result(MaintenanceResult, "{}")


def test_progress_omits_zeros_and_is_never_guessed() -> None:
    assert ProgressMessage().to_json() == "{}"
    progress = ProgressMessage(total_bytes=7, done_bytes=3, sent_bytes=1)
    assert progress.to_json() == '{"totalBytes":7,"doneBytes":3,"sentBytes":1}'
    for message in ("", "half", '{"totalBytes":"many"}'):
        with pytest.raises(ContractError):
            parse_progress(message)


def test_long_message_keeps_its_end_within_the_limit() -> None:
    assert shorten_message("x" * TERMINATION_MESSAGE_LIMIT_BYTES) == "x" * TERMINATION_MESSAGE_LIMIT_BYTES
    short = shorten_message("ü" * 4000 + ": data path is canceled")
    assert len(short.encode()) <= TERMINATION_MESSAGE_LIMIT_BYTES
    assert short.startswith("…")
    assert short.endswith("ü: data path is canceled")

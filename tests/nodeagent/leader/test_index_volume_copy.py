"""What a completed backup saved, as the index reads it from the custom resource."""

import json
from datetime import UTC, datetime

import msgspec
import pytest

from client.status.parse import decode_transfer, transfer_record
from client.status.records import TRANSFER_KINDS
from client.status.records import copy_of as completed_of
from core.models.base import JsonDict
from core.models.names import PVC_NAME_ANNOTATION, PVC_UID_LABEL, SCHEDULE_LABEL, VERIFICATION_ANNOTATION
from core.models.transfers import DataDownload, DataUpload, PodVolumeBackup
from nodeagent.leader.index import VolumeCopy, read_copy
from tests.nodeagent.support.transfers import data_download, data_upload, pod_volume_backup

CREATED = datetime(2026, 11, 21, 11, 58, tzinfo=UTC)
DONE: JsonDict = {"phase": "Completed", "progress": {"totalBytes": 9, "bytesDone": 9}}


def copy_of(raw: JsonDict) -> VolumeCopy:
    found = read_copy(DataUpload.parse(raw))
    assert found is not None
    return found


def backup_owner(name: str) -> list[JsonDict]:
    return [{"apiVersion": "velero.io/v1", "kind": "Backup", "name": name, "uid": "u"}]


def test_a_completed_backup_saved_its_pvc_if_it_names_one() -> None:
    raw = data_upload(status=DONE)
    uid = raw["metadata"]["labels"][PVC_UID_LABEL]
    assert copy_of(raw) == VolumeCopy(raw["spec"]["sourcePVC"], CREATED, 9, None, None, claim_uid=uid)
    for annotations, claim in (({PVC_NAME_ANNOTATION: "data"}, "data"), ({}, None)):
        cr = PodVolumeBackup.parse(pod_volume_backup(status=DONE, annotations=annotations))
        copy = VolumeCopy(claim, CREATED, 9, None, None, claim_uid=cr.metadata.labels[PVC_UID_LABEL])
        assert read_copy(cr) == copy


def test_what_was_new_and_how_long_it_took_is_read_where_it_is_known() -> None:
    times = {"startTimestamp": "2026-11-21T11:58:30Z", "completionTimestamp": "2026-11-21T12:00:00Z"}
    found = copy_of(data_upload(status={**DONE, **times, "incrementalBytes": 4}))
    assert (found.completed, found.new_bytes, found.seconds) == (datetime(2026, 11, 21, 12, tzinfo=UTC), 4, 90)


@pytest.mark.parametrize(
    ("times", "hour"),
    [
        pytest.param({"startTimestamp": 9, "completionTimestamp": 10}, 9, id="found in a bucket"),
        pytest.param({"completionTimestamp": 10}, 10, id="found in a bucket, never started"),
        pytest.param({"startTimestamp": 12, "completionTimestamp": 13}, None, id="made here"),
    ],
)
def test_a_backup_that_a_server_creates_from_a_bucket_is_as_old_as_its_data(
    times: dict[str, int], hour: int | None
) -> None:
    raw = pod_volume_backup(status=DONE | {key: f"2026-11-21T{at:02}:00:00Z" for key, at in times.items()})
    kind = next(kind for kind in TRANSFER_KINDS if kind.name == raw["kind"])
    found = read_copy(PodVolumeBackup.parse(raw))
    records = transfer_record(kind, raw), decode_transfer(kind, msgspec.Raw(json.dumps(raw).encode()))
    made_at = CREATED if hour is None else datetime(2026, 11, 21, hour, tzinfo=UTC)
    copies = (found, *map(completed_of, records))
    claim_uid = raw["metadata"]["labels"][PVC_UID_LABEL]
    assert {one and (one.created, one.claim_uid) for one in copies} == {(made_at, claim_uid)}


@pytest.mark.parametrize("phase", ["", "InProgress", "Failed", "Canceled"])
def test_what_ended_otherwise_is_not_complete_and_what_has_not_ended_saved_nothing(phase: str) -> None:
    found = read_copy(DataUpload.parse(data_upload(status={"phase": phase} if phase else {})))
    assert (found and found.complete) == (False if phase in {"Failed", "Canceled"} else None)


def test_a_restore_saved_nothing() -> None:
    assert read_copy(DataDownload.parse(data_download(status=DONE))) is None


@pytest.mark.parametrize(
    ("meta", "schedule"),
    [
        pytest.param({"ownerReferences": backup_owner("nightly-20261121020000")}, "nightly", id="of Velero"),
        pytest.param({"ownerReferences": backup_owner("by-hand")}, None, id="a Backup without Schedule"),
        pytest.param({"labels": {SCHEDULE_LABEL: "hourly"}}, "hourly", id="of a CronJob"),
        pytest.param({}, None, id="none"),
    ],
)
def test_the_schedule_is_that_of_the_label_or_of_the_backups_name(meta: JsonDict, schedule: str | None) -> None:
    assert copy_of(data_upload(status=DONE, **meta)).schedule == schedule


def test_the_annotation_of_a_verification_is_read() -> None:
    text = '{"at":"2026-11-22T00:00:00Z","outcome":"failed"}'
    found = copy_of(data_upload(status=DONE, annotations={VERIFICATION_ANNOTATION: text})).verification
    assert found is not None
    assert not found.passed

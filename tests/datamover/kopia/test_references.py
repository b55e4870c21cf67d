"""The judgment of snapshots: each verdict and its reason, by what refers to them."""

import json
from datetime import UTC, datetime
from typing import Any, Final

import pytest

from core.models.base import JsonDict
from core.models.names import SNAPSHOT_REQUESTER_TAG
from core.snapshot_contract import SnapshotVerdict
from datamover.kopia.references import CompletedTransfer, Judgment, ListedSnapshot, References, judge, needs_bucket
from tests.support.golden import RECORDINGS

_NOW: Final = datetime(2026, 11, 30, 12, tzinfo=UTC)
_UID: Final = "6bc33b7d-f98e-42f3-b79d-e2c5b7f42847"
_RECORDED: Final[list[JsonDict]] = json.loads((RECORDINGS / "kopia-snapshots.json").read_text())
_UPLOAD: Final = {
    "snapshot-requester": "snapshot-data-upload-download",
    "velero.io/async-operation-id": f"du-{_UID}.6601d200-6a9c-48c7358b3",
}


def _snapshot(**changes: Any) -> ListedSnapshot:
    """Return Velero's snapshot of a DataUpload, nine days old, with other fields."""
    return ListedSnapshot.from_wire(_RECORDED[0] | changes)


def _judge(snapshot: ListedSnapshot, **read: Any) -> Judgment:
    return judge(snapshot, References(**read), _NOW)


def test_velero_names_the_backup_of_a_data_upload_and_not_of_a_pod_volume() -> None:
    upload, volume = (ListedSnapshot.from_wire(one) for one in _RECORDED)
    assert (upload.backup_uid, upload.tag(SNAPSHOT_REQUESTER_TAG)) == (_UID, "snapshot-data-upload-download")
    assert (volume.backup_uid, volume.tag(SNAPSHOT_REQUESTER_TAG)) == (None, "snapshot-pod-volume")
    assert upload.shown_source == "default@default:snapshot-data-upload-download/kopia/app/data"
    assert upload.size_bytes == 50_000_000


@pytest.mark.parametrize(
    ("tags", "uid"),
    [
        ({f"tag:{key}": value for key, value in _UPLOAD.items()}, _UID),
        ({"velero.io/async-operation-id": f"du-{_UID}.{_UID}"}, _UID),
        ({"backup-uid": "any"}, "any"),
        ({"tag:backup-uid": "any"}, "any"),
        ({"velero.io/async-operation-id": f"du-{_UID}"}, None),
        ({"velero.io/async-operation-id": f"dd-{_UID}.{_UID}"}, None),
        ({"velero.io/async-operation-id": ""}, None),
        ({}, None),
    ],
)
def test_the_uid_of_the_backup_by_the_tags(tags: dict[str, str], uid: str | None) -> None:
    assert _snapshot(tags=tags).backup_uid == uid


@pytest.mark.parametrize("changes", [{}, {"endTime": "2026-11-23T12:00:00Z"}], ids=["nine days", "seven days"])
def test_a_snapshot_that_nothing_names_is_unreferenced(changes: JsonDict) -> None:
    reason = f"no Backup has the UID {_UID}, and no transfer and no file in the bucket names the snapshot"
    assert _judge(_snapshot(**changes)) == (SnapshotVerdict.UNREFERENCED, reason)


@pytest.mark.parametrize(
    "read",
    [
        {"snapshot_ids": {_RECORDED[0]["id"]: "DataUpload velero/du-1"}},
        {"backup_uids": frozenset({_UID})},
        {"in_bucket": frozenset({_RECORDED[0]["id"]})},
        {"in_bucket": frozenset({_UID})},
    ],
    ids=["transfer", "Backup", "ID in the bucket", "UID in the bucket"],
)
def test_one_reference_suffices_whatever_else_cannot_be_read(read: dict[str, Any]) -> None:
    assert _judge(_snapshot(), unread="denied", **read).verdict is SnapshotVerdict.REFERENCED


@pytest.mark.parametrize(
    ("changes", "unread", "reason"),
    [
        ({}, "the bucket says no", "the bucket says no"),
        ({"tags": {}}, "", "it has no tags: no data mover made it"),
        ({"tags": None}, "", "it has no tags: no data mover made it"),
        ({"tags": {"a": "b"}}, "", "it names no requester: no data mover made it"),
        ({"tags": _UPLOAD | {"snapshot-requester": "me"}}, "", 'its requester is "me": no data mover made it'),
        ({"pins": ["velero-pin", "mine"]}, "", 'it is pinned by "mine"'),
        ({"tags": _RECORDED[1]["tags"]}, "", "no tag has the UID of its backup"),
        ({"endTime": "2026-11-23T12:00:01Z"}, "", "it is younger than 7 days"),
        ({"startTime": "2026-11-23T12:00:01Z"}, "", "it is younger than 7 days"),
    ],
)
def test_a_doubt_makes_a_verdict_unknown(changes: JsonDict, unread: str, reason: str) -> None:
    assert _judge(_snapshot(**changes), unread=unread) == (SnapshotVerdict.UNKNOWN, reason)


_WINNER: Final = CompletedTransfer("DataUpload velero/du-1", 2)


@pytest.mark.parametrize("referred", [{}, {"backup_uids": frozenset({_UID})}], ids=["nothing else", "its Backup"])
def test_a_snapshot_of_an_overtaken_attempt_is_unreferenced(referred: JsonDict) -> None:
    tags = {**_UPLOAD, "tag:nodeagent.io/transfer-uid": "u", "tag:nodeagent.io/attempt": "1"}
    reason = "attempt 1 of DataUpload velero/du-1 made it, which attempt 2 completed"
    judgment = _judge(_snapshot(tags=tags), completed={"u": _WINNER}, **referred)
    assert judgment == (SnapshotVerdict.UNREFERENCED, reason)


@pytest.mark.parametrize(
    ("uid", "attempt"),
    [("u", {"tag:nodeagent.io/attempt": "2"}), ("v", {"tag:nodeagent.io/attempt": "1"}), ("u", {})],
    ids=["winner", "other transfer", "unknown attempt"],
)
def test_other_snapshots_of_transfers_are_judged_by_their_backup(uid: str, attempt: dict[str, str]) -> None:
    """Also one that has got another ID, because it was pinned."""
    tags = {**_UPLOAD, "tag:nodeagent.io/transfer-uid": uid, **attempt}
    read = {"completed": {"u": _WINNER}, "backup_uids": frozenset({_UID})}
    assert _judge(_snapshot(tags=tags), **read).verdict is SnapshotVerdict.REFERENCED


def test_an_incomplete_snapshot_is_incomplete_unless_a_transfer_names_it() -> None:
    checkpoint = _snapshot(incomplete="checkpoint", rootEntry=None)
    judgment = (SnapshotVerdict.INCOMPLETE, "its backup did not end: checkpoint")
    assert _judge(checkpoint, backup_uids=frozenset({_UID})) == judgment
    named = {checkpoint.id: "DataDownload velero/dd-1"}
    assert _judge(checkpoint, snapshot_ids=named).verdict is SnapshotVerdict.REFERENCED


@pytest.mark.parametrize(
    ("changes", "read", "needed"),
    [
        ({}, {}, True),
        ({"tags": {}}, {}, True),
        ({"incomplete": "checkpoint"}, {}, False),
        ({}, {"backup_uids": frozenset({_UID})}, False),
        ({}, {"snapshot_ids": {_RECORDED[0]["id"]: "PodVolumeBackup velero/p"}}, False),
    ],
)
def test_the_bucket_is_needed_unless_the_cluster_decides(changes: JsonDict, read: JsonDict, needed: bool) -> None:
    assert needs_bucket(_snapshot(**changes), References(**read)) is needed

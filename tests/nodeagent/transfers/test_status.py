"""The only writer of phases."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from core.kube.errors import ConflictError
from core.kube.transport import Request, Response
from core.models.names import EXPOSE_ON_GOING_LABEL, NODE_LABEL, PENDING_REASON_ANNOTATION
from core.models.phases import TRANSITIONS, IllegalMoveError, Phase
from core.models.transfers import Transfer
from nodeagent.transfers.kinds.base import Kind
from nodeagent.transfers.kinds.csi_snapshot import DataDownloadKind, DataUploadKind
from nodeagent.transfers.kinds.pod_volume import PodVolumeBackupKind, PodVolumeRestoreKind
from nodeagent.transfers.status import Change, StatusWriter
from tests.nodeagent.support.data_kinds import bare
from tests.nodeagent.support.hand_clock import HandClock
from tests.nodeagent.support.transfers import data_download, data_upload, pod_volume_backup, pod_volume_restore
from tests.support.objects import JsonDict
from tests.support.scripted import answer, scripted_client

STAMP = "2026-11-21T12:30:00Z"
UPLOADS = bare(DataUploadKind)
DOWNLOADS = bare(DataDownloadKind)
BACKUPS = bare(PodVolumeBackupKind)
RESTORES = bare(PodVolumeRestoreKind)
RECORDINGS = Path(__file__).parents[2] / "recordings" / "velero-1.18.2"


class Recorder:
    """Records patches and answers with the object that they are for."""

    def __init__(self, cr: JsonDict) -> None:
        self.patches: list[JsonDict] = []
        self._cr = cr
        self.writer = StatusWriter(scripted_client(self._answer), HandClock(1800.0))

    def _answer(self, request: Request) -> Response:
        self.patches.append(json.loads(request.body or b"{}"))
        return answer(self._cr)

    @property
    def patch(self) -> JsonDict:
        assert len(self.patches) == 1
        return self.patches[0]


def upload(phase: Phase, **status: Any) -> JsonDict:
    labels = {EXPOSE_ON_GOING_LABEL: "true"} if phase in {Phase.ACCEPTED, Phase.PREPARED} else {}
    return data_upload(status={"phase": str(phase)} | status, labels=labels, resourceVersion="7")


async def moved(transfer: JsonDict, to: Phase, change: Change | None = None, kind: Kind[Any] = UPLOADS) -> JsonDict:
    recorder = Recorder(transfer)
    await recorder.writer.move(kind, kind.parse(transfer), to, change)
    return recorder.patch


@pytest.mark.parametrize("to", Phase, ids=str)
@pytest.mark.parametrize("phase", Phase, ids=str)
async def test_only_moves_of_the_table_are_written(phase: Phase, to: Phase) -> None:
    recorder = Recorder(upload(phase))
    cr = UPLOADS.parse(upload(phase))
    change = Change(status={"message": "why"})
    if to in TRANSITIONS[phase]:
        await recorder.writer.move(UPLOADS, cr, to, change)
        assert recorder.patch["status"]["phase"] == to
    else:
        with pytest.raises(IllegalMoveError):
            await recorder.writer.move(UPLOADS, cr, to, change)
        assert recorder.patches == []


async def test_failed_needs_a_message() -> None:
    with pytest.raises(IllegalMoveError, match="without a message"):
        await moved(upload(Phase.ACCEPTED), Phase.FAILED, Change(status={"message": ""}))


@pytest.mark.parametrize(
    ("phase", "to", "restore_type", "told"),
    [
        (Phase.IN_PROGRESS, Phase.FAILED, "incremental", True),
        (Phase.CANCELING, Phase.CANCELED, "Full", True),
        (Phase.IN_PROGRESS, Phase.COMPLETED, "full", False),
        (Phase.PREPARED, Phase.FAILED, "full", False),
        (Phase.IN_PROGRESS, Phase.FAILED, "none", False),
        (Phase.IN_PROGRESS, Phase.FAILED, "unknown", False),
    ],
)
async def test_a_restore_in_place_that_did_not_succeed_says_in_what_state_the_volume_is(
    phase: Phase, to: Phase, restore_type: str, told: bool
) -> None:
    start = {"startTimestamp": STAMP} if phase in {Phase.IN_PROGRESS, Phase.CANCELING} else {}
    transfer = pod_volume_restore(status={"phase": str(phase), **start})
    transfer["spec"]["restoreType"] = restore_type
    patch = await moved(transfer, to, Change(status={"message": "why"}), RESTORES)
    volume = transfer["spec"]["volume"]
    state = f"; volume {volume} may have been restored in part: restore it again" if told else ""
    assert patch["status"]["message"] == f"why{state}"


async def test_a_write_requires_the_version_that_was_read() -> None:
    patch = await moved(upload(Phase.PREPARED), Phase.IN_PROGRESS)
    assert patch["metadata"]["uid"] == "uid-of-du-1"
    assert patch["metadata"]["resourceVersion"] == "7"


async def test_an_accepted_transfer_gets_marks_and_timestamp() -> None:
    change = Change(status={"acceptedByNode": "node-a"}, labels={NODE_LABEL: "node-a"}, finalizers=["f"])
    patch = await moved(upload(Phase.NEW), Phase.ACCEPTED, change)
    assert patch["status"] == {"phase": "Accepted", "acceptedTimestamp": STAMP, "acceptedByNode": "node-a"}
    assert patch["metadata"]["labels"] == {EXPOSE_ON_GOING_LABEL: "true", NODE_LABEL: "node-a"}
    assert patch["metadata"]["finalizers"] == ["f"]


@pytest.mark.parametrize(
    ("kind", "transfer"),
    [(UPLOADS, data_upload), (DOWNLOADS, data_download), (BACKUPS, pod_volume_backup), (RESTORES, pod_volume_restore)],
    ids=["dataupload", "datadownload", "podvolumebackup", "podvolumerestore"],
)
async def test_an_accepted_transfer_has_the_status_fields_that_velero_writes(
    kind: Kind[Any], transfer: Callable[[], JsonDict], request: pytest.FixtureRequest
) -> None:
    patch = await moved(transfer(), Phase.ACCEPTED, Change(status={"acceptedByNode": "node-a"}), kind)

    recorded = json.loads((RECORDINGS / f"{request.node.callspec.id}.json").read_text())
    recorded_status = next(
        s for s in (one["object"].get("status") or {} for one in recorded) if s.get("phase") == "Accepted"
    )
    assert patch["status"].keys() == recorded_status.keys() - {"progress"}
    assert patch["status"].get("node") == recorded_status.get("node")


async def test_a_started_transfer_loses_the_expose_label_and_a_stale_message() -> None:
    patch = await moved(upload(Phase.PREPARED, message="waiting"), Phase.IN_PROGRESS)
    assert patch["status"] == {"phase": "InProgress", "startTimestamp": STAMP, "message": None}
    assert patch["metadata"]["labels"] == {EXPOSE_ON_GOING_LABEL: None}


async def test_a_final_status_has_both_timestamps_although_nothing_started() -> None:
    patch = await moved(upload(Phase.ACCEPTED), Phase.FAILED, Change(status={"message": "why"}))
    assert patch["status"] == {
        "phase": "Failed",
        "message": "why",
        "startTimestamp": STAMP,
        "completionTimestamp": STAMP,
    }


async def test_a_final_status_keeps_the_start() -> None:
    transfer = upload(Phase.IN_PROGRESS, startTimestamp="2026-11-21T12:00:00Z")
    patch = await moved(transfer, Phase.COMPLETED)
    assert "startTimestamp" not in patch["status"]


async def test_a_field_that_the_kind_lacks_is_never_written() -> None:
    transfer = data_download(status={"phase": "Accepted"})
    change = Change(status={"node": "node-a", "nodeOS": "linux", "path": "/x"})
    patch = await moved(transfer, Phase.PREPARED, change, DOWNLOADS)
    assert patch["status"] == {"phase": "Prepared", "node": "node-a"}


WAITING = {PENDING_REASON_ANNOTATION: "WaitingForSlot"}


async def reported(annotations: dict[str, str], **report: Any) -> JsonDict:
    transfer = data_upload(status={"phase": "Prepared", "message": "old"}, annotations=annotations)
    recorder = Recorder(transfer)
    await recorder.writer.report(UPLOADS, UPLOADS.parse(transfer), **report)
    return recorder.patch


async def test_a_reason_is_written_by_the_same_patch_as_its_message() -> None:
    patch = await reported({}, message="waiting for a free slot", reason="WaitingForSlot")
    assert patch["status"] == {"message": "waiting for a free slot"}
    assert patch["metadata"]["annotations"] == WAITING


@pytest.mark.parametrize("message", ["", "another one"], ids=["removed", "without a reason"])
async def test_a_message_without_a_reason_removes_the_last_reason(message: str) -> None:
    patch = await reported(WAITING, message=message)
    assert patch["metadata"]["annotations"] == {PENDING_REASON_ANNOTATION: None}


@pytest.mark.parametrize("message", ["waiting", ""], ids=["with message", "message overwritten"])
async def test_a_move_removes_message_and_reason(message: str) -> None:
    transfer = data_upload(status={"phase": "Prepared", "message": message}, annotations=WAITING)
    patch = await moved(transfer, Phase.IN_PROGRESS)
    assert patch["status"]["message"] is None
    assert patch["metadata"]["annotations"] == {PENDING_REASON_ANNOTATION: None}


async def test_annotating_never_writes_a_phase() -> None:
    recorder = Recorder(upload(Phase.IN_PROGRESS))
    cr = UPLOADS.parse(upload(Phase.IN_PROGRESS))
    with pytest.raises(IllegalMoveError):
        await recorder.writer.annotate(UPLOADS, cr, Change(status={"phase": "Completed"}))
    assert recorder.patches == []


async def test_each_subscriber_receives_what_was_stored_before_the_write_returns() -> None:
    stored: list[list[str]] = [[], []]
    client = scripted_client(lambda _: answer(upload(Phase.IN_PROGRESS) | {"metadata": data_upload()["metadata"]}))
    writer = StatusWriter(
        client, HandClock(), on_stored=[lambda cr: stored[0].append(cr.phase), lambda cr: stored[1].append(cr.phase)]
    )
    await writer.move(UPLOADS, UPLOADS.parse(upload(Phase.PREPARED)), Phase.IN_PROGRESS)
    assert stored == [["InProgress"], ["InProgress"]]


async def test_a_rejected_write_notifies_no_subscriber() -> None:
    stored: list[Transfer] = []
    client = scripted_client(lambda _: answer({"reason": "Conflict", "message": "changed"}, status=409))
    writer = StatusWriter(client, HandClock(), on_stored=[stored.append])
    with pytest.raises(ConflictError):
        await writer.move(UPLOADS, UPLOADS.parse(upload(Phase.PREPARED)), Phase.IN_PROGRESS)
    assert stored == []


async def test_secrets_in_a_message_are_redacted_and_other_fields_kept() -> None:
    change = Change(status={"message": "https://user:hunter2@minio/: refused", "node": "https://user:x@node"})
    status = (await moved(upload(Phase.ACCEPTED), Phase.FAILED, change))["status"]
    assert (status["message"], status["node"]) == ("https://user:***@minio/: refused", "https://user:x@node")

"""The only writer of phases; whether the owner of a transfer waits for it; a blocked cleanup is reported."""

import asyncio
import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from core.kube.errors import ConflictError, KubeError
from core.kube.resources import BACKUPS, EVENTS, PERSISTENT_VOLUME_CLAIMS, VOLUME_SNAPSHOT_CONTENTS
from core.kube.transport import Request, Response
from core.models.names import EXPOSE_ON_GOING_LABEL, NODE_LABEL, PENDING_REASON_ANNOTATION
from core.models.phases import TRANSITIONS, IllegalMoveError, Phase
from core.models.transfers import DataUpload, PodVolumeBackup, Transfer
from nodeagent.transfers.kinds.base import Kind
from nodeagent.transfers.kinds.csi_snapshot import DataDownloadKind, DataUploadKind
from nodeagent.transfers.kinds.pod_volume import PodVolumeBackupKind, PodVolumeRestoreKind
from nodeagent.transfers.status import Change, StatusWriter, read_owner_refusal
from tests.nodeagent.support.data_kinds import bare
from tests.nodeagent.support.hand_clock import HandClock
from tests.nodeagent.support.harness import World, accepted, open_world
from tests.nodeagent.support.simulation import Mover
from tests.nodeagent.support.transfers import (
    NAMESPACE,
    data_download,
    data_upload,
    pod_volume_backup,
    pod_volume_restore,
)
from tests.support.fakekube import FakeKube
from tests.support.objects import JsonDict
from tests.support.scripted import answer, scripted_client

pytestmark = pytest.mark.looptime

STAMP = "2026-11-21T12:30:00Z"
UPLOADS = bare(DataUploadKind)
DOWNLOADS = bare(DataDownloadKind)
POD_BACKUPS = bare(PodVolumeBackupKind)
RESTORES = bare(PodVolumeRestoreKind)
RECORDINGS = Path(__file__).parents[2] / "recordings" / "velero-1.18.2"


class Recorder:
    """Records patches and answers with the object that they are for."""

    def __init__(self, cr: JsonDict) -> None:
        self.patches: list[JsonDict] = []
        self._cr = cr
        self.writer = StatusWriter(scripted_client(self._answer), HandClock(1800.0).now)

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


@pytest.mark.parametrize(
    ("phase", "to", "restore_type", "said"),
    [
        (Phase.IN_PROGRESS, Phase.FAILED, "incremental", True),
        (Phase.CANCELING, Phase.CANCELED, "Full", True),
        (Phase.IN_PROGRESS, Phase.COMPLETED, "full", False),
        (Phase.PREPARED, Phase.FAILED, "full", False),
        (Phase.IN_PROGRESS, Phase.FAILED, "none", False),
        (Phase.IN_PROGRESS, Phase.FAILED, "unknown", False),
    ],
)
async def test_a_failed_restore_in_place_says_so(phase: Phase, to: Phase, restore_type: str, said: bool) -> None:
    start = {"startTimestamp": STAMP} if phase in {Phase.IN_PROGRESS, Phase.CANCELING} else {}
    transfer = pod_volume_restore(status={"phase": str(phase), **start})
    transfer["spec"]["restoreType"] = restore_type
    patch = await moved(transfer, to, Change(status={"message": "why"}), RESTORES)
    volume = transfer["spec"]["volume"]
    state = f"; volume {volume} may have been restored in part: restore it again" if said else ""
    assert patch["status"]["message"] == f"why{state}"


@pytest.mark.parametrize(
    ("kind", "transfer"),
    [
        (UPLOADS, data_upload),
        (DOWNLOADS, data_download),
        (POD_BACKUPS, pod_volume_backup),
        (RESTORES, pod_volume_restore),
    ],
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


async def test_failed_needs_a_message() -> None:
    with pytest.raises(IllegalMoveError, match="without a message"):
        await moved(upload(Phase.ACCEPTED), Phase.FAILED, Change(status={"message": ""}))


_MARKS = Change(status={"acceptedByNode": "node-a"}, labels={NODE_LABEL: "node-a"}, finalizers=["f"])
_HELD, _FREE = {EXPOSE_ON_GOING_LABEL: "true"}, {EXPOSE_ON_GOING_LABEL: None}
_NOON = {"startTimestamp": "2026-11-21T12:00:00Z"}


@pytest.mark.parametrize(
    ("transfer", "change", "status", "labels"),
    [
        (upload(Phase.NEW), _MARKS, {"acceptedTimestamp": STAMP, **_MARKS.status}, {**_HELD, **_MARKS.labels}),
        (upload(Phase.PREPARED, message="waits"), Change(), {"startTimestamp": STAMP, "message": None}, _FREE),
        (upload(Phase.IN_PROGRESS, **_NOON), Change(), {"completionTimestamp": STAMP}, None),
        (
            upload(Phase.ACCEPTED),
            Change(status={"message": "why"}),
            {"message": "why", "startTimestamp": STAMP, "completionTimestamp": STAMP},
            _FREE,
        ),
    ],
    ids=["Accepted", "InProgress", "Completed", "Failed"],
)
async def test_a_move_writes_timestamps_and_the_expose_label_and_requires_the_version_that_was_read(
    transfer: JsonDict, change: Change, status: JsonDict, labels: JsonDict, request: pytest.FixtureRequest
) -> None:
    to = Phase(request.node.callspec.id)
    patch = await moved(transfer, to, change)
    assert patch["status"] == {"phase": to} | status
    meta = {"uid": "uid-of-du-1", "resourceVersion": "7"} | ({"labels": labels} if labels else {})
    assert patch["metadata"] == meta | ({"finalizers": ["f"]} if change.finalizers else {})


WAITING = {PENDING_REASON_ANNOTATION: "WaitingForSlot"}


@pytest.mark.parametrize(
    ("annotations", "message", "reason", "written"),
    [
        ({}, "waiting for a free slot", "WaitingForSlot", WAITING),
        (WAITING, "", None, {PENDING_REASON_ANNOTATION: None}),
        (WAITING, "another one", None, {PENDING_REASON_ANNOTATION: None}),
    ],
    ids=["with a reason", "removed", "without a reason"],
)
async def test_a_reason_is_written_by_the_same_patch_as_its_message(
    annotations: JsonDict, message: str, reason: str | None, written: JsonDict
) -> None:
    transfer = data_upload(status={"phase": "Prepared", "message": "old"}, annotations=annotations)
    recorder = Recorder(transfer)
    await recorder.writer.report(UPLOADS, UPLOADS.parse(transfer), message=message, reason=reason)
    assert recorder.patch["status"] == {"message": message or None}
    assert recorder.patch["metadata"]["annotations"] == written


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


@pytest.mark.parametrize("rejected", [False, True])
async def test_each_subscriber_receives_what_was_stored_before_the_write_returns(rejected: bool) -> None:
    stored: list[list[str]] = [[], []]
    conflict = answer({"reason": "Conflict", "message": "changed"}, status=409)
    client = scripted_client(lambda _: conflict if rejected else answer(upload(Phase.IN_PROGRESS)))
    subscribers = [lambda cr, seen=seen: seen.append(cr.phase) for seen in stored]
    writer = StatusWriter(client, HandClock().now, on_stored=subscribers)
    with pytest.raises(ConflictError) if rejected else nullcontext():
        await writer.move(UPLOADS, UPLOADS.parse(upload(Phase.PREPARED)), Phase.IN_PROGRESS)
    assert stored == ([[], []] if rejected else [["InProgress"], ["InProgress"]])


async def test_secrets_in_a_message_are_redacted_and_other_fields_kept() -> None:
    change = Change(status={"message": "https://user:hunter2@minio/: refused", "node": "https://user:x@node"})
    status = (await moved(upload(Phase.ACCEPTED), Phase.FAILED, change))["status"]
    assert (status["message"], status["node"]) == ("https://user:***@minio/: refused", "https://user:x@node")


OWNER = {"apiVersion": "velero.io/v1", "kind": "Backup", "name": "nightly", "uid": "uid-of-nightly"}


_GONE = "Backup velero/nightly no longer exists"


async def refusal(phase: str | None, owner: JsonDict | None = OWNER, *, failing: int = 0) -> str | None:
    """Return why a PodVolumeBackup of `owner` is not retried; its Backup has that phase, None: there is none."""
    kube = FakeKube()
    if phase is not None:
        meta = {"name": "nightly", "namespace": NAMESPACE, "uid": OWNER["uid"]}
        status = {"phase": phase} if phase else {}
        kube.put({"apiVersion": BACKUPS.api_version, "kind": "Backup", "metadata": meta, "status": status})
    if failing:
        kube.fail_next("GET", "/backups/nightly", failing, times=10)
    owners = [] if owner is None else [owner]
    return await read_owner_refusal(kube.client, PodVolumeBackup.parse(pod_volume_backup(ownerReferences=owners)))


@pytest.mark.parametrize("phase", ["", "New", "InProgress", "WaitingForPluginOperations", "Finalizing"])
async def test_a_backup_that_is_not_final_waits(phase: str) -> None:
    assert await refusal(phase) is None


@pytest.mark.parametrize("phase", ["Completed", "PartiallyFailed", "Failed", "FailedValidation", "Deleting"])
async def test_a_backup_that_is_final_does_not_wait(phase: str) -> None:
    assert await refusal(phase) == f"Backup velero/nightly is {phase}"


@pytest.mark.parametrize(
    ("phase", "owner", "expected"),
    [
        (None, OWNER, _GONE),
        ("InProgress", OWNER | {"uid": "another"}, _GONE),
        ("Failed", None, None),
        ("Failed", OWNER | {"kind": "Schedule"}, None),
        ("Failed", OWNER | {"apiVersion": "example.com/v1"}, None),
    ],
    ids=["deleted", "created again", "without an owner", "of another kind", "of another group"],
)
async def test_only_the_owning_backup_decides(phase: str | None, owner: JsonDict | None, expected: str | None) -> None:
    assert await refusal(phase, owner) == expected


async def test_other_kinds_do_not_depend_on_their_owner() -> None:
    kube = FakeKube()
    cr: Transfer = DataUpload.parse(data_upload(ownerReferences=[OWNER]))
    assert await read_owner_refusal(kube.client, cr) is None
    assert kube.requests == []


async def test_only_without_the_permission_the_owner_does_not_matter(caplog: pytest.LogCaptureFixture) -> None:
    assert await refusal("Failed", failing=403) is None
    assert "whatever has become of its Backup" in caplog.text
    with pytest.raises(KubeError):
        await refusal("Failed", failing=500)


OF_SNAPSHOTS = {"DataUpload": data_upload, "DataDownload": data_download}
FOREIGN = "example.com/keep"


async def hold_claim(world: World, name: str, *, finalizers: list[str]) -> None:
    patch: JsonDict = {"metadata": {"finalizers": finalizers}}
    await world.cluster.client.patch(PERSISTENT_VOLUME_CLAIMS, NAMESPACE, name, patch)


def reported_events(world: World, reason: str = "CleanupBlocked") -> list[str]:
    return [event["message"] for event in world.kube.objects(EVENTS) if event["reason"] == reason]


@pytest.mark.parametrize("kind", OF_SNAPSHOTS)
@pytest.mark.cause("cleanup-blocked")
async def test_a_blocked_cleanup_is_reported_once_and_continues_when_it_can(kind: str) -> None:
    transfer = accepted(OF_SNAPSHOTS[kind]())
    name = transfer["metadata"]["name"]
    async with (
        open_world(transfer, mover=Mover(exit_code=11, message="no space left")) as world,
        world.agent() as agent,
    ):
        await world.until(lambda: world.phase(kind) == "InProgress")
        await hold_claim(world, name, finalizers=[FOREIGN])
        await world.until(lambda: world.phase(kind) == "Failed")
        status = world.transfer(kind)["status"]
        world.cluster.tick_seconds = 5.0
        await asyncio.sleep(580)
        assert reported_events(world) == []
        await world.until(lambda: reported_events(world) != [], seconds=100, every=1)
        await asyncio.sleep(1800)
        claim = f"PersistentVolumeClaim velero/{name} is being deleted (finalizers: {FOREIGN})"
        assert reported_events(world) == [f"not cleaned up within 10m0s, will retry: {claim}"]
        assert [entry["pendingMessage"] for entry in agent.report()["transfers"]] == [claim]
        assert world.transfer(kind)["status"] == status
        await hold_claim(world, name, finalizers=[])
        await world.until(lambda: world.done(kind), seconds=100, every=1)


async def test_a_snapshot_of_a_group_that_is_not_deleted_within_the_operation_timeout_is_left_and_reported() -> None:
    transfer = accepted(data_upload())
    name = transfer["metadata"]["name"]
    async with open_world(transfer, mover=Mover(seconds=5)) as world:
        client = world.cluster.client
        in_group: JsonDict = {"status": {"volumeGroupSnapshotHandle": "group-1"}}
        await client.patch(VOLUME_SNAPSHOT_CONTENTS, "", f"content-{name}", in_group)
        async with world.agent():
            await world.until(lambda: world.phase() == "InProgress")
            held: JsonDict = {"metadata": {"finalizers": [FOREIGN]}}
            await client.patch(VOLUME_SNAPSHOT_CONTENTS, "", name, held)
            world.cluster.tick_seconds = 5.0
            await world.until(lambda: reported_events(world, "SnapshotInGroup") != [], seconds=800, every=10)
            await client.patch(VOLUME_SNAPSHOT_CONTENTS, "", name, {"metadata": {"finalizers": []}})
            await world.until(world.done, seconds=100, every=1)
        (message,) = reported_events(world, "SnapshotInGroup")
        assert " is of the group group-1, whose snapshots driver " in message
        assert message.endswith(" stays on the storage")

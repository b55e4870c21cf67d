"""The only writer of phases; whether the owner of a transfer waits for it; a blocked cleanup is reported."""

import asyncio
import json
from collections.abc import Callable
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


OWNER = {"apiVersion": "velero.io/v1", "kind": "Backup", "name": "nightly", "uid": "uid-of-nightly"}


def kube_with(phase: str | None) -> FakeKube:
    """Return an API server with the Backup `nightly` in that phase; None: without it."""
    kube = FakeKube()
    if phase is not None:
        meta = {"name": "nightly", "namespace": NAMESPACE, "uid": OWNER["uid"]}
        status = {"phase": phase} if phase else {}
        kube.put({"apiVersion": BACKUPS.api_version, "kind": "Backup", "metadata": meta, "status": status})
    return kube


async def refusal(kube: FakeKube, *owners: JsonDict) -> str | None:
    cr = PodVolumeBackup.parse(pod_volume_backup(ownerReferences=list(owners)))
    return await read_owner_refusal(kube.client, cr)


@pytest.mark.parametrize("phase", ["", "New", "InProgress", "WaitingForPluginOperations", "Finalizing"])
async def test_a_backup_that_is_not_final_waits(phase: str) -> None:
    assert await refusal(kube_with(phase), OWNER) is None


@pytest.mark.parametrize("phase", ["Completed", "PartiallyFailed", "Failed", "FailedValidation", "Deleting"])
async def test_a_backup_that_is_final_does_not_wait(phase: str) -> None:
    assert await refusal(kube_with(phase), OWNER) == f"Backup velero/nightly is {phase}"


@pytest.mark.parametrize(
    ("phase", "uid"), [(None, OWNER["uid"]), ("InProgress", "another")], ids=["deleted", "created again"]
)
async def test_a_backup_that_is_gone_does_not_wait(phase: str | None, uid: str) -> None:
    assert await refusal(kube_with(phase), OWNER | {"uid": uid}) == "Backup velero/nightly no longer exists"


@pytest.mark.parametrize(
    "owners",
    [[], [OWNER | {"kind": "Schedule"}], [OWNER | {"apiVersion": "example.com/v1"}]],
    ids=["none", "another kind", "another group"],
)
async def test_without_an_owning_backup_nothing_is_read(owners: list[JsonDict]) -> None:
    kube = kube_with(None)
    assert await refusal(kube, *owners) is None
    assert kube.requests == []


async def test_other_kinds_do_not_depend_on_their_owner() -> None:
    kube = kube_with(None)
    cr: Transfer = DataUpload.parse(data_upload(ownerReferences=[OWNER]))
    assert await read_owner_refusal(kube.client, cr) is None
    assert kube.requests == []


async def test_without_the_permission_the_owner_does_not_matter(caplog: pytest.LogCaptureFixture) -> None:
    kube = kube_with("Failed")
    kube.fail_next("GET", "/backups/nightly", 403)
    assert await refusal(kube, OWNER) is None
    assert "whatever has become of its Backup" in caplog.text


async def test_an_api_server_that_fails_gives_no_answer() -> None:
    kube = kube_with("Failed")
    kube.fail_next("GET", "/backups/nightly", 500, times=10)
    with pytest.raises(KubeError):
        await refusal(kube, OWNER)


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


async def test_a_blocked_cleanup_does_not_block_other_transfers() -> None:
    blocked, others = accepted(data_upload("blocked")), [accepted(data_upload(f"du-{n}")) for n in range(3)]
    for transfer in (blocked, *others):
        source = {"volumeSnapshot": f"vs-{transfer['metadata']['name']}"}
        transfer["spec"] = transfer["spec"] | {"csiSnapshot": transfer["spec"]["csiSnapshot"] | source}
    async with open_world(blocked, *others, mover=Mover(seconds=1)) as world, world.agent(slots=1):
        await world.until(
            lambda: any(c["metadata"]["name"] == "blocked" for c in world.kube.objects(PERSISTENT_VOLUME_CLAIMS))
        )
        await hold_claim(world, "blocked", finalizers=[FOREIGN])
        await world.until(lambda: all(world.done(name=f"du-{n}") for n in range(3)), seconds=60)
        await world.until(lambda: world.phase(name="blocked") == "Completed", seconds=60)
        assert not world.done(name="blocked")


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

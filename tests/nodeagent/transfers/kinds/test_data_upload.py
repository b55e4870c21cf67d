"""What is particular to DataUploads and DataDownloads."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import pytest

from core.errors import ExposeError, ResultError
from core.kube.client import KubeClient
from core.kube.resources import BACKUP_STORAGE_LOCATIONS, PERSISTENT_VOLUME_CLAIMS, SECRETS
from core.kube.transport import Request, Response
from core.models.attempts import Interruption
from core.models.base import JsonDict
from core.models.in_place import InPlace
from core.models.names import OUTCOME_ANNOTATION
from core.models.phases import Phase
from core.models.reasons import FailureReason
from exposer.model import Exposed, Guard, KeptVolume, Pending, Reader, RestoreRequest, SnapshotRequest
from exposer.settings import BackupPVCSettings, ExposeSettings
from exposer.template import AgentTemplate
from nodeagent.runtime.settings import Settings
from nodeagent.transfers.kinds.base import Admission, AdmissionState, Kind
from nodeagent.transfers.kinds.data_download import DataDownloadKind
from nodeagent.transfers.kinds.data_upload import DataUploadKind
from nodeagent.transfers.outcome import Outcome
from tests.exposer.support.world import no_guard
from tests.nodeagent.support.transfers import data_download, data_upload
from tests.support.fakeobjects import merge_patch
from tests.support.scripted import answer, rejection, scripted_client, stored

SETTINGS = ExposeSettings(AgentTemplate(image="mover:1"))
LOCATION = stored(
    BACKUP_STORAGE_LOCATIONS,
    metadata={"name": "default"},
    spec={"provider": "aws", "objectStorage": {"bucket": "b"}, "credential": {"name": "cloud", "key": "k"}},
)
TRUSTING = {"provider": "aws", "objectStorage": {"bucket": "b", "caCertRef": {"name": "ca", "key": "k"}}}
LOCATION_PATH = "/apis/velero.io/v1/namespaces/velero/backupstoragelocations/default"
SECRET_PATH = "/api/v1/namespaces/velero/secrets/cloud"
CLAIM_PATH = "/api/v1/namespaces/app3/persistentvolumeclaims/data"
READY_WORLD: dict[str, JsonDict] = {
    LOCATION_PATH: LOCATION,
    SECRET_PATH: stored(SECRETS, data={"k": "eA=="}),
    CLAIM_PATH: stored(PERSISTENT_VOLUME_CLAIMS, spec={}),
}


def client(world: Mapping[str, JsonDict]) -> KubeClient:
    def script(request: Request) -> Response:
        found = world.get(request.path)
        return answer(found) if found is not None else rejection(404, "not found")

    return scripted_client(script)


@dataclass
class FakeExposer:
    """Answers as scripted, and records what it was asked for."""

    found: Pending | Exception | None = None
    dropped: list[KeptVolume] = field(default_factory=list)
    given_back: list[str] = field(default_factory=list)
    checked: list[Any] = field(default_factory=list)
    cleaned: int = 0

    async def check(self, request: SnapshotRequest | RestoreRequest, reader: Reader) -> Pending | None:
        self.checked.append(request)
        if isinstance(self.found, Exception):
            raise self.found
        return self.found

    async def ensure(self, request: SnapshotRequest | RestoreRequest, guard: Guard) -> Exposed | Pending:
        raise NotImplementedError

    async def confirm(self, request: SnapshotRequest | RestoreRequest) -> None:
        if isinstance(self.found, Exception):
            raise self.found

    async def withdraw(self, request: SnapshotRequest | RestoreRequest, interruption: Interruption) -> Pending | None:
        raise NotImplementedError

    async def clean_up(self, request: SnapshotRequest | RestoreRequest) -> Pending | None:
        self.cleaned += 1
        return None

    async def read_volume(self, request: RestoreRequest) -> KeptVolume:
        return KeptVolume("pv-1", "Delete", provisioned=True)

    async def rebind(self, request: RestoreRequest, kept: KeptVolume) -> Pending | None:
        return Pending("Binding", kept.pv_name)

    async def drop_volume(self, request: RestoreRequest, kept: KeptVolume) -> Pending | None:
        self.dropped.append(kept)
        return None

    async def give_back(self, request: RestoreRequest) -> Pending | None:
        self.given_back.append(request.volume)
        return None


def uploads(exposer: FakeExposer | None = None) -> DataUploadKind:
    return DataUploadKind(exposer or FakeExposer(), lambda: SETTINGS, Settings("").datamover_names)


def downloads(exposer: FakeExposer | None = None) -> DataDownloadKind:
    return DataDownloadKind(exposer or FakeExposer(), lambda: SETTINGS, Settings("").datamover_names)


async def admission(kind: Kind[Any], transfer: JsonDict, world: Mapping[str, JsonDict] = READY_WORLD) -> Admission:
    return await kind.check_admission(kind.parse(transfer), client(world))


async def test_a_transfer_may_start_when_all_it_needs_is_ready() -> None:
    verdicts = [
        (await admission(uploads(), data_upload())).decision,
        (await admission(downloads(), data_download())).decision,
    ]
    assert verdicts == [AdmissionState.READY, AdmissionState.READY]


MISSING = timedelta(minutes=2)


@pytest.mark.parametrize(
    ("world", "limit", "words"),
    [
        pytest.param({}, MISSING, "BackupStorageLocation velero/default does not exist", id="no location"),
        pytest.param({LOCATION_PATH: LOCATION}, MISSING, "Secret velero/cloud", id="no secret"),
        pytest.param(
            READY_WORLD | {SECRET_PATH: stored(SECRETS, data={"other": ""})},
            MISSING,
            "Secret velero/cloud of BackupStorageLocation default has no key k",
            id="no such key",
        ),
        pytest.param(
            READY_WORLD | {LOCATION_PATH: LOCATION | {"spec": TRUSTING}},
            MISSING,
            "Secret velero/ca of BackupStorageLocation default does not exist",
            id="no CA",
        ),
        pytest.param(
            READY_WORLD | {LOCATION_PATH: LOCATION | {"spec": {"provider": "aws"}}},
            None,
            "objectStorage",
            id="unreadable",
            marks=pytest.mark.cause("location-unreadable"),
        ),
    ],
)
@pytest.mark.cause("location-secret-missing")
async def test_an_unusable_location_is_named_and_pending(
    world: Mapping[str, JsonDict], limit: timedelta | None, words: str
) -> None:
    """One that is missing may be in rotation: the transfer fails after two minutes only."""
    for found in (
        await admission(uploads(), data_upload(), world),
        await admission(downloads(), data_download(), world),
    ):
        assert words in found.message
        assert (found.decision, found.blocked, found.indefinite) == (AdmissionState.PENDING, True, False)
        assert found.limit == limit


@pytest.mark.parametrize(
    ("status", "warning"),
    [
        ({"phase": "Unavailable", "message": "no bucket"}, "velero/default is Unavailable: no bucket"),
        ({"phase": "Unavailable"}, "velero/default is Unavailable"),
        ({"phase": "Odd"}, "velero/default is Odd"),
        ({"phase": "Available", "message": "old"}, ""),
        ({}, ""),
    ],
    ids=["message", "no message", "unknown phase", "available", "no phase"],
)
async def test_a_location_that_is_not_available_delays_nothing(status: JsonDict, warning: str) -> None:
    world = READY_WORLD | {LOCATION_PATH: LOCATION | {"status": status}}
    for found in (
        await admission(uploads(), data_upload(), world),
        await admission(downloads(), data_download(), world),
    ):
        wanted = f"BackupStorageLocation {warning}" if warning else ""
        assert found == Admission(AdmissionState.READY, warning=wanted)


async def test_a_snapshot_that_is_not_ready_is_pending_indefinitely() -> None:
    exposer = FakeExposer(Pending("SnapshotNotReady", "not ready yet"))
    found = await admission(uploads(exposer), data_upload())
    assert found == Admission(AdmissionState.PENDING, "SnapshotNotReady", "not ready yet", indefinite=True)


async def test_a_snapshot_with_an_error_is_blocked() -> None:
    exposer = FakeExposer(Pending("SnapshotError", "no space left", blocked=True))
    found = await admission(uploads(exposer), data_upload())
    assert found == Admission(AdmissionState.PENDING, "SnapshotError", "no space left", blocked=True)


async def test_a_missing_snapshot_fails() -> None:
    found = await admission(uploads(FakeExposer(ExposeError("VolumeSnapshot a/b is gone"))), data_upload())
    assert (found.decision, found.message) == (AdmissionState.FAILED, "VolumeSnapshot a/b is gone")


COPYING = replace(
    SETTINGS, backup_pvcs={"hostpath": BackupPVCSettings(copies=("Secret/a",))}, restore_copies=("Secret/b",)
)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (None, Admission(AdmissionState.READY)),
        (Pending("CopyInUse", "m"), Admission(AdmissionState.PENDING, "CopyInUse", "m", indefinite=True)),
        (
            Pending("CopySourceMissing", "m", blocked=True),
            Admission(AdmissionState.PENDING, "CopySourceMissing", "m", blocked=True),
        ),
    ],
    ids=["ready", "in use", "missing"],
)
async def test_the_copies_that_a_transfer_needs_are_named_by_its_check(
    found: Pending | None, expected: Admission
) -> None:
    """A copy is in use for as long as another transfer takes; a missing source is the operator's mistake."""
    upload = DataUploadKind(FakeExposer(found), lambda: COPYING, Settings("").datamover_names)
    download = DataDownloadKind(FakeExposer(found), lambda: COPYING, Settings("").datamover_names)
    assert await admission(upload, data_upload()) == replace(expected, copies=("Secret/a",))
    assert await admission(download, data_download()) == replace(expected, copies=("Secret/b",))


@pytest.mark.parametrize("change", [{"snapshotType": "Magic"}, {"csiSnapshot": None}], ids=["type", "no snapshot"])
@pytest.mark.cause("snapshot-type")
async def test_another_snapshot_type_is_rejected_and_leaves_nothing_to_clean(change: JsonDict) -> None:
    transfer = data_upload()
    transfer["spec"] |= change
    exposer = FakeExposer()
    kind = uploads(exposer)
    assert (await admission(kind, transfer)).decision is AdmissionState.FAILED
    if transfer["spec"]["csiSnapshot"] is None:
        assert await kind.clean_up(kind.parse(transfer)) is None
        assert exposer.cleaned == 0


async def test_a_missing_target_claim_is_permanent_after_two_minutes() -> None:
    world = {path: obj for path, obj in READY_WORLD.items() if path != CLAIM_PATH}
    found = await admission(downloads(), data_download(), world)
    assert (found.decision, found.indefinite, found.limit) == (AdmissionState.PENDING, False, timedelta(minutes=2))
    assert "PersistentVolumeClaim app3/data" in found.message


async def test_an_unconsumed_target_claim_waits() -> None:
    found = await admission(downloads(FakeExposer(Pending("R", "first pod"))), data_download())
    assert found == Admission(AdmissionState.PENDING, "R", "first pod")


async def test_a_bound_target_claim_fails() -> None:
    found = await admission(downloads(FakeExposer(ExposeError("bound already"))), data_download())
    assert (found.decision, found.message) == (AdmissionState.FAILED, "bound already")


@pytest.mark.parametrize(
    ("datamover", "ours"),
    [("", True), ("velero", True), ("velero-fs", True), ("velero-block", True), ("Velero", False), ("another", False)],
)
def test_only_transfers_for_this_mover_are_managed(datamover: str, ours: bool) -> None:
    cases: list[tuple[Kind[Any], JsonDict]] = [(uploads(), data_upload()), (downloads(), data_download())]
    for kind, transfer in cases:
        transfer["spec"]["datamover"] = datamover
        assert kind.managed(kind.parse(transfer)) is ours


@pytest.mark.parametrize("transfer", [data_upload(), data_download()], ids=lambda transfer: str(transfer["kind"]))
@pytest.mark.cause("data-mover-unsupported")
async def test_a_transfer_of_the_block_data_mover_fails_whoever_accepted_it(transfer: JsonDict) -> None:
    transfer["spec"]["datamover"] = "velero-block"
    kind: Kind[Any] = uploads() if transfer["kind"] == "DataUpload" else downloads()
    message = "data mover velero-block is not supported by this node agent; use velero-fs"

    found = await admission(kind, transfer, {})

    assert found == Admission(AdmissionState.FAILED, FailureReason.DATA_MOVER_UNSUPPORTED, message)
    with pytest.raises(ExposeError, match=message):
        await kind.ensure_exposed(kind.parse(transfer), no_guard)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"targetVolume": {"pv": "pv-7"}, "restoreType": "full", "dataMoverConfig": {"DeleteExtraFiles": "maybe"}},
            'setting DeleteExtraFiles: must be true or false: "maybe"',
        ),
        ({"restoreType": "partly"}, 'unknown restore type "partly": use none, full or incremental'),
    ],
    ids=["setting", "restore type"],
)
@pytest.mark.cause("restore-type-unsupported")
async def test_a_restore_that_this_agent_cannot_carry_out_fails_whoever_accepted_it(
    change: JsonDict, message: str
) -> None:
    transfer = merge_patch(data_download(), {"spec": change})
    found = await admission(downloads(), transfer)
    assert (found.decision, found.reason) == (AdmissionState.FAILED, FailureReason.RESTORE_TYPE_UNSUPPORTED)
    assert re.fullmatch(message.replace(".*", "is not supported by this node agent"), found.message)
    with pytest.raises(ExposeError, match=message):
        await downloads().ensure_exposed(downloads().parse(transfer), no_guard)


@pytest.mark.parametrize("wanted", ["", "none", "Full", "INCREMENTAL"])
async def test_an_existing_volume_is_restored_with_every_restore_type(wanted: str) -> None:
    spec = {"restoreType": wanted, "targetVolume": {"pv": "pv-7"}, "dataMoverConfig": {"DeleteExtraFiles": "true"}}
    exposer = FakeExposer()
    kind = downloads(exposer)
    cr = kind.parse(merge_patch(data_download(), {"spec": spec}))

    assert (await kind.check_admission(cr, client(READY_WORLD))).decision is AdmissionState.READY

    assert exposer.checked[-1].volume == "pv-7"
    assert exposer.checked[-1].in_place == InPlace(incremental=wanted == "INCREMENTAL", delete_extra_files=True)


@pytest.mark.parametrize("end", ["Failed", "Canceled", "Completed"])
async def test_an_existing_volume_is_given_back_unless_it_was_rebound(end: str) -> None:
    exposer = FakeExposer()
    transfer = merge_patch(data_download(status={"phase": end}), {"spec": {"targetVolume": {"pv": "pv-7"}}})
    kind = downloads(exposer)

    await kind.clean_up(kind.parse(transfer))

    assert exposer.given_back == ([] if end == "Completed" else ["pv-7"])
    assert exposer.dropped == []
    assert exposer.cleaned == 1


@pytest.mark.parametrize("wanted", ["", "none", "Full", "INCREMENTAL"])
async def test_a_new_volume_is_restored_with_every_restore_type(wanted: str) -> None:
    settings = {"DeleteExtraFiles": "true"}
    transfer = merge_patch(data_download(), {"spec": {"restoreType": wanted, "dataMoverConfig": settings}})
    assert (await admission(downloads(), transfer)).decision is AdmissionState.READY


def test_a_transfer_queues_for_its_volumes_namespace() -> None:
    assert uploads().queue_namespace(uploads().parse(data_upload())) == "app"
    assert downloads().queue_namespace(downloads().parse(data_download())) == "app3"


def test_the_final_status_of_an_upload_is_as_recorded() -> None:
    kind = uploads()
    result = kind.parse_result(
        '{"snapshotID":"74b3","emptySnapshot":false,"source":{"byPath":"/scratch/volume","volumeMode":"Filesystem"},'
        '"totalBytes":50000000,"incrementalBytes":50000000}'
    )
    cr = kind.parse(data_upload())
    assert kind.final_status(cr, Outcome(phase=Phase.COMPLETED, result=result)) == {
        "path": f"/{cr.uid}",
        "snapshotID": "74b3",
        "incrementalBytes": 50000000,
        "sourceSize": 50000000,
        "progress": {"totalBytes": 50000000, "bytesDone": 50000000},
    }


def test_the_note_of_a_backup_is_its_message() -> None:
    kind = uploads()
    text = '{"snapshotID":"74b3","source":{"byPath":"/volume"},"totalBytes":1,"note":"read everything"}'
    outcome = Outcome.from_json(Outcome(phase=Phase.COMPLETED, result=kind.parse_result(text)).to_json())
    assert kind.final_status(kind.parse(data_upload()), outcome)["message"] == "read everything"


def test_the_final_status_of_a_download_is_as_recorded() -> None:
    kind = downloads()
    result = kind.parse_result('{"target":{"byPath":"/72bf","volumeMode":"Filesystem"},"totalBytes":50000000}')
    status = kind.final_status(kind.parse(data_download()), Outcome(phase=Phase.COMPLETED, result=result))
    assert status == {"progress": {"totalBytes": 50000000, "bytesDone": 50000000}}


def test_a_result_of_the_other_kind_is_rejected() -> None:
    with pytest.raises(ResultError):
        downloads().parse_result('{"snapshotID":"s","source":{"byPath":"/x"}}')


@pytest.mark.parametrize(
    ("phase", "dropped"),
    [(Phase.FAILED, [KeptVolume("pv-1", "Retain", provisioned=True)]), (Phase.COMPLETED, [])],
    ids=["failed", "completed"],
)
async def test_the_kept_volume_is_dropped_unless_it_was_handed_over(phase: Phase, dropped: list[KeptVolume]) -> None:
    result = downloads().parse_result('{"target":{"byPath":"/72bf","volumeMode":"Filesystem"},"totalBytes":50000000}')
    kept = Outcome(Phase.COMPLETED, result=result, pv_name="pv-1", reclaim_policy="Retain", provisioned=True)
    transfer = data_download(status={"phase": str(phase)}, annotations={OUTCOME_ANNOTATION: kept.to_json()})
    exposer = FakeExposer()
    kind = downloads(exposer)
    assert await kind.clean_up(kind.parse(transfer)) is None
    assert (exposer.dropped, exposer.cleaned) == (dropped, 1)


async def test_the_written_volume_is_kept_with_the_outcome() -> None:
    kind = downloads()
    cr = kind.parse(data_download())
    outcome = await kind.keep(cr, Outcome(phase=Phase.COMPLETED))
    assert (outcome.pv_name, outcome.reclaim_policy, outcome.provisioned) == ("pv-1", "Delete", True)
    assert await kind.complete(cr, outcome) == Pending("Binding", "pv-1")


async def test_an_upload_whose_volume_is_not_the_snapshots_is_not_confirmed() -> None:
    kind = uploads(FakeExposer(ExposeError("was bound to the existing PersistentVolume precious")))
    with pytest.raises(ExposeError, match="precious"):
        await kind.confirm_volume(kind.parse(data_upload()))


async def test_an_upload_is_complete_with_its_outcome() -> None:
    kind = uploads()
    cr, outcome = kind.parse(data_upload()), Outcome(phase=Phase.COMPLETED)
    assert await kind.keep(cr, outcome) == outcome
    assert await kind.complete(cr, outcome) is None

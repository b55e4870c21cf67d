"""What is particular to DataUploads and DataDownloads."""

import re
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from core.errors import ExposeError, ResultError
from core.kube.resources import SECRETS
from core.models.base import JsonDict
from core.models.names import OUTCOME_ANNOTATION
from core.models.phases import Phase
from core.models.reasons import FailureReason
from core.models.transfer_settings import InPlace
from exposer.model import KeptVolume, Pending, RestoreRequest
from exposer.settings import BackupPVCSettings
from nodeagent.transfers.kinds.base import Admission, AdmissionState, Kind
from nodeagent.transfers.outcome import Outcome
from tests.exposer.support.world import no_guard
from tests.nodeagent.support.data_kinds import (
    LOCATION,
    LOCATION_PATH,
    READY_WORLD,
    SECRET_PATH,
    SETTINGS,
    TRUSTING,
    FakeExposer,
    admission,
    downloads,
    uploads,
)
from tests.nodeagent.support.transfers import data_download, data_upload
from tests.support.fakeobjects import merge_patch
from tests.support.scripted import stored
from tests.support.versions import built

WAITS = AdmissionState.PENDING
MISSING = timedelta(minutes=2)


def _located(**fields: JsonDict) -> dict[str, JsonDict]:
    """Return a cluster whose location has these fields."""
    return READY_WORLD | {LOCATION_PATH: LOCATION | fields}


async def _admissions(world: Mapping[str, JsonDict]) -> list[Admission]:
    return [await admission(uploads(), data_upload(), world), await admission(downloads(), data_download(), world)]


_UNUSABLE: dict[str, tuple[Mapping[str, JsonDict], timedelta | None, str]] = {
    "no location": ({}, MISSING, "BackupStorageLocation velero/default does not exist"),
    "no secret": ({LOCATION_PATH: LOCATION}, MISSING, "Secret velero/cloud"),
    "no such key": (
        READY_WORLD | {SECRET_PATH: stored(SECRETS, data={"other": ""})},
        MISSING,
        "Secret velero/cloud of BackupStorageLocation default has no key k",
    ),
    "no CA": (_located(spec=TRUSTING), MISSING, "Secret velero/ca of BackupStorageLocation default does not exist"),
    "unreadable": (_located(spec={"provider": "aws"}), None, "objectStorage"),
}


@pytest.mark.parametrize(("world", "limit", "words"), _UNUSABLE.values(), ids=_UNUSABLE)
@pytest.mark.cause("location-unreadable")
@pytest.mark.cause("location-secret-missing")
async def test_an_unusable_location_is_named_and_pending(
    world: Mapping[str, JsonDict], limit: timedelta | None, words: str
) -> None:
    """One that is missing may be in rotation: the transfer fails after two minutes only."""
    for found in await _admissions(world):
        assert words in found.message
        assert (found.decision, found.blocked, found.indefinite, found.limit) == (WAITS, True, False, limit)


@pytest.mark.parametrize(
    ("status", "warning"),
    [
        ({"phase": "Unavailable", "message": "no bucket"}, "velero/default is Unavailable: no bucket"),
        ({"phase": "Unavailable"}, "velero/default is Unavailable"),
        ({"phase": "Odd"}, "velero/default is Odd"),
        ({"phase": "Available", "message": "old"}, None),
        ({}, None),
    ],
    ids=["message", "no message", "unknown phase", "available", "no phase"],
)
async def test_a_location_that_is_not_available_delays_nothing(status: JsonDict, warning: str | None) -> None:
    wanted = Admission(AdmissionState.READY, warning=f"BackupStorageLocation {warning}" if warning else None)
    assert await _admissions(_located(status=status)) == [wanted, wanted]


@pytest.mark.parametrize(
    ("upload", "found", "expected"),
    [
        (True, Pending("NotReady", "m"), Admission(WAITS, "NotReady", "m", indefinite=True)),
        (True, Pending("Error", "m", blocked=True), Admission(WAITS, "Error", "m", blocked=True)),
        (True, ExposeError("m"), Admission(AdmissionState.FAILED, FailureReason.SOURCE_MISSING, "m")),
        (False, Pending("Unused", "m"), Admission(WAITS, "Unused", "m")),
        (False, Pending("Missing", "m", timeout=MISSING), Admission(WAITS, "Missing", "m", limit=MISSING)),
        (False, ExposeError("m"), Admission(AdmissionState.FAILED, FailureReason.TARGET_CLAIM_UNUSABLE, "m")),
    ],
    ids=[
        "not ready",
        "snapshot with an error",
        "no snapshot",
        "target without a consumer",
        "no target",
        "target bound",
    ],
)
async def test_a_transfer_waits_for_its_exposer_or_fails_with_it(
    found: Pending | ExposeError, expected: Admission, *, upload: bool
) -> None:
    kind: Kind[Any] = (uploads if upload else downloads)(FakeExposer(found))
    assert await admission(kind, data_upload() if upload else data_download()) == expected


COPYING = replace(
    SETTINGS, backup_pvcs={"hostpath": BackupPVCSettings(copies=("Secret/a",))}, restore_copies=("Secret/b",)
)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (None, Admission(AdmissionState.READY)),
        (Pending("CopyInUse", "m"), Admission(WAITS, "CopyInUse", "m", indefinite=True)),
        (Pending("SourceMissing", "m", blocked=True), Admission(WAITS, "SourceMissing", "m", blocked=True)),
    ],
    ids=["ready", "in use", "missing"],
)
async def test_the_copies_that_a_transfer_needs_are_named(found: Pending | None, expected: Admission) -> None:
    """A copy is in use for as long as another transfer takes; a missing source is the operator's mistake."""
    upload, download = (
        replace(one(FakeExposer(found)), expose_settings=lambda: COPYING) for one in (uploads, downloads)
    )
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


@pytest.mark.parametrize(
    ("datamover", "ours"),
    [("", True), ("velero", True), ("velero-fs", True), ("velero-block", True), ("Velero", False), ("another", False)],
)
def test_only_transfers_for_this_mover_are_managed(datamover: str, ours: bool) -> None:
    cases: list[tuple[Kind[Any], JsonDict]] = [(uploads(), data_upload()), (downloads(), data_download())]
    for kind, transfer in cases:
        transfer["spec"]["datamover"] = datamover
        assert kind.managed(kind.parse(transfer)) is ours


@pytest.mark.parametrize("transfer", [data_upload(), data_download()], ids=["upload", "download"])
async def test_the_block_data_mover_gets_a_device_of_volumes_of_both_modes(transfer: JsonDict) -> None:
    transfer["spec"]["datamover"] = "velero-block"
    exposer = FakeExposer()
    kind: Kind[Any] = uploads(exposer) if transfer["kind"] == "DataUpload" else downloads(exposer)
    assert (await admission(kind, transfer)).decision is AdmissionState.READY
    (request,) = exposer.checked
    assert request.by_block
    assert kind.parse(transfer).required_feature == "velero-block"


@pytest.mark.parametrize(
    ("datamover", "annotation", "storage_class", "preferred"),
    [
        pytest.param("", "nodeagent.io/backup", "fast", "velero-block", id="of the class"),
        pytest.param("", "nodeagent.io/backup", "slow", None, id="of another class"),
        pytest.param("velero-fs", "nodeagent.io/backup", "fast", None, id="by --data-mover fs"),
        pytest.param("", "note", "fast", None, id="of a Velero server"),
    ],
)
async def test_volumes_of_a_configured_class_prefer_the_block_data_mover(
    datamover: str, annotation: str, storage_class: str, preferred: str | None
) -> None:
    transfer = data_upload(annotations={annotation: "night"})
    transfer["spec"] |= {"datamover": datamover}
    transfer["spec"]["csiSnapshot"]["storageClass"] = storage_class
    kind = replace(uploads(), expose_settings=lambda: replace(SETTINGS, block_classes=frozenset({"fast"})))
    found = await admission(kind, transfer)
    assert (found.decision, found.datamover) == (AdmissionState.READY, preferred)


def test_a_transfer_queues_for_its_volumes_namespace() -> None:
    assert uploads().queue_namespace(uploads().parse(data_upload())) == "app"
    assert downloads().queue_namespace(downloads().parse(data_download())) == "app3"


def test_a_result_of_the_other_kind_is_rejected() -> None:
    with pytest.raises(ResultError):
        downloads().parse_result('{"snapshotID":"s","source":{"byPath":"/x"}}')


@pytest.mark.parametrize(
    ("phase", "fields", "fs_type"),
    [(Phase.FAILED, ',"fsType":"xfs"', "xfs"), (Phase.FAILED, "", None), (Phase.COMPLETED, "", None)],
    ids=["failed with a file system", "failed", "completed"],
)
async def test_the_kept_volume_is_dropped_unless_it_was_handed_over(
    phase: Phase, fields: str, fs_type: str | None
) -> None:
    """The server names a file system only if it knows the source's; another agent may have taken the result over."""
    exposer = FakeExposer()
    kind = downloads(exposer)
    result = kind.parse_result(f'{{"target":{{"byPath":"/v","volumeMode":"Block"}}{fields}}}')
    kept = Outcome(Phase.COMPLETED, result=result, pv_name="pv-1", reclaim_policy="Retain", provisioned=True)
    status = {"phase": str(phase), "node": "node-b", "acceptedByNode": "node-a"}
    transfer = data_download(status=status, annotations={OUTCOME_ANNOTATION: kept.to_json()})
    transfer["spec"]["targetVolume"]["fsType"] = "ext4"
    assert await kind.clean_up(kind.parse(transfer)) is None
    volume = KeptVolume("pv-1", "Retain", fs_type=fs_type, provisioned=True)
    assert (exposer.dropped, exposer.cleaned) == ([volume] if phase is Phase.FAILED else [], 1)
    (request,) = exposer.checked
    assert isinstance(request, RestoreRequest)
    assert (request.fs_type, request.nodes) == ("ext4", ("node-b", "node-a"))


async def test_an_upload_whose_volume_is_not_the_snapshots_is_not_confirmed() -> None:
    kind = uploads(FakeExposer(ExposeError("was bound to the existing PersistentVolume precious")))
    with pytest.raises(ExposeError, match="precious"):
        await kind.confirm_volume(kind.parse(data_upload()))


VOLUME = built("datadownload")["spec"]["targetVolume"]["pv"]
BASE = built("datadownload", 2)["spec"]["csiSnapshot"]["volumeSnapshot"]


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
async def test_a_restore_it_cannot_carry_out_fails_whoever_accepted_it(change: JsonDict, message: str) -> None:
    transfer = merge_patch(data_download(), {"spec": change})
    found = await admission(downloads(), transfer)
    assert (found.decision, found.reason) == (AdmissionState.FAILED, FailureReason.RESTORE_TYPE_UNSUPPORTED)
    assert re.fullmatch(message.replace(".*", "is not supported by this node agent"), found.message)
    with pytest.raises(ExposeError, match=message):
        await downloads().ensure_exposed(downloads().parse(transfer), no_guard)


@pytest.mark.parametrize("wanted", ["", "none", "Full", "INCREMENTAL"])
@pytest.mark.parametrize("existing", [False, True])
async def test_a_volume_is_restored_with_every_restore_type(wanted: str, *, existing: bool) -> None:
    exposer = FakeExposer()
    kind = downloads(exposer)
    change = {"spec": {"restoreType": wanted, "dataMoverConfig": {"DeleteExtraFiles": "true"}}}
    transfer = merge_patch(built("datadownload") if existing else data_download(), change)
    assert (await admission(kind, transfer)).decision is AdmissionState.READY
    assert (exposer.checked[-1].volume == VOLUME) is existing
    if existing:
        expected = InPlace(incremental=wanted == "INCREMENTAL", delete_extra_files=True)
        assert kind.parse(transfer).in_place == expected


@pytest.mark.parametrize(
    ("snapshot", "deleted"),
    [
        pytest.param({"volumeSnapshotNamespace": "app", "cleanUp": True}, ("app", BASE), id="taken for it"),
        pytest.param({"cleanUp": True}, ("app3", BASE), id="beside the target"),
        pytest.param({"volumeSnapshotNamespace": "app", "cleanUp": False}, None, id="of a user"),
        pytest.param({"volumeSnapshot": "", "cleanUp": True}, None, id="without a name"),
        pytest.param(None, None, id="none"),
    ],
)
async def test_a_restores_own_snapshot_is_deleted(snapshot: JsonDict | None, deleted: tuple[str, str] | None) -> None:
    transfer = built("datadownload", 2)
    named = {key: transfer["spec"]["csiSnapshot"][key] for key in ("storageClass", "volumeSnapshot")}
    transfer["spec"]["csiSnapshot"] = None if snapshot is None else named | snapshot
    exposer = FakeExposer()
    kind = downloads(exposer)
    cr = kind.parse(transfer | {"status": {"phase": "Failed"}})
    await kind.clean_up(cr)
    assert exposer.checked[-1].base_snapshot == deleted
    assert exposer.checked[-1].requested_at == cr.metadata.creation_timestamp

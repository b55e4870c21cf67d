"""Restores into new and existing volumes, by the type that a Velero server asks for."""

import re

import pytest

from core.errors import ExposeError
from core.models.base import JsonDict
from core.models.reasons import FailureReason
from core.models.transfer_settings import InPlace
from nodeagent.transfers.kinds.base import AdmissionState
from tests.exposer.support.world import no_guard
from tests.nodeagent.support.data_kinds import (
    READY_WORLD,
    FakeExposer,
    admission,
    client,
    downloads,
)
from tests.nodeagent.support.transfers import data_download
from tests.support.fakeobjects import merge_patch
from tests.support.versions import built

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
    exposer = FakeExposer()
    kind = downloads(exposer)
    cr = kind.parse(merge_patch(built("datadownload"), {"spec": {"restoreType": wanted}}))

    assert (await kind.check_admission(cr, client(READY_WORLD))).decision is AdmissionState.READY

    assert exposer.checked[-1].volume == VOLUME
    assert cr.in_place == InPlace(incremental=wanted == "INCREMENTAL", delete_extra_files=True)


@pytest.mark.parametrize("end", ["Failed", "Canceled", "Completed"])
async def test_an_existing_volume_is_given_back_unless_it_was_rebound(end: str) -> None:
    exposer = FakeExposer()
    kind = downloads(exposer)

    await kind.clean_up(kind.parse(built("datadownload") | {"status": {"phase": end}}))

    assert exposer.given_back == ([] if end == "Completed" else [VOLUME])
    assert exposer.dropped == []
    assert exposer.cleaned == 1


@pytest.mark.parametrize("wanted", ["", "none", "Full", "INCREMENTAL"])
async def test_a_new_volume_is_restored_with_every_restore_type(wanted: str) -> None:
    settings = {"DeleteExtraFiles": "true"}
    transfer = merge_patch(data_download(), {"spec": {"restoreType": wanted, "dataMoverConfig": settings}})
    assert (await admission(downloads(), transfer)).decision is AdmissionState.READY


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
async def test_a_snapshot_is_deleted_if_it_was_taken_for_the_restore_alone(
    snapshot: JsonDict | None, deleted: tuple[str, str] | None
) -> None:
    transfer = built("datadownload", 2)
    named = {key: transfer["spec"]["csiSnapshot"][key] for key in ("storageClass", "volumeSnapshot")}
    transfer["spec"]["csiSnapshot"] = None if snapshot is None else named | snapshot
    exposer = FakeExposer()
    kind = downloads(exposer)
    cr = kind.parse(transfer | {"status": {"phase": "Failed"}})

    await kind.clean_up(cr)

    assert exposer.checked[-1].base_snapshot == deleted
    assert exposer.checked[-1].requested_at == cr.metadata.creation_timestamp

"""What the index knows of a transfer and of what a completed backup saved, and the memory that it takes."""

import asyncio
import gc
import json
import tracemalloc
from datetime import UTC, datetime

import msgspec
import pytest

from client.status.parse import decode_transfer, transfer_record
from client.status.records import TRANSFER_KINDS
from client.status.records import copy_of as completed_of
from core.kube.resources import DATA_UPLOADS
from core.models.base import JsonDict
from core.models.names import (
    ATTEMPTS_ANNOTATION,
    NOT_PREPARED_ANNOTATION,
    PVC_NAME_ANNOTATION,
    PVC_UID_LABEL,
    SCHEDULE_LABEL,
    VERIFICATION_ANNOTATION,
)
from core.models.phases import AttemptStage, InterruptionCause, Phase
from core.models.reasons import NotPrepared
from core.models.storage import RepositoryKey
from core.models.transfers import DataDownload, DataUpload, PodVolumeBackup
from nodeagent.leader.index import TransferIndex, VolumeCopy, build_entry, read_copy
from nodeagent.transfers.kinds.base import Admission, AdmissionState
from tests.nodeagent.support.dispatching import Scene, ScriptedKind, interrupted, open_scene
from tests.nodeagent.support.parts import fake_parts
from tests.nodeagent.support.transfers import NAMESPACE, data_download, data_upload, pod_volume_backup
from tests.support.fakekube import FakeKube
from tests.support.tasks import running, until

pytestmark = pytest.mark.looptime


def traced_bytes() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


async def measure(scene: Scene, transfers: int) -> int:
    """Return the bytes that are freed when the dispatcher of so many pending transfers stops."""
    stored = scene.kube.stored
    async with scene.dispatching():
        # All but the first are reported as pending.
        await until(
            lambda: sum("message" in cr["status"] for cr in stored(DATA_UPLOADS)) == transfers, seconds=500, every=1
        )
        await asyncio.sleep(10)
        # They are of the fake.
        scene.kube.requests.clear()
        with_it = traced_bytes()
    # Canceled timers keep references until they are due.
    await asyncio.sleep(1000)
    return with_it - traced_bytes()


@pytest.mark.parametrize(
    ("text", "expected"), [("MoverLost", NotPrepared.MOVER_LOST), ("of a user", None), ("", None)], ids=str
)
def test_only_known_failures_are_in_an_entry(text: str, expected: NotPrepared | None) -> None:
    raw = data_upload(annotations={NOT_PREPARED_ANNOTATION: text})
    assert build_entry(ScriptedKind(), raw).not_prepared is expected


COUNTED = {AttemptStage.READY: Phase.NEW, AttemptStage.EXPOSING: Phase.PREPARED}
"""The phase by which an interrupted transfer is admitted again."""


@pytest.mark.parametrize("stage", [None, *AttemptStage])
@pytest.mark.parametrize("phase", Phase)
def test_only_the_next_attempt_of_one_in_progress_is_admitted_again(phase: Phase, stage: AttemptStage | None) -> None:
    annotations = {} if stage is None else {ATTEMPTS_ANNOTATION: interrupted(stage=stage).to_json()}
    entry = build_entry(ScriptedKind(), data_upload(status={"phase": str(phase)}, annotations=annotations))
    runs = phase is Phase.IN_PROGRESS
    assert entry.stage is ((stage or AttemptStage.RUNNING) if runs else None)
    assert entry.interrupted_by is (InterruptionCause.STORAGE_UNAVAILABLE if runs and stage else None)
    assert entry.admission_phase is (COUNTED.get(entry.stage, phase) if entry.stage else phase)


@pytest.mark.parametrize("what", ["queue", pytest.param("snapshot", marks=pytest.mark.thorough)])
async def test_a_pending_transfer_takes_two_kibibytes_at_most(what: str) -> None:
    transfers = 200
    scene = open_scene("node-a", limit=1)
    scene.add("first")
    names = [f"nightly-backup-20261121-{number:05}" for number in range(transfers)]
    if what == "snapshot":
        pending = Admission(AdmissionState.PENDING, "SnapshotNotReady", "not ready: " + "x" * 40, indefinite=True)
        scene.kind.answers.update(dict.fromkeys(names, pending))
    tracemalloc.start()
    try:
        await measure(scene, 0)
        alone = await measure(scene, 0)
        for number, name in enumerate(names):
            scene.add(name, queue=f"team-{number % 7}", uid=f"8cd3b3a4-4f4e-4b7a-9c4a-{number:012}")
        full = await measure(scene, transfers)
    finally:
        tracemalloc.stop()
    assert 500 < (full - alone) / transfers <= 2048


async def test_the_finished_backups_of_a_repository_are_known_once_all_are_listed() -> None:
    kube = FakeKube()
    parts = fake_parts(kube)
    uids = {}
    for name, make, phase in (
        ("done", data_upload, "Completed"),
        ("failed", pod_volume_backup, "Failed"),
        ("running", data_upload, "InProgress"),
        ("restored", data_download, "Completed"),
    ):
        uids[name] = kube.put(make(name) | {"status": {"phase": phase}})["metadata"]["uid"]
    elsewhere = data_upload("elsewhere")
    kube.put(
        elsewhere | {"spec": elsewhere["spec"] | {"backupStorageLocation": "other"}, "status": {"phase": "Failed"}}
    )
    index = TransferIndex(parts.client, parts.clock, namespace=NAMESPACE, kinds=parts.kinds, on_change=lambda _: None)
    key = RepositoryKey(data_upload()["spec"]["sourceNamespace"], "default")
    assert index.finished_backups(key) is None
    async with running(index.run()):
        await index.wait_synced()
        namespaces = {data_upload()["spec"]["sourceNamespace"], pod_volume_backup()["spec"]["pod"]["namespace"]}

        def found() -> set[str]:
            return {uid for one in namespaces for uid in index.finished_backups(RepositoryKey(one, "default")) or []}

        assert found() == {uids["done"], uids["failed"]}
        kube.put(data_upload("running") | {"status": {"phase": "Canceled"}})
        await parts.client.delete(DATA_UPLOADS, NAMESPACE, "done")
        await until(lambda: found() == {uids["running"], uids["failed"]})


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
def test_a_backup_created_from_a_bucket_is_as_old_as_its_data(times: dict[str, int], hour: int | None) -> None:
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

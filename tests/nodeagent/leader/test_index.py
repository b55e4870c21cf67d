"""The memory that each of ten thousand pending transfers takes in the leader, measured on fewer."""

import asyncio
import gc
import tracemalloc

import pytest

from core.kube.resources import DATA_UPLOADS
from core.kube.transport import Request, Response
from core.models.names import ATTEMPTS_ANNOTATION, NOT_PREPARED_ANNOTATION
from core.models.phases import AttemptStage, InterruptionCause, Phase
from core.models.reasons import NotPrepared
from core.models.storage import RepositoryKey
from nodeagent.leader.index import TransferIndex, build_entry
from nodeagent.transfers.kinds.base import Admission, AdmissionState
from tests.nodeagent.support.dispatching import Scene, ScriptedKind, agent_pod, interrupted, open_scene
from tests.nodeagent.support.parts import fake_parts
from tests.nodeagent.support.transfers import NAMESPACE, data_download, data_upload, pod_volume_backup
from tests.support.fakekube import FakeKube
from tests.support.tasks import running

TRANSFERS = 200
MAX_BYTES_PER_TRANSFER = 2048
NOT_READY = Admission(
    AdmissionState.PENDING,
    "SnapshotNotReady",
    "VolumeSnapshot team-1/velero-data-x7k2p is not ready yet",
    indefinite=True,
)


class Forgetful(FakeKube):
    """A fake that keeps no list of requests, which would count as the leader's memory."""

    async def request(self, request: Request) -> Response:
        try:
            return await super().request(request)
        finally:
            self.requests.clear()


def traced_bytes() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


async def settle(scene: Scene, transfers: int) -> None:
    """Return once every transfer but the first is reported as pending, and nothing changes any more."""
    store = scene.kube._store
    async with asyncio.timeout(500):
        while sum(bool(cr["status"].get("message")) for cr in store.all(DATA_UPLOADS)) < transfers:
            await asyncio.sleep(1)
    await asyncio.sleep(10)


async def measure(scene: Scene, transfers: int) -> int:
    """Return the bytes that are freed when the dispatcher of so many pending transfers stops."""
    async with scene.dispatching():
        await settle(scene, transfers)
        with_it = traced_bytes()
    # Canceled timers keep references until they are due.
    await asyncio.sleep(1000)
    return with_it - traced_bytes()


@pytest.mark.parametrize(
    ("annotations", "expected"),
    [
        ({}, None),
        ({NOT_PREPARED_ANNOTATION: "MoverLost"}, NotPrepared.MOVER_LOST),
        ({NOT_PREPARED_ANNOTATION: "of a user"}, None),
        ({NOT_PREPARED_ANNOTATION: ""}, None),
    ],
    ids=["none", "recorded", "unknown", "empty"],
)
def test_only_recorded_failures_before_prepared_are_in_an_entry(
    annotations: dict[str, str], expected: NotPrepared | None
) -> None:
    raw = data_upload(annotations=annotations)
    assert build_entry(ScriptedKind(), raw).not_prepared is expected


COUNTED = {AttemptStage.READY: Phase.NEW, AttemptStage.EXPOSING: Phase.PREPARED}
"""The phase by which an interrupted transfer is admitted again."""


@pytest.mark.parametrize("stage", [None, *AttemptStage])
@pytest.mark.parametrize("phase", Phase)
def test_only_the_next_attempt_of_a_transfer_in_progress_is_admitted_again(
    phase: Phase, stage: AttemptStage | None
) -> None:
    annotations = {} if stage is None else {ATTEMPTS_ANNOTATION: interrupted(stage=stage).to_json()}
    entry = build_entry(ScriptedKind(), data_upload(status={"phase": str(phase)}, annotations=annotations))
    runs = phase is Phase.IN_PROGRESS
    assert entry.stage is ((stage or AttemptStage.RUNNING) if runs else None)
    assert entry.interrupted_by is (InterruptionCause.STORAGE_UNAVAILABLE if runs and stage else None)
    assert entry.admission_phase is (COUNTED.get(entry.stage, phase) if entry.stage else phase)


@pytest.mark.looptime
@pytest.mark.parametrize("what", ["queue", pytest.param("snapshot", marks=pytest.mark.thorough)])
async def test_a_pending_transfer_takes_two_kibibytes_at_most(what: str) -> None:
    scene = open_scene("node-a", limit=1)
    scene.kube = Forgetful()
    scene.kube.put(agent_pod("node-a"))
    scene.add("first")
    names = [f"nightly-backup-20261121-{number:05}" for number in range(TRANSFERS)]
    if what == "snapshot":
        scene.kind.answers.update(dict.fromkeys(names, NOT_READY))
    tracemalloc.start()
    try:
        await measure(scene, 0)
        alone = await measure(scene, 0)
        for number, name in enumerate(names):
            scene.add(name, queue=f"team-{number % 7}", uid=f"8cd3b3a4-4f4e-4b7a-9c4a-{number:012}")
        full = await measure(scene, TRANSFERS)
    finally:
        tracemalloc.stop()
    per_transfer = (full - alone) / TRANSFERS
    assert 500 < per_transfer <= MAX_BYTES_PER_TRANSFER


@pytest.mark.looptime
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
        found = {uid for one in namespaces for uid in index.finished_backups(RepositoryKey(one, "default")) or []}
    assert found == {uids["done"], uids["failed"]}

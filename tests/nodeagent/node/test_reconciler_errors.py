"""Transfers whose requests are rejected or objects lost; their faults; a result that the kubelet has not reported."""

import asyncio
from types import SimpleNamespace
from typing import cast

import pytest

from core.errors import ExposeError
from core.kube.events import EventRecorder
from core.kube.resources import DATA_UPLOADS, EVENTS, PERSISTENT_VOLUME_CLAIMS, PERSISTENT_VOLUMES, PODS
from core.models.names import NODE_LABEL, OUTCOME_ANNOTATION
from nodeagent.node.cache import TransferCache
from nodeagent.node.lifecycle import Site
from nodeagent.node.reconciler import TransferFaults
from nodeagent.node.steps import Tools
from nodeagent.transfers.kinds.csi_snapshot import DataUploadKind
from nodeagent.transfers.status import EventLog, StatusWriter
from tests.nodeagent.support.data_kinds import bare
from tests.nodeagent.support.harness import World, accepted, open_world
from tests.nodeagent.support.simulation import BACKUP_DONE, Mover
from tests.nodeagent.support.transfers import (
    NAMESPACE,
    NODE,
    data_download,
    data_upload,
    pod_volume_backup,
)
from tests.support.clock import LoopClock
from tests.support.fakekube import FakeKube
from tests.support.objects import JsonDict

pytestmark = pytest.mark.looptime


async def end_pod(world: World, *, exit_code: int, message: str) -> None:
    terminated = {"exitCode": exit_code, "message": message}
    status = {"phase": "Failed", "containerStatuses": [{"name": "mover", "state": {"terminated": terminated}}]}
    await world.cluster.client.patch(PODS, NAMESPACE, "du-1", {"status": status})


async def test_an_object_that_is_rejected_as_invalid_fails_its_transfer_at_once() -> None:
    async with open_world(accepted(data_upload())) as world, world.agent():
        world.kube.fail_next("POST", "/pods", 422)
        await world.until(world.done, seconds=10)
        assert world.phase() == "Failed"
        assert "create Pod velero/du-1: 422" in world.transfer()["status"]["message"]
        await asyncio.sleep(1)
        assert world.left() == {"persistentvolumeclaims": ["data"]}


@pytest.mark.cause("permission-missing")
async def test_a_missing_permission_is_reported_and_retried() -> None:
    async with open_world(accepted(data_upload())) as world, world.agent():
        world.kube.fail_next("POST", "/pods", 403, times=4)
        await world.until(
            lambda: "create Pod velero/du-1: 403" in world.transfer()["status"].get("message", ""), seconds=20
        )
        await world.until(world.done)
        assert world.phase() == "Completed"
        assert "message" not in world.transfer()["status"]
        assert world.reasons().count("Forbidden") == 1


@pytest.mark.cause("object-malformed")
async def test_a_malformed_object_is_reported_and_read_again() -> None:
    async with open_world(accepted(data_upload())) as world, world.agent():
        (claim,) = world.kube.objects(PERSISTENT_VOLUME_CLAIMS)
        world.kube.put(claim | {"spec": claim["spec"] | {"volumeMode": "Tape"}})
        place = f"{claim['metadata']['namespace']}/{claim['metadata']['name']}"
        await world.until(
            lambda: (
                f"malformed PersistentVolumeClaim {place}: spec.volumeMode: Invalid enum value 'Tape'"
                in world.transfer()["status"].get("message", "")
            ),
            seconds=20,
        )
        world.kube.put(claim)
        await world.until(world.done)
        assert world.phase() == "Completed"
        assert world.reasons().count("ObjectMalformed") == 1


async def test_a_forbidden_cleanup_is_reported_once_and_retried(caplog: pytest.LogCaptureFixture) -> None:
    async with open_world(accepted(data_upload())) as world, world.agent():
        world.kube.fail_next("DELETE", "/pods", 403, times=2)
        await world.until(world.done, seconds=100)
        assert world.phase() == "Completed"
        assert world.kube.objects(PODS) == []
        assert world.reasons().count("StepFailed") == 1
    errors = [record for record in caplog.records if record.levelname == "ERROR"]
    assert ["delete Pod velero/du-1: 403" in record.getMessage() for record in errors] == [True]


@pytest.mark.parametrize(
    ("kind", "verb", "path", "status"),
    [
        ("DataUpload", "PATCH", "/datauploads/first", 403),
        ("DataUpload", "PATCH", "/datauploads/first", 422),
        ("PodVolumeBackup", "GET", "/app/pods/", 403),
    ],
    ids=["write forbidden", "write invalid", "its volume cannot be confirmed"],
)
async def test_a_transfer_whose_start_is_rejected_keeps_no_slot_from_others(
    kind: str, verb: str, path: str, status: int
) -> None:
    first = accepted(data_upload("first") if kind == "DataUpload" else pod_volume_backup("first"))
    first["status"]["acceptedTimestamp"] = "2026-11-21T11:00:00Z"
    async with open_world(first, accepted(data_upload("second"))) as world, world.agent(slots=0) as agent:
        await world.until(lambda: (world.phase(kind, "first"), world.phase(name="second")) == ("Prepared",) * 2)
        world.kube.fail_next(verb, path, status, times=1000)
        agent.set_slots(1)
        await world.until(lambda: world.done(name="second"), seconds=60)
        assert (world.phase(kind, "first"), world.phase(name="second")) == ("Prepared", "Completed")
        sent = len(world.kube.requests)
        await asyncio.sleep(300)
        assert len(world.kube.requests) - sent < 100
        world.kube.fulfill()
        await world.until(lambda: world.done(kind, "first"), seconds=60)
        assert world.phase(kind, "first") == "Completed"


@pytest.mark.parametrize(
    ("exit_code", "message", "text"),
    [(12, "wrong password", "wrong password"), (0, BACKUP_DONE, "ended before its data path started")],
    ids=["with a message", "with a result"],
)
async def test_a_mover_that_ends_before_its_start_fails_its_transfer(exit_code: int, message: str, text: str) -> None:
    async with open_world(accepted(data_upload())) as world, world.agent(slots=0):
        await world.until(lambda: world.phase() == "Prepared")
        await end_pod(world, exit_code=exit_code, message=message)
        await world.until(world.done, seconds=10)
        assert world.phase() == "Failed"
        assert text in world.transfer()["status"]["message"]


async def test_a_transfer_whose_pod_is_deleted_after_a_cancel_request_is_canceled() -> None:
    async with open_world(accepted(data_upload()), mover=Mover(stubborn=True)) as world, world.agent():
        await world.until(lambda: world.phase() == "InProgress")
        await world.stop(world.transfer(), "cancel")
        await world.until(lambda: world.phase() == "Canceling")
        await world.cluster.client.delete(PODS, NAMESPACE, "du-1")
        await world.until(world.done, seconds=10)
        assert world.phase() == "Canceled"


@pytest.mark.parametrize(
    ("verb", "path", "times", "reason"),
    [
        ("PATCH", "/persistentvolumes", 4, "Forbidden"),
        # The volume of a DataDownload is read before it is changed.
        ("GET", "/persistentvolumes/", 2, "StepFailed"),
    ],
    ids=["handover", "step before it"],
)
async def test_a_rejected_later_step_is_reported_and_retried(verb: str, path: str, times: int, reason: str) -> None:
    text = f"{verb.lower()} PersistentVolume"
    async with open_world(accepted(data_download())) as world, world.agent():
        await world.until(lambda: world.phase("DataDownload") == "InProgress")
        world.kube.fail_next(verb, path, 403, times=times)
        await world.until(lambda: text in world.transfer("DataDownload")["status"].get("message", ""), seconds=20)
        await world.until(lambda: world.done("DataDownload"))
        assert world.phase("DataDownload") == "Completed"
        assert "message" not in world.transfer("DataDownload")["status"]
        assert world.reasons().count(reason) == 1


REJECTIONS = pytest.mark.parametrize(
    ("status", "message"),
    [(422, "spec: Invalid value"), (403, 'admission webhook "volumes.example.com" denied the request: freeze')],
    ids=["invalid", "webhook"],
)


@REJECTIONS
async def test_a_rejected_change_of_a_volume_is_waited_out(status: int, message: str) -> None:
    """The data is there: a policy that is changed in time does not cost a restore of hours."""
    async with open_world(accepted(data_download())) as world, world.agent():
        await world.until(lambda: world.phase("DataDownload") == "InProgress")
        world.kube.fail_next("PATCH", "/persistentvolumes", status, times=2, message=message)
        await world.until(lambda: message in world.transfer("DataDownload")["status"].get("message", ""), seconds=20)
        await world.until(lambda: world.done("DataDownload"), seconds=60)
        assert world.phase("DataDownload") == "Completed"
        assert world.reasons().count("Rejected") == 1


@REJECTIONS
async def test_a_change_of_a_volume_that_stays_rejected_fails_after_the_timeout(status: int, message: str) -> None:
    async with open_world(accepted(data_download())) as world, world.agent():
        await world.until(lambda: world.phase("DataDownload") == "InProgress")
        world.kube.fail_next("PATCH", "/persistentvolumes", status, times=100_000, message=message)
        world.cluster.tick_seconds = 5
        await asyncio.sleep(590)
        assert world.phase("DataDownload") == "InProgress"
        await world.until(lambda: world.phase("DataDownload") == "Failed", seconds=60, every=5)
        text = world.transfer("DataDownload")["status"]["message"]
        assert text.startswith("not completed within 10m0s after the data was moved: patch PersistentVolume pvc-")
        assert message in text


async def test_an_invalid_outcome_is_recorded_again() -> None:
    async with open_world(accepted(data_upload())) as world:
        async with world.agent():
            await world.until(lambda: world.phase() == "InProgress")
        await world.cluster.client.patch(
            DATA_UPLOADS, NAMESPACE, "du-1", {"metadata": {"annotations": {OUTCOME_ANNOTATION: "garbage"}}}
        )
        async with world.agent():
            await world.until(world.done)
        assert world.phase() == "Completed"


async def test_an_agent_creates_nothing_for_a_transfer_that_was_reassigned() -> None:
    transfer = accepted(data_upload())
    async with open_world(transfer, mover=Mover(starts=False)) as world:
        async with world.agent():
            await world.until(lambda: world.kube.objects(PODS) != [])
            label = {"metadata": {"labels": {NODE_LABEL: "node-b"}}}
            await world.cluster.client.patch(DATA_UPLOADS, NAMESPACE, "du-1", label)
            await world.cluster.client.delete(PODS, NAMESPACE, "du-1")
            await asyncio.sleep(20)
            assert world.kube.objects(PODS) == []
        async with world.agent(node="node-b"):
            await world.until(lambda: world.kube.objects(PODS) != [])


async def test_a_recorded_outcome_is_completed_without_the_pod() -> None:
    async with open_world(accepted(data_download())) as world:
        world.cluster.binds = False
        async with world.agent():
            await world.until(
                lambda: OUTCOME_ANNOTATION in world.transfer("DataDownload")["metadata"].get("annotations", {})
            )
            await world.until(lambda: world.kube.objects(PODS) == [])
        world.cluster.binds = True
        async with world.agent():
            await world.until(lambda: world.done("DataDownload"))
        assert world.phase("DataDownload") == "Completed"
        claim, volume = world.target()
        assert volume["spec"]["claimRef"]["uid"] == claim["metadata"]["uid"]
        assert len(world.kube.objects(PERSISTENT_VOLUMES)) == 1


KEY = ("DataUpload", NAMESPACE, "du-1")
UPLOADS = bare(DataUploadKind)


class StoredCache(TransferCache):
    """A cache that is always current."""

    def __init__(self, kube: FakeKube) -> None:
        super().__init__(kube.client, LoopClock(), Site(NODE, NAMESPACE), kinds=[UPLOADS])
        self._kube = kube

    def raw(self, key: tuple[str, str, str]) -> JsonDict | None:
        return next(iter(self._kube.objects(DATA_UPLOADS)), None)


def faults_of(kube: FakeKube) -> TransferFaults:
    client = kube.client
    events = EventLog(EventRecorder(client, LoopClock(), component="node-agent", host=NODE))
    status = StatusWriter(client, LoopClock())
    tools = SimpleNamespace(client=client, status=status, events=events, cache=StoredCache(kube))
    return TransferFaults(cast(Tools, tools))


def reasons(kube: FakeKube) -> list[str]:
    return [event["reason"] for event in kube.objects(EVENTS)]


def message(kube: FakeKube) -> str:
    return str(kube.objects(DATA_UPLOADS)[0]["status"].get("message", ""))


async def test_a_failed_step_is_reported_as_event_and_message_until_it_succeeds() -> None:
    kube = FakeKube()
    kube.put(accepted(data_upload()))
    faults = faults_of(kube)
    await faults.report_failed(UPLOADS, KEY, ExposeError("patch Pod: 403"))
    await faults.report_failed(UPLOADS, KEY, ExposeError("patch Pod: 403"))
    assert (reasons(kube), message(kube)) == (["StepFailed"], "patch Pod: 403")
    faults.clear(KEY)
    await faults.report_failed(UPLOADS, KEY, ExposeError("patch Pod: 404"))
    assert (len(reasons(kube)), message(kube)) == (2, "patch Pod: 404")


async def test_a_failed_step_of_a_final_transfer_leaves_its_status_alone() -> None:
    kube = FakeKube()
    kube.put(accepted(data_upload()) | {"status": {"phase": "Failed", "message": "no space left"}})
    await faults_of(kube).report_failed(UPLOADS, KEY, ExposeError("delete Pod: 403"))
    assert (reasons(kube), message(kube)) == (["StepFailed"], "no space left")


async def test_a_failed_step_is_reported_as_event_where_the_status_cannot_be_written() -> None:
    kube = FakeKube()
    kube.put(accepted(data_upload()))
    kube.fail_next("PATCH", "/datauploads", 403)
    await faults_of(kube).report_failed(UPLOADS, KEY, ExposeError("patch Pod: 403"))
    assert (reasons(kube), message(kube)) == (["StepFailed"], "")


async def test_an_invalid_transfer_is_reported_once_for_each_uid_and_cause() -> None:
    kube = FakeKube()
    kube.put(accepted(data_upload()))
    faults = faults_of(kube)
    await faults.report_invalid(KEY, "spec: missing")
    await faults.report_invalid(KEY, "spec: missing")
    assert reasons(kube) == ["Unreadable"]
    faults.forget(KEY, "uid-of-du-1")
    await faults.report_invalid(KEY, "spec: missing")
    assert len(reasons(kube)) == 2
    await faults.report_invalid(KEY, "spec: of another type")
    assert len(reasons(kube)) == 3


_LOOKS_SECONDS = 30.0
"""Longer than any check of a running transfer."""

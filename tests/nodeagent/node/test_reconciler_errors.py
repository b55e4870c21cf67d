"""Transfers whose requests are rejected or objects lost; their faults; a result that the kubelet has not reported.

Such a transfer completes once its mover has left its result, although its pod is still reported as running.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from core.kube.resources import DATA_UPLOADS, PERSISTENT_VOLUME_CLAIMS, PODS
from core.kube.transport import Request
from core.models.base import JsonDict
from core.models.names import DATA_UPLOAD_LABEL, OUTCOME_ANNOTATION
from nodeagent.transfers.mover_pod import PodState, pod_state
from tests.nodeagent.node.test_progress import event
from tests.nodeagent.support.harness import World, accepted, open_world
from tests.nodeagent.support.simulation import BACKUP_DONE, RESTORE_DONE, Mover
from tests.nodeagent.support.transfers import (
    NAMESPACE,
    data_download,
    data_upload,
    ended,
    pod_volume_backup,
    pod_volume_restore,
)
from tests.support.transports import Around

pytestmark = pytest.mark.looptime


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


class _WithoutPods(Around):
    """Its watches of pods show nothing."""

    def stream(self, request: Request) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        nothing = {"fieldSelector": "metadata.name=none"} if request.path.endswith("/pods") else {}
        return super().stream(replace(request, query={**request.query, **nothing}))


async def test_a_mover_pod_that_no_watch_shows_is_not_read_all_the_time() -> None:
    async with open_world(accepted(data_upload())) as world, world.agent(_WithoutPods(world.kube)):
        await world.until(lambda: any(pod_state(pod) is PodState.RUNNING for pod in world.kube.objects(PODS)))
        sent = len(world.kube.requests)
        await asyncio.sleep(60)
        reads = [one for one in world.kube.requests[sent:] if one.path.endswith("/pods/du-1")]
        assert len(reads) < 30


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
    """The status of a final transfer is left alone."""
    async with open_world(accepted(data_upload())) as world, world.agent():
        world.kube.fail_next("DELETE", "/pods", 403, times=2)
        await world.until(lambda: "StepFailed" in world.reasons())
        assert "message" not in world.transfer()["status"]
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
        await world.cluster.client.patch(PODS, NAMESPACE, "du-1", {"status": ended(exit_code, message)})
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


async def test_a_failed_step_is_an_event_where_its_message_cannot_be_written() -> None:
    async with open_world(accepted(data_download())) as world, world.agent():
        await world.until(lambda: "progress" in world.transfer("DataDownload")["status"])
        world.kube.fail_next("GET", "/persistentvolumes/", 403)
        world.kube.fail_next("PATCH", "/datadownloads/", 403)
        await world.until(lambda: world.done("DataDownload"))
    assert (world.phase("DataDownload"), world.reasons().count("StepFailed")) == ("Completed", 1)


async def test_a_rejection_whose_text_always_changes_is_retried_after_a_pause() -> None:
    async with open_world(accepted(data_upload()), mover=Mover(evicted=True)) as world, world.agent():
        for number in range(500):
            text = f'admission webhook "pods.example.com" denied the request: {number:x}-id'
            world.kube.fail_next("DELETE", "/pods/", 403, message=text)
        await world.until(lambda: "StepFailed" in world.reasons())
        before = len(world.kube.requests)
        await asyncio.sleep(300)
        assert 4 < world.reasons().count("StepFailed") < 14
        assert len(world.kube.requests) - before < 120
        world.kube.fulfill()
        world.cluster.mover.evicted = False
        await world.until(world.done)
    assert world.phase() == "Completed"


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


_LOOKS_SECONDS = 30.0
"""Longer than any check of a running transfer."""


def _mover_pod(world: World) -> JsonDict:
    return next(each for each in world.kube.objects(PODS) if each["metadata"].get("ownerReferences"))


def _leave(host_pods: Path, pod: JsonDict, message: str) -> None:
    Mover(host_pods=host_pods).leave(pod, message)


@asynccontextmanager
async def _running(transfer: JsonDict, host_pods: str | Path) -> AsyncIterator[tuple[World, JsonDict]]:
    """Run an agent whose transfer has a mover that never ends; yield its pod, whose container runs."""
    async with open_world(transfer, mover=Mover(stubborn=True)) as world, world.agent(host_pods=host_pods):
        await world.until(lambda: world.phase(transfer["kind"]) == "InProgress")
        yield world, _mover_pod(world)


@pytest.mark.parametrize(
    ("transfer", "message"),
    [
        pytest.param(data_upload(), BACKUP_DONE, id="DataUpload"),
        pytest.param(data_download(), RESTORE_DONE, id="DataDownload"),
        pytest.param(pod_volume_backup(), BACKUP_DONE, id="PodVolumeBackup"),
        pytest.param(pod_volume_restore(), RESTORE_DONE, id="PodVolumeRestore"),
    ],
)
async def test_a_result_that_was_left_completes_its_transfer(transfer: JsonDict, message: str, tmp_path: Path) -> None:
    async with _running(accepted(transfer), tmp_path) as (world, pod):
        _leave(tmp_path, pod, message)
        world.kube.put(event(transfer, "Completed", message))
        await world.until(lambda: world.done(transfer["kind"]), seconds=60)
        final = world.transfer(transfer["kind"])
        assert final["status"]["phase"] == "Completed"
        assert final["status"]["progress"] == {"totalBytes": 1000, "bytesDone": 1000}
        assert PODS.plural not in world.left() or transfer["kind"].startswith("PodVolume")


async def _stays(world: World) -> bool:
    """Return whether the transfer is InProgress after all checks that time alone brings."""
    await asyncio.sleep(_LOOKS_SECONDS)
    return world.phase() == "InProgress" and not (world.transfer()["metadata"].get("annotations") or {}).get(
        "nodeagent.io/outcome"
    )


_DELETED = {"deletionTimestamp": "2026-11-21T12:00:00Z", "finalizers": ["example.com/held"]}


@pytest.mark.parametrize(
    ("message", "left", "changed"),
    [
        # A process that may create Events in the namespace cannot have a transfer pass for complete.
        pytest.param(None, {}, {}, id="an Event alone"),
        pytest.param("", {}, {}, id="nothing"),
        pytest.param(BACKUP_DONE[:40], {}, {}, id="half"),
        pytest.param("cannot connect to the repository", {}, {}, id="a failure"),
        pytest.param("data path is canceled", {}, {}, id="canceled"),
        pytest.param("{}", {}, {}, id="no result"),
        pytest.param(BACKUP_DONE, {"uid": "another"}, {}, id="of another pod"),
        # It may have more to do after its last Event.
        pytest.param(BACKUP_DONE, {}, {"labels": {DATA_UPLOAD_LABEL: "du-1"}}, id="of a mover of Velero"),
        pytest.param(BACKUP_DONE, {}, _DELETED, id="of a pod that is being deleted"),
    ],
)
async def test_what_is_no_result_is_left_to_the_kubelet(
    message: str | None, left: JsonDict, changed: JsonDict, tmp_path: Path
) -> None:
    """A mover in a pod whose metadata was `changed` has left a `message`, or the one in a pod with other metadata."""
    transfer = accepted(data_upload())
    async with _running(transfer, tmp_path) as (world, pod):
        if changed:
            world.kube.put(pod | {"metadata": pod["metadata"] | changed})
        if message is not None:
            _leave(tmp_path, pod | {"metadata": pod["metadata"] | left}, message)
        world.kube.put(event(transfer, "Completed", BACKUP_DONE))
        assert await _stays(world)


@pytest.mark.parametrize("left", [False, True])
async def test_a_result_that_the_kubelet_has_cut_is_read_as_a_whole(left: bool, tmp_path: Path) -> None:
    transfer = accepted(data_upload())
    async with _running(transfer, tmp_path) as (world, pod):
        if left:
            _leave(tmp_path, pod, BACKUP_DONE)
        terminated = {"exitCode": 0, "reason": "Completed", "message": BACKUP_DONE[:40]}
        (running,) = _mover_pod(world)["status"]["containerStatuses"]
        world.kube.put(pod | {"status": {"containerStatuses": [running | {"state": {"terminated": terminated}}]}})
        await world.until(world.done)
        assert world.phase() == ("Completed" if left else "Failed")

"""A transfer whose mover is lost gets another attempt, and stays InProgress until it ends."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import pytest

from core.kube.resources import PERSISTENT_VOLUME_CLAIMS, PODS
from core.models.base import JsonDict, parse_time
from core.models.names import ATTEMPT_LABEL, ATTEMPTS_ANNOTATION, BANDWIDTH_ANNOTATION, OUTCOME_ANNOTATION
from core.models.phases import Attempts, AttemptStage, Interruption, InterruptionCause, RetryRules
from core.models.transfers import Transfer
from nodeagent.metrics import Metrics
from tests.nodeagent.support.harness import World, accepted, open_world, volumes_of
from tests.nodeagent.support.simulation import BACKUP_DONE, RESTORE_DONE, Mover
from tests.nodeagent.support.transfers import NAMESPACE, NODE, TRANSFERS, data_upload, disrupted, ended

pytestmark = pytest.mark.looptime

RULES = RetryRules(initial_backoff=timedelta(seconds=10), deadline=None)
RESTORES = ["DataDownload", "PodVolumeRestore"]
_STOPPED = "SIGTERM: data path is canceled"


RESTORED = {"initContainerStatuses": [{"name": "restore-wait", "state": {"terminated": {"exitCode": 0}}}]}
"""The status of a workload pod that has found its data."""


def attempts_of(world: World, kind: str = "DataUpload") -> Attempts:
    marks = world.transfer(kind).get("metadata", {}).get("annotations") or {}
    return Attempts.from_json(marks.get(ATTEMPTS_ANNOTATION) or "{}")


def mover_pod(world: World, kind: str = "DataUpload") -> JsonDict:
    name = world.transfer(kind)["metadata"]["name"]
    return next((pod for pod in world.kube.objects(PODS) if pod["metadata"]["name"] == name), {})


async def set_workload_status(world: World, status: JsonDict) -> None:
    meta = next(pod for pod in world.kube.objects(PODS) if not pod["metadata"].get("ownerReferences"))["metadata"]
    await world.cluster.client.patch(PODS, meta["namespace"], meta["name"], {"status": status})


async def set_pod_status(world: World, kind: str, status: JsonDict) -> None:
    name = mover_pod(world, kind)["metadata"]["name"]
    await world.cluster.client.patch(PODS, NAMESPACE, name, {"status": status})


@asynccontextmanager
async def interrupted_world(
    kind: str, status: JsonDict, *, rules: RetryRules = RULES, grants: bool = True, **options: Any
) -> AsyncIterator[World]:
    """A world whose first mover has just ended with `status` while it moved data."""
    async with open_world(accepted(TRANSFERS[kind]()), mover=Mover(seconds=1000)) as world:
        world.cluster.grants = grants
        async with world.agent(retries=rules, **options):
            await world.until(lambda: world.transfer(kind).get("status", {}).get("progress") is not None)
            await set_pod_status(world, kind, status)
            world.cluster.mover.seconds = 2
            yield world


@pytest.mark.parametrize("kind", TRANSFERS)
async def test_a_killed_mover_is_followed_by_another_attempt(kind: str) -> None:
    seen: list[tuple[str, int]] = []
    async with interrupted_world(kind, ended(137)) as world:

        def watch() -> bool:
            status = world.transfer(kind)["status"]
            seen.append((status["phase"], status["progress"]["bytesDone"]))
            return world.done(kind)

        await world.until(lambda: "attempt 1 was interrupted" in world.transfer(kind)["status"].get("message", ""))
        assert world.transfer(kind)["status"]["message"].endswith("attempt 2 begins in 10s")
        await world.until(
            lambda: mover_pod(world, kind).get("metadata", {}).get("labels", {}).get(ATTEMPT_LABEL) == "2"
        )
        assert "--attempt=2" in mover_pod(world, kind)["spec"]["containers"][0]["args"]
        await world.until(watch)
    phases = [phase for phase, _ in seen]
    assert set(phases) == {"InProgress", "Completed"}
    assert [done for _, done in seen] == sorted(done for _, done in seen)
    assert world.transfer(kind)["status"].get("message") is None
    (interruption,) = attempts_of(world, kind).interruptions
    assert (interruption.cause, interruption.node, interruption.terminated) == (InterruptionCause.KILLED, NODE, True)
    assert [reason for reason in world.reasons() if reason in {"Interrupted", "Retried", "Completed"}] == [
        "Interrupted",
        "Retried",
        "Completed",
    ]


async def test_each_attempt_starts_with_the_limits_that_hold_then() -> None:
    limits: dict[str, str | None] = {BANDWIDTH_ANNOTATION: '{"uploadBytesPerSecond":5}'}

    def starting(cr: Transfer) -> dict[str, str | None]:
        return limits if cr.attempts.number > 1 else {}

    async with interrupted_world("DataUpload", ended(137), starting=starting) as world:
        world.cluster.mover.stubborn = True
        await world.until(lambda: attempts_of(world).number == 2 and attempts_of(world).stage is AttemptStage.RUNNING)
        assert world.transfer()["metadata"]["annotations"].items() >= limits.items()


async def test_retries_end_with_the_cause_and_the_limit() -> None:
    async with interrupted_world("DataUpload", ended(137), rules=RetryRules(max_retries=2, deadline=None)) as world:
        world.cluster.mover.interrupted = 10
        await world.until(world.done, seconds=1000)
    assert (world.phase(), attempts_of(world).number) == ("Failed", 3)
    assert world.transfer()["status"]["message"].endswith("not retried: 2 retries (maxRetries)")


@pytest.mark.parametrize("stage", [AttemptStage.WAITING, AttemptStage.READY, AttemptStage.EXPOSING])
@pytest.mark.parametrize("kind", TRANSFERS)
async def test_a_cancel_between_two_attempts_ends_the_transfer_at_once(kind: str, stage: AttemptStage) -> None:
    async with interrupted_world(kind, ended(137), grants=stage is AttemptStage.EXPOSING) as world:
        world.cluster.mover.starts = False
        await world.until(lambda: attempts_of(world, kind).stage is stage)
        await world.stop(world.transfer(kind), "cancel")
        await world.until(lambda: world.phase(kind) == "Canceled", seconds=5)
        await world.until(lambda: world.done(kind))
    assert mover_pod(world, kind) == {}


@pytest.mark.parametrize("kind", TRANSFERS)
async def test_only_a_restore_waits_until_a_mover_without_a_known_end_has_fenced_itself(kind: str) -> None:
    async with interrupted_world(kind, {"phase": "Running"}) as world:
        began = asyncio.get_running_loop().time()
        await world.cluster.client.delete(PODS, NAMESPACE, mover_pod(world, kind)["metadata"]["name"])
        await world.until(lambda: attempts_of(world, kind).number == 2)
        await world.until(lambda: attempts_of(world, kind).stage is not AttemptStage.WAITING, every=0.5)
        waited = asyncio.get_running_loop().time() - began
        await world.until(lambda: world.done(kind))
    assert world.phase(kind) == "Completed"
    assert waited >= 180 if kind in RESTORES else waited < 30


@pytest.mark.parametrize("kind", RESTORES)
async def test_an_agent_that_is_restarted_every_minute_counts_what_it_waited_before(kind: str) -> None:
    async with open_world(accepted(TRANSFERS[kind]()), mover=Mover(seconds=1000)) as world:
        async with world.agent(retries=RULES):
            await world.until(lambda: world.transfer(kind).get("status", {}).get("progress") is not None)
            await world.cluster.client.delete(PODS, NAMESPACE, mover_pod(world, kind)["metadata"]["name"])
            await world.until(lambda: attempts_of(world, kind).number == 2)
        minutes = 1
        while attempts_of(world, kind).stage is AttemptStage.WAITING and minutes < 20:
            async with world.agent(retries=RULES):
                await asyncio.sleep(60)
            minutes += 1
    # As long as a fence, and as long as the write of the announcement may have taken.
    assert minutes in {6, 7}


@pytest.mark.parametrize("kind", RESTORES)
async def test_a_restore_waits_as_long_as_its_last_mover_says_something(kind: str) -> None:
    async with interrupted_world(kind, {"phase": "Running"}) as world:
        await world.cluster.client.delete(PODS, NAMESPACE, mover_pod(world, kind)["metadata"]["name"])
        await world.until(lambda: attempts_of(world, kind).number == 2)
        for minute in range(10):
            await world.cluster.record(world.transfer(kind), json.dumps({"totalBytes": 1000, "doneBytes": minute}))
            await asyncio.sleep(60)
            assert attempts_of(world, kind).stage is AttemptStage.WAITING


@pytest.mark.parametrize("kind", TRANSFERS)
async def test_a_restore_whose_mover_knows_no_fence_and_may_still_write_is_not_retried(kind: str) -> None:
    async with interrupted_world(kind, {"phase": "Running"}) as world:
        pod = mover_pod(world, kind)
        world.kube.put(pod | {"metadata": {key: pod["metadata"][key] for key in pod["metadata"] if key != "labels"}})
        await world.cluster.client.delete(PODS, NAMESPACE, pod["metadata"]["name"])
        await world.until(lambda: world.done(kind))
    assert world.phase(kind) == ("Failed" if kind in RESTORES else "Completed")


@pytest.mark.parametrize("kind", TRANSFERS)
async def test_another_attempt_begins_only_when_the_old_pod_is_gone(kind: str) -> None:
    async with interrupted_world(kind, ended(137, "", "ContainerStatusUnknown")) as world:
        pod = mover_pod(world, kind)
        world.kube.put(pod | {"metadata": pod["metadata"] | {"finalizers": ["test/hold"]}})
        await world.until(lambda: "is being deleted" in world.transfer(kind)["status"].get("message", ""), seconds=60)
        assert attempts_of(world, kind).stage is AttemptStage.WAITING
        may_write = f"its data mover may write: delete Node {NODE}" in world.transfer(kind)["status"]["message"]
        assert may_write is (kind in RESTORES)
        await world.cluster.client.patch(PODS, NAMESPACE, pod["metadata"]["name"], {"metadata": {"finalizers": None}})
        await world.until(lambda: world.done(kind))
    assert world.phase(kind) == "Completed"


@pytest.mark.parametrize(
    ("status", "same"),
    [(ended(137), True), (ended(143, _STOPPED, **disrupted("EvictionByEvictionAPI")), False)],
    ids=["killed", "evicted"],
)
async def test_a_backup_gets_a_new_volume_unless_only_its_mover_ended(status: JsonDict, same: bool) -> None:
    async with interrupted_world("DataUpload", {"phase": "Running"}) as world:
        before = await world.cluster.client.get(PERSISTENT_VOLUME_CLAIMS, NAMESPACE, "du-1")
        await set_pod_status(world, "DataUpload", status)
        await world.until(lambda: attempts_of(world).number == 2 and attempts_of(world).stage is AttemptStage.RUNNING)
        after = await world.cluster.client.get(PERSISTENT_VOLUME_CLAIMS, NAMESPACE, "du-1")
        await world.until(world.done)
    assert (before["metadata"]["uid"] == after["metadata"]["uid"]) is same


async def test_the_start_of_a_snapshot_is_recorded_with_the_progress() -> None:
    async with open_world(accepted(data_upload()), mover=Mover(seconds=5)) as world, world.agent():
        await world.until(lambda: world.phase() == "InProgress")
        message = {"totalBytes": 1000, "doneBytes": 500, "snapshotStarted": "2026-11-21T12:00:00.5Z"}
        await world.cluster.record(world.transfer(), json.dumps(message))
        await world.until(lambda: attempts_of(world).starts != ())
        assert [start.isoformat() for start in attempts_of(world).starts] == ["2026-11-21T12:00:00.500000+00:00"]
        await world.until(world.done)
    assert ATTEMPTS_ANNOTATION not in world.transfer()["metadata"].get("annotations", {})


@pytest.mark.parametrize("kind", ["PodVolumeBackup", "PodVolumeRestore"])
async def test_a_transfer_whose_workload_is_gone_gets_no_other_attempt(kind: str) -> None:
    async with interrupted_world(kind, {"phase": "Running"}) as world:
        workload = next(pod for pod in world.kube.objects(PODS) if not pod["metadata"].get("ownerReferences"))
        await world.cluster.client.delete(PODS, workload["metadata"]["namespace"], workload["metadata"]["name"])
        await set_pod_status(world, kind, ended(137))
        await world.until(lambda: world.done(kind))
    assert world.phase(kind) == "Failed"
    assert "not retried: " in world.transfer(kind)["status"]["message"]


async def test_a_transfer_that_waits_too_long_for_its_next_attempt_fails() -> None:
    rules = RetryRules(initial_backoff=timedelta(seconds=1), deadline=timedelta(hours=10_000))
    transfer = accepted(data_upload())
    async with open_world(transfer, mover=Mover(seconds=1, interrupted=1)) as world, world.agent(retries=rules):
        await world.until(lambda: attempts_of(world).stage is AttemptStage.READY)
        old = world.transfer()["metadata"] | {"creationTimestamp": "1999-01-01T00:00:00Z"}
        world.kube.put(world.transfer() | {"metadata": old})
        await world.until(world.done, seconds=200)
    status = world.transfer()["status"]
    assert status["phase"] == "Failed"
    assert "older than 10000h0m0s (deadline); attempt 1 was interrupted" in status["message"]


async def test_progress_does_not_decrease_and_what_is_sent_before_it_grows_is_sent_again() -> None:
    metrics = Metrics(NODE)
    async with interrupted_world("DataUpload", ended(137), metrics=metrics) as world:
        world.cluster.mover.stubborn = True
        await world.until(lambda: attempts_of(world).number == 2 and attempts_of(world).stage is AttemptStage.RUNNING)
        for done, sent in ((100, 10), (300, 30), (700, 70)):
            message = {"totalBytes": 1000, "doneBytes": done, "sentBytes": sent, "bytesPerSecond": done}
            await world.cluster.record(world.transfer(), json.dumps(message | {"attempt": 2}))
            # A list delivers Events of the first attempt again.
            await world.cluster.record(world.transfer(), json.dumps(message | {"doneBytes": 900, "sentBytes": 900}))
            await asyncio.sleep(2)
            assert world.transfer()["status"]["progress"] == {"totalBytes": 1000, "bytesDone": max(400, done)}
    (resent,) = [line for line in metrics.render().decode().splitlines() if "retry_resent_bytes_total{" in line]
    assert resent.endswith(" 30.0")


async def test_a_mover_that_gets_no_pod_keeps_no_other_from_a_slot() -> None:
    other = accepted(data_upload("du-2"))
    async with interrupted_world("DataUpload", ended(137), slots=1) as world:
        await world.until(lambda: attempts_of(world).number == 2)
        world.cluster.mover.starts = False
        await world.until(lambda: attempts_of(world).stage is AttemptStage.EXPOSING and mover_pod(world) != {})
        # No rule of the simulated cluster starts it.
        world.kube.put(mover_pod(world) | {"status": {"phase": "Unknown"}})
        world.cluster.mover.starts = True
        for obj in volumes_of(other):
            world.kube.put(obj)
        world.kube.put(other)
        await world.until(lambda: world.done(name="du-2"))
        assert (world.phase(name="du-2"), world.phase(name="du-1")) == ("Completed", "InProgress")
        assert (
            Attempts.from_json(world.transfer(name="du-1")["metadata"]["annotations"][ATTEMPTS_ANNOTATION]).number == 2
        )


@pytest.mark.parametrize("kind", TRANSFERS)
async def test_a_result_counts_that_an_announcement_came_too_late_for(kind: str) -> None:
    async with interrupted_world(kind, {"phase": "Running"}) as world:
        pod = mover_pod(world, kind)
        world.kube.put(pod | {"metadata": pod["metadata"] | {"finalizers": ["test/hold"]}})
        lost = Interruption(at=parse_time("2026-11-21T12:00:00Z"), cause=InterruptionCause.NODE_LOST, node=NODE)
        transfer = world.transfer(kind)
        mark = {ATTEMPTS_ANNOTATION: Attempts().interrupt(lost).to_json()}
        world.kube.put(transfer | {"metadata": transfer["metadata"] | {"annotations": mark}})
        await world.until(lambda: "deletionTimestamp" in mover_pod(world, kind)["metadata"])
        done = BACKUP_DONE if kind not in RESTORES else RESTORE_DONE
        if kind == "PodVolumeRestore":
            await set_workload_status(world, RESTORED)
        await set_pod_status(world, kind, ended(0, done))
        await world.until(lambda: OUTCOME_ANNOTATION in world.transfer(kind)["metadata"]["annotations"], seconds=100)
        await world.cluster.client.patch(PODS, NAMESPACE, pod["metadata"]["name"], {"metadata": {"finalizers": None}})
        await world.until(lambda: world.done(kind))
    assert world.phase(kind) == "Completed"
    assert "Retried" not in world.reasons()


async def test_a_backup_waits_while_its_workload_is_started_again() -> None:
    """A node was restarted: the init containers of the workload run again."""
    async with interrupted_world("PodVolumeBackup", ended(255, "", "Unknown")) as world:
        app = {"name": "app", "state": {"terminated": {"exitCode": 255, "reason": "Unknown"}}}
        await set_workload_status(world, {"phase": "Pending", "containerStatuses": [app]})
        await world.until(lambda: "starting again" in world.transfer("PodVolumeBackup")["status"].get("message", ""))
        await set_workload_status(world, {"phase": "Running", "containerStatuses": [app | {"state": {"running": {}}}]})
        await world.until(lambda: world.done("PodVolumeBackup"))
    assert world.phase("PodVolumeBackup") == "Completed"


async def test_a_restore_whose_workload_runs_already_is_not_written_again() -> None:
    """An earlier attempt wrote its done file, and its result was lost."""
    async with interrupted_world("PodVolumeRestore", ended(137)) as world:
        await world.until(lambda: attempts_of(world, "PodVolumeRestore").stage is AttemptStage.WAITING)
        await set_workload_status(world, RESTORED)
        await world.until(lambda: world.done("PodVolumeRestore"))
    assert world.phase("PodVolumeRestore") == "Failed"
    assert "no longer waits for its data" in world.transfer("PodVolumeRestore")["status"]["message"]
    assert "Retried" not in world.reasons()

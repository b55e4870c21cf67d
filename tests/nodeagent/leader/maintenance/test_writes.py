"""A maintenance that is disturbed at each of its writes, and what one that is held costs."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from zoneinfo import ZoneInfo

import pytest

from core.kube.resources import BACKUP_REPOSITORIES, BACKUP_STORAGE_LOCATIONS, PODS
from core.kube.transport import Request, Response
from core.models.base import JsonDict, format_time
from core.models.names import MAINTENANCE_ANNOTATION
from nodeagent.config.repositories import MaintenanceSettings
from nodeagent.config.windows import Window, parse_schedule
from tests.nodeagent.support.maintenance_scene import (
    MINUTE,
    MaintenanceScene,
    repository_object,
    result,
    velero_job,
    words_of,
)
from tests.nodeagent.support.repository_scene import SERVER
from tests.support.tasks import running, until
from tests.support.transports import Around

pytestmark = pytest.mark.looptime

_MOST_WRITES = 30
_WRITES = frozenset({"POST", "PATCH", "DELETE"})


@dataclass
class _AtWrite(Around):
    """A transport that calls `do` at the write number `at`, before or after it; then the write hangs, or goes on."""

    at: int
    do: Callable[[], object]
    after: bool
    hangs: bool
    writes: int = 0
    reached: bool = False

    async def request(self, request: Request) -> Response:
        if request.method not in _WRITES or request.path.endswith("/events"):
            return await self.inner.request(request)
        self.writes += 1
        if self.writes != self.at:
            return await self.inner.request(request)
        response = await self.inner.request(request) if self.after else None
        self.reached = True
        self.do()
        if self.hangs:
            await asyncio.Event().wait()
        return response or await self.inner.request(request)


@asynccontextmanager
async def _kubelet(scene: MaintenanceScene) -> AsyncIterator[None]:
    """Run the pod of each Job, and end it well 20 seconds after its Job was labeled."""

    async def work() -> None:
        while True:
            await asyncio.sleep(2)
            names = {pod["metadata"]["labels"].get("job-name") for pod in scene.kube.objects(PODS)}
            for job in scene.jobs:
                if job["metadata"]["name"] not in names:
                    scene.start_pod(job)
                elif scene.labeled(job) and not job.get("status"):
                    await asyncio.sleep(20)
                    if any(one["metadata"]["uid"] == job["metadata"]["uid"] for one in scene.jobs):
                        scene.end(job, 0, result(nextQuick="2026-12-01T00:00:00Z", nextFull="2026-12-01T00:00:00Z"))

    async with running(work()):
        yield


def _has_history(scene: MaintenanceScene) -> bool:
    return bool(scene.history)


def _is_reached(transport: _AtWrite, scene: MaintenanceScene) -> bool:
    return transport.reached or _has_history(scene)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
async def test_a_leader_that_is_stopped_at_any_write_leaves_one_run_and_its_result(after: bool) -> None:
    for number in range(1, _MOST_WRITES):
        scene = MaintenanceScene()
        transport = _AtWrite(scene.kube, number, lambda: None, after=after, hangs=True)
        async with _kubelet(scene):
            async with scene.running(transport):
                await until(partial(_is_reached, transport, scene), seconds=2 * 60 * MINUTE, every=1)
                await asyncio.sleep(30)
            async with scene.running():
                await until(partial(_has_history, scene), seconds=2 * 60 * MINUTE, every=1)
                await asyncio.sleep(5 * MINUTE)
        assert [entry["result"] for entry in scene.history] == ["Succeeded"], number
        assert len(scene.jobs) == 1
        assert "running" not in scene.record
        if not transport.reached:
            break
    assert 4 <= number < _MOST_WRITES - 1


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
async def test_a_server_that_appears_at_any_write_never_waits_for_ever(after: bool) -> None:
    """Each Job that it can see has a pod, so it ends; and no Job that it can see was deleted before."""
    for number in range(1, _MOST_WRITES):
        scene = MaintenanceScene()
        seen: list[JsonDict] = []
        transport = _AtWrite(scene.kube, number, partial(scene.kube.put, SERVER), after=after, hangs=False)
        async with _kubelet(scene), scene.running(transport):
            await until(partial(_is_reached, transport, scene), seconds=2 * 60 * MINUTE, every=1)
            for _ in range(300):
                seen += [job for job in scene.jobs if scene.labeled(job)]
                await asyncio.sleep(1)
        left = {job["metadata"]["uid"]: job for job in scene.jobs}
        assert all(scene.labeled(job) for job in left.values()), number
        for job in seen:
            assert left[job["metadata"]["uid"]].get("status"), number
        if not transport.reached:
            break
    assert 4 <= number < _MOST_WRITES - 1


_NEVER = Window(parse_schedule("0 0 1 1 *"), ZoneInfo("UTC"), timedelta(minutes=1))


@pytest.mark.parametrize("hold", ["location-read-only", "window", "rejected", "concurrency", "idle"])
async def test_repositories_that_are_held_cost_few_requests(hold: str) -> None:
    """Without any, the leader looks for a server every half minute."""
    count = 10
    windows = (_NEVER,) if hold == "window" else ()
    scene = MaintenanceScene(settings=MaintenanceSettings(windows=windows))
    if hold == "location-read-only":
        (location,) = scene.kube.objects(BACKUP_STORAGE_LOCATIONS)
        scene.kube.put(location | {"spec": location["spec"] | {"accessMode": "ReadOnly"}})
    if hold == "rejected":
        scene.kube.fail_next("POST", "pods", 403, times=10_000, message="exceeded quota")
    for number in range(count):
        scene.kube.put(repository_object(f"r{number}-default-kopia"))
    if hold == "idle":
        for one in scene.kube.objects(BACKUP_REPOSITORIES):
            scene.kube.put(one | {"spec": one["spec"] | {"maintenanceFrequency": "100h"}})
    async with scene.running():
        await asyncio.sleep(90 * MINUTE)
        if hold == "concurrency":
            scene.start_pod(scene.jobs[0])
            await scene.until_labeled(scene.jobs[0])
        before = len(scene.kube.requests)
        await asyncio.sleep(60 * MINUTE)
        per_minute = (len(scene.kube.requests) - before) / 60
        found = {shown["hold"] for shown in scene.report().values()}
    if hold != "idle":
        assert hold in found
    assert per_minute <= 2 + (1.8 * count if hold in {"location-read-only", "window", "rejected"} else 1)


async def test_no_job_is_labeled_beside_another_that_runs() -> None:
    """A Velero server started it before it was removed again."""
    async with MaintenanceScene().running() as scene:
        job = await scene.until_job(seconds=2 * 60 * MINUTE)
    scene.kube.put(velero_job())
    scene.start_pod(job)
    async with scene.running():
        await asyncio.sleep(30 * MINUTE)
        assert not scene.labeled(job)


async def test_of_two_jobs_on_both_sides_of_a_slots_edge_one_runs_and_one_finds_nothing_to_do() -> None:
    """Two leaders created them; their clocks differ."""
    async with MaintenanceScene().running() as scene:
        first = await scene.until_job(seconds=2 * 60 * MINUTE)
    slot = int(first["metadata"]["name"].rpartition("-")[2]) + 3_600_000
    name = f"app-default-kopia-maintain-job-{slot}"
    kept = {key: first["metadata"][key] for key in ("namespace", "labels")}
    scene.kube.put(first | {"metadata": kept | {"name": name}})
    second = scene.jobs[-1]
    scene.start_pod(first)
    scene.start_pod(second)
    async with scene.running():
        await asyncio.sleep(MINUTE)
        ran = next(job for job in (first, second) if scene.labeled(job))
        other = second if ran is first else first
        assert not scene.labeled(other)
        due = {"nextQuick": "2026-12-01T00:00:00Z", "nextFull": "2026-12-01T00:00:00Z"}
        scene.end(ran, 0, result(**due))
        await scene.until_labeled(other)
        scene.end(other, 0, result("none", reason="nothing is due", **due))
        await asyncio.sleep(MINUTE)
        assert [entry["startTimestamp"] for entry in scene.history] == [ran["metadata"]["creationTimestamp"]]
        assert "running" not in scene.record


@pytest.mark.parametrize("step", ["created", "running", "suspended", "ended"])
@pytest.mark.parametrize("when", ["observed", "without a leader", "created again"])
async def test_the_jobs_of_a_repository_that_was_deleted_are_removed_unless_they_run(when: str, step: str) -> None:
    """Nor are those whose end is history of the next repository of that name."""
    scene = MaintenanceScene()

    async def delete() -> None:
        await scene.client.delete(BACKUP_REPOSITORIES, "velero", "app-default-kopia")
        if when == "created again":
            scene.kube.put(repository_object(lastMaintenanceTime=format_time(scene.clock.now())))

    def is_left() -> bool:
        return job["metadata"]["uid"] in {one["metadata"]["uid"] for one in scene.jobs}

    async with scene.running():
        job = await scene.until_job(seconds=2 * 60 * MINUTE)
        if step != "created":
            scene.start_pod(job)
            await scene.until_labeled(job)
        if step == "suspended":
            job = scene.current(job)
            scene.kube.put(job | {"spec": job["spec"] | {"suspend": True}})
        if when != "without a leader":
            await delete()
            await asyncio.sleep(2 * MINUTE)
            assert is_left() == (step in {"running", "ended"} or (step, when) == ("suspended", "created again"))
    if when == "without a leader":
        await delete()
    async with scene.running():
        if step == "ended":
            scene.end(job, 0, result())
        await asyncio.sleep(2 * MINUTE)
        # What has ended is history of the next one, which would take its run for another cluster's.
        assert is_left() == (step in {"running", "ended"} or (step, when) == ("suspended", "created again"))


async def test_times_out_of_range_hold_up_no_other_repository_and_no_decision_is_shown(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scene = MaintenanceScene()
    stored = scene.kube.put(repository_object("r0-default-kopia"))
    async with scene.running():
        await asyncio.sleep(MINUTE)
        assert "r0-default-kopia" in scene.report()
        annotations = {MAINTENANCE_ANNOTATION: json.dumps({"fullIntervalSeconds": 1e15})}
        scene.kube.put(stored | {"metadata": stored["metadata"] | {"annotations": annotations}})
        job = await scene.until_job(seconds=2 * 60 * MINUTE)
        assert "r0-default-kopia" not in scene.report()
    assert "--backup-repository=app-default-kopia" in words_of(job)
    assert "r0-default-kopia: a time or duration of its maintenance is out of range" in caplog.text


async def test_what_a_wrong_clock_has_left_holds_nothing_and_is_replaced() -> None:
    scene = MaintenanceScene()
    ahead = "2027-11-21T12:00:00Z"
    failed = {"result": "Failed", "startTimestamp": ahead, "message": "x"}
    scene.kube.put(repository_object(lastMaintenanceTime=ahead, recentMaintenance=[failed]))
    async with scene.running():
        job = await scene.run_once(result(nextQuick="2026-12-01T00:00:00Z", nextFull="2026-12-01T00:00:00Z"))
        await asyncio.sleep(5 * 60 * MINUTE)
    assert [entry["result"] for entry in scene.history] == ["Succeeded", "Failed"]
    assert scene.repository()["status"]["lastMaintenanceTime"] == scene.current(job)["status"]["completionTime"]
    assert len(scene.jobs) == 1

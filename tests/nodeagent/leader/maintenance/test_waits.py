"""Each repository that is due is maintained within a bounded time, whatever else happens, and never in a tight loop."""

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest

from core.kube.errors import UnreachableError
from core.kube.resources import BACKUP_REPOSITORIES, DEPLOYMENTS, JOBS, PODS
from core.models.base import format_time
from nodeagent.config.repositories import MaintenanceSettings
from nodeagent.leader.maintenance import controller
from nodeagent.leader.maintenance.controller import MaintenanceController
from nodeagent.maintenance.jobs import MaintenanceJob, RepositoryJobs
from nodeagent.runtime.settings import MaintenanceSwitch
from tests.nodeagent.support.maintenance_scene import MINUTE, MaintenanceScene, repository_object, result
from tests.nodeagent.support.repository_scene import SERVER
from tests.support.objects import JsonDict

pytestmark = pytest.mark.looptime

_HOUR = 60 * MINUTE


def _suspend(scene: MaintenanceScene, job: JsonDict) -> None:
    """Suspend the Job, as a queue of Jobs does; the Job controller deletes its pod."""
    job = scene.current(job)
    scene.kube.put(job | {"spec": job["spec"] | {"suspend": True}})


@pytest.mark.parametrize("step", ["created", "labeled"])
async def test_a_job_that_stays_suspended_is_a_failure_with_that_cause(step: str) -> None:
    scene = MaintenanceScene()
    async with scene.running():
        job = await scene.until_job(seconds=2 * _HOUR)
        if step == "labeled":
            scene.start_pod(job)
            await scene.until_labeled(job)
            await asyncio.sleep(20 * MINUTE)
            await scene.client.delete(PODS, "velero", f"{job['metadata']['name']}-x")
        _suspend(scene, job)
        await asyncio.sleep(9 * MINUTE)
        assert scene.history == []
        await asyncio.sleep(3 * MINUTE)
        assert "the Job is suspended" in scene.history[0]["message"]
        assert not any(one["metadata"]["uid"] == job["metadata"]["uid"] for one in scene.jobs)
        await scene.run_once(result(), seconds=10 * MINUTE)


async def test_more_places_count_although_the_job_in_the_only_one_never_ends() -> None:
    scene = MaintenanceScene()
    scene.kube.put(repository_object("other-default-kopia"))
    async with scene.running():
        await scene.start_job()
        await asyncio.sleep(_HOUR)
        assert len(scene.jobs) == 1
        scene.settings = MaintenanceSettings(max_concurrent_jobs=2)
        await scene.until_job(seconds=10 * MINUTE, but=1)


async def test_a_job_past_its_deadline_whose_pod_stays_on_a_lost_node_keeps_its_place_from_no_other() -> None:
    scene = MaintenanceScene()
    scene.kube.put(repository_object("other-default-kopia"))
    async with scene.running():
        job = await scene.start_job()
        target = {"type": "FailureTarget", "status": "True", "reason": "DeadlineExceeded"}
        scene.kube.put(scene.current(job) | {"status": {"terminating": 1, "conditions": [target]}})
        await scene.until_job(seconds=_HOUR, but=1)
    assert {one["metadata"]["name"].partition("-")[0] for one in scene.jobs} == {"app", "other"}


@pytest.mark.parametrize("began", [True, False], ids=["after a while", "from the start"])
async def test_settings_that_cannot_be_read_stop_only_what_is_due(*, began: bool) -> None:
    unread = UnreachableError("no response")
    scene = MaintenanceScene(switch=MaintenanceSwitch.ON, unread=None if began else unread)
    scene.kube.put(repository_object(lastMaintenanceTime="2026-11-21T11:59:00Z"))
    async with scene.running():
        await asyncio.sleep(MINUTE)
        scene.unread = unread
        await asyncio.sleep(20 * MINUTE)
        assert scene.report()["app-default-kopia"]["hold"] == "not-due"
        scene.unread = None
        await scene.until_job(seconds=2 * _HOUR)


async def test_where_more_is_due_than_fits_no_repository_is_left_out() -> None:
    names = [f"r{number}-default-kopia" for number in range(3)]
    settings = MaintenanceSettings(keep_jobs=99)
    scene = MaintenanceScene(switch=MaintenanceSwitch.ON, settings=settings)
    for name in names:
        scene.kube.put(repository_object(name))
    async with scene.running():
        await scene.until_job(seconds=2 * _HOUR)
        for number in range(10):
            await asyncio.sleep(MINUTE)
            job = next(one for one in scene.jobs if "status" not in one)
            scene.start_pod(job)
            await scene.until_labeled(job)
            scene.backups.append(f"uid-{number}")
            await asyncio.sleep(40 * MINUTE)
            scene.end(job, 0, result(nextFull="2026-12-01T00:00:00Z"))
        counts = [len(scene.repository(name)["status"].get("recentMaintenance", [])) for name in names]
    assert min(counts) >= 2, counts


async def test_a_pod_that_is_rejected_for_long_makes_the_maintenance_overdue() -> None:
    scene = MaintenanceScene(switch=MaintenanceSwitch.ON)
    scene.kube.put(repository_object(lastMaintenanceTime="2026-11-17T10:00:00Z"))
    scene.kube.fail_next("POST", "pods", 403, message="exceeded quota: all", times=10_000)
    async with scene.running() as controller:
        await asyncio.sleep(2 * _HOUR)
        shown = controller.report()["app-default-kopia"]
    assert (shown["hold"], shown["overdue"]) == ("rejected", True)
    assert scene.reasons().count("MaintenanceOverdue") == 1
    assert scene.reasons().count("MaintenanceRejected") <= 3


@pytest.mark.parametrize(
    ("kept", "dropped"), [(True, True), (False, True), (True, False)], ids=["kept", "deleted", "not dropped"]
)
async def test_a_job_whose_end_a_server_has_stored_is_waited_for_no_more(*, kept: bool, dropped: bool) -> None:
    """A Velero server keeps three entries."""
    scene = MaintenanceScene()
    async with scene.running():
        job = await scene.start_job()
        scene.kube.put(SERVER)
        await asyncio.sleep(MINUTE)
        scene.end(job, 0, result())
        created, done = job["metadata"]["creationTimestamp"], scene.current(job)["status"]["completionTime"]
        if not kept:
            await scene.client.delete(JOBS, "velero", job["metadata"]["name"])
        if dropped:
            created = done = format_time(scene.clock.now())
        entry = {"result": "Succeeded", "startTimestamp": created, "completeTimestamp": done}
        stored = scene.repository()
        status = stored["status"] | {"recentMaintenance": [entry], "lastMaintenanceTime": done}
        scene.kube.put(stored | {"status": status})
        await asyncio.sleep(5 * MINUTE)
        await scene.remove_server()
        await asyncio.sleep(5 * MINUTE)
        assert "running" not in scene.record
        assert scene.history == [entry]
        await scene.until_job(seconds=2 * _HOUR, but=int(kept))


async def test_a_failed_job_that_a_server_does_not_see_does_not_outlive_our_maintenance() -> None:
    scene = MaintenanceScene()
    async with scene.running():
        job = await scene.until_job(seconds=2 * _HOUR)
        scene.start_pod(job, "Pending")
        scene.end(job, 1, "", reason="Evicted")
        await asyncio.sleep(MINUTE)
        assert len(scene.jobs) == 1
        scene.kube.put(SERVER)
        await asyncio.sleep(5 * MINUTE)
        assert scene.jobs == []


async def test_a_search_for_a_server_that_fails_does_not_find_that_there_was_none() -> None:
    async with MaintenanceScene().running() as scene:
        await asyncio.sleep(50 * MINUTE)
        scene.kube.fail_next("GET", DEPLOYMENTS.plural, 403)
        await asyncio.sleep(55 * MINUTE)
        assert (scene.jobs, scene.report()["app-default-kopia"]["hold"]) == ([], "server-seen")
        await scene.until_job(seconds=10 * MINUTE)


@pytest.mark.parametrize("again", [True, False], ids=["created again", "gone"])
async def test_the_runs_of_a_repository_are_known_when_it_is_created_again(*, again: bool) -> None:
    """Otherwise each would pass for another cluster's, and hold maintenance for three intervals."""
    scene = MaintenanceScene()
    async with scene.running():
        await scene.run_once(result(nextQuick="2026-12-01T00:00:00Z", nextFull="2026-12-01T00:00:00Z"))
        history = scene.history
        await scene.client.delete(BACKUP_REPOSITORIES, "velero", "app-default-kopia")
        await asyncio.sleep(2 * 24 * _HOUR)
        if again:
            scene.kube.put(repository_object(lastMaintenanceTime=format_time(scene.clock.now())))
            await asyncio.sleep(MINUTE)
            assert scene.history == history
        await asyncio.sleep(24 * _HOUR + 2 * MINUTE)
        assert bool(scene.jobs) is again


async def test_the_jobs_are_ordered_once_for_the_looks_at_all_repositories(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of repositories are looked at each minute, and each has a few Jobs."""
    scene, ordered = MaintenanceScene(), list[RepositoryJobs]()

    class Noted(RepositoryJobs):
        def __init__(self, jobs: Iterable[MaintenanceJob]) -> None:
            ordered.append(self)
            super().__init__(jobs)

    monkeypatch.setattr(controller, "RepositoryJobs", Noted)
    for number in range(9):
        scene.kube.put(repository_object(f"app-{number}-default-kopia"))
    async with scene.running():
        await asyncio.sleep(30 * MINUTE)
        assert len(ordered) == 1
        job = await scene.run_once(result())
        before = len(ordered)
        # A Job that is gone is news, too.
        await scene.client.delete(JOBS, "velero", job["metadata"]["name"])
        await asyncio.sleep(5 * MINUTE)
        assert before < len(ordered) <= before + 5
        assert job["metadata"]["uid"] not in {one.uid for one in ordered[-1].all}


async def test_the_end_of_a_job_wakes_its_repository_and_those_that_wait_for_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene, looks, look = MaintenanceScene(), list[str](), MaintenanceController._maintain

    async def note(self: Any, steps: Any, raw: JsonDict, jobs: Any) -> Any:
        looks.append(raw["metadata"]["name"])
        return await look(self, steps, raw, jobs)

    monkeypatch.setattr(MaintenanceController, "_maintain", note)
    for name in ("b", "a"):
        scene.kube.put(repository_object(f"{name}-default-kopia"))
    for number in range(9):
        scene.kube.put(repository_object(f"idle-{number}-default-kopia", frequency="168h0m0s"))
    async with scene.running():
        job = await scene.start_job()
        await asyncio.sleep(_HOUR)
        looks.clear()
        scene.end(job, 0, result())
        await asyncio.sleep(0.01)
        assert set(looks) == {f"{name}-default-kopia" for name in ("app", "a", "b")}

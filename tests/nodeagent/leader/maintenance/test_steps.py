"""The steps of a repository's maintenance, with two kinds of rivals: another leader, and a Velero server."""

import asyncio
from datetime import timedelta

import pytest

from core.kube.resources import JOBS, PODS
from core.models.base import JsonDict
from exposer.pods import JobSettings
from nodeagent.config.repositories import MaintenanceSettings
from nodeagent.runtime.settings import MaintenanceSwitch
from tests.nodeagent.support.maintenance_scene import (
    MINUTE,
    MaintenanceScene,
    repository_object,
    result,
    velero_job,
    words_of,
)
from tests.nodeagent.support.repository_scene import SERVER
from tests.support.clock import LoopClock

pytestmark = pytest.mark.looptime

_HOUR = 60 * MINUTE
_ERROR = "Repo maintenance error: "


async def test_a_due_repository_gets_one_job_and_the_status_that_velero_writes() -> None:
    async with MaintenanceScene().running() as scene:
        await asyncio.sleep(59 * MINUTE)
        assert scene.jobs == []
        assert scene.report()["app-default-kopia"]["hold"] == "server-seen"
        job = await scene.until_job(seconds=3 * MINUTE)
        assert "velero.io/repo-name" not in job["metadata"]["labels"]
        await asyncio.sleep(5 * MINUTE)
        assert not scene.labeled(job)
        scene.start_pod(job)
        await scene.until_labeled(job)
        assert scene.current(job)["metadata"]["labels"]["velero.io/repo-name"] == "app-default-kopia"
        scene.end(job, 0, result())
        await asyncio.sleep(10)
        (entry,) = scene.history
        completed = scene.current(job)["status"]["completionTime"]
        assert entry == {
            "result": "Succeeded",
            "startTimestamp": job["metadata"]["creationTimestamp"],
            "completeTimestamp": completed,
        }
        assert scene.repository()["status"]["lastMaintenanceTime"] == completed
        assert scene.reasons() == ["Maintained"]
        await asyncio.sleep(30 * MINUTE)
        assert len(scene.jobs) == 1
        text = scene.metrics.render().decode()
    for line in (
        'velero_repo_maintenance_success_total{node="node-a",repository_name="app-default-kopia"} 1.0',
        'nodeagent_repository_index_blobs{node="node-a",repository_name="app-default-kopia"} 7.0',
    ):
        assert line in text


@pytest.mark.parametrize("step", ["created", "running", "labeled"])
async def test_a_server_that_appears_meets_no_job_that_never_ends(step: str) -> None:
    async with MaintenanceScene().running() as scene:
        job = await scene.until_job(seconds=2 * _HOUR)
        if step == "labeled":
            scene.start_pod(job)
            await scene.until_labeled(job)
        scene.kube.put(SERVER)
        if step == "running":
            scene.start_pod(job)
        await asyncio.sleep(10 * MINUTE)
        assert [scene.labeled(one) for one in scene.jobs] == ([True] if step == "labeled" else [])
        assert scene.history == []
        if step != "labeled":
            # What never began is no failure; the next one waits for an hour.
            await scene.remove_server()
            await asyncio.sleep(59 * MINUTE)
            assert (scene.history, scene.jobs) == ([], [])
            await scene.until_job(seconds=3 * MINUTE)


async def test_a_failure_is_tried_again_with_a_growing_delay_and_moves_no_time() -> None:
    async with MaintenanceScene().running() as scene:
        first = await scene.run_once(f"log\n{_ERROR}blob not found: p1", exit_code=1)
        assert scene.history == [
            {
                "result": "Failed",
                "startTimestamp": first["metadata"]["creationTimestamp"],
                "message": "blob not found: p1",
            }
        ]
        assert scene.repository()["status"]["lastMaintenanceTime"] == "2026-11-21T12:00:00Z"
        await asyncio.sleep(4 * MINUTE)
        assert len(scene.jobs) == 1
        await scene.run_once(f"{_ERROR}again", exit_code=1, seconds=2 * MINUTE)
        await asyncio.sleep(8 * MINUTE)
        assert len(scene.jobs) == 2
        await scene.run_once(result("full"), seconds=4 * MINUTE)
        assert [entry["result"] for entry in scene.history] == ["Failed", "Failed", "Succeeded"]
        assert scene.reasons() == ["MaintenanceFailed", "MaintenanceFailed", "Maintained"]
        names = {job["metadata"]["name"] for job in scene.jobs}
        assert len(names) == 3


@pytest.mark.parametrize("step", ["created", "running", "labeled"])
async def test_a_job_that_was_deleted_by_hand_is_a_failure(step: str) -> None:
    async with MaintenanceScene().running() as scene:
        job = await scene.until_job(seconds=2 * _HOUR)
        await asyncio.sleep(1)
        if step != "created":
            scene.start_pod(job)
        if step == "labeled":
            await scene.until_labeled(job)
        await scene.client.delete(JOBS, "velero", job["metadata"]["name"])
        await asyncio.sleep(10)
        if step != "created":
            # Its pod may still write until it is gone.
            assert scene.history == []
            await scene.client.delete(PODS, "velero", f"{job['metadata']['name']}-x")
            await asyncio.sleep(10)
        (entry,) = scene.history
        assert entry["message"] == "it was deleted before it ended"
        assert "running" not in scene.record
        again = await scene.until_job(seconds=6 * MINUTE)
        assert again["metadata"]["name"] != job["metadata"]["name"]


async def test_a_run_that_was_out_of_memory_gets_twice_as_much_up_to_the_cap_and_says_so() -> None:
    scene = MaintenanceScene(settings=MaintenanceSettings(memory_limit_max_bytes=768 * 2**20))
    limits = []
    async with scene.running():
        for attempt in range(3):
            job = await scene.start_job(but=len(scene.jobs))
            limits.append(job["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]["memory"])
            assert scene.reasons().count("MaintenanceMemory") == attempt
            scene.end(job, 137, "", reason="OOMKilled")
            await asyncio.sleep(10)
        assert limits == ["512Mi", "768Mi", "768Mi"]
        assert scene.history[0]["message"] == "out of memory: the memory limit of its pod is 512Mi"


async def test_a_pod_that_never_starts_is_a_failure_with_its_cause() -> None:
    async with MaintenanceScene().running() as scene:
        job = await scene.until_job(seconds=2 * _HOUR)
        scene.start_pod(job, "Pending")
        pod = scene.kube.objects(PODS)[0]
        condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes: full"}
        scene.kube.put(pod | {"status": {"phase": "Pending", "conditions": [condition]}})
        await asyncio.sleep(11 * MINUTE)
        assert "0/1 nodes: full" in scene.history[0]["message"]
        assert not any(one["metadata"]["uid"] == job["metadata"]["uid"] for one in scene.jobs)


async def test_two_leaders_create_one_job_and_with_the_switch_on_at_once_and_none_if_it_is_off() -> None:
    on, off = MaintenanceScene(switch=MaintenanceSwitch.ON), MaintenanceScene(switch=MaintenanceSwitch.OFF)
    for scene in (on, off):
        scene.kube.put(repository_object(lastMaintenanceTime="2026-11-21T10:00:00Z"))
    async with on.running(), on.running(), off.running():
        assert "--ignore-foreign" in words_of(await on.until_job(seconds=5))
        await asyncio.sleep(5 * MINUTE)
        assert len(on.jobs) == 1
        await asyncio.sleep(3 * _HOUR)
    assert off.jobs == []


async def test_a_pod_that_is_rejected_gets_no_job_unless_its_priority_class_is_why_and_holds_up_no_other() -> None:
    settings = MaintenanceSettings(JobSettings(priority_class_name="low"), max_concurrent_jobs=2)
    scene = MaintenanceScene(settings=settings)
    scene.kube.put(repository_object("other-default-kopia"))
    scene.kube.fail_next("POST", "pods", 403, message="exceeded quota: all")
    scene.kube.fail_next("POST", "pods", 403, message="no PriorityClass with name low was found")
    async with scene.running():
        job = await scene.until_job(seconds=2 * _HOUR)
        assert "priorityClassName" not in job["spec"]["template"]["spec"]
        assert (len(scene.jobs), scene.reasons()) == (1, ["MaintenanceRejected"])
        assert [shown["hold"] for shown in scene.report().values()].count("rejected") == 1


async def test_a_job_of_a_server_that_is_gone_is_waited_for_and_becomes_history() -> None:
    old = {"result": "Succeeded", "startTimestamp": "2026-11-21T11:00:00Z", "completeTimestamp": "2026-11-21T11:01:00Z"}
    scene = MaintenanceScene()
    scene.kube.put(repository_object(recentMaintenance=[old]))
    scene.kube.put(velero_job())
    async with scene.running():
        await asyncio.sleep(50 * MINUTE)
        assert len(scene.jobs) == 1
        scene.kube.put(velero_job(succeeded=1, completionTime="2026-11-21T12:50:00Z"))
        await asyncio.sleep(10)
        assert scene.history == [
            old,
            {
                "result": "Succeeded",
                "startTimestamp": "2026-11-21T12:00:00Z",
                "completeTimestamp": "2026-11-21T12:50:00Z",
            },
        ]
        assert scene.repository()["status"]["lastMaintenanceTime"] == "2026-11-21T12:50:00Z"
        job = await scene.until_job(seconds=2 * _HOUR, but=1)
        assert "maintain-job" in job["metadata"]["name"]


async def test_an_unfinished_job_of_a_server_without_a_pod_is_removed_after_an_hour() -> None:
    scene = MaintenanceScene()
    scene.kube.put(velero_job())
    async with scene.running():
        await asyncio.sleep(59 * MINUTE)
        assert len(scene.jobs) == 1
        await asyncio.sleep(3 * MINUTE)
        assert all(job["metadata"]["name"] != velero_job()["metadata"]["name"] for job in scene.jobs)


async def test_as_many_finished_jobs_are_kept_as_configured() -> None:
    async with MaintenanceScene(settings=MaintenanceSettings(keep_jobs=2)).running() as scene:
        for _ in range(3):
            scene.backups.append(f"uid-{len(scene.history)}")
            await scene.run_once(result())
        await asyncio.sleep(2 * MINUTE)
        assert len(scene.jobs) == 2
        assert len(scene.history) == 3


async def test_maintenance_by_another_cluster_holds_ours_for_three_intervals() -> None:
    scene = MaintenanceScene()
    held = {"reason": "another cluster maintains it", "foreignAt": "2026-11-21T12:30:00Z"}
    text = result("none", held=True, fullIntervalSeconds=86400, **held)
    async with scene.running():
        await scene.run_once(text)
        assert scene.history == []
        assert scene.jobs == []
        assert scene.reasons() == ["MaintenanceHeld"]
        await asyncio.sleep(2 * MINUTE)
        assert scene.report()["app-default-kopia"]["hold"] == "foreign"
        await asyncio.sleep(70 * _HOUR)
        assert scene.jobs == []
        await scene.until_job(seconds=4 * _HOUR)


async def test_a_repository_that_is_not_ready_now_is_maintained_all_the_same() -> None:
    scene = MaintenanceScene()
    scene.kube.put(repository_object(phase="NotReady"))
    never = repository_object("never-default-kopia")
    scene.kube.put(never | {"status": {"phase": "NotReady"}})
    async with scene.running():
        job = await scene.until_job(seconds=2 * _HOUR)
        assert "--backup-repository=app-default-kopia" in words_of(job)
        await asyncio.sleep(9 * MINUTE)
        assert len(scene.jobs) == 1


async def test_an_idle_repository_gets_no_pod_for_days_and_a_backup_wakes_it() -> None:
    scene = MaintenanceScene()
    later = LoopClock().now() + timedelta(days=1)

    def due(**changes: object) -> dict[str, object]:
        return {"nextQuick": later.isoformat(), "nextFull": later.isoformat(), "fullIntervalSeconds": 86400} | changes

    async with scene.running():
        for _ in range(4):
            await scene.run_once(result("full", **due(nextFull=LoopClock().now().isoformat())))
        assert scene.record["fullsSinceChange"] == 4
        before = len(scene.history)
        # It was due after a day; the rules have the week.
        await asyncio.sleep(36 * _HOUR)
        assert len(scene.history) == before
        assert scene.report()["app-default-kopia"]["hold"] == "idle"
        scene.backups.append("uid-1")
        await scene.run_once(result("quick"), seconds=_HOUR)


async def test_as_many_jobs_run_at_a_time_as_configured() -> None:
    scene = MaintenanceScene()
    for number in range(3):
        scene.kube.put(repository_object(f"r{number}-default-kopia"))
    async with scene.running():
        for number in range(4):
            job = await scene.until_job(seconds=2 * _HOUR, but=number)
            await asyncio.sleep(3 * MINUTE)
            assert len(scene.jobs) == number + 1
            scene.start_pod(job)
            await scene.until_labeled(job)
            scene.end(job, 0, result(nextQuick="2026-12-01T00:00:00Z", nextFull="2026-12-01T00:00:00Z"))


@pytest.mark.parametrize(
    ("status", "text"),
    [
        ({"reason": "Evicted", "message": "node low on memory"}, "Evicted: node low on memory"),
        ({"reason": "DeadlineExceeded"}, "before its deadline of 6h0m0s"),
    ],
    ids=["evicted", "deadline"],
)
async def test_the_end_of_a_pod_by_its_node_is_named(status: JsonDict, text: str) -> None:
    async with MaintenanceScene().running() as scene:
        job = await scene.start_job()
        scene.kube.put(scene.kube.objects(PODS)[0] | {"status": {"phase": "Failed"} | status})
        scene.kube.put(scene.current(job) | {"status": {"failed": 1}})
        await asyncio.sleep(10)
        assert text in scene.history[0]["message"]


async def test_a_result_counts_although_the_pod_was_ended_meanwhile() -> None:
    async with MaintenanceScene().running() as scene:
        job = await scene.start_job()
        pod, times = scene.kube.objects(PODS)[0], {"lastTransitionTime": "2026-11-21T12:09:00Z"}
        terminated = {"exitCode": 0, "reason": "Completed", "message": result("full")}
        state = [{"name": pod["spec"]["containers"][0]["name"], "state": {"terminated": terminated}}]
        shutdown = {"phase": "Failed", "reason": "Terminated", "message": "imminent node shutdown"}
        scene.kube.put(pod | {"status": shutdown | {"containerStatuses": state}})
        failed = {"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded"} | times
        scene.kube.put(scene.current(job) | {"status": {"failed": 1, "conditions": [failed]}})
        await asyncio.sleep(10)
    (entry,) = scene.history
    assert (entry["result"], entry["completeTimestamp"]) == ("Succeeded", times["lastTransitionTime"])

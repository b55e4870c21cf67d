"""Schedules in the cluster: created, changed, listed and deleted, also after an interruption."""

from datetime import timedelta

import pytest

from core.errors import ConfigError
from core.kube.errors import KubeError, NotFoundError
from core.kube.resources import (
    CLUSTER_ROLE_BINDINGS,
    CLUSTER_ROLES,
    CONFIG_MAPS,
    CRON_JOBS,
    DAEMON_SETS,
    ROLE_BINDINGS,
    ROLES,
    SERVICE_ACCOUNTS,
)
from nodeagent.cli.run_schedule import parse_run
from nodeagent.operations.schedules.objects import AgentImage, build_schedule
from nodeagent.operations.schedules.owned import OwnedObjects
from nodeagent.operations.schedules.request import ScheduleRequest, ScheduleTimes
from nodeagent.operations.schedules.store import (
    ScheduleList,
    apply_schedule,
    delete_schedule,
    find_schedules,
    read_image,
    read_request,
)
from tests.nodeagent.support.hand_clock import NOON
from tests.nodeagent.support.schedule_scene import ScheduleScene

_ACCESS = (SERVICE_ACCOUNTS, ROLES, ROLE_BINDINGS, CLUSTER_ROLES, CLUSTER_ROLE_BINDINGS)


@pytest.fixture
def scene() -> ScheduleScene:
    return ScheduleScene()


def _parse(words: object) -> ScheduleRequest:
    return parse_run(words)[0]  # type: ignore[arg-type]


async def _create(scene: ScheduleScene, times: ScheduleTimes | None = None, image: str = "i:1") -> bool:
    request = scene.request(ttl=timedelta(days=1))
    objects = build_schedule(request, times or ScheduleTimes("0 2 * * *", "Europe/Berlin"), AgentImage(image), NOON)
    return await apply_schedule(_owned(scene, request), objects, _parse)


def _owned(scene: ScheduleScene, request: ScheduleRequest) -> OwnedObjects:
    return OwnedObjects(scene.old.client, request, scene.lines.append, scene.lines.append)


async def _delete(scene: ScheduleScene, name: str) -> None:
    await delete_schedule(_owned(scene, await read_request(scene.old.client, "velero", name, _parse)))


async def _find(scene: ScheduleScene, *names: str) -> ScheduleList:
    return await find_schedules(scene.old.client, "velero", names, _parse, NOON)


async def test_a_schedule_is_listed_with_its_runs(scene: ScheduleScene) -> None:
    assert await _create(scene) is False
    (cron_job,) = scene.cron_jobs
    status = {
        "lastScheduleTime": "2026-11-21T01:00:00Z",
        "lastSuccessfulTime": "2026-11-21T01:10:00Z",
        "active": [{"kind": "Job", "name": "x"}],
    }
    scene.kube.put(cron_job | {"status": status})
    (found,) = (await _find(scene)).schedules
    assert (found.name, found.schedule, found.time_zone, found.ttl) == (
        "night",
        "0 2 * * *",
        "Europe/Berlin",
        "24h0m0s",
    )
    assert (found.claims, found.method, found.running) == ("app/data", "auto", 1)
    assert found.next_run is not None
    assert found.next_run.hour == 1


async def test_creating_it_again_changes_it(scene: ScheduleScene) -> None:
    await _create(scene)
    scene.kube.put(scene.kube.objects(CONFIG_MAPS)[0] | {"data": {"x": '{"default":["app/x/u"]}'}})
    assert await _create(scene, ScheduleTimes("@daily", suspend=True), "i:2") is True
    (cron_job,) = scene.cron_jobs
    assert (cron_job["spec"]["schedule"], cron_job["spec"]["suspend"]) == ("@daily", True)
    assert "timeZone" not in cron_job["spec"]
    (container,) = cron_job["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "i:2"
    # The record of what is being deleted stays.
    assert scene.kube.objects(CONFIG_MAPS)[0]["data"] == {"x": '{"default":["app/x/u"]}'}
    (found,) = (await _find(scene)).schedules
    assert (found.suspended, found.next_run) == (True, None)


async def test_another_cron_job_of_the_name_is_left_alone(scene: ScheduleScene) -> None:
    scene.old.put("CronJob", "night", "batch/v1", spec={"schedule": "@daily"})
    with pytest.raises(ConfigError, match="CronJob velero/night exists, and is not of schedule night"):
        await _create(scene)
    assert scene.old.names(SERVICE_ACCOUNTS) == set()
    assert (await _find(scene)).schedules == []
    with pytest.raises(NotFoundError, match="there is no schedule night in namespace velero"):
        await _delete(scene, "night")


@pytest.mark.parametrize("interrupted", range(8))
async def test_a_deletion_that_was_interrupted_is_repeated(scene: ScheduleScene, interrupted: int) -> None:
    await _create(scene)
    if interrupted:
        before = len(scene.kube.requests)
        inner = scene.kube.request

        async def request(what: object) -> object:
            if len(scene.kube.requests) - before == interrupted:
                raise KubeError("stopped", status=500)
            return await inner(what)  # type: ignore[arg-type]

        scene.kube.request = request  # type: ignore[assignment, method-assign]
        with pytest.raises(KubeError):
            await _delete(scene, "night")
        scene.kube.request = inner  # type: ignore[method-assign]
    await _delete(scene, "night")
    assert [one for resource in (*_ACCESS, CRON_JOBS) for one in scene.kube.objects(resource)] == []
    assert scene.lines[-1] == "CronJob velero/night"
    assert len(scene.lines) == 8


async def test_an_unknown_name_has_a_hint(scene: ScheduleScene) -> None:
    await _create(scene)
    with pytest.raises(NotFoundError, match=r"there is no schedule nigth in namespace velero \(did you mean night\?\)"):
        await _find(scene, "nigth")
    with pytest.raises(NotFoundError, match=r"did you mean night\?"):
        await _delete(scene, "nigt")


async def test_a_cron_job_of_another_version_is_a_note(scene: ScheduleScene) -> None:
    await _create(scene)
    (cron_job,) = scene.cron_jobs
    template = cron_job["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    template["containers"][0]["args"].append("--later")
    scene.kube.put(cron_job)
    found = await _find(scene)
    assert found.schedules == []
    assert found.notes[0].startswith("CronJob velero/night cannot be read: unrecognized arguments: --later")


async def test_without_agents_there_is_no_image(scene: ScheduleScene) -> None:
    assert await read_image(scene.old.client, "velero") == AgentImage("mover:1")
    await scene.claims.client.delete(DAEMON_SETS, "velero", "node-agent")
    with pytest.raises(ConfigError, match="DaemonSet velero/node-agent does not exist: run nodeagent install"):
        await read_image(scene.old.client, "velero")

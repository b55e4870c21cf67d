"""The objects of a schedule: none is left that is not needed, and none of someone else is touched."""

from datetime import timedelta

import pytest

from client.backups.manifests import Method
from client.backups.plan import Choice, ClaimName
from client.schedules.manifests import build_schedule
from client.schedules.request import ScheduleRequest, ScheduleTimes
from client.schedules.store import OwnedObjects, apply_schedule, delete_schedule
from core.errors import ConfigError
from core.kube.resources import CLUSTER_ROLE_BINDINGS, CLUSTER_ROLES, ROLE_BINDINGS, ROLES
from exposer.pods import AgentImage
from tests.client.support.schedule_scene import ScheduleScene
from tests.nodeagent.support.hand_clock import NOON

_ROLES = (ROLES, ROLE_BINDINGS, CLUSTER_ROLES, CLUSTER_ROLE_BINDINGS)


@pytest.fixture
def scene() -> ScheduleScene:
    return ScheduleScene()


def _owned(scene: ScheduleScene, request: ScheduleRequest) -> OwnedObjects:
    return OwnedObjects(scene.old.client, request, scene.lines.append, scene.lines.append)


async def _apply(scene: ScheduleScene, request: ScheduleRequest, image: str = "i:1") -> None:
    objects = build_schedule(request, ScheduleTimes("@daily"), AgentImage(image), NOON)
    await apply_schedule(_owned(scene, request), objects)


async def _delete(scene: ScheduleScene, request: ScheduleRequest) -> None:
    await delete_schedule(_owned(scene, request))


def _roles(scene: ScheduleScene) -> set[tuple[str, str, str]]:
    return {
        (one["kind"], one["metadata"].get("namespace", ""), one["metadata"]["name"])
        for resource in _ROLES
        for one in scene.kube.objects(resource)
    }


@pytest.mark.parametrize("may_list", [True, False], ids=["listed", "not listed"])
async def test_a_change_leaves_no_role_that_is_not_needed_any_more(scene: ScheduleScene, *, may_list: bool) -> None:
    await _apply(scene, scene.request(ttl=timedelta(days=1)))
    assert ("Role", "app", "node-agent-schedule.velero.night") in _roles(scene)
    if not may_list:
        for kind in ("roles", "rolebindings", "clusterroles", "clusterrolebindings"):
            scene.kube.fail_next("GET", f"/apis/rbac.authorization.k8s.io/v1/{kind}", 403, message="may not list")
    await _apply(scene, ScheduleRequest("night", "velero", Choice((ClaimName("db", "data"),), method=Method.FS_BACKUP)))
    wanted = {("velero", "node-agent-schedule-night"), ("db", "node-agent-schedule.velero.night")}
    assert {one[1:] for one in _roles(scene)} == wanted
    assert any("may be left: " in line and "may not list" in line for line in scene.lines) is not may_list


async def test_a_deletion_finds_roles_of_earlier_namespaces_and_of_no_other_schedule(scene: ScheduleScene) -> None:
    request = scene.request()
    await _apply(scene, request)
    of_another = ScheduleRequest("night", "other", Choice((ClaimName("app", "data"),)))
    objects = build_schedule(of_another, ScheduleTimes("@daily"), AgentImage("i"), NOON)
    for one in objects:
        if one["kind"] in {resource.kind for resource in _ROLES}:
            scene.kube.put(one)
    others = {one for one in _roles(scene) if "other" in "".join(one)}
    assert others
    role = next(one for one in scene.kube.objects(ROLES) if one["metadata"]["name"].endswith(".velero.night"))
    scene.kube.put(role | {"metadata": role["metadata"] | {"namespace": "before", "uid": "u-before"}})
    await _delete(scene, request)
    assert _roles(scene) == others
    assert "Role before/node-agent-schedule.velero.night" in scene.lines


async def test_a_role_of_someone_else_is_left_alone_and_named(scene: ScheduleScene) -> None:
    request = scene.request()
    foreign = "Role app/node-agent-schedule.velero.night exists, and is not of schedule night: it is left alone"
    await _apply(scene, request)
    (role,) = [one for one in scene.kube.objects(ROLES) if one["metadata"]["namespace"] == "app"]
    scene.kube.put(role | {"metadata": role["metadata"] | {"labels": {}}, "rules": []})
    with pytest.raises(ConfigError, match=foreign):
        await _apply(scene, request, "i:2")
    assert "i:2" not in str(scene.cron_jobs)
    with pytest.raises(ConfigError, match=foreign):
        await _delete(scene, request)
    assert _roles(scene) == {("Role", "app", "node-agent-schedule.velero.night")}
    assert scene.cron_jobs == []

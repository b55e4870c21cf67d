"""Schedules in the cluster: created, changed, listed and deleted, also after an interruption, and nothing of others."""

import itertools
from dataclasses import replace
from datetime import timedelta

import pytest

from client.backups.manifests import Method
from client.backups.plan import Choice, ClaimName
from client.install.apply import ApplyResult
from client.schedules.manifests import build_schedule
from client.schedules.request import ScheduleRequest, ScheduleTimes
from client.schedules.store import (
    OwnedObjects,
    ScheduleList,
    apply_schedule,
    delete_schedule,
    find_applier,
    find_schedules,
    read_request,
    renew_schedules,
)
from core.errors import ConfigError
from core.kube.errors import KubeError, NotFoundError
from core.kube.resources import (
    CLUSTER_ROLE_BINDINGS,
    CLUSTER_ROLES,
    CONFIG_MAPS,
    CRON_JOBS,
    LEASES,
    ROLE_BINDINGS,
    ROLES,
    SERVICE_ACCOUNTS,
)
from core.models.names import VERIFICATION_INTERVAL_ANNOTATION
from exposer.pods import AgentImage
from tests.client.support.schedule_scene import ScheduleScene
from tests.nodeagent.support.hand_clock import NOON
from tests.support.objects import JsonDict

_ROLES = (ROLES, ROLE_BINDINGS, CLUSTER_ROLES, CLUSTER_ROLE_BINDINGS)
_DAILY = ScheduleTimes("@daily")
_KUBECTL = "kubectl.kubernetes.io/last-applied-configuration"


@pytest.fixture
def scene() -> ScheduleScene:
    return ScheduleScene()


async def _apply(
    scene: ScheduleScene, request: ScheduleRequest, times: ScheduleTimes = _DAILY, image: str = "i:1"
) -> ApplyResult:
    return await apply_schedule(_owned(scene, request), build_schedule(request, times, AgentImage(image), NOON))


async def _create(scene: ScheduleScene, image: str = "i:1") -> ApplyResult:
    times = ScheduleTimes("0 2 * * *", "Europe/Berlin")
    return await _apply(scene, scene.request(ttl=timedelta(days=1)), times, image)


def _owned(scene: ScheduleScene, request: ScheduleRequest) -> OwnedObjects:
    return OwnedObjects(replace(scene.old.tools, on_note=scene.lines.append), request, scene.lines.append)


async def _delete(scene: ScheduleScene, name: str = "night") -> None:
    await delete_schedule(_owned(scene, await read_request(scene.old.client, "velero", name)))


async def _find(scene: ScheduleScene, *names: str) -> ScheduleList:
    return await find_schedules(scene.old.client, "velero", names, NOON)


def _container(cron_job: JsonDict) -> JsonDict:
    (container,) = cron_job["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"]
    return container


async def test_a_schedule_is_listed_with_its_runs(scene: ScheduleScene) -> None:
    assert await _create(scene) is ApplyResult.CREATED
    (cron_job,) = scene.cron_jobs
    scene.kube.put(cron_job | {"status": {"active": [{"kind": "Job", "name": "x"}]}})
    (found,) = (await _find(scene)).schedules
    assert (found.schedule, found.time_zone, found.running) == ("0 2 * * *", "Europe/Berlin", 1)
    assert found.next_run is not None
    assert found.next_run.hour == 1


async def test_creating_it_again_changes_it(scene: ScheduleScene) -> None:
    await _create(scene)
    scene.kube.put(scene.kube.objects(CONFIG_MAPS)[0] | {"data": {"x": '{"default":["app/x/u"]}'}})
    scene.kube.put(scene.kube.objects(LEASES)[0] | {"spec": {"holderIdentity": "h"}})
    changed = ScheduleTimes("@daily", suspend=True)
    assert await _apply(scene, scene.request(ttl=timedelta(days=1)), changed, "i:2") is ApplyResult.CHANGED
    (cron_job,) = scene.cron_jobs
    assert (cron_job["spec"]["schedule"], cron_job["spec"]["suspend"]) == ("@daily", True)
    assert "timeZone" not in cron_job["spec"]
    assert _container(cron_job)["image"] == "i:2"
    # The record of what is being deleted stays, and so does the Lease of who deletes.
    assert scene.kube.objects(CONFIG_MAPS)[0]["data"] == {"x": '{"default":["app/x/u"]}'}
    assert scene.kube.objects(LEASES)[0]["spec"] == {"holderIdentity": "h"}
    (found,) = (await _find(scene)).schedules
    assert (found.suspended, found.next_run) == (True, None)


async def test_another_cron_job_of_the_name_is_left_alone(scene: ScheduleScene) -> None:
    scene.old.put("CronJob", "night", "batch/v1", spec={"schedule": "@daily"})
    with pytest.raises(ConfigError, match="CronJob velero/night exists, and is not of schedule night"):
        await _create(scene)
    assert scene.old.names(SERVICE_ACCOUNTS) == set()
    assert (await _find(scene)).schedules == []
    with pytest.raises(NotFoundError, match="there is no schedule night in namespace velero"):
        await _delete(scene)


@pytest.mark.parametrize("path", ["/namespaces/app/roles", "/cronjobs"])
async def test_what_cannot_be_created_is_found_before_anything_is(path: str, scene: ScheduleScene) -> None:
    scene.kube.fail_next("POST", path, 404, message='namespaces "app" not found')
    with pytest.raises(NotFoundError, match='namespaces "app" not found'):
        await _create(scene)
    assert (scene.old.names(SERVICE_ACCOUNTS), _roles(scene)) == (set(), set())


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
            await _delete(scene)
        scene.kube.request = inner  # type: ignore[method-assign]
    await _delete(scene)
    left = (SERVICE_ACCOUNTS, *_ROLES, CRON_JOBS)
    assert [one for resource in left for one in scene.kube.objects(resource)] == []
    assert scene.lines[-1] == "CronJob velero/night: deleted"
    assert len(scene.lines) == 8


async def test_a_cron_job_of_another_version_is_a_note(scene: ScheduleScene) -> None:
    await _create(scene)
    (cron_job,) = scene.cron_jobs
    _container(cron_job)["args"].append("--later")
    scene.kube.put(cron_job)
    found = await _find(scene)
    assert found.schedules == []
    assert found.notes[0].startswith("CronJob velero/night cannot be read: unrecognized arguments: --later")
    with pytest.raises(ConfigError, match=r"^CronJob velero/night cannot be read: unrecognized arguments: --later"):
        await _delete(scene)


async def _create_old(scene: ScheduleScene) -> JsonDict:
    """Create a schedule as before there was a Lease: without it in the role, and without the annotation."""
    await _create(scene, image="old:1")
    (cron_job,) = scene.cron_jobs
    del cron_job["metadata"]["annotations"]
    (role,) = [one for one in scene.kube.objects(ROLES) if one["metadata"]["namespace"] == "velero"]
    rules = [rule for rule in role["rules"] if rule["resources"] != ["leases"]]
    scene.kube.put(role | {"rules": rules})
    return scene.kube.put(cron_job)


async def _renew(scene: ScheduleScene, *names: str) -> list[str]:
    return await renew_schedules(scene.claims.tools, names, scene.lines.append)


async def test_an_old_schedule_is_renewed_with_image_rules_and_permissions(scene: ScheduleScene) -> None:
    before = await _create_old(scene)
    assert [one.old_rules for one in (await _find(scene)).schedules] == [True]
    assert await _renew(scene) == []
    (cron_job,) = scene.cron_jobs
    assert _container(cron_job) == _container(before) | {"image": "mover:1"}
    assert cron_job["spec"] | {"jobTemplate": {}} == before["spec"] | {"jobTemplate": {}}
    assert cron_job["metadata"]["annotations"] == {"nodeagent.io/retention-image": "mover:1"}
    (role,) = [one for one in scene.kube.objects(ROLES) if one["metadata"]["namespace"] == "velero"]
    leases = [rule for rule in role["rules"] if rule["resources"] == ["leases"]]
    granted = (["node-agent-backup-deletions"], ["get", "patch"])
    assert [(one["resourceNames"], one["verbs"]) for one in leases] == [granted]
    assert [one.old_rules for one in (await _find(scene)).schedules] == [False]
    assert await _renew(scene, "night") == []
    assert scene.lines == ["schedule night: renewed", "schedule night: unchanged"]


async def test_one_that_kubectl_applied_is_left_alone_and_named(scene: ScheduleScene) -> None:
    before = await _create_old(scene)
    annotations = {_KUBECTL: "{}"}
    scene.kube.put(before | {"metadata": before["metadata"] | {"annotations": annotations}})
    assert await _renew(scene) == []
    assert [_container(one)["image"] for one in scene.cron_jobs] == ["old:1"]
    (line,) = scene.lines
    assert line == (
        "schedule night: left alone, since kubectl apply applies it from files: "
        "apply what nodeagent schedule create night ... -o yaml prints"
    )


async def test_one_that_cannot_be_renewed_is_named_and_the_others_are_renewed(scene: ScheduleScene) -> None:
    cron_job = await _create_old(scene)
    copy, later = (cron_job | {"metadata": cron_job["metadata"] | {"name": name}} for name in ("copy", "later"))
    scene.kube.put(copy)
    words = _container(later)["args"]
    template = {"spec": {"containers": [{"args": [*words, "--later"]}]}}
    scene.kube.put(later | {"spec": later["spec"] | {"jobTemplate": {"spec": {"template": template}}}})
    unknown, unreadable = await _renew(scene)
    assert unknown == "schedule copy was not renewed: its pods run schedule night of namespace velero"
    assert unreadable.startswith("schedule later was not renewed: CronJob velero/later cannot be read: unrecognized ")
    assert scene.lines == ["schedule night: renewed"]


async def test_a_changed_schedule_is_as_one_that_is_created_so_and_keeps_an_interval_of_the_user() -> None:
    requests = [
        ScheduleScene().request(ttl=ttl, verify=verify)
        for ttl, verify in itertools.product((None, timedelta(days=1)), (False, True))
    ]
    for (before, after), own in itertools.product(itertools.product(requests, repeat=2), (False, True)):
        changed, created = ScheduleScene(), ScheduleScene()
        await _apply(changed, before, ScheduleTimes("@hourly", "Asia/Tokyo", suspend=True))
        interval = {VERIFICATION_INTERVAL_ANNOTATION: "24h"} if own and not before.verify else {}
        (raw,) = changed.cron_jobs
        raw["metadata"]["annotations"] = raw["metadata"].get("annotations", {}) | interval
        changed.kube.put(raw)
        await _apply(changed, after)
        await _apply(created, after)
        found, wanted = (scene.cron_jobs[0] for scene in (changed, created))
        assert found["spec"] == wanted["spec"]
        annotations = wanted["metadata"].get("annotations") or {}
        assert (found["metadata"].get("annotations") or {}) == interval | annotations


@pytest.mark.parametrize(
    ("meta", "applier"),
    [
        ({}, None),
        ({"managedFields": [{"manager": "nodeagent", "operation": "Update"}]}, None),
        ({"managedFields": [{"manager": "kubectl", "operation": "Apply"}]}, "kubectl"),
        ({"annotations": {"meta.helm.sh/release-name": "r"}}, "Helm"),
        ({"labels": {"kustomize.toolkit.fluxcd.io/name": "n"}}, "Flux"),
        ({"annotations": {_KUBECTL: "{}", "argocd.argoproj.io/tracking-id": "t"}}, "Argo CD"),
    ],
)
def test_what_applies_an_object_from_files(meta: JsonDict, applier: str | None) -> None:
    assert find_applier({"metadata": meta}) == applier


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
    await _apply(scene, scene.request())
    of_another = ScheduleRequest("night", "other", Choice((ClaimName("app", "data"),)))
    for one in build_schedule(of_another, _DAILY, AgentImage("i"), NOON):
        if one["kind"] in {resource.kind for resource in _ROLES}:
            scene.kube.put(one)
    others = {one for one in _roles(scene) if "other" in "".join(one)}
    assert others
    role = next(one for one in scene.kube.objects(ROLES) if one["metadata"]["name"].endswith(".velero.night"))
    scene.kube.put(role | {"metadata": role["metadata"] | {"namespace": "before", "uid": "u-before"}})
    await _delete(scene)
    assert _roles(scene) == others
    assert "Role before/node-agent-schedule.velero.night: deleted" in scene.lines


async def test_a_role_of_someone_else_is_left_alone_and_named(scene: ScheduleScene) -> None:
    request = scene.request()
    foreign = "Role app/node-agent-schedule.velero.night exists, and is not of schedule night: it is left alone"
    await _apply(scene, request)
    (role,) = [one for one in scene.kube.objects(ROLES) if one["metadata"]["namespace"] == "app"]
    scene.kube.put(role | {"metadata": role["metadata"] | {"labels": {}}, "rules": []})
    with pytest.raises(ConfigError, match=foreign):
        await _apply(scene, request, image="i:2")
    assert "i:2" not in str(scene.cron_jobs)
    with pytest.raises(ConfigError, match=foreign):
        await _delete(scene)
    assert _roles(scene) == {("Role", "app", "node-agent-schedule.velero.night")}
    assert scene.cron_jobs == []

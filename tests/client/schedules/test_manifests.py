"""The objects of a schedule: all of them as golden files, and permissions that are as few as its choice allows."""

import itertools
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from client.backups.copies import KeepPolicy, KeepRule
from client.backups.manifests import Method
from client.backups.plan import Choice, ClaimName
from client.schedules.manifests import build_schedule, schedule_permissions
from client.schedules.request import ScheduleRequest, ScheduleTimes, read_cron_job
from client.schedules.scheduled_run import run_schedule
from core.kube.resources import DATA_UPLOADS, JOBS, PODS, SECRETS, VOLUME_SNAPSHOTS
from exposer.pods import AgentImage
from nodeagent.runtime.permissions import Scope
from tests.client.support.schedule_scene import DATA, ScheduleScene
from tests.nodeagent.support.hand_clock import NOON
from tests.support.access import access_of
from tests.support.golden import assert_golden
from tests.support.objects import JsonDict, only

_CLAIMS = Choice((DATA, ClaimName("db", "data")))
_REQUEST = ScheduleRequest("night", "velero", _CLAIMS, ttl=timedelta(days=30))
_KEEP = KeepPolicy({rule: number + 1 for number, rule in enumerate(KeepRule)}, "Europe/Berlin")
_TIMES = ScheduleTimes("0 2 * * *", "Europe/Berlin")


def test_the_objects_of_a_schedule() -> None:
    agent = AgentImage("mover:1", "Always", ("pull",))
    items = build_schedule(_REQUEST, _TIMES, agent, NOON)
    assert_golden("schedule-objects", {"items": items})


def test_the_image_is_that_of_the_agents() -> None:
    containers = [{"name": "other", "image": "x"}, {"name": "node-agent", "image": "i:2"}]
    pod = {"containers": containers, "imagePullSecrets": [{"name": "p"}]}
    daemonset = only(spec={"template": {"spec": pod}})
    assert AgentImage.of(daemonset) == AgentImage("i:2", "IfNotPresent", ("p",))


@pytest.mark.parametrize(
    "request_",
    [
        _REQUEST,
        ScheduleRequest("a", "velero", Choice(namespace="app", selector="tier in (web,db)", method=Method.FS_BACKUP)),
        ScheduleRequest("a.b", "other", Choice(namespace="app", ignore_velero_server=True), location="bucket"),
        ScheduleRequest("night", "velero", Choice((DATA,)), verify=True, labels={"a": "b"}, annotations={"c": "d"}),
        ScheduleRequest("night", "velero", Choice((DATA,)), keep=_KEEP),
        ScheduleRequest("night", "velero", Choice((DATA,)), ttl=timedelta(days=2), keep=replace(_KEEP, zone="UTC")),
    ],
    ids=["claims", "selector", "all of a namespace", "verified", "kept", "kept in UTC"],
)
def test_the_pods_command_line_says_what_the_schedule_does(request_: ScheduleRequest) -> None:
    cron_job: JsonDict = build_schedule(request_, _TIMES, AgentImage("i"), NOON)[-1]
    assert read_cron_job(cron_job) == request_


def test_no_word_of_a_user_names_a_variable_of_the_pod() -> None:
    request = ScheduleRequest("night", "velero", Choice((DATA,)), annotations={"note": "$(HOME) $$5"})
    cron_job: JsonDict = build_schedule(request, _TIMES, AgentImage("i"), NOON)[-1]
    (container,) = cron_job["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"]
    assert container["args"][-1] == "--annotations=note=$$(HOME) $$$$5"
    assert read_cron_job(cron_job) == request


@pytest.mark.parametrize(
    ("method", "claims", "deletes"),
    list(itertools.product(Method, [(DATA,), ()], [{}, {"ttl": timedelta(days=1)}, {"keep": _KEEP}])),
)
def test_none_reads_secrets_or_widens_roles(
    method: Method, claims: tuple[ClaimName, ...], deletes: dict[str, Any]
) -> None:
    request = ScheduleRequest("night", "velero", Choice(claims, "app", method=method), **deletes)
    granted = schedule_permissions(request)
    assert SECRETS not in {one.resource for one in granted}
    assert not {"escalate", "bind", "impersonate"} & {verb for one in granted for verb in one.verbs}
    writes = {(one.resource, verb) for one in granted for verb in one.verbs if verb not in {"get", "list"}}
    assert ((DATA_UPLOADS, "delete") in writes) == ((JOBS, "create") in writes) == bool(deletes)
    assert any(one.resource is VOLUME_SNAPSHOTS for one in granted) == (method is not Method.FS_BACKUP)
    in_claims = [one for one in granted if one.scope is Scope.CLUSTER and one.resource is PODS]
    assert bool(in_claims) == (method is not Method.CSI_SNAPSHOT)


async def test_a_run_uses_every_permission_of_its_account_and_no_other() -> None:
    """All of them, by two runs: one that deletes and one whose PVC needs a pod."""
    scene = ScheduleScene()
    scene.old.put_backup("first", 9)
    scene.old.put("Job", "night-1", "batch/v1", meta={"creationTimestamp": "2026-11-21T02:00:00Z"})
    scene.old.put("ConfigMap", "node-agent-backup-deletions", "v1")
    scene.old.put("Lease", "node-agent-backup-deletions", "coordination.k8s.io/v1")
    request = replace(_REQUEST, choice=Choice((DATA, ClaimName("app", "files"))))
    scene.end_backups()
    scene.kube.requests.clear()
    await run_schedule(scene.tools("night-1"), request)
    used = {(found.verb, found.group, found.path) for found in map(access_of, scene.kube.requests)}
    granted = {(verb, one.resource.group, one.path) for one in schedule_permissions(request) for verb in one.verbs}
    # What only a failure needs: why a pod is pending, a creation that is repeated or taken back, a wrong name.
    rare = {("list", "", "events"), ("get", "velero.io", "datauploads")}
    rare |= {(verb, "velero.io", "podvolumebackups") for verb in ("get", "delete")}
    rare |= {(verb, "snapshot.storage.k8s.io", "volumesnapshots") for verb in ("get", "delete")}
    assert used <= granted
    assert granted - used == rare


def test_with_verify_the_cron_job_says_how_often_and_the_account_may_record_it() -> None:
    request = replace(_REQUEST, verify=True)
    cron_job: JsonDict = build_schedule(request, _TIMES, AgentImage("i"), NOON)[-1]
    assert cron_job["metadata"]["annotations"]["nodeagent.io/verification-interval"] == "24h0m0s"
    patched = [one for one in schedule_permissions(request) if one.resource is DATA_UPLOADS and "patch" in one.verbs]
    assert len(patched) == 1
    assert not [one for one in schedule_permissions(_REQUEST) if one.resource is DATA_UPLOADS and "patch" in one.verbs]

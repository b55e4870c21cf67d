"""`nodeagent schedule` against a real API server: its objects, and what their account may and may not do."""

import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest

from client.backups.plan import Choice, ClaimName
from client.schedules.manifests import EXPIRY_PERMISSIONS, SCHEDULE_PERMISSIONS, schedule_permissions
from client.schedules.request import ScheduleRequest
from core.kube.resources import CRON_JOBS, DATA_UPLOADS, JOBS, POD_VOLUME_BACKUPS, ROLES, SERVICE_ACCOUNTS, Resource
from core.kube.transport import APPLY_PATCH, MERGE_PATCH
from nodeagent.__main__ import main
from nodeagent.runtime.permissions import Permission, Scope
from tests.integration.person import Done
from tests.integration.test_backup_command import Backups
from tests.support.apiserver import ApiServer
from tests.support.rbac import allows
from tests.testbed.api import Json

pytestmark = pytest.mark.integration

_ACCOUNT = "node-agent-schedule-night"


class _Schedules(Backups):
    """The cluster of backups, and a user who may make schedules."""

    def schedule(self, *words: str) -> Done:
        return self.run("schedule", *words, "--agent-namespace", self.namespace)

    def create_night(self, *words: str) -> Done:
        claims = (f"--pvc={self.namespace}/data", f"--pvc={self.namespace}/files")
        return self.schedule("create", "night", "--schedule=0 2 * * *", "--time-zone=Europe/Berlin", *claims, *words)

    def cron_job(self) -> Json:
        return self.api.request("GET", CRON_JOBS.path(self.namespace, "night"))

    def allows(self, verb: str, permission: Permission, name: str = "", *, namespace: str | None = None) -> bool:
        """Return whether the account of the schedule may do that: by name, if the permission has names."""
        return allows(self.api, self.namespace, _ACCOUNT, (verb, permission, name), where=namespace)


@pytest.fixture
def cluster(apiserver: ApiServer, namespace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> _Schedules:
    cluster = _Schedules(apiserver, namespace, tmp_path, capsys)
    cluster.grant(SCHEDULE_PERMISSIONS)
    return cluster


def test_a_schedule_is_created_changed_and_deleted_with_the_listed_permissions(cluster: _Schedules) -> None:
    code, out, err = cluster.create_night("--ttl=720h")
    assert (code, out[:40]) == (0, "schedule night was created: its first run"[:40]), err
    assert cluster.cron_job()["spec"]["timeZone"] == "Europe/Berlin"
    again = ("create", "night", "--schedule=@daily", f"--pvc={cluster.namespace}/data", "--suspend")
    assert cluster.schedule(*again)[1] == "schedule night was changed: it is suspended\n"
    spec = cluster.cron_job()["spec"]
    assert (spec["schedule"], spec["suspend"], spec.get("timeZone")) == ("@daily", True, None)
    assert "night" in cluster.schedule("get")[1]
    code, out, err = cluster.schedule("delete", "night")
    assert (code, out.splitlines()[-1]) == (0, f"CronJob {cluster.namespace}/night: deleted"), err
    for resource in (SERVICE_ACCOUNTS, ROLES):
        names = [one["metadata"]["name"] for one in cluster.api.objects(resource, cluster.namespace)]
        assert [name for name in names if name.startswith("node-agent-schedule")] == []


def test_schedules_are_renewed_with_the_listed_permissions_unless_something_applies_them(cluster: _Schedules) -> None:
    assert cluster.create_night("--ttl=720h")[0] == 0
    assert cluster.schedule("renew") == (0, "schedule night: unchanged\n", "")
    path = CRON_JOBS.path(cluster.namespace, "night")
    old = {"metadata": {"annotations": {"nodeagent.io/retention-image": None}}}
    cluster.api.request("PATCH", path, body=old, content_type=MERGE_PATCH)
    assert "note: schedule night deletes by older rules" in cluster.schedule("get")[2]
    assert cluster.schedule("renew", "night") == (0, "schedule night: renewed\n", "")
    assert cluster.schedule("get")[2] == ""
    applied = {"apiVersion": CRON_JOBS.api_version, "kind": CRON_JOBS.kind, "spec": {"schedule": "0 2 * * *"}}
    cluster.api.request(
        "PATCH",
        f"{path}?fieldManager=flux",
        body=applied | {"metadata": {"name": "night", "labels": {"team": "a"}}},
        content_type=APPLY_PATCH,
    )
    assert "schedule night: left alone, since flux applies it" in cluster.schedule("renew")[1]


def test_its_account_may_do_what_is_listed_and_nothing_with_secrets(cluster: _Schedules) -> None:
    assert cluster.create_night("--ttl=720h")[0] == 0
    choice = Choice((ClaimName(cluster.namespace, "data"), ClaimName(cluster.namespace, "files")))
    request = ScheduleRequest("night", cluster.namespace, choice, ttl=timedelta(days=30))
    for permission in schedule_permissions(request):
        for verb in permission.verbs:
            assert cluster.allows(verb, permission, *permission.names[:1]), (verb, permission)
            if permission.scope is Scope.OWN_NAMESPACE or permission.resource.namespaced:
                assert not cluster.allows(verb, permission, *permission.names[:1], namespace="default"), permission
    for verb, path, group in (
        ("get", "secrets", ""),
        ("list", "secrets", ""),
        ("create", "pods", ""),
        ("create", "serviceaccounts", ""),
        ("patch", "datauploads", "velero.io"),
        ("create", "datadownloads", "velero.io"),
        ("create", "roles", "rbac.authorization.k8s.io"),
        ("delete", "persistentvolumeclaims", ""),
        ("patch", "cronjobs", "batch"),
    ):
        refused = Permission(Scope.OWN_NAMESPACE, Resource("X", path, group), (verb,), "")
        assert not cluster.allows(verb, refused), (verb, path)


def test_without_a_time_to_live_its_account_deletes_nothing(cluster: _Schedules) -> None:
    assert cluster.create_night()[0] == 0
    for permission in EXPIRY_PERMISSIONS:
        for verb in set(permission.verbs) & {"create", "delete", "patch"}:
            assert not cluster.allows(verb, permission, *permission.names[:1]), (verb, permission)


def test_its_pods_back_up_with_their_account(cluster: _Schedules, capsys: pytest.CaptureFixture[str]) -> None:
    assert cluster.create_night()[0] == 0
    template = cluster.cron_job()["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    kubeconfig = cluster.apiserver.account_kubeconfig(cluster.namespace, template["serviceAccountName"], cluster.folder)
    end = threading.Thread(target=_complete, args=(cluster,))
    end.start()
    try:
        code = main([*template["containers"][0]["args"], f"--kubeconfig={kubeconfig}"])
    finally:
        end.join()
    captured = capsys.readouterr()
    assert (code, captured.err) == (0, "")
    assert "is Completed: 2/2 volumes\n" in captured.out
    transfers = [one for one in cluster.made() if one["kind"] != "VolumeSnapshot"]
    assert {one["metadata"]["labels"]["nodeagent.io/schedule"] for one in transfers} == {"night"}
    assert cluster.api.objects(JOBS, cluster.namespace) == []


def _complete(cluster: _Schedules) -> None:
    """Let both transfers end, as agents do."""
    until, left = time.monotonic() + 60, 2
    while left and time.monotonic() < until:
        for one in cluster.made():
            if one["kind"] != "VolumeSnapshot" and not one.get("status"):
                resource = DATA_UPLOADS if one["kind"] == "DataUpload" else POD_VOLUME_BACKUPS
                cluster.set_status(resource, one["metadata"]["name"], phase="Completed", snapshotID="k1")
                left -= 1
        time.sleep(0.1)

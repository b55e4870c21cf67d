"""What a user sees of backup repositories, with and without the leader, and with few permissions."""

import json
from typing import Any

import pytest

from client.repository_view import RepositorySummary
from core.errors import ContractError
from tests.client.support.user_scene import NAME, RECORD, UserScene
from tests.nodeagent.support.maintenance_scene import result
from tests.support.objects import JsonDict


@pytest.fixture
def scene() -> UserScene:
    return UserScene()


async def _only(scene: UserScene) -> RepositorySummary:
    found = await scene.reader.summarize()
    assert [one.name for one in found.repositories] == [NAME]
    return found.repositories[0]


def _put_job(scene: UserScene, name: str = "job-1", **status: object) -> JsonDict:
    labels = {"velero.io/repo-name": NAME, "nodeagent.io/owner-uid": "other"}
    return scene.put("Job", name, "batch/v1", labels=labels, spec={}, status=status)


def _put_location(scene: UserScene, phase: str = "Available", **spec: object) -> None:
    full = {"provider": "aws", "objectStorage": {"bucket": "b"}, **spec}
    scene.put("BackupStorageLocation", "default", spec=full, status={"phase": phase})


def _configure(scene: UserScene) -> None:
    scene.put_daemonset("serve", "--repo-maintenance-job-configmap=m")
    window = {"windows": [{"schedule": "0 22 * * *", "duration": "1h"}]}
    scene.put("ConfigMap", "m", "v1", data={"global": json.dumps(window)})
    scene.put_repository(RECORD | {"nextQuick": "2026-11-21T11:00:00Z"})


def _verify_another(scene: UserScene) -> None:
    scene.put_repository(RECORD | {"nextQuick": "2026-11-21T11:00:00Z"})
    scene.put("Job", "job-1", "batch/v1", labels={"nodeagent.io/verified-repository": "other"}, spec={}, status={})


_HOLDS: dict[str, Any] = {
    "off": lambda scene: scene.put_daemonset("serve", "--repo-maintenance=off"),
    "server": lambda scene: scene.put("Deployment", "velero", "apps/v1", spec={}),
    "job-unfinished": _put_job,
    "location-read-only": lambda scene: _put_location(scene, accessMode="ReadOnly"),
    "location-unavailable": lambda scene: _put_location(scene, "Unavailable"),
    "foreign": lambda scene: scene.put_repository(RECORD | {"foreignAt": "2026-11-21T11:00:00Z"}),
    "blocked": lambda scene: scene.put_repository(
        RECORD | {"blockedInputs": "i", "lastFailure": "2026-11-21T11:00:00Z"}
    ),
    "back-off": lambda scene: scene.put_repository(
        RECORD | {"nextQuick": "2026-11-21T11:00:00Z"},
        recentMaintenance=[{"result": "Failed", "startTimestamp": "2026-11-21T11:58:00Z"}],
    ),
    "window": _configure,
    "concurrency": _verify_another,
    "": lambda scene: scene.put_repository(RECORD | {"nextQuick": "2026-11-21T11:00:00Z"}),
}


@pytest.mark.parametrize("hold", _HOLDS, ids=lambda hold: hold or "due")
async def test_without_the_leader_its_rules_decide(scene: UserScene, hold: str) -> None:
    _HOLDS[hold](scene)
    scene.hush(500)
    following = (await _only(scene)).next
    assert (following.hold, following.from_leader) == (hold, False)
    assert bool(following.reason) is bool(hold)


async def test_a_time_out_of_range_is_no_error(scene: UserScene) -> None:
    scene.put_repository(RECORD | {"fullIntervalSeconds": 1e15})
    scene.hush()
    assert (await _only(scene)).next.hold == "invalid"


async def test_an_invalid_repository_is_noted_and_the_others_are_shown(scene: UserScene) -> None:
    raw = scene.put_repository(name="db-default-kopia")
    raw["status"]["phase"] = "Odd"
    scene.kube.put(raw)
    found = await scene.reader.summarize()
    assert [one.name for one in found.repositories] == [NAME]
    assert found.notes[0].startswith("invalid BackupRepository velero/db-default-kopia: ")
    with pytest.raises(ContractError, match="db-default-kopia"):
        await scene.reader.describe("db-default-kopia")


async def test_chosen_repositories_come_once_and_in_order(scene: UserScene) -> None:
    scene.put_repository(name="db-default-kopia")
    found = await scene.reader.summarize(["db-default-kopia", NAME, NAME])
    assert [one.name for one in found.repositories] == [NAME, "db-default-kopia"]


async def test_a_full_maintenance_that_did_not_finish_is_named(scene: UserScene) -> None:
    assert not (await scene.reader.describe(NAME)).incomplete_full
    scene.put_repository(RECORD | {"incompleteFull": True})
    assert (await scene.reader.describe(NAME)).incomplete_full


async def test_a_running_job_is_shown_with_the_reason_why_its_pod_is_pending(scene: UserScene) -> None:
    _put_job(scene)
    unschedulable = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}
    status = {"phase": "Pending", "conditions": [unschedulable]}
    scene.put("Pod", "job-1-x", "v1", labels={"job-name": "job-1"}, status=status)
    labels = {"velero.io/repo-name": NAME}
    scene.put("Job", "job-2", "batch/v1", labels=labels, spec={"suspend": True}, status={})
    job, suspended = (await scene.reader.describe(NAME)).running
    assert suspended.pending == "the Job is suspended (spec.suspend)"
    assert (job.job, job.pod, job.phase) == ("job-1", "job-1-x", "Pending")
    assert job.pending == "Pod velero/job-1-x cannot be scheduled: 0/3 nodes"


async def test_the_result_of_the_last_job_is_read_from_its_pod(scene: UserScene) -> None:
    _put_job(scene, succeeded=1, completionTime="2026-11-21T10:00:00Z")
    state = {"terminated": {"exitCode": 0, "message": result("full", freedBytes=5)}}
    status = {"phase": "Succeeded", "containerStatuses": [{"name": "c", "state": state}]}
    scene.put("Pod", "job-1-x", "v1", labels={"job-name": "job-1"}, status=status)
    last = (await scene.reader.describe(NAME)).last_result
    assert last is not None
    assert (last.mode, last.freed_bytes) == ("full", 5)


async def test_events_of_the_repository_come_newest_first(scene: UserScene) -> None:
    uid = scene.put_repository()["metadata"]["uid"]
    for name, about, seen in (("1", uid, "10:00"), ("2", uid, "11:00"), ("3", "other", "12:00")):
        moment = f"2026-11-21T{seen}:00Z"
        scene.put("Event", name, "v1", involvedObject={"uid": about}, message=name, lastTimestamp=moment)
    assert [event.message for event in (await scene.reader.describe(NAME)).events] == ["2", "1"]


@pytest.mark.parametrize("part", ["/daemonsets", "/leases", "/jobs", "/deployments", "locations", "/events"])
async def test_what_may_not_be_read_is_left_out_with_a_note(scene: UserScene, part: str) -> None:
    scene.kube.fail_next("GET", part, 403)
    one = await scene.reader.describe(NAME)
    assert one.name == NAME
    assert len(one.notes) == 1
    assert "403" in one.notes[0]

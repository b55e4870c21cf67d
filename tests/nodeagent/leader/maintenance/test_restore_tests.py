"""The leader has a volume restored in each period, by a Job of the client, and records what came of it."""

import asyncio
import json
from datetime import timedelta

import pytest

from core.kube.resources import DATA_UPLOADS
from core.models.base import JsonDict, format_time
from core.models.verification import SHARES, VerificationOutcome
from exposer.pods import JobSettings
from nodeagent.config.repositories import MaintenanceSettings
from nodeagent.config.windows import VerificationPlan
from tests.nodeagent.support.maintenance_scene import MINUTE, VerificationScene, verified_line, words_of
from tests.nodeagent.support.repository_scene import SERVER
from tests.support.clock import NOON

pytestmark = pytest.mark.looptime

_HOUR = 60 * MINUTE
_ANNOTATION = "nodeagent.io/verification"


class Scene(VerificationScene):
    """A repository beside a Velero server, whose shares were all read, with backups of two PVCs and of a pod volume."""

    def store(self, record: JsonDict) -> None:
        repository = self.repository()
        annotations = {_ANNOTATION: json.dumps(record)}
        self.kube.put(repository | {"metadata": repository["metadata"] | {"annotations": annotations}})


@pytest.fixture
def scene() -> Scene:
    made = Scene(
        verification=VerificationPlan(timedelta(days=30), restore_test=True, restore_test_class="scratch"),
        settings=MaintenanceSettings(job=JobSettings(priority_class_name="low")),
        backups=["uid"],
    )
    made.kube.put(SERVER)
    for name, claim in (("one", "data"), ("two", "data"), ("three", "logs"), ("four", "")):
        made.put_backup(name, claim)
    # Before the backups, which they do not prove.
    read = format_time(NOON - timedelta(hours=1))
    made.store({"shares": {str(share): read for share in range(SHARES)}, "job": read})
    return made


def _claim(job: JsonDict) -> str:
    return str(job["metadata"]["annotations"]["nodeagent.io/restore-test"])


async def test_one_volume_is_restored_in_a_period_and_then_the_next_one(scene: Scene) -> None:
    async with scene.running():
        job = await scene.next_job()
        options = ["--agent-namespace=velero", "--storage-class=scratch", "--timeout=6h0m0s"]
        assert (_claim(job), words_of(job)) == ("data", ["run-restore-test", "DataUpload", "two", *options])
        pod = job["spec"]["template"]["spec"]
        assert (pod["serviceAccountName"], pod["priorityClassName"]) == ("node-agent-restore-test", "low")
        assert job["metadata"]["labels"]["nodeagent.io/verified-repository"] == scene.repository()["metadata"]["uid"]
        await scene.finish(job, verified_line("two", VerificationOutcome.PASSED))
        assert scene.verified() == {"two": "passed"}
        text = "PVC data was restored and compared: 3 files with 7 bytes are right"
        assert scene.events() == [("Verified", text)]
        await asyncio.sleep(2 * _HOUR)
        assert len(scene.jobs) == 1
    # Another leader goes on from there, a period later.
    tests = scene.stored["restoreTests"]
    assert (tests["claim"], tests["outcome"], list(tests["tested"])) == ("data", "passed", ["data"])
    ago = format_time(NOON - timedelta(days=30))
    scene.store(scene.stored | {"restoreTests": tests | {"at": ago, "tested": {"data": ago}}})
    async with scene.running():
        assert _claim(await scene.next_job()) == "logs"


async def test_the_end_of_a_test_is_stored_by_the_next_leader(scene: Scene) -> None:
    async with scene.running():
        job = await scene.next_job()
    await scene.finish(job, verified_line("two", VerificationOutcome.FAILED, "etc/passwd: owner 7 instead of 0"))
    async with scene.running():
        await asyncio.sleep(MINUTE)
        assert len(scene.jobs) == 1
    (damaged,) = scene.stored["damaged"]
    assert damaged.startswith("PVC app/data: damaged: backup backup-two")
    assert ": etc/passwd: owner 7 instead of 0; no copy is known to be right" in damaged
    assert scene.verified() == {"two": "failed"}
    assert [reason for reason, _ in scene.events()] == ["VerificationFailed", "VerificationFailed"]


@pytest.mark.parametrize("kind", ["unknown", "failed", "no pod"])
async def test_a_test_without_a_finding_is_repeated_and_then_the_next_has_its_turn(scene: Scene, kind: str) -> None:
    tested = []
    async with scene.running():
        for _ in range(4):
            job = await scene.next_job(seconds=2 * _HOUR)
            tested.append(_claim(job))
            match kind:
                case "unknown":
                    await scene.finish(job, verified_line("two", None, "no room"))
                case "failed":
                    await scene.finish(job, exit_code=1, message="no room")
                case _:
                    await asyncio.sleep(11 * MINUTE)
                    assert scene.jobs == []
    assert tested == ["data", "data", "data", "logs"]
    assert scene.stored["restoreTests"]["failures"] == 4
    assert scene.verified() == {}
    reason, text = scene.events()[-1]
    assert reason == "VerificationIncomplete"
    assert "PVC logs: " in text
    assert ("no room" in text) is (kind != "no pod")


async def test_a_test_whose_pod_never_ran_keeps_what_was_tested(scene: Scene) -> None:
    ago = format_time(NOON - timedelta(days=40))
    scene.store(scene.stored | {"restoreTests": {"at": ago, "claim": "logs", "tested": {"logs": ago}}})
    async with scene.running():
        assert _claim(await scene.next_job()) == "data"
        await asyncio.sleep(11 * MINUTE)
    assert (scene.stored["restoreTests"]["failures"], scene.stored["restoreTests"]["tested"]) == (1, {"logs": ago})


async def test_without_its_account_nothing_starts_and_an_event_says_what_makes_it(scene: Scene) -> None:
    missing = "error looking up service account velero/node-agent-restore-test: serviceaccount not found"
    scene.kube.fail_next("POST", "/pods", 403, times=99, message=missing)
    async with scene.running():
        await asyncio.sleep(_HOUR)
    assert scene.jobs == []
    ((reason, text),) = scene.events()
    assert reason == "VerificationRejected"
    assert text.endswith("; nodeagent install --restore-tests makes the account, or restoreTests of the chart")
    # There may be very many.
    assert sum(one.path.endswith("/datauploads") for one in scene.kube.requests) == 1


async def test_without_a_good_copy_nothing_starts_and_transfers_are_listed_once(scene: Scene) -> None:
    for one in scene.kube.objects(DATA_UPLOADS):
        failed = {_ANNOTATION: json.dumps({"at": format_time(NOON), "outcome": "failed"})}
        scene.kube.put(one | {"metadata": one["metadata"] | {"annotations": failed}})
    async with scene.running():
        await asyncio.sleep(_HOUR)
    assert (scene.jobs, scene.events()) == ([], [])
    # There may be very many.
    assert sum(one.path.endswith("/datauploads") for one in scene.kube.requests) == 1

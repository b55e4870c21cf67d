"""The leader has a volume restored in each period, by a Job of the client, and records what came of it."""

import asyncio
import json
from datetime import timedelta
from typing import Any

import pytest

from core.kube.resources import DATA_UPLOADS, EVENTS
from core.models.base import JsonDict, format_time
from core.models.verification import (
    SHARES,
    VERIFIED_LINE,
    SnapshotVerification,
    VerificationOutcome,
    VerifiedSnapshot,
)
from exposer.pods import JobSettings
from nodeagent.config.repositories import MaintenanceSettings
from nodeagent.config.windows import VerificationPlan
from tests.nodeagent.support.maintenance_scene import MINUTE, MaintenanceScene
from tests.nodeagent.support.repository_scene import SERVER
from tests.support.clock import NOON
from tests.support.job_output import seal

pytestmark = pytest.mark.looptime

_HOUR = 60 * MINUTE
_ANNOTATION = "nodeagent.io/verification"


class Scene(MaintenanceScene):
    """A repository beside a Velero server, whose shares were all read, with backups of two PVCs and of a pod volume."""

    def prepare(self) -> None:
        self.verification = VerificationPlan(timedelta(days=30), restore_test=True, restore_test_class="scratch")
        self.settings = MaintenanceSettings(job=JobSettings(priority_class_name="low"))
        self.backups = ["uid"]
        self.kube.put(SERVER)
        for name, claim in (("one", "data"), ("two", "data"), ("three", "logs"), ("four", "")):
            self.put_backup(name, claim)
        # Before the backups, which they do not prove.
        read = format_time(NOON - timedelta(hours=1))
        self.store({"shares": {str(share): read for share in range(SHARES)}, "job": read})

    def store(self, record: JsonDict) -> None:
        repository = self.repository()
        annotations = {_ANNOTATION: json.dumps(record)}
        self.kube.put(repository | {"metadata": repository["metadata"] | {"annotations": annotations}})

    async def next_test(self, *, seconds: float = 2 * MINUTE) -> JsonDict:
        """Return the Job of the next test."""
        ended = len(self.jobs)
        await self.until_job(seconds=seconds, but=ended)
        return next(one for one in self.jobs if "status" not in one)

    async def finish(self, job: JsonDict, name: str, outcome: VerificationOutcome | None, *faults: str) -> None:
        """Let the Job start, and end after this result for the snapshot of a backup."""
        self.start_pod(job)
        found = VerifiedSnapshot(id=f"id-{name}", outcome=outcome, files=3, bytes=7, faults=list(faults))
        line = VERIFIED_LINE.format(found)
        self.kube.logs["velero", f"{job['metadata']['name']}-x"] = f"PVC app/data {outcome}\n{line}\n"
        self.end(job, 0, seal(SnapshotVerification(snapshots=1), line))
        await asyncio.sleep(20)

    @property
    def stored(self) -> JsonDict:
        return dict(json.loads(self.repository()["metadata"]["annotations"][_ANNOTATION]))

    def verified(self) -> dict[str, str]:
        """Return the outcomes on the transfers."""
        transfers = [one["metadata"] for one in self.kube.objects(DATA_UPLOADS)]
        texts = {meta["name"]: meta["annotations"].get(_ANNOTATION) for meta in transfers}
        return {name: json.loads(text)["outcome"] for name, text in texts.items() if text}

    def events(self) -> list[tuple[str, str]]:
        return [(one["reason"], one["message"]) for one in self.kube.objects(EVENTS)]


@pytest.fixture
def scene() -> Scene:
    made = Scene()
    made.prepare()
    return made


def _tested(job: JsonDict) -> tuple[str, list[str]]:
    """Return the PVC of a Job, and the words of its command."""
    return job["metadata"]["annotations"]["nodeagent.io/restore-test"], _pod(job)["containers"][0]["args"]


def _pod(job: JsonDict) -> dict[str, Any]:
    found: dict[str, Any] = job["spec"]["template"]["spec"]
    return found


async def test_one_volume_is_restored_in_a_period_and_then_the_next_one(scene: Scene) -> None:
    async with scene.running():
        job = await scene.next_test()
        claim, words = _tested(job)
        assert (claim, words[:3]) == ("data", ["run-restore-test", "DataUpload", "two"])
        assert words[3:] == ["--agent-namespace=velero", "--storage-class=scratch", "--timeout=6h0m0s"]
        assert (_pod(job)["serviceAccountName"], _pod(job)["priorityClassName"]) == ("node-agent-restore-test", "low")
        assert job["metadata"]["labels"]["nodeagent.io/verified-repository"] == scene.repository()["metadata"]["uid"]
        await scene.finish(job, "two", VerificationOutcome.PASSED)
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
        assert _tested(await scene.next_test())[0] == "logs"


async def test_the_end_of_a_test_is_stored_by_the_next_leader(scene: Scene) -> None:
    async with scene.running():
        job = await scene.next_test()
    await scene.finish(job, "two", VerificationOutcome.FAILED, "etc/passwd: owner 7 instead of 0")
    async with scene.running():
        await asyncio.sleep(MINUTE)
        assert len(scene.jobs) == 1
    (damaged,) = scene.stored["damaged"]
    assert damaged.startswith("PVC app/data: damaged: backup backup-two")
    assert ": etc/passwd: owner 7 instead of 0; no copy is known to be right" in damaged
    assert scene.verified() == {"two": "failed"}
    assert [reason for reason, _ in scene.events()] == ["VerificationFailed", "VerificationFailed"]


@pytest.mark.parametrize("kind", ["unknown", "failed", "no pod"])
async def test_a_test_that_found_nothing_out_is_repeated_and_then_the_next_volume_has_its_turn(
    scene: Scene, kind: str
) -> None:
    tested = []
    async with scene.running():
        for _ in range(4):
            job = await scene.next_test(seconds=2 * _HOUR)
            tested.append(_tested(job)[0])
            match kind:
                case "unknown":
                    await scene.finish(job, "two", None, "no room")
                case "failed":
                    scene.start_pod(job)
                    scene.end(job, 1, "no room")
                    await asyncio.sleep(20)
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
        assert _tested(await scene.next_test())[0] == "data"
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

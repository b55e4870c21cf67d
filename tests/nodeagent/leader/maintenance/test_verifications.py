"""The leader has repositories verified and volumes restored, beside a Velero server too, and records what was found."""

import asyncio
import json
from datetime import timedelta
from typing import Any

import pytest

from core.kube.resources import DATA_UPLOADS
from core.kube.transport import Request, Response
from core.models.base import JsonDict, format_time
from core.models.verification import SHARE_LINE, SHARES, SnapshotVerification, VerificationOutcome, VerifiedShare
from exposer.pods import JobSettings
from nodeagent.config.repositories import MaintenanceSettings
from nodeagent.config.windows import VerificationPlan
from nodeagent.leader.maintenance.verifications import VerificationSteps
from nodeagent.runtime.settings import MaintenanceSwitch
from tests.nodeagent.support.maintenance_scene import (
    MINUTE,
    VerificationScene,
    repository_object,
    result,
    verified_line,
    words_of,
)
from tests.nodeagent.support.repository_scene import SERVER
from tests.support.clock import NOON
from tests.support.job_output import seal
from tests.support.tasks import until

pytestmark = pytest.mark.looptime

_HOUR = 60 * MINUTE
_ALL = tuple(range(SHARES))
_WITH_LOG = ["failed", "rotated", "unknown", "deadline"]


@pytest.fixture
def scene() -> VerificationScene:
    """A repository beside a Velero server, with backups of two volumes."""
    made = VerificationScene(verification=VerificationPlan(timedelta(hours=16)), backups=["uid"])
    made.kube.put(SERVER)
    for name, claim in (("one", "data"), ("two", "data"), ("three", "logs")):
        made.put_backup(name, claim, completionTimestamp="2026-11-21T11:00:00Z")
    return made


def _shares(*shares: int) -> list[str]:
    return [SHARE_LINE.format(VerifiedShare(share=share, contents=10)) for share in shares]


async def test_shares_are_read_one_after_the_other_until_all_backups_are_proven(scene: VerificationScene) -> None:
    async with scene.running():
        for share in _ALL:
            job = await scene.next_job(seconds=1.1 * _HOUR)
            labels = job["metadata"]["labels"]
            assert labels["nodeagent.io/verified-repository"] == scene.repository()["metadata"]["uid"]
            assert "velero.io/repo-name" not in labels
            assert next(one for one in words_of(job) if "share=" in one) == f"--share={share}"
            assert scene.verified() == {}
            await scene.finish(job, *_shares(share))
        assert scene.verified() == dict.fromkeys(("one", "two", "three"), "passed")
        assert scene.stored["outcome"] == "passed"
        assert len(scene.stored["shares"]) == SHARES
    # Another leader goes on from there.
    async with scene.running():
        assert "--share=0" in words_of(await scene.next_job(seconds=_HOUR))
    reason, text = scene.events()[-1]
    assert reason == "Verified"
    assert text.startswith("read 1 of 16 shares: 10 contents are right; all was read since 2026-")


async def test_damage_is_recorded_on_its_backup_and_names_the_copy_that_is_right(scene: VerificationScene) -> None:
    inner = scene.kube.request

    async def request(what: Request) -> Response:
        await asyncio.sleep(1.0 if what.method == "PATCH" else 0.0)
        return await inner(what)

    async with scene.running():
        job = await scene.until_job(seconds=2 * MINUTE)
        scene.kube.request = request  # type: ignore[assignment, method-assign]
        lines = [
            verified_line("one", VerificationOutcome.FAILED, "db/wal: invalid checksum"),
            verified_line("two", VerificationOutcome.PASSED),
            verified_line("three", VerificationOutcome.PASSED),
            verified_line("of another cluster", VerificationOutcome.FAILED, "db: invalid checksum"),
            *_shares(*_ALL),
        ]
        await scene.finish(job, *lines)
    assert scene.verified() == {"one": "failed", "two": "passed", "three": "passed"}
    # At one time: else the metrics of the PVC had the one that passed.
    assert len(set(scene.verified("at").values())) == 1
    assert scene.stored["outcome"] == "failed"
    damaged, unnamed = scene.stored["damaged"]
    assert damaged.startswith("PVC app/data: damaged: backup backup-one of 2026-")
    assert ": db/wal: invalid checksum; still right: backup backup-two of 2026-" in damaged
    assert unnamed.startswith("kopia snapshots without a backup in this cluster: damaged: id-of another cluster: ")
    assert scene.reasons() == ["VerificationFailed"] * 3


async def test_damage_is_recorded_on_its_backup_although_the_write_fails_for_a_while(scene: VerificationScene) -> None:
    scene.kube.fail_next("PATCH", "/datauploads/one", 503, times=12)
    async with scene.running():
        job = await scene.until_job(seconds=2 * MINUTE)
        await scene.finish(
            job, verified_line("one", VerificationOutcome.FAILED, "db/wal: invalid checksum"), *_shares(*_ALL)
        )
        await asyncio.sleep(5 * MINUTE)
    assert scene.verified()["one"] == "failed"
    assert scene.reasons().count("VerificationFailed") == 2


async def test_of_all_backups_only_those_of_the_namespace_are_kept_meanwhile(
    scene: VerificationScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cluster has 100,000 transfers, and the leader the memory of an agent."""
    kept: list[str] = []
    write = VerificationSteps._write

    async def note(self: Any, *given: Any) -> None:
        kept.extend(one.name for one in given[-1])
        await write(self, *given)

    monkeypatch.setattr(VerificationSteps, "_write", note)
    elsewhere = next(one for one in scene.kube.objects(DATA_UPLOADS) if one["metadata"]["name"] == "one")
    meta = {"name": "elsewhere", "namespace": "velero"}
    scene.kube.put(elsewhere | {"metadata": meta, "spec": elsewhere["spec"] | {"sourceNamespace": "shop"}})
    async with scene.running():
        await scene.finish(await scene.until_job(seconds=2 * MINUTE), *_shares(*_ALL))
    assert sorted(kept) == ["one", "three", "two"]


@pytest.mark.parametrize("exit_code", [0, 1])
async def test_a_failed_job_has_no_backup_pass_that_it_did_not_see(scene: VerificationScene, exit_code: int) -> None:
    """It may know of damage, and not in which snapshots."""
    async with scene.running():
        job = await scene.until_job(seconds=2 * MINUTE)
        lines = [verified_line("two", VerificationOutcome.PASSED), verified_line("one", None, "no answer")]
        await scene.finish(job, *_shares(*_ALL), *lines, exit_code=exit_code)
    assert (len(scene.stored["shares"]), scene.verified()) == (SHARES, {"two": "passed"})


@pytest.mark.parametrize("kind", [*_WITH_LOG, "no pod", "rejected by kubelet", "node lost", "log forbidden"])
async def test_what_a_job_could_not_find_out_is_tried_again(scene: VerificationScene, kind: str) -> None:
    async with scene.running():
        job = await scene.until_job(seconds=2 * MINUTE)
        match kind:
            case "failed":
                await scene.finish(job, *_shares(0), exit_code=1, message="the storage does not answer")
            case "rotated":
                message = seal(SnapshotVerification(snapshots=0), *_shares(0, 1))
                await scene.finish(job, *_shares(0), message=message)
            case "unknown":
                await scene.finish(job, *_shares(0), verified_line("one", None, "no answer"))
            case "deadline":
                scene.start_pod(job)
                scene.kube.logs["velero", f"{job['metadata']['name']}-x"] = f"{_shares(0)[0]}\n"
                # Its pod is still being ended.
                target = {"type": "FailureTarget", "status": "True", "reason": "DeadlineExceeded"}
                scene.kube.put(job | {"status": {"failed": 1, "conditions": [target]}})
                await asyncio.sleep(20)
                assert scene.stored["message"] == "it did not end before its deadline of 6h0m0s"
            case "rejected by kubelet" | "node lost":
                rejected = kind == "rejected by kubelet"
                scene.start_pod(job, "Failed" if rejected else "Running")
                scene.kube.fail_next("GET", "/log", 400 if rejected else 502, times=999)
                scene.kube.put(job | {"status": {"failed": 1}})
                await until(lambda: "failures" in scene.stored, seconds=20 if rejected else 20 * MINUTE, every=1)
            case "log forbidden":
                scene.kube.fail_next("GET", "/log", 403, message="no access")
                await scene.finish(job, *_shares(0))
                assert scene.stored["message"].startswith(f"log of Pod velero/{job['metadata']['name']}-x: 403 ")
            case _:
                await asyncio.sleep(11 * MINUTE)
                assert scene.jobs == []
        assert scene.stored["failures"] == 1
        assert list(scene.stored.get("shares", {})) == (["0"] if kind in _WITH_LOG else [])
        assert scene.reasons()[-1] == "VerificationIncomplete"
        assert scene.verified() == {}
        await scene.until_job(seconds=2 * _HOUR, but=len(scene.jobs))


@pytest.mark.parametrize("starts", [False, True], ids=["never starts", "starts meanwhile"])
async def test_a_job_that_was_given_up_counts_once_although_its_deletion_fails(
    scene: VerificationScene, *, starts: bool
) -> None:
    async with scene.running():
        job = await scene.until_job(seconds=2 * MINUTE)
        # The client itself tries several times.
        scene.kube.fail_next("DELETE", "/jobs/", 500, times=6)
        await until(lambda: "failures" in scene.stored, seconds=11 * MINUTE, every=1)
        if starts:
            scene.start_pod(job)
        await until(lambda: scene.jobs == [], seconds=15 * MINUTE, every=1)
    assert scene.stored["failures"] == 1
    assert scene.reasons() == ["VerificationIncomplete"]


async def test_jobs_of_both_kinds_share_the_places_and_nothing_is_verified_unless_configured() -> None:
    scene = VerificationScene(MaintenanceSwitch.ON, backups=["uid"], verification=VerificationPlan(timedelta(hours=16)))
    scene.kube.put(repository_object("shop-default-kopia", lastMaintenanceTime="2026-11-21T10:00:00Z"))
    async with scene.running():
        first = await scene.until_job(seconds=10 * MINUTE)
        await asyncio.sleep(5 * MINUTE)
        assert len(scene.jobs) == 1
        scene.start_pod(first)
        if "nodeagent.io/verified-repository" not in first["metadata"]["labels"]:
            await scene.until_labeled(first)
        scene.end(first, 0, result())
        await scene.until_job(seconds=10 * MINUTE, but=1)
    scene = VerificationScene(MaintenanceSwitch.OFF, backups=["uid"])
    async with scene.running():
        await asyncio.sleep(3 * _HOUR)
        assert scene.jobs == []
        scene.verification = VerificationPlan(timedelta(hours=16))
        await scene.until_job(seconds=2 * MINUTE)


@pytest.mark.parametrize("deleting", [False, True])
async def test_maintenance_that_waits_goes_before_the_next_verification(*, deleting: bool) -> None:
    scene = VerificationScene(MaintenanceSwitch.ON, backups=["uid"], verification=VerificationPlan(timedelta(hours=16)))
    # It is looked at first, and only to be verified; the other one is to be maintained, too.
    first = repository_object(frequency="168h0m0s")
    scene.kube.put(first | {"status": {"phase": "New"}})
    other = scene.kube.put(repository_object("shop-default-kopia"))
    async with scene.running():
        proof = await scene.until_job(seconds=2 * MINUTE)
        scene.start_pod(proof)
        scene.kube.put(first)
        await asyncio.sleep(2 * _HOUR)
        assert len(scene.jobs) == 1
        if deleting:
            going = {"finalizers": ["x"], "deletionTimestamp": format_time(NOON)}
            scene.kube.put(other | {"metadata": other["metadata"] | going})
        scene.end(proof, 0, seal(SnapshotVerification(snapshots=0)))
        job = await scene.next_job()
        assert ("nodeagent.io/verified-repository" in job["metadata"]["labels"]) is deleting


_ANNOTATION = "nodeagent.io/verification"


def _store(restoring: VerificationScene, record: JsonDict) -> None:
    repository = restoring.repository()
    annotations = {_ANNOTATION: json.dumps(record)}
    restoring.kube.put(repository | {"metadata": repository["metadata"] | {"annotations": annotations}})


@pytest.fixture
def restoring() -> VerificationScene:
    """A repository beside a Velero server, whose shares were all read, with backups of two PVCs and of a pod volume."""
    made = VerificationScene(
        verification=VerificationPlan(timedelta(days=30), restore_test=True, restore_test_class="scratch"),
        settings=MaintenanceSettings(job=JobSettings(priority_class_name="low")),
        backups=["uid"],
    )
    made.kube.put(SERVER)
    for name, claim in (("one", "data"), ("two", "data"), ("three", "logs"), ("four", "")):
        made.put_backup(name, claim)
    # Before the backups, which they do not prove.
    read = format_time(NOON - timedelta(hours=1))
    _store(made, {"shares": {str(share): read for share in range(SHARES)}, "job": read})
    return made


def _claim(job: JsonDict) -> str:
    return str(job["metadata"]["annotations"]["nodeagent.io/restore-test"])


async def test_one_volume_is_restored_in_a_period_and_then_the_next_one(restoring: VerificationScene) -> None:
    async with restoring.running():
        job = await restoring.next_job()
        options = ["--agent-namespace=velero", "--storage-class=scratch", "--timeout=6h0m0s"]
        assert (_claim(job), words_of(job)) == ("data", ["run-restore-test", "DataUpload", "two", *options])
        pod = job["spec"]["template"]["spec"]
        assert (pod["serviceAccountName"], pod["priorityClassName"]) == ("node-agent-restore-test", "low")
        assert (
            job["metadata"]["labels"]["nodeagent.io/verified-repository"] == restoring.repository()["metadata"]["uid"]
        )
        await restoring.finish(job, verified_line("two", VerificationOutcome.PASSED))
        assert restoring.verified() == {"two": "passed"}
        text = "PVC data was restored and compared: 3 files with 7 bytes are right"
        assert restoring.events() == [("Verified", text)]
        await asyncio.sleep(2 * _HOUR)
        assert len(restoring.jobs) == 1
    # Another leader goes on from there, a period later.
    tests = restoring.stored["restoreTests"]
    assert (tests["claim"], tests["outcome"], list(tests["tested"])) == ("data", "passed", ["data"])
    ago = format_time(NOON - timedelta(days=30))
    _store(restoring, restoring.stored | {"restoreTests": tests | {"at": ago, "tested": {"data": ago}}})
    async with restoring.running():
        assert _claim(await restoring.next_job()) == "logs"


@pytest.mark.parametrize("set_back", [False, True], ids=["clocks are right", "the clock was set back"])
async def test_the_end_of_a_test_is_stored_by_the_next_leader(restoring: VerificationScene, *, set_back: bool) -> None:
    if set_back:
        last = {"job": format_time(NOON + timedelta(minutes=10)), "tried": "data"}
        _store(restoring, restoring.stored | {"restoreTests": last})
    async with restoring.running():
        job = await restoring.next_job()
    await restoring.finish(job, verified_line("two", VerificationOutcome.FAILED, "etc/passwd: owner 7 instead of 0"))
    async with restoring.running():
        await asyncio.sleep(MINUTE)
        assert len(restoring.jobs) == 1
    (damaged,) = restoring.stored["damaged"]
    assert damaged.startswith("PVC app/data: damaged: backup backup-two")
    assert ": etc/passwd: owner 7 instead of 0; no copy is known to be right" in damaged
    assert restoring.verified() == {"two": "failed"}
    assert [reason for reason, _ in restoring.events()] == ["VerificationFailed", "VerificationFailed"]


@pytest.mark.parametrize("kind", ["unknown", "failed", "no pod"])
async def test_a_test_without_a_finding_is_repeated_and_then_the_next_has_its_turn(
    restoring: VerificationScene, kind: str
) -> None:
    tested = []
    async with restoring.running():
        for _ in range(4):
            job = await restoring.next_job(seconds=2 * _HOUR)
            tested.append(_claim(job))
            match kind:
                case "unknown":
                    await restoring.finish(job, verified_line("two", None, "no room"))
                case "failed":
                    await restoring.finish(job, exit_code=1, message="no room")
                case _:
                    await asyncio.sleep(11 * MINUTE)
                    assert restoring.jobs == []
    assert tested == ["data", "data", "data", "logs"]
    assert restoring.stored["restoreTests"]["failures"] == 4
    assert restoring.verified() == {}
    reason, text = restoring.events()[-1]
    assert reason == "VerificationIncomplete"
    assert "PVC logs: " in text
    assert ("no room" in text) is (kind != "no pod")


async def test_a_test_whose_pod_never_ran_keeps_what_was_tested(restoring: VerificationScene) -> None:
    ago = format_time(NOON - timedelta(days=40))
    _store(restoring, restoring.stored | {"restoreTests": {"at": ago, "claim": "logs", "tested": {"logs": ago}}})
    async with restoring.running():
        assert _claim(await restoring.next_job()) == "data"
        await asyncio.sleep(11 * MINUTE)
    assert (restoring.stored["restoreTests"]["failures"], restoring.stored["restoreTests"]["tested"]) == (
        1,
        {"logs": ago},
    )


@pytest.mark.parametrize("missing", ["account", "copy"])
async def test_without_its_account_or_a_good_copy_nothing_starts(restoring: VerificationScene, missing: str) -> None:
    if missing == "account":
        text = "error looking up service account velero/node-agent-restore-test: serviceaccount not found"
        restoring.kube.fail_next("POST", "/pods", 403, times=99, message=text)
    for one in restoring.kube.objects(DATA_UPLOADS) if missing == "copy" else ():
        failed = {_ANNOTATION: json.dumps({"at": format_time(NOON), "outcome": "failed"})}
        restoring.kube.put(one | {"metadata": one["metadata"] | {"annotations": failed}})
    async with restoring.running():
        await asyncio.sleep(_HOUR)
    assert restoring.jobs == []
    # There may be very many.
    assert sum(one.path.endswith("/datauploads") for one in restoring.kube.requests) == 1
    if missing == "account":
        ((reason, text),) = restoring.events()
        assert reason == "VerificationRejected"
        assert text.endswith("; nodeagent install --restore-tests makes the account, or restoreTests of the chart")

"""A verification by reading back: a Job for each repository, and what is recorded of its results."""

import itertools

import pytest
from msgspec.structs import replace

from client.verifications.report import VolumeOutcome
from core.kube.resources import DATA_UPLOADS
from core.models.verification import Verification, VerificationOutcome, VerifiedSnapshot
from tests.client.support.verification_scene import VerificationScene, failed, passed
from tests.support.clock import NOON
from tests.support.tasks import interrupt, until

pytestmark = pytest.mark.looptime


@pytest.fixture
async def scene() -> VerificationScene:
    return VerificationScene()


def _args(job: dict[str, object]) -> list[str]:
    return job["spec"]["template"]["spec"]["containers"][0]["args"]  # type: ignore[index,no-any-return]


def _join(scene: VerificationScene) -> VerificationScene:
    """Let both volumes be in one repository."""
    raw = scene.base.kube.objects(DATA_UPLOADS)[1]
    scene.base.kube.put(raw | {"spec": raw["spec"] | {"sourceNamespace": "app"}})
    return scene


async def test_each_repository_is_read_by_a_job_that_is_deleted(scene: VerificationScene) -> None:
    found = await scene.run(percent=12.5)
    passed_ones = [(claim, VolumeOutcome.PASSED, 3, False) for claim in ("data", "files")]
    assert [(one.claim, one.outcome, one.files, one.restored) for one in found] == passed_ones
    first, second = scene.seen
    assert _args(first)[:2] == ["verify-snapshots", "--backup-repository=app-default-kopia"]
    assert _args(first)[-2:] == ["--snapshot=s1", "--percent=12.5"]
    assert _args(second)[-2:] == ["--snapshot=s2", "--percent=12.5"]
    assert first["metadata"]["labels"] == {"nodeagent.io/snapshot-verification": "app-default-kopia"}
    # The command ends before its Job would by itself.
    assert first["spec"]["activeDeadlineSeconds"] == 20 * 60
    assert scene.jobs == []
    assert scene.base.notes == []


async def test_a_job_whose_creation_was_not_answered_is_used(scene: VerificationScene) -> None:
    scene.base.attempts = 2
    scene.base.kube.fail_next("POST", "/jobs", "lost-applied")
    assert [one.outcome for one in await scene.run()] == [VolumeOutcome.PASSED] * 2
    assert (len(scene.seen), scene.jobs) == (2, [])


async def test_volumes_of_one_repository_are_read_by_one_job() -> None:
    scene = _join(VerificationScene(results={"s2": failed("s2")}))
    found = await scene.run()
    assert [one.outcome for one in found] == [VolumeOutcome.PASSED, VolumeOutcome.FAILED]
    (job,) = scene.seen
    assert [one for one in _args(job) if "snapshot=" in one] == ["--snapshot=s1", "--snapshot=s2"]


async def test_the_result_goes_onto_the_transfer_and_into_an_event(scene: VerificationScene) -> None:
    scene.results["s2"] = failed("s2")
    found = await scene.run()
    raw = scene.base.kube.objects(DATA_UPLOADS)[0]
    written = Verification.from_json(raw["metadata"]["annotations"]["nodeagent.io/verification"])
    assert (written.outcome, written.percent) == (VerificationOutcome.PASSED, 100.0)
    assert NOON < written.at == found[0].at
    assert written.at.microsecond == 0
    assert scene.outcomes == {"night-data": "passed", "night-files": "failed"}
    fault = "sub/first: object 1 is backed by missing blob p1; and at least 1 more"
    assert scene.events == [
        ("Normal", "Verified", "kopia snapshot s1: read 100 % of its files: 3 files with 1048576 bytes are right"),
        ("Warning", "VerificationFailed", f"kopia snapshot s2: {fault}"),
    ]
    assert found[1].message == fault


async def test_a_share_of_the_files_does_not_take_back_what_failed(scene: VerificationScene) -> None:
    """The file that is damaged may be one of the others; retention would take the copy for a sound one."""
    scene.results["s1"] = failed("s1")
    await scene.run(claims=("data",))
    scene.results["s1"] = replace(passed("s1"), percent=10.0)
    (found,) = await scene.run(percent=10.0, claims=("data",))
    assert (found.outcome, found.at, scene.outcomes) == (VolumeOutcome.PASSED, None, {"night-data": "failed"})
    (note,) = scene.base.notes
    assert "DataUpload velero/night-data stays failed: " in note
    scene.results["s1"] = passed("s1")
    await scene.run(claims=("data",))
    assert scene.outcomes == {"night-data": "passed"}


async def test_what_could_not_be_read_is_no_failed_verification_and_keeps_no_other_from_it() -> None:
    scene = VerificationScene(broken={"app-default-kopia"})
    found = await scene.run()
    assert [one.outcome for one in found] == [VolumeOutcome.UNVERIFIED, VolumeOutcome.PASSED]
    assert "of the verification failed: Error (exit code 1): no memory" in found[0].message
    assert found[0].at is None
    assert scene.outcomes == {"night-files": "passed"}
    assert [reason for _, reason, _ in scene.events] == ["Verified"]


@pytest.mark.parametrize(
    ("fault", "cause"),
    [("broken", "failed: Error (exit code 1): no memory"), ("slow", "did not end within 5m0s: Pod velero/")],
)
async def test_what_a_job_had_found_out_before_it_ended_or_took_too_long_is_kept(fault: str, cause: str) -> None:
    scene = _join(VerificationScene(logged=1))
    getattr(scene, fault).add("app-default-kopia")
    found = await scene.run()
    assert [one.outcome for one in found] == [VolumeOutcome.PASSED, VolumeOutcome.UNVERIFIED]
    assert cause in found[1].message
    assert (scene.outcomes, scene.jobs) == ({"night-data": "passed"}, [])


async def test_an_interrupted_command_records_what_its_job_had_found_out() -> None:
    scene = _join(VerificationScene(slow={"app-default-kopia"}, logged=1))
    await interrupt(scene.run(), until(lambda: bool(scene.seen)))
    assert (scene.outcomes, scene.jobs) == ({"night-data": "passed"}, [])


async def test_a_log_that_cannot_be_read_is_no_result_and_the_cause_stays() -> None:
    scene = _join(VerificationScene(slow={"app-default-kopia"}, logged=1))
    scene.base.kube.fail_next("GET", "/log", 500, times=99, message="the kubelet is gone")
    found = await scene.run()
    assert [one.outcome for one in found] == [VolumeOutcome.UNVERIFIED] * 2
    assert "did not end within 5m0s" in found[0].message
    assert (scene.outcomes, scene.jobs) == ({}, [])


@pytest.mark.parametrize(
    ("restore", "path"), [(False, "/pods"), (True, "/datadownloads/"), (True, "/persistentvolumeclaims/")]
)
async def test_an_outage_of_the_api_server_is_waited_for(restore: bool, path: str) -> None:
    scene, calls = VerificationScene(restored=""), itertools.count()

    def go_on() -> None:
        match next(calls):
            case 0:
                scene.base.kube.fail_next("GET", path, "lost", times=10)
            case 20:
                scene.restored = "Completed"

    scene.on_job = go_on
    (found,) = await scene.run(restore=restore, claims=("data",))
    assert (found.outcome, found.message, scene.jobs, scene.base.notes) == (VolumeOutcome.PASSED, "", [], [])


async def test_a_snapshot_that_the_job_could_not_read_is_not_recorded(scene: VerificationScene) -> None:
    scene.results["s1"] = VerifiedSnapshot(id="s1", faults=["the bucket does not exist"], fault_count=1)
    found = await scene.run(claims=("data",))
    assert [(one.outcome, one.message) for one in found] == [(VolumeOutcome.UNVERIFIED, "the bucket does not exist")]
    assert (scene.outcomes, scene.events) == ({}, [])


async def test_a_volume_without_a_repository_is_unverified(scene: VerificationScene) -> None:
    raw = scene.base.kube.objects(DATA_UPLOADS)[0]
    scene.base.kube.put(raw | {"spec": raw["spec"] | {"backupStorageLocation": "gone"}})
    (found,) = await scene.run(claims=("data",))
    assert found.outcome is VolumeOutcome.UNVERIFIED
    assert found.message.startswith('there is no BackupRepository of volume namespace "app"')


@pytest.mark.parametrize(
    ("method", "path", "note", "recorded"),
    [
        ("PATCH", "/datauploads/night-data", "the result could not be recorded on DataUpload velero/night-data", False),
        ("POST", "/events", "no Event on DataUpload velero/night-data was recorded: ", True),
    ],
    ids=["annotation", "event"],
)
async def test_no_record_is_a_note(
    scene: VerificationScene, method: str, path: str, note: str, *, recorded: bool
) -> None:
    scene.base.kube.fail_next(method, path, 403, message="not you")
    (found,) = await scene.run(claims=("data",))
    assert (found.outcome, found.at is not None) == (VolumeOutcome.PASSED, recorded)
    (shown,) = scene.base.notes
    assert shown.startswith(note)
    assert "not you" in shown

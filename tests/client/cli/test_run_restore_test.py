"""`nodeagent run-restore-test` in a Job of the leader: what it creates, writes and leaves."""

import io
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from client.cli import run_restore_test
from client.cli.run_restore_test import prove_restore
from core.kube.resources import DATA_UPLOADS
from core.kube.types import OwnerRef
from core.models.base import JsonDict
from core.models.job_output import JobOutput, read_output
from core.models.verification import VERIFIED_LINE, VerificationOutcome, VerifiedSnapshot
from exposer.pods import JOB_VARIABLE
from nodeagent.maintenance.restore_tests import RestoreTestRequest
from tests.client.support.commands import open_shell
from tests.client.support.restore_scene import DATA
from tests.client.support.verification_scene import VerificationScene, failed

_OWNER: OwnerRef = {"apiVersion": "batch/v1", "kind": "Job", "name": "job", "uid": "u1"}
_REQUEST = RestoreTestRequest("DataUpload", "night-data", "velero", timedelta(minutes=5))


async def _prove(scene: VerificationScene, request: RestoreTestRequest = _REQUEST) -> list[VerifiedSnapshot]:
    """Return what the leader reads."""
    stream = io.StringIO()
    async with scene.working([_OWNER]) as tools:
        message = await prove_restore(tools, request, JobOutput(stream))
    return read_output(VERIFIED_LINE, message, f"a line\n{stream.getvalue()}")


@pytest.mark.looptime
async def test_all_that_it_creates_goes_with_its_job() -> None:
    scene, made = VerificationScene(), list[JsonDict]()
    scene.on_job = lambda: made.extend([*scene.base.claims.values(), *scene.base.downloads, *scene.jobs])
    request = RestoreTestRequest("DataUpload", "night-data", "velero", timedelta(minutes=5), "late")
    (found,) = await _prove(scene, request)
    assert (found.id, found.outcome, found.files, found.faults) == ("s1", VerificationOutcome.PASSED, 3, [])
    assert scene.outcomes == {"night-data": "passed"}
    assert {one["kind"] for one in made} == {"PersistentVolumeClaim", "DataDownload", "Job"}
    assert all(one["metadata"]["ownerReferences"] == [_OWNER] for one in made)
    assert made[0]["spec"]["storageClassName"] == "late"
    assert (scene.base.claims, scene.base.downloads, scene.jobs) == ({}, [], [])


@pytest.mark.looptime
async def test_damage_and_what_was_not_found_out_are_told_apart() -> None:
    (found,) = await _prove(VerificationScene(compared={"s1": failed("s1")}))
    assert found.outcome is VerificationOutcome.FAILED
    assert found.faults == ["sub/first: object 1 is backed by missing blob p1; and at least 1 more"]
    (found,) = await _prove(VerificationScene(restored="Failed"))
    assert found.outcome is None
    assert found.faults[0].endswith("is Failed: no node has room")


def _forget_claim(scene: VerificationScene) -> None:
    """Let the backup be one of Velero, which does not say the size of a PVC."""
    raw = next(one for one in scene.base.kube.objects(DATA_UPLOADS) if one["metadata"]["name"] == "night-data")
    del raw["metadata"]["annotations"]["nodeagent.io/claim"]
    scene.base.kube.put(raw)


@pytest.mark.looptime
async def test_a_backup_of_velero_has_the_size_and_class_of_its_pvc() -> None:
    scene, made = VerificationScene(), list[JsonDict]()
    _forget_claim(scene)
    scene.on_job = lambda: made.extend(one for one in scene.base.claims.values() if one["metadata"]["name"] != "data")
    spec = {"storageClassName": "fast", "resources": {"requests": {"storage": "3Gi"}}, "accessModes": ["ReadWriteOnce"]}
    scene.base.put_claim(DATA.name, spec=spec, status={"capacity": {"storage": "4Gi"}})
    (found,) = await _prove(scene)
    assert found.outcome is VerificationOutcome.PASSED
    assert made[0]["spec"]["resources"] == {"requests": {"storage": "4Gi"}}
    assert made[0]["spec"]["storageClassName"] == "fast"


@pytest.mark.parametrize("name", ["gone", "night-data"])
def test_why_it_failed_is_the_message_of_its_pod(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene, message = VerificationScene(), tmp_path / "message"
    shell = open_shell(scene.base.kube, capsys, monkeypatch)
    monkeypatch.setattr(run_restore_test, "_MESSAGE", message)
    monkeypatch.setenv(JOB_VARIABLE, "job")
    if name == "gone":
        scene.base.user.put("Job", "job", "batch/v1")
    done = shell.run(*replace(_REQUEST, name=name).argv)
    assert done.code == 1
    cause = "DataUpload velero/gone is gone, or has no snapshot" if name == "gone" else "get Job velero/job: 404 "
    assert done.err.startswith(f"error: {cause}")
    assert done.err == f"error: {message.read_text()}\n"

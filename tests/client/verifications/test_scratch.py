"""A verification by a restore: the scratch volume, what is compared, and that nothing stays."""

import asyncio
import itertools
import re
from datetime import timedelta

import pytest
from msgspec.structs import replace

from client.restores.manifests import PlannedRestore, RequestedRestore
from client.verifications import scratch
from client.verifications.report import VolumeOutcome
from core.kube.resources import DATA_DOWNLOADS, DATA_UPLOADS, JOBS, PERSISTENT_VOLUME_CLAIMS
from core.models.base import JsonDict, format_time
from tests.client.support.restore_scene import DATA, saved
from tests.client.support.verification_scene import VerificationScene, failed
from tests.support.clock import NOON, LoopClock
from tests.support.tasks import interrupt, until

pytestmark = pytest.mark.looptime


@pytest.fixture
async def scene() -> VerificationScene:
    return VerificationScene()


def _hold_claims(scene: VerificationScene) -> None:
    """Keep the PVCs that there are, though they are deleted."""
    for claim in scene.base.claims.values():
        claim["metadata"]["finalizers"] = ["kubernetes.io/pvc-protection"]
        scene.base.kube.put(claim)


def _left(scene: VerificationScene) -> list[JsonDict]:
    kube = scene.base.kube
    return [*scene.jobs, *kube.objects(DATA_DOWNLOADS), *kube.objects(PERSISTENT_VOLUME_CLAIMS)]


async def test_a_volume_is_restored_compared_and_removed(scene: VerificationScene) -> None:
    made: list[JsonDict] = []
    scene.on_job = lambda: made.extend([*scene.base.claims.values(), *scene.base.downloads])
    found = await scene.run(restore=True)
    assert [(one.claim, one.restored) for one in found] == [("data", True), ("files", True)]
    assert scene.outcomes == {"night-data": "passed", "night-files": "passed"}
    claim, download = made[:2]
    name = claim["metadata"]["name"]
    assert name.startswith("nodeagent-verify-")
    assert (claim["metadata"]["namespace"], claim["spec"]["storageClassName"]) == ("velero", "fast")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert claim["spec"]["resources"]["requests"]["storage"] == "2Gi"
    assert download["spec"]["targetVolume"] == {"namespace": "velero", "pvc": name, "pv": ""}
    assert (download["spec"]["snapshotID"], download["spec"]["sourceNamespace"]) == ("s1", "app")
    assert (_left(scene), scene.base.notes) == ([], [])
    files, block = (one["spec"]["template"]["spec"] for one in scene.seen)
    mounts = {one["name"]: one for one in files["containers"][0]["volumeMounts"]}
    (volume,) = (one for one in files["volumes"] if "persistentVolumeClaim" in one)
    assert mounts[volume["name"]]["readOnly"]
    assert "--volume-mode=Block" in block["containers"][0]["args"]
    assert block["containers"][0]["volumeDevices"]
    assert scene.events[0][2] == ("kopia snapshot s1: restored and compared: 3 files with 1048576 bytes are right")


@pytest.mark.parametrize("damaged", [True, False], ids=["damaged", "not damaged"])
async def test_a_restore_that_fails_is_a_failed_verification_only_if_data_is_damaged(*, damaged: bool) -> None:
    scene = VerificationScene(restored="Failed", results={"s1": failed("s1")} if damaged else {})
    (found,) = await scene.run(restore=True, claims=("data",))
    assert len(scene.seen) == 1
    assert _left(scene) == []
    if damaged:
        assert (found.outcome, scene.outcomes) == (VolumeOutcome.FAILED, {"night-data": "failed"})
    else:
        assert (found.outcome, scene.outcomes) == (VolumeOutcome.UNVERIFIED, {})
        assert found.message.startswith("DataDownload velero/nodeagent-verify-")
        assert found.message.endswith(" is Failed: no node has room")


async def test_an_interruption_removes_everything() -> None:
    scene = VerificationScene(restored="")
    await interrupt(scene.run(restore=True), until(lambda: bool(scene.jobs and scene.base.downloads)))
    assert (_left(scene), scene.outcomes, scene.base.notes) == ([], {}, [])


def _put_left(scene: VerificationScene, name: str, *, age: timedelta, job: str = "", ended: timedelta | None) -> None:
    """Store what a command has left: a PVC of that age, its transfer, and a Job that has ended so long ago."""
    name, _, user = name.partition(" ")
    volume = saved(replace(DATA, namespace="velero", name=name))
    planned = PlannedRestore(RequestedRestore(user or name, "velero"), volume, 1)
    claim, kube = planned.build_claim(), scene.base.kube
    claim["metadata"]["creationTimestamp"] = format_time(NOON - age)
    kube.put(claim)
    kube.put(planned.build_transfer() | {"status": {"phase": "Completed"}})
    if not job:
        return
    condition = {"type": "Failed", "status": "True", "lastTransitionTime": format_time(NOON - (ended or age))}
    volumes = [{"name": "volume", "persistentVolumeClaim": {"claimName": name}}]
    spec, labels = {"template": {"spec": {"volumes": volumes}}}, {"nodeagent.io/snapshot-verification": "r"}
    scene.base.user.put("Job", job, "batch/v1", labels=labels, spec=spec)
    kube.put(kube.objects(JOBS)[-1] | {"status": {"conditions": [condition] if ended else []}})


_HOUR, _MINUTES = timedelta(hours=1), timedelta(minutes=20)


async def test_what_a_killed_command_has_left_is_removed_and_named(scene: VerificationScene) -> None:
    _put_left(scene, "nodeagent-verify-1", age=_HOUR, ended=None)
    _put_left(scene, "nodeagent-verify-2", age=2 * _HOUR, job="ended", ended=_HOUR)
    await scene.run(restore=True, claims=("data",))
    assert _left(scene) == []
    assert scene.base.notes == [
        f"removed PVC velero/nodeagent-verify-{number}, which a verification that was killed had left"
        for number in (1, 2)
    ]


async def test_what_a_command_leaves_that_is_killed_at_any_request_is_removed_by_a_later_one() -> None:
    for writes in itertools.count(1):
        scene = VerificationScene()
        with scene.base.cutting(writes) as sent:
            await scene.run(restore=True, claims=("data",))
        ended = {"type": "Failed", "status": "True", "lastTransitionTime": format_time(LoopClock().now())}
        for job in scene.jobs:
            scene.base.kube.put(job | {"status": {"conditions": [ended]}})
        await asyncio.sleep(3600)
        await scene.run(restore=True, claims=("data",))
        assert (_left(scene), scene.outcomes) == ([], {"night-data": "passed"})
        if len(sent) < writes:
            break


@pytest.mark.parametrize(
    ("name", "age", "job", "ended"),
    [
        ("nodeagent-verify-1", _MINUTES, "", None),
        ("nodeagent-verify-1", _HOUR, "running", None),
        ("nodeagent-verify-1", _HOUR, "ended", _MINUTES),
        ("of-a-user", _HOUR, "", None),
        ("nodeagent-verify-1 by a user", _HOUR, "", None),
    ],
    ids=["young", "runs", "has just ended", "no scratch volume", "restored by a user"],
)
async def test_what_another_command_may_use_stays(
    scene: VerificationScene, name: str, age: timedelta, job: str, ended: timedelta | None
) -> None:
    _put_left(scene, name, age=age, job=job, ended=ended)
    before = len(_left(scene))
    await scene.run(restore=True, claims=("data",))
    assert (len(_left(scene)), scene.base.notes) == (before, [])


async def test_what_cannot_be_listed_stays_and_is_noted(scene: VerificationScene) -> None:
    scene.base.kube.fail_next("GET", "/persistentvolumeclaims", 403, message="not you")
    (found,) = await scene.run(restore=True, claims=("data",))
    assert found.outcome is VolumeOutcome.PASSED
    (note,) = scene.base.notes
    assert note.startswith("what verifications that were killed have left was not removed: ")


async def test_an_interruption_of_the_removal_loses_no_result(scene: VerificationScene) -> None:
    scene.on_job = lambda: _hold_claims(scene)
    await interrupt(scene.run(restore=True), until(lambda: "removing the scratch volume" in str(scene.progress)))
    assert scene.outcomes == {"night-data": "passed"}


async def test_a_comparison_that_fails_after_its_result_keeps_it() -> None:
    scene = VerificationScene(broken={"app-default-kopia"}, logged=1)
    (found,) = await scene.run(restore=True, claims=("data",))
    assert (found.outcome, found.restored, scene.outcomes) == (VolumeOutcome.PASSED, True, {"night-data": "passed"})
    assert _left(scene) == []


async def test_a_restore_that_does_not_end_in_time_is_removed() -> None:
    scene = VerificationScene(restored="")
    (found,) = await scene.run(restore=True, claims=("data",))
    assert found.outcome is VolumeOutcome.UNVERIFIED
    assert "did not end within 5m0s" in found.message
    assert _left(scene) == []


async def test_what_cannot_be_removed_is_named_with_the_command(scene: VerificationScene) -> None:
    scene.base.kube.fail_next("DELETE", "/persistentvolumeclaims/", 403, message="not you")
    await scene.run(restore=True, claims=("data",))
    (claim,) = scene.base.claims.values()
    name = claim["metadata"]["name"]
    (note,) = scene.base.notes
    assert note.startswith(
        f"PersistentVolumeClaim velero/{name} of the verification is left, to delete by kubectl -n velero delete "
        f"persistentvolumeclaims {name}: "
    )
    assert note.endswith("not you")


async def test_an_object_that_stays_is_named_in_the_end(scene: VerificationScene) -> None:
    scene.on_job = lambda: _hold_claims(scene)
    await scene.run(restore=True, claims=("data",))
    (note,) = scene.base.notes
    assert note.endswith("it is being deleted, and still there")


async def test_a_volume_that_its_class_retains_is_named() -> None:
    scene = VerificationScene(volume="pv-1")
    spec = {"persistentVolumeReclaimPolicy": "Retain"}
    scene.base.kube.put({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": "pv-1"}, "spec": spec})
    await scene.run(restore=True, claims=("data",))
    (note,) = scene.base.notes
    assert "PersistentVolume pv-1 of the verification stays by its policy Retain" in note
    assert note.endswith("kubectl delete pv pv-1")


async def test_a_pvc_of_which_nothing_is_known_is_unverified(scene: VerificationScene) -> None:
    raw = scene.base.kube.objects(DATA_UPLOADS)[0]
    del raw["metadata"]["annotations"]["nodeagent.io/claim"]
    scene.base.kube.put(raw)
    (found,) = await scene.run(restore=True, claims=("data",))
    assert found.outcome is VolumeOutcome.UNVERIFIED
    assert found.message == (
        "its backup does not say the size of its PVC: verify it without --restore (there is no such PVC any more)"
    )
    assert _left(scene) == []


async def test_a_removal_that_hangs_is_a_note(scene: VerificationScene, monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang(*_: object) -> bool:
        await asyncio.sleep(1e6)
        return False

    monkeypatch.setattr(scratch, "_remove", hang)
    found = await scene.run(restore=True)
    assert [one.outcome for one in found] == [VolumeOutcome.PASSED] * 2
    (first, _) = scene.base.notes
    left = r"PVC velero/nodeagent-verify-\w+ may be left: remove the scratch volume: timed out after 10m0s"
    assert re.fullmatch(left, first)

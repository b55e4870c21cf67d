"""The controller of BackupStorageLocations: what it writes, when, and that a Velero server is left alone."""

import asyncio
import json

import pytest

from core.kube.resources import BACKUP_STORAGE_LOCATIONS, PODS
from core.models.base import JsonDict
from core.models.names import STORAGE_LOCATION_LABEL
from exposer.workload import ONTO_ANY_NODE
from nodeagent.leader.repositories.locations import Verdict
from nodeagent.runtime.settings import RepositoryControllerMode
from tests.nodeagent.support.location_scene import NAME, LocationScene
from tests.nodeagent.support.repository_scene import SERVER
from tests.support.tasks import until

pytestmark = pytest.mark.looptime

_PREFIX = f'BackupStorageLocation "{NAME}" is unavailable: '
_GOOD = json.dumps({"needsPod": False})


def _writes(scene: LocationScene) -> int:
    path = BACKUP_STORAGE_LOCATIONS.path("velero", NAME)
    return sum(request.method == "PATCH" and request.path == path for request in scene.kube.requests)


async def test_an_unavailable_location_gets_a_short_message_without_secrets() -> None:
    url = "GET https://account.blob.test/c?sig=0123456789abcdef&se=1: 403"
    async with LocationScene(Verdict(f"the credentials have no access\n\n{url}\n" + "x" * 1000)).running() as scene:
        await asyncio.sleep(1)
    message = scene.status["message"]
    assert scene.status["phase"] == "Unavailable"
    assert message.startswith(f"{_PREFIX}the credentials have no access; GET https://account.blob.test/c?sig=***")
    assert "0123456789abcdef" not in message
    assert len(message) <= len(_PREFIX) + 500
    assert scene.metric == 0.0


async def test_it_is_validated_every_minute_and_gets_the_status_that_velero_writes_once_each_time() -> None:
    scene = LocationScene()
    synced = {"lastSyncedTime": "2026-11-20T10:00:00Z"}
    scene.put_location(status={"phase": "Unavailable", "message": "old"} | synced)
    async with scene.running():
        await asyncio.sleep(30)
        first = {"phase": "Available", "lastValidationTime": "2026-11-21T12:00:00Z"}
        assert (scene.status, scene.metric, scene.pod) == (first | synced, 1.0, None)
        scene.verdict = Verdict("the bucket does not exist")
        await asyncio.sleep(29)
        assert (scene.status["phase"], _writes(scene)) == ("Available", 1)
        await asyncio.sleep(2)
        assert (scene.status["phase"], _writes(scene)) == ("Unavailable", 2)
        scene.verdict = Verdict()
        await asyncio.sleep(60)
        assert scene.status == synced | {"phase": "Available", "lastValidationTime": "2026-11-21T12:02:00Z"}
        assert _writes(scene) == 3
    assert scene.validated_at == pytest.approx([0, 60, 120], abs=1)


@pytest.mark.parametrize(
    ("frequency", "validations"),
    [("5m", 2), ("1m30s", 6), ("10s", 49), ("1s", 49), ("0s", 1), (None, 9), ("-1m", 9), ("often", 9)],
)
async def test_the_locations_frequency_is_honored(frequency: str | None, validations: int) -> None:
    scene = LocationScene()
    scene.put_location(validationFrequency=frequency)
    async with scene.running():
        await asyncio.sleep(485)
    assert len(scene.validated_at) == _writes(scene) == validations
    if frequency == "0s":
        # It allows the first validation only.
        async with scene.running():
            await asyncio.sleep(200)
            assert (len(scene.validated_at), scene.metric) == (1, 1.0)


async def test_a_new_spec_or_location_is_validated_at_once_and_a_new_status_is_not() -> None:
    async with LocationScene().running() as scene:
        await asyncio.sleep(10)
        scene.put_location(status=scene.status | {"lastSyncedTime": "2026-11-20T10:00:00Z"})
        await asyncio.sleep(10)
        assert len(scene.validated_at) == 1
        scene.put_location(objectStorage={"bucket": "other"})
        await asyncio.sleep(2)
        assert len(scene.validated_at) == 2
        await scene.delete_location()
        await asyncio.sleep(1)
        assert scene.metric is None
        scene.put_location()
        await asyncio.sleep(1)
    assert len(scene.validated_at) == 3


async def test_an_edit_during_a_validation_makes_its_result_invalid() -> None:
    async with LocationScene(Verdict("the bucket does not exist"), seconds=10).running() as scene:
        await asyncio.sleep(5)
        scene.put_location(objectStorage={"bucket": "other"})
        scene.verdict = Verdict()
        await asyncio.sleep(7)
        assert scene.status == {}
        await asyncio.sleep(12)
    assert scene.status["phase"] == "Available"


@pytest.mark.parametrize("mode", RepositoryControllerMode)
async def test_with_a_server_or_switched_off_nothing_is_validated_or_written(mode: RepositoryControllerMode) -> None:
    scene = LocationScene(mode=mode)
    if mode is not RepositoryControllerMode.OFF:
        scene.kube.put(SERVER)
    async with scene.running():
        await asyncio.sleep(300)
    assert (scene.status, scene.validated_at, scene.metric) == ({}, [], None)
    assert bool(scene.kube.requests) is (mode is not RepositoryControllerMode.OFF)


async def test_a_server_that_is_installed_during_a_validation_is_left_alone() -> None:
    async with LocationScene(seconds=10).running() as scene:
        await asyncio.sleep(75)
        assert (scene.metric, _writes(scene)) == (1.0, 1)
        scene.kube.put(SERVER)
        await asyncio.sleep(200)
        assert (scene.metric, _writes(scene)) == (None, 1)
        assert len(scene.validated_at) == 2


async def test_a_location_whose_access_depends_on_the_pod_is_validated_by_one_every_ten_minutes() -> None:
    async with LocationScene(verdict=None).running() as scene:
        for round_ in range(3):
            pod = await scene.until_pod(seconds=8)
            assert pod["metadata"]["name"] == f"{NAME}-validation"
            assert pod["metadata"]["ownerReferences"][0]["uid"] == scene.location["metadata"]["uid"]
            assert pod["metadata"]["labels"][STORAGE_LOCATION_LABEL] == NAME
            assert pod["spec"]["serviceAccountName"] == "movers"
            container = pod["spec"]["containers"][0]
            assert container["args"][:2] == ["validate-location", f"--backup-storage-location={NAME}"]
            assert "--keys-only" not in container["args"]
            assert container["resources"] == {"requests": {"cpu": "100m"}}
            assert _writes(scene) == round_
            scene.end_pod(0, _GOOD)
            await asyncio.sleep(6)
            assert (scene.status["phase"], scene.pod, _writes(scene)) == ("Available", None, round_ + 1)
            await asyncio.sleep(590)
            assert scene.pod is None


async def test_a_directory_is_validated_by_a_pod_that_can_only_read_it() -> None:
    scene = LocationScene()
    scene.put_location("velero.io/fs", config={"fspath": "/backups/a"})
    async with scene.running():
        pod = await scene.until_pod()
        assert scene.validated_at == []
        (volume,) = [each for each in pod["spec"]["volumes"] if each["name"] == "mover-repository"]
        assert volume["persistentVolumeClaim"] == {"claimName": "shared", "readOnly": True}
        mounts = pod["spec"]["containers"][0]["volumeMounts"]
        assert {"name": "mover-repository", "mountPath": "/backups", "readOnly": True} in mounts
        scene.end_pod(12, "/backups/a: directory /backups/a does not exist")
        await asyncio.sleep(6)
    assert scene.status["message"] == f"{_PREFIX}/backups/a: directory /backups/a does not exist"


async def test_a_pod_that_cannot_start_makes_the_location_unavailable_after_ninety_seconds() -> None:
    async with LocationScene(verdict=None).running() as scene:
        await scene.until_pod()
        scene.block_pod()
        await asyncio.sleep(20)
        pod: JsonDict = scene.pod or {}
        assert ONTO_ANY_NODE in pod["spec"]["tolerations"]
        assert scene.status == {}
        await asyncio.sleep(80)
        assert "0/1 nodes: full" in scene.status["message"]
        assert scene.pod is None


@pytest.mark.parametrize(
    ("phase", "ending"),
    [
        ("Running", "pod velero/default-validation did not end: the storage may not answer"),
        ("Pending", "Pod velero/default-validation is starting on node node-a"),
    ],
)
async def test_a_pod_that_does_not_end_or_only_starts_makes_the_location_unavailable(phase: str, ending: str) -> None:
    async with LocationScene(verdict=None).running() as scene:
        pod = await scene.until_pod()
        scene.kube.put(pod | {"spec": pod["spec"] | {"nodeName": "node-a"}})
        scene.set_pod(phase=phase)
        await asyncio.sleep(170)
        assert scene.status == {}
        await asyncio.sleep(20)
    assert scene.status["message"].endswith(ending)


async def test_a_rejected_pod_is_reported_and_not_repeated_before_ten_minutes() -> None:
    scene = LocationScene(verdict=None)
    scene.kube.fail_next("POST", "pods", 403, times=1)
    async with scene.running():
        await asyncio.sleep(5)
        assert scene.status["phase"] == "Unavailable"
        await asyncio.sleep(580)
        assert scene.pod is None
        await scene.until_pod()


async def test_a_new_leader_continues_with_the_pod_it_finds() -> None:
    async with LocationScene(verdict=None).running() as scene:
        first = await scene.until_pod()
    async with scene.running():
        await asyncio.sleep(20)
        assert (scene.pod or {})["metadata"]["uid"] == first["metadata"]["uid"]
        scene.end_pod(0, _GOOD)
        await asyncio.sleep(6)
    assert scene.status["phase"] == "Available"


async def test_a_pod_that_its_kubelet_does_not_end_holds_no_validation() -> None:
    async with LocationScene(verdict=None).running() as scene:
        pod = await scene.until_pod()
        scene.kube.put(pod | {"metadata": pod["metadata"] | {"finalizers": ["x/y"]}})
        scene.set_pod(phase="Running")
        await asyncio.sleep(680)
        assert _grace(scene) == [None]
        # The agent's own process has found that a pod is needed, and is not asked again meanwhile.
        assert (len(scene.validated_at), _writes(scene)) == (2, 1)
        await asyncio.sleep(30)
        assert set(_grace(scene)[1:]) == {0}
        await scene.client.patch(PODS, "velero", f"{NAME}-validation", {"metadata": {"finalizers": []}})
        await until(lambda: (scene.pod or pod)["metadata"]["uid"] != pod["metadata"]["uid"], seconds=8)
        assert len(scene.validated_at) == 2


def _grace(scene: LocationScene) -> list[int | None]:
    """Return the grace periods of the deletions of pods."""
    deletions = [one for one in scene.kube.requests if one.method == "DELETE" and "/pods/" in one.path]
    return [json.loads(one.body or b"").get("gracePeriodSeconds") for one in deletions]


async def test_a_pod_is_deleted_when_a_server_is_installed() -> None:
    async with LocationScene(verdict=None).running() as scene:
        await scene.until_pod()
        scene.kube.put(SERVER)
        await asyncio.sleep(70)
        assert scene.pod is None
    assert scene.status == {}


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("PATCH", "backupstoragelocations", 409), ("PATCH", "backupstoragelocations", 500), ("GET", "deployments", 403)],
)
async def test_a_failed_request_does_not_end_the_controller(method: str, path: str, status: int) -> None:
    scene = LocationScene()
    scene.kube.fail_next(method, path, status, times=4)
    async with scene.running():
        await asyncio.sleep(400)
    assert scene.status["phase"] == "Available"


async def test_an_invalid_location_ends_nothing_and_is_not_written() -> None:
    scene = LocationScene()
    scene.put_location(credential="text")
    async with scene.running():
        await asyncio.sleep(130)
        assert scene.status == {}
        scene.put_location()
        await asyncio.sleep(2)
    assert scene.status["phase"] == "Available"

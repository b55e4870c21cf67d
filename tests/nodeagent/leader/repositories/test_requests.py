"""What the controller of BackupRepositories does when a transfer that needs one is accepted, and what it asks for."""

import asyncio
import json
from collections import Counter

import pytest

from core.kube.resources import BACKUP_REPOSITORIES, BACKUP_STORAGE_LOCATIONS, PODS
from core.models.base import JsonDict
from core.models.storage import RepositoryKey, build_backup_repository
from tests.nodeagent.support.repository_scene import GOOD, RECORDED, Scene, open_scene

pytestmark = pytest.mark.looptime


def _others(scene: Scene) -> list[JsonDict]:
    """Return the repositories of the second namespace."""
    found = scene.kube.objects(BACKUP_REPOSITORIES)
    return [each for each in found if each["spec"]["volumeNamespace"] == "other"]


def _phase(scene: Scene) -> str:
    (repository,) = _others(scene)
    return str(repository.get("status", {}).get("phase", ""))


async def test_a_transfer_that_needs_the_repository_causes_a_retry_unless_one_was_just_done() -> None:
    scene = open_scene()
    async with scene.running():
        await scene.fail_once()
        scene.controller.request("app", "default")
        await asyncio.sleep(10)
        assert scene.pod is None
        await scene.until_pod(seconds=11)
        await scene.fail_once()
        await asyncio.sleep(60)
        assert scene.pod is None
        scene.controller.request("app", "other")
        await asyncio.sleep(6)
        assert scene.pod is None
        scene.controller.request("app", "default")
        await scene.until_pod(seconds=1)


async def test_a_repository_that_a_transfer_needs_is_created_if_absent() -> None:
    """The mover of the transfer creates it as well, but starts only once its volume is exposed."""
    scene = open_scene()
    async with scene.running():
        await scene.until_pod()
        scene.end_pod(0, GOOD)
        await scene.until_phase("Ready")
        await asyncio.sleep(1)
        for _ in range(2):
            scene.controller.request("other", "default")
        await scene.until_pod(seconds=1)
        (created,) = _others(scene)
        recorded = json.loads(RECORDED.read_text())[0]["object"]
        assert created["spec"].keys() == recorded["spec"].keys()
        assert created["metadata"]["labels"].keys() == recorded["metadata"]["labels"].keys()
        assert created["spec"]["volumeNamespace"] == "other"
        await scene.client.delete(BACKUP_REPOSITORIES, "velero", "other-default-kopia")
        await asyncio.sleep(60)
        assert _others(scene) == []


async def test_a_repository_that_the_leader_may_not_create_is_left_to_the_mover(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scene = open_scene()
    async with scene.running():
        await scene.until_pod()
        scene.kube.fail_next("POST", "/backuprepositories", 403)
        scene.controller.request("other", "default")
        await asyncio.sleep(60)
        assert _others(scene) == []
    assert caplog.messages == []


async def test_no_second_repository_is_created_while_those_that_exist_were_not_listed() -> None:
    """Velero gave repositories names of other forms, and refuses to work with two for one namespace and location."""
    scene = open_scene()
    found = build_backup_repository("velero", RepositoryKey("other", "default"))
    scene.kube.put(found | {"metadata": found["metadata"] | {"name": "other-default-kopia-x9zkq"}})
    scene.kube.fail_next("GET", "/backuprepositories", "lost", times=20)
    async with scene.running():
        await asyncio.sleep(1)
        scene.controller.request("other", "default")
        await asyncio.sleep(300)
    assert [one["metadata"]["name"] for one in _others(scene)] == ["other-default-kopia-x9zkq"]


async def test_no_repository_is_created_in_a_location_that_is_only_read() -> None:
    """A backup into it fails before its mover would create one."""
    scene = open_scene()
    (location,) = scene.kube.objects(BACKUP_STORAGE_LOCATIONS)
    scene.kube.put(location | {"spec": location["spec"] | {"accessMode": "ReadOnly"}})
    async with scene.running():
        await asyncio.sleep(1)
        scene.controller.request("other", "default")
        await asyncio.sleep(60)
    assert _others(scene) == []


async def test_a_name_that_the_api_server_rejects_is_not_tried_again() -> None:
    scene = open_scene()
    async with scene.running():
        await asyncio.sleep(1)
        scene.kube.fail_next("POST", "/backuprepositories", 422, times=100)
        scene.controller.request("other", "default")
        await asyncio.sleep(300)
    tried = [one for one in scene.kube.requests if one.method == "POST" and one.path.endswith("/backuprepositories")]
    assert len(tried) == 1


async def _until_new(scene: Scene) -> None:
    """Wait for the first repository's pod, and make it Ready; then request one that does not exist."""
    await scene.until_pod()
    scene.end_pod(0, GOOD)
    await scene.until_phase("Ready")
    await asyncio.sleep(1)
    scene.controller.request("other", "default")
    await scene.until_pod(seconds=1)


async def test_an_early_failure_that_is_not_the_storages_fails_no_transfer() -> None:
    """The transfer's mover, which a NotReady repository would fail, waits for the same node for up to half an hour."""
    scene = open_scene()
    async with scene.running():
        await _until_new(scene)
        for _ in range(3):
            scene.block_pod()
            await asyncio.sleep(92)
            assert _phase(scene) in {"", "New"}
            assert "cannot be scheduled: 0/1 nodes" in _others(scene)[0]["status"]["message"]
            assert scene.pod is None
            await scene.until_pod(seconds=20)
        scene.end_pod(0, GOOD)
        await asyncio.sleep(5)
        (repository,) = _others(scene)
        assert (repository["status"]["phase"], repository["status"].get("message")) == ("Ready", None)


async def test_after_ten_minutes_such_a_failure_is_final() -> None:
    scene = open_scene()
    async with scene.running():
        await _until_new(scene)
        async with asyncio.timeout(900):
            while _phase(scene) != "NotReady":
                if scene.pod is not None:
                    scene.end_pod(137, "")
                await asyncio.sleep(1)
        assert asyncio.get_running_loop().time() > 600


async def test_what_the_storage_reports_is_final_at_once() -> None:
    """Also while the kubelet keeps the pod, which is deleted then, for some more seconds."""
    scene = open_scene()
    async with scene.running():
        await _until_new(scene)
        pod = await scene.until_pod()
        scene.kube.put(pod | {"metadata": pod["metadata"] | {"finalizers": ["test/kubelet"]}})
        scene.end_pod(12, "the bucket does not exist")
        await asyncio.sleep(2)
        assert _phase(scene) == "NotReady"
        pod = await scene.until_pod()
        assert pod["metadata"]["deletionTimestamp"]
        await asyncio.sleep(10)
        await scene.client.patch(
            PODS, pod["metadata"]["namespace"], pod["metadata"]["name"], {"metadata": {"finalizers": None}}
        )
        await asyncio.sleep(60)
        assert scene.pod is None


_STOPPED = {"terminated": {"exitCode": 14, "message": "SIGTERM: data path is canceled", "reason": "Error"}}
_KILLED = {"terminated": {"exitCode": 137, "message": "killed while connecting", "reason": "Error"}}
_PREEMPTED = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler", "message": "preempted"}


@pytest.mark.parametrize(
    "status",
    [
        {"reason": "OutOfcpu", "message": "Pod was rejected: Node didn't have enough resource: cpu"},
        {"reason": "Evicted", "message": "The node was low on resource: memory."},
        {"containerStatuses": [{"name": "init", "state": _STOPPED}]},
        {"containerStatuses": [{"name": "init", "state": _KILLED}], "conditions": [_PREEMPTED]},
    ],
    ids=["rejected", "evicted", "stopped", "preempted"],
)
async def test_what_the_cluster_does_to_the_init_pod_fails_no_transfer(status: JsonDict) -> None:
    scene = open_scene()
    async with scene.running():
        await _until_new(scene)
        scene.set_pod(phase="Failed", **status)
        await asyncio.sleep(2)
        assert _phase(scene) in {"", "New"}
        await scene.until_pod(seconds=20)


async def test_a_repository_whose_creation_had_no_answer_is_early_too() -> None:
    scene = open_scene()
    scene.kube.fail_next("POST", "/backuprepositories", "lost-applied")
    async with scene.running():
        await _until_new(scene)
        scene.end_pod(137, "")
        await asyncio.sleep(2)
        assert _phase(scene) in {"", "New"}


async def test_repositories_that_are_not_ready_cost_few_requests_for_what_they_have_in_common() -> None:
    """A location whose credentials are wrong fails all of its repositories, for hours."""
    scene = open_scene()
    for number in range(30):
        failed = build_backup_repository("velero", RepositoryKey(f"app-{number}", "default"))
        scene.kube.put(failed | {"status": {"phase": "NotReady", "message": "the bucket does not exist"}})
    async with scene.running():
        while any(one.get("status", {}).get("phase") != "NotReady" for one in scene.kube.objects(BACKUP_REPOSITORIES)):
            for pod in scene.kube.objects(PODS):
                ended = {"terminated": {"exitCode": 12, "message": "the bucket does not exist"}}
                status = {"phase": "Failed", "containerStatuses": [{"name": "init", "state": ended}]}
                scene.kube.put(pod | {"status": status})
            await asyncio.sleep(0.5)
        await asyncio.sleep(10)
        scene.kube.requests.clear()
        await asyncio.sleep(200)
    asked = Counter(one.path.split("/")[-1 if "deployments" in one.path else -2] for one in scene.kube.requests)
    assert asked["deployments"] <= 20
    # The password and the credentials.
    assert asked["secrets"] <= 2 * 40

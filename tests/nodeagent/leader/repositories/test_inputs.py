"""A change of what a Ready repository depends on; a repository that an accepted transfer needs, and what that costs."""

import asyncio
import json
from collections import Counter

import pytest

from core.kube.resources import BACKUP_REPOSITORIES, BACKUP_STORAGE_LOCATIONS, DEPLOYMENTS, PODS
from core.models.base import JsonDict
from core.models.storage import RepositoryKey, build_backup_repository
from nodeagent.runtime.settings import RepositoryControllerMode
from tests.nodeagent.support.repository_scene import (
    GOOD,
    RECORDED,
    SERVER,
    Scene,
    build_controller,
    open_scene,
    put_secret,
)

pytestmark = pytest.mark.looptime


async def _make_ready(scene: Scene, unique_id: str = "abc", *, created: bool = False) -> None:
    await scene.succeed(json.dumps({"uniqueID": unique_id, "created": created}))
    await asyncio.sleep(1)


def _location(scene: Scene) -> JsonDict:
    return next(o for o in scene.kube.objects(BACKUP_STORAGE_LOCATIONS) if o["metadata"]["name"] == "default")


@pytest.mark.parametrize("changed", ["bucket", "config", "credential", "recreated", "secret", "password"])
async def test_a_change_of_what_a_ready_repository_depends_on_is_checked_at_once(changed: str) -> None:
    scene = open_scene()
    location = _location(scene)
    changes: dict[str, JsonDict] = {
        "bucket": {"objectStorage": {"bucket": "other"}},
        "config": {"config": {"s3Url": "https://other.test"}},
        "credential": {"credential": {"name": "keys", "key": "other"}},
    }
    async with scene.running():
        await _make_ready(scene)
        if changed in changes:
            scene.kube.put(location | {"spec": location["spec"] | changes[changed]})
        elif changed == "recreated":
            await scene.client.delete(BACKUP_STORAGE_LOCATIONS, "velero", "default")
            scene.kube.put(location | {"metadata": {"name": "default", "namespace": "velero"}})
        else:
            put_secret(scene.kube, {"secret": "keys", "password": "velero-repo-credentials"}[changed], cloud="new")
        await scene.until_phase("New", seconds=62)
        assert scene.reasons() == ["Ready", "Checking"]
        await scene.until_pod(seconds=2)
        scene.end_pod(12, "wrong password")
        await scene.until_phase("NotReady", seconds=2)
        assert scene.message == "wrong password"
        await asyncio.sleep(310)
        await _make_ready(scene)
        assert scene.message == ""


@pytest.mark.parametrize("exit_code", [None, 12, 0])
async def test_an_init_pod_of_what_the_location_was_is_replaced_without_its_result(exit_code: int | None) -> None:
    scene = open_scene()
    location = _location(scene)
    async with scene.running():
        await scene.until_pod()
        first = scene.pod
        if exit_code is not None:
            scene.end_pod(exit_code, "the endpoint cannot be reached" if exit_code else GOOD)
        scene.kube.put(location | {"spec": location["spec"] | {"config": {"s3Url": "https://right.test"}}})
        await asyncio.sleep(20)
        assert first is not None
        assert scene.pod is not None
        assert scene.pod["metadata"]["uid"] != first["metadata"]["uid"]
        assert (scene.phase in {"", "New"}, scene.reasons()) == (True, [])
        await _make_ready(scene)


async def test_the_repositories_of_a_deleted_location_are_not_ready_until_it_is_back() -> None:
    scene = open_scene()
    location = _location(scene)
    async with scene.running():
        await _make_ready(scene)
        await scene.client.delete(BACKUP_STORAGE_LOCATIONS, "velero", "default")
        await scene.until_phase("NotReady", seconds=2)
        assert scene.message == "BackupStorageLocation velero/default does not exist"
        await asyncio.sleep(1000)
        assert scene.pod is None
        scene.kube.put(location | {"metadata": {"name": "default", "namespace": "velero"}})
        await scene.until_pod(seconds=6)
        await _make_ready(scene)


@pytest.mark.parametrize("edit", ["validationFrequency", "status", "nothing"])
async def test_a_ready_repository_is_not_checked_again_without_a_change_of_what_it_depends_on(edit: str) -> None:
    scene = open_scene()
    location = _location(scene)
    async with scene.running():
        await _make_ready(scene)
        if edit == "validationFrequency":
            scene.kube.put(location | {"spec": location["spec"] | {"validationFrequency": "5m0s"}})
        elif edit == "status":
            scene.kube.put(location | {"status": {"phase": "Unavailable"}})
        await asyncio.sleep(700)
        assert scene.phase == "Ready"
        assert scene.reasons() == ["Ready"]


async def test_a_repository_that_a_server_made_ready_is_taken_over_as_it_is() -> None:
    scene = open_scene()
    recorded = json.loads(RECORDED.read_text())[-1]["object"]
    scene.kube.put(recorded)
    async with scene.running():
        await asyncio.sleep(200)
        assert scene.phase == "Ready"
        assert scene.reasons() == []
        put_secret(scene.kube, "keys", cloud="new")
        await scene.until_phase("New", seconds=62)


async def test_a_server_checks_repositories_itself() -> None:
    async with open_scene().running() as scene:
        await _make_ready(scene)
        scene.kube.put(SERVER)
        put_secret(scene.kube, "keys", cloud="new")
        await asyncio.sleep(300)
        assert scene.phase == "Ready"
        await scene.client.delete(DEPLOYMENTS, "velero", "velero")
    # No leader has seen the change.
    scene.controller = build_controller(scene.kube, RepositoryControllerMode.AUTO)
    async with scene.running():
        await scene.until_phase("New", seconds=5)


async def test_the_repositorys_id_is_kept_and_another_one_is_reported() -> None:
    scene = open_scene()

    def marks() -> dict[str, str]:
        return {
            name.removeprefix("nodeagent.io/repository-"): value
            for name, value in scene.repository["metadata"]["annotations"].items()
            if not name.endswith("inputs")
        }

    async with scene.running():
        await _make_ready(scene, created=True)
        assert marks() == {"id": "abc", "created": "true"}
        put_secret(scene.kube, "keys", cloud="new")
        await scene.until_phase("New", seconds=62)
        await _make_ready(scene)
        assert marks() == {"id": "abc", "created": "true"}
        put_secret(scene.kube, "keys", cloud="newer")
        await scene.until_phase("New", seconds=62)
        await _make_ready(scene, "def")
        assert marks() == {"id": "abc", "created": "true"}
        assert scene.reasons()[-2:] == ["Ready", "DifferentRepository"]
        # In a location that was emptied, or another one.
        put_secret(scene.kube, "keys", cloud="newest")
        await scene.until_phase("New", seconds=62)
        await _make_ready(scene, "ghi", created=True)
        assert marks() == {"id": "ghi", "created": "true"}
        assert scene.reasons()[-2:] == ["Ready", "DifferentRepository"]


@pytest.mark.parametrize(
    ("method", "path", "attempted"),
    [
        ("GET", "/secrets/keys", "get Secret velero/keys"),
        ("GET", "/secrets/velero-repo-credentials", "get Secret velero/velero-repo-credentials"),
        ("POST", "/secrets", "create Secret velero/velero-repo-credentials"),
        ("GET", "/backupstoragelocations/default", "get BackupStorageLocation velero/default"),
    ],
)
async def test_what_may_not_be_read_is_why_transfers_wait(method: str, path: str, attempted: str) -> None:
    scene = open_scene()
    scene.kube.fail_next(method, path, 403, times=4)
    async with scene.running():
        await asyncio.sleep(5)
        assert (scene.phase, scene.pod) == ("", None)
        assert scene.message.startswith(f"{attempted}: 403")
        assert scene.reasons() == ["NotReady"]
        await scene.until_pod(seconds=300)
        await scene.succeed()
    assert scene.message == ""


def _others(scene: Scene) -> list[JsonDict]:
    """Return the repositories of the second namespace."""
    found = scene.kube.objects(BACKUP_REPOSITORIES)
    return [each for each in found if each["spec"]["volumeNamespace"] == "other"]


def _phase(scene: Scene) -> str:
    (repository,) = _others(scene)
    return str(repository.get("status", {}).get("phase", ""))


async def test_a_transfer_that_needs_the_repository_causes_a_retry_unless_one_was_just_done() -> None:
    async with open_scene().running() as scene:
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
    async with open_scene().running() as scene:
        await scene.succeed()
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


async def test_a_repository_it_may_not_create_is_left_to_the_mover(caplog: pytest.LogCaptureFixture) -> None:
    async with open_scene().running() as scene:
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


@pytest.mark.parametrize("why", ["its name is rejected", "its location is only read"])
async def test_a_repository_that_cannot_be_created_is_left_alone(why: str) -> None:
    """A backup into a location that is only read fails before its mover would create one."""
    scene = open_scene()
    if why == "its location is only read":
        location = _location(scene)
        scene.kube.put(location | {"spec": location["spec"] | {"accessMode": "ReadOnly"}})
    async with scene.running():
        await asyncio.sleep(1)
        scene.kube.fail_next("POST", "/backuprepositories", 422, times=100)
        scene.controller.request("other", "default")
        await asyncio.sleep(300)
    tried = [one for one in scene.kube.requests if one.method == "POST" and one.path.endswith("/backuprepositories")]
    assert (len(tried), _others(scene)) == (int(why == "its name is rejected"), [])


async def _until_new(scene: Scene) -> None:
    """Wait for the first repository's pod, and make it Ready; then request one that does not exist."""
    await scene.succeed()
    await asyncio.sleep(1)
    scene.controller.request("other", "default")
    await scene.until_pod(seconds=1)


async def test_an_early_failure_that_is_not_the_storages_fails_no_transfer() -> None:
    """The transfer's mover, which a NotReady repository would fail, waits for the same node for up to half an hour."""
    async with open_scene().running() as scene:
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
    # The answer to its creation is lost.
    scene.kube.fail_next("POST", "/backuprepositories", "lost-applied")
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
    async with open_scene().running() as scene:
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
    async with open_scene().running() as scene:
        await _until_new(scene)
        scene.set_pod(phase="Failed", **status)
        await asyncio.sleep(2)
        assert _phase(scene) in {"", "New"}
        await scene.until_pod(seconds=20)


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

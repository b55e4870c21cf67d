"""A change of what a Ready repository depends on: it is checked again while transfers wait."""

import asyncio
import json

import pytest

from core.kube.resources import BACKUP_STORAGE_LOCATIONS
from core.models.base import JsonDict
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
    await scene.until_pod()
    scene.end_pod(0, json.dumps({"uniqueID": unique_id, "created": created}))
    await scene.until_phase("Ready", seconds=2)
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
async def test_an_init_pod_of_what_the_location_was_is_replaced_and_its_result_does_not_count(
    exit_code: int | None,
) -> None:
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


async def test_a_change_that_no_leader_saw_is_checked() -> None:
    scene = open_scene()
    async with scene.running():
        await _make_ready(scene)
    location = _location(scene)
    scene.kube.put(location | {"spec": location["spec"] | {"objectStorage": {"bucket": "other"}}})
    scene.controller = build_controller(scene.kube, RepositoryControllerMode.AUTO)
    async with scene.running():
        await scene.until_phase("New", seconds=5)


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
    scene = open_scene()
    async with scene.running():
        await _make_ready(scene)
        scene.kube.put(SERVER)
        put_secret(scene.kube, "keys", cloud="new")
        await asyncio.sleep(300)
        assert scene.phase == "Ready"


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
async def test_what_may_not_be_read_is_the_reason_for_which_transfers_wait(
    method: str, path: str, attempted: str
) -> None:
    scene = open_scene()
    scene.kube.fail_next(method, path, 403, times=4)
    async with scene.running():
        await asyncio.sleep(5)
        assert (scene.phase, scene.pod) == ("", None)
        assert scene.message.startswith(f"{attempted}: 403")
        assert scene.reasons() == ["NotReady"]
        await scene.until_pod(seconds=300)
        scene.end_pod(0, GOOD)
        await scene.until_phase("Ready", seconds=2)
    assert scene.message == ""

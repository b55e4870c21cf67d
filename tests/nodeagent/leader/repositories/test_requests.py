"""What the controller of BackupRepositories does when a transfer that needs one is accepted."""

import asyncio
import json

import pytest

from core.kube.client import KubeClient
from core.kube.resources import BACKUP_REPOSITORIES
from core.kube.retry import Retry
from core.models.base import JsonDict
from tests.nodeagent.support.repository_scene import GOOD, RECORDED, Scene, open_scene
from tests.support.clock import LoopClock

pytestmark = pytest.mark.looptime


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


def _named(scene: Scene, name: str) -> list[JsonDict]:
    return [each for each in scene.kube.objects(BACKUP_REPOSITORIES) if each["metadata"]["name"] == name]


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
        (created,) = _named(scene, "other-default-kopia")
        recorded = json.loads(RECORDED.read_text())[0]["object"]
        assert created["spec"].keys() == recorded["spec"].keys()
        assert created["metadata"]["labels"].keys() == recorded["metadata"]["labels"].keys()
        assert created["spec"]["volumeNamespace"] == "other"
        await KubeClient(scene.kube, Retry(LoopClock())).delete(BACKUP_REPOSITORIES, "velero", "other-default-kopia")
        await asyncio.sleep(60)
        assert _named(scene, "other-default-kopia") == []


async def test_a_repository_that_the_leader_may_not_create_is_left_to_the_mover(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scene = open_scene()
    async with scene.running():
        await scene.until_pod()
        scene.kube.fail_next("POST", "/backuprepositories", 403)
        scene.controller.request("other", "default")
        await asyncio.sleep(60)
        assert _named(scene, "other-default-kopia") == []
    assert caplog.messages == []

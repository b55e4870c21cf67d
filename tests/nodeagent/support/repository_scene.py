"""A fake API server with one location, and a repository controller that works on it."""

import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import ClassVar

from core.kube.resources import BACKUP_REPOSITORIES, BACKUP_STORAGE_LOCATIONS, DEPLOYMENTS, EVENTS, SECRETS
from core.kube.velero_server import VeleroServerCheck
from core.models.storage import BlockHash
from exposer.causes import CauseFinder
from exposer.settings import ExposeSettings
from exposer.template import AgentTemplate
from nodeagent.config.repositories import RepositoryConfig
from nodeagent.leader.repositories.controller import RepositoryController
from nodeagent.leader.repositories.init_pod import InitPods
from nodeagent.runtime.settings import RepositoryControllerMode
from tests.nodeagent.support.clusters import build_cluster
from tests.nodeagent.support.pod_scene import PodScene
from tests.support.clock import LoopClock
from tests.support.fakekube import FakeKube
from tests.support.objects import JsonDict, build_object
from tests.support.tasks import running, until

RECORDED = Path(__file__).parents[2] / "recordings" / "velero-1.18.2" / "backuprepository.json"
SERVER = build_object(
    DEPLOYMENTS, "velero", "velero", metadata={"labels": {"component": "velero"}}, spec={"replicas": 0}
)
GOOD = json.dumps({"uniqueID": "abc"})


@dataclass
class Scene(PodScene):
    """A fake API server with one location, and a controller that works on it."""

    container: ClassVar[str] = "init"
    kube: FakeKube
    controller: RepositoryController

    @property
    def repository(self) -> JsonDict:
        return self.kube.objects(BACKUP_REPOSITORIES)[0]

    @property
    def phase(self) -> str:
        return str(self.repository.get("status", {}).get("phase", ""))

    @property
    def message(self) -> str:
        return str(self.repository.get("status", {}).get("message", ""))

    def reasons(self) -> list[str]:
        return [event["reason"] for event in self.kube.objects(EVENTS)]

    async def until_phase(self, phase: str, *, seconds: float = 30.0) -> None:
        await until(lambda: self.phase == phase, seconds=seconds)

    async def fail_once(self, message: str = "the bucket does not exist") -> None:
        await self.until_pod()
        self.end_pod(12, message)
        await self.until_phase("NotReady")

    async def succeed(self, message: str = GOOD) -> None:
        await self.until_pod()
        self.end_pod(0, message)
        await self.until_phase("Ready", seconds=2)

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Scene"]:
        async with running(self.controller.run()):
            yield self


def build_controller(
    kube: FakeKube, mode: RepositoryControllerMode, *, config_map: str = "", skew: timedelta = timedelta()
) -> RepositoryController:
    async def block_hash() -> BlockHash:
        return BlockHash.HMAC_SHA256_128

    clock = LoopClock(skew)
    client = kube.client
    cluster = build_cluster(client, clock)
    settings = ExposeSettings(AgentTemplate(image="mover:1"))
    return RepositoryController(
        cluster,
        InitPods(cluster, lambda: settings, CauseFinder(client, clock)),
        server=VeleroServerCheck(client, clock, "velero"),
        mode=mode,
        new_settings=RepositoryConfig(client, "velero", config_map).settings,
        block_hash=block_hash,
    )


def open_scene(
    mode: RepositoryControllerMode = RepositoryControllerMode.AUTO, *, skew: timedelta = timedelta()
) -> Scene:
    kube = FakeKube()
    kube.put(json.loads(RECORDED.read_text())[0]["object"])
    location = {"provider": "aws", "objectStorage": {"bucket": "b"}, "credential": {"name": "keys", "key": "cloud"}}
    kube.put(build_object(BACKUP_STORAGE_LOCATIONS, "default", "velero", spec=location))
    put_secret(kube, "keys", cloud="wrong")
    return Scene(kube, build_controller(kube, mode, skew=skew))


def put_secret(kube: FakeKube, name: str, **data: str) -> None:
    coded = {key: base64.b64encode(value.encode()).decode() for key, value in data.items()}
    kube.put(build_object(SECRETS, name, "velero", data=coded))

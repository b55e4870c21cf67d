"""A fake API server with one location, and a location controller that validates it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

from core.kube.resources import BACKUP_STORAGE_LOCATIONS
from core.kube.velero_server import VeleroServerCheck
from exposer.causes import CauseFinder
from exposer.settings import ExposeSettings, PodSettings, RepositoryMount
from exposer.template import AgentTemplate
from nodeagent.leader.repositories.init_pod import InitPods
from nodeagent.leader.repositories.locations import LocationController, LocationProbes, Verdict
from nodeagent.metrics import Metrics
from nodeagent.runtime.settings import RepositoryControllerMode
from tests.nodeagent.support.clusters import build_cluster
from tests.nodeagent.support.pod_scene import PodScene
from tests.support.clock import LoopClock
from tests.support.fakekube import FakeKube
from tests.support.objects import JsonDict, build_object
from tests.support.tasks import running

NAME = "default"
_SHARED = RepositoryMount("/backups", {"persistentVolumeClaim": {"claimName": "shared"}})


@dataclass
class LocationScene(PodScene):
    """A fake API server with one location, and a controller whose own validations return `verdict`."""

    container: ClassVar[str] = "mover"
    verdict: Verdict | None = field(default_factory=Verdict)
    mode: RepositoryControllerMode = RepositoryControllerMode.AUTO
    kube: FakeKube = field(default_factory=FakeKube)
    metrics: Metrics = field(default_factory=lambda: Metrics("node-a"))
    validated_at: list[float] = field(default_factory=list)
    probes: LocationProbes = field(default_factory=lambda: LocationProbes(LoopClock()))
    seconds: float = 0.0
    """How long a validation takes."""

    def put_location(self, provider: str = "velero.io/aws", status: JsonDict | None = None, **spec: Any) -> None:
        """Create or replace the location, as a user does: its status stays."""
        found: JsonDict = next(iter(self.kube.objects(BACKUP_STORAGE_LOCATIONS)), {"metadata": {}})
        status = found.get("status", {}) if status is None else status
        whole = {"provider": provider, "objectStorage": {"bucket": "b"}, **spec}
        self.kube.put(
            build_object(
                BACKUP_STORAGE_LOCATIONS, NAME, "velero", metadata=found["metadata"], spec=whole, status=status
            )
        )

    @property
    def location(self) -> JsonDict:
        return self.kube.objects(BACKUP_STORAGE_LOCATIONS)[0]

    @property
    def status(self) -> JsonDict:
        found: JsonDict = self.location.get("status", {})
        return found

    async def delete_location(self) -> None:
        await self.client.delete(BACKUP_STORAGE_LOCATIONS, "velero", NAME)

    @property
    def metric(self) -> float | None:
        """The value of the location's series; None: there is none."""
        name = f'velero_backup_location_status_gauge{{backup_location_name="{NAME}",node="node-a"}} '
        lines = self.metrics.render().decode().splitlines()
        return next((float(line.removeprefix(name)) for line in lines if line.startswith(name)), None)

    @asynccontextmanager
    async def running(self) -> AsyncIterator["LocationScene"]:
        """Run a controller, as a leader does; a second one knows nothing of the first."""
        if not self.kube.objects(BACKUP_STORAGE_LOCATIONS):
            self.put_location()
        async with running(self._build().run()):
            yield self

    def _build(self) -> LocationController:
        clock, client = LoopClock(), self.client

        async def validate(name: str) -> Verdict | None:
            assert name == NAME
            self.validated_at.append(asyncio.get_running_loop().time())
            await asyncio.sleep(self.seconds)
            return self.verdict

        pod = PodSettings(service_account="movers", resources={"requests": {"cpu": "4"}})
        settings = ExposeSettings(AgentTemplate("mover:1"), pod, repository_volumes=(_SHARED,))
        cluster = build_cluster(client, clock, metrics=self.metrics)
        return LocationController(
            cluster,
            InitPods(cluster, lambda: settings, CauseFinder(client, clock)),
            server=VeleroServerCheck(client, clock, "velero"),
            mode=self.mode,
            validate=validate,
            probes=self.probes,
        )

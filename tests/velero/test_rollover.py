"""A DaemonSet is rolled over from Velero's agent to this one, and back: each carries on what the other accepted.

On a real API server with Velero's own agent. Storage, scheduler, kubelet and data movers are simulated.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from core.kube.client import KubeClient
from core.kube.errors import AlreadyExistsError
from core.kube.resources import (
    NODES,
    PERSISTENT_VOLUME_CLAIMS,
    PERSISTENT_VOLUMES,
    PODS,
    STORAGE_CLASSES,
    VOLUME_SNAPSHOT_CONTENTS,
    VOLUME_SNAPSHOTS,
    Resource,
)
from core.models.names import NODE_LABEL, OUTCOME_ANNOTATION
from tests.crash.controllers import RealCluster
from tests.crash.worlds import World, beside
from tests.nodeagent.support.dispatching import agent_pod, cluster_node
from tests.nodeagent.support.simulation import TRANSFER_RESOURCES
from tests.nodeagent.support.transfers import NODE
from tests.support.apiserver import ApiServer, run_apiserver
from tests.support.objects import JsonDict
from tests.testbed.processes import Component
from tests.velero.server import apply_definitions, running_agent

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(300)]

_VERSION = "1.18.3"
_VELEROS = "node-of-velero"
_MINUTES = 120


class _Cluster(RealCluster):
    """The controllers, as Velero's agent reads them: a container has the name that its pod says."""

    async def _volumes(self) -> None:
        """Bind volumes that name their claim without its UID, too, as Velero does."""
        metas = [claim["metadata"] for claim in await self._all(PERSISTENT_VOLUME_CLAIMS)]
        uids = {(meta["namespace"], meta["name"]): meta["uid"] for meta in metas}
        for volume in await self._all(PERSISTENT_VOLUMES):
            reference = volume["spec"].get("claimRef") or {}
            uid = uids.get((reference.get("namespace", ""), reference.get("name", "")))
            if uid and not reference.get("uid"):
                await self._patch(PERSISTENT_VOLUMES, volume, {"spec": {"claimRef": {"uid": uid}}})
        await super()._volumes()

    async def _set_status(self, resource: Resource, obj: JsonDict, status: JsonDict) -> None:
        if resource is PODS:
            (container,) = obj["spec"]["containers"]
            named = [each | {"name": container["name"]} for each in status.get("containerStatuses", [])]
            status = status | ({"containerStatuses": named} if named else {})
        await super()._set_status(resource, obj, status)


class _World(World):
    """A DataUpload or DataDownload, the agent of `NODE`, and one of Velero's on another node."""

    folder: Path
    cluster: RealCluster

    async def prepare(self) -> None:
        await super().prepare()
        pod = self._put(agent_pod(_VELEROS, annotations={}), self.namespace)
        pod["spec"]["containers"] = [{"name": "agent", "image": "none"}]
        await self._create(PODS, pod)
        for node in (NODE, _VELEROS):
            manifest = cluster_node(node)
            manifest["metadata"]["labels"] = {"kubernetes.io/os": "linux"}
            await self._share(NODES, manifest)
        meta = {"name": "hostpath"}
        base = {"apiVersion": STORAGE_CLASSES.api_version, "kind": STORAGE_CLASSES.kind}
        await self._share(STORAGE_CLASSES, {**base, "metadata": meta, "provisioner": "hostpath.csi.k8s.io"})

    async def _share(self, resource: Resource, obj: JsonDict) -> None:
        """Create an object that all worlds have in common."""
        with suppress(AlreadyExistsError):
            await self._create(resource, obj)

    async def begin(self) -> None:
        await super().begin()
        for reason in ("Data-Path-Started", "Data-Path-Stopped"):
            # Velero's agent waits for them; the simulated mover records progress alone.
            await self.cluster.record(self.transfer, "{}", reason=reason)
        if self.kind == "DataUpload":
            await self._put_source()

    def _claim(self, name: str) -> JsonDict:
        claim = super()._claim(name)
        claim["spec"]["storageClassName"] = "hostpath"
        return claim

    async def _put_source(self) -> None:
        """Create the volume of the source PVC."""
        claim = await self.client.get(PERSISTENT_VOLUME_CLAIMS, self.space, self.transfer["spec"]["sourcePVC"])
        reference = {key: claim["metadata"][key] for key in ("namespace", "name", "uid")}
        spec = {
            "accessModes": ["ReadWriteOnce"],
            "capacity": {"storage": "1Gi"},
            "claimRef": reference,
            "csi": {"driver": "hostpath.csi.k8s.io", "volumeHandle": "source"},
            "persistentVolumeReclaimPolicy": "Retain",
            "storageClassName": "",
        }
        meta = {"name": claim["spec"]["volumeName"]}
        volume = {"apiVersion": "v1", "kind": PERSISTENT_VOLUMES.kind, "metadata": meta, "spec": spec}
        await self.client.create(PERSISTENT_VOLUMES, volume)

    async def until(self, condition: Callable[[JsonDict], bool], velero: Component | None = None) -> JsonDict:
        async with asyncio.timeout(_MINUTES):
            while True:
                found = await self.client.get(TRANSFER_RESOURCES[self.kind], self.namespace, self.name)
                if condition(found):
                    return found
                if velero is not None:
                    assert velero.process.poll() is None, velero.log.read_text()
                await asyncio.sleep(0.2)

    async def until_clean(self, velero: Component | None = None) -> JsonDict:
        """Return the transfer once it is final, and nothing that an expose creates is left."""
        done = await self.until(lambda found: "completionTimestamp" in found.get("status", {}), velero)
        async with asyncio.timeout(_MINUTES):
            while await self.left():
                await asyncio.sleep(0.2)
        return done

    async def check(self, done: JsonDict, node: str) -> None:
        status = done["status"]
        assert (status["phase"], status["node"]) == ("Completed", node), done
        if self.kind == "DataUpload":
            assert status["snapshotID"] == "kopia-1"
        else:
            claim, volume = await self.target()
            restored = self.cluster.moved[done["metadata"]["uid"]]
            assert volume["metadata"]["name"] == claim["spec"]["volumeName"] == restored
            assert volume["spec"]["persistentVolumeReclaimPolicy"] == "Delete"

    async def left(self) -> list[str]:
        """Return the kinds of which an object exists that an expose has created."""
        kinds = (PODS, PERSISTENT_VOLUME_CLAIMS, VOLUME_SNAPSHOTS, VOLUME_SNAPSHOT_CONTENTS)
        found = [await self.client.read(kind, self.namespace if kind.namespaced else "", self.name) for kind in kinds]
        return [one["kind"] for one in found if one is not None]


@pytest.fixture(scope="module")
def apiserver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with run_apiserver() as server:
        apply_definitions(_VERSION, server, tmp_path_factory.mktemp("velero"))
        yield server


@pytest.fixture(params=["DataUpload", "DataDownload"])
async def world(
    client: KubeClient, apiserver: ApiServer, tmp_path: Path, request: pytest.FixtureRequest
) -> AsyncIterator[_World]:
    world = _World(apiserver, client, request.param)
    world.folder, world.cluster = tmp_path / "velero", _Cluster(client)
    async with beside(world.cluster.run(), "controllers"):
        yield world


def _has_started(velero: Component, kind: str) -> bool:
    lines = velero.log.read_text(errors="replace").splitlines()
    return any("Starting workers" in line and f"controllerKind={kind}" in line for line in lines)


@pytest.mark.parametrize("velero_stays", [True, False], ids=["beside Velero's", "after Velero's"])
async def test_we_carry_on_what_velero_accepted(world: _World, velero_stays: bool) -> None:
    await world.prepare()
    with running_agent(_VERSION, world.apiserver, world.folder, namespace=world.namespace, node=_VELEROS) as velero:
        world.cluster.not_starting.add(world.namespace)
        await world.begin()
        accepted = await world.until(lambda found: found.get("status", {}).get("phase") == "Accepted", velero)
        assert accepted["status"]["acceptedByNode"] == _VELEROS
        async with asyncio.timeout(_MINUTES):
            while "Pod" not in await world.left():
                await asyncio.sleep(0.2)
        if velero_stays:
            async with world.agent():
                world.cluster.not_starting.clear()
                done = await world.until_clean(velero)
    if not velero_stays:
        async with world.agent():
            world.cluster.not_starting.clear()
            done = await world.until_clean()
    await world.check(done, NODE)


async def test_velero_carries_on_what_we_accepted(world: _World) -> None:
    """Our mover pod is on the node of Velero's agent, which finishes the transfer as its own."""
    await world.prepare()
    world.cluster.node, world.cluster.mover.seconds = _VELEROS, 3.0
    world.cluster.not_starting.add(world.namespace)
    async with world.agent():
        await world.begin()
        accepted = await world.until(lambda found: found.get("status", {}).get("phase") == "Accepted")
        assert accepted["status"]["acceptedByNode"] == NODE
        with running_agent(_VERSION, world.apiserver, world.folder, namespace=world.namespace, node=_VELEROS) as velero:
            # Velero's agent does not see pods that run already when it starts.
            await world.until(lambda _: _has_started(velero, world.kind), velero)
            world.cluster.not_starting.clear()
            await world.until(lambda found: found["metadata"]["labels"].get(NODE_LABEL) == _VELEROS, velero)
            done = await world.until_clean(velero)
    assert OUTCOME_ANNOTATION not in done["metadata"].get("annotations", {})
    await world.check(done, _VELEROS)

"""Whichever definitions a cluster has, and gets while data moves, transfers of each kind end as they should.

A row is two versions of Velero: transfers are created with the definitions of the first, and get those of the second
before and while data moves; when they have ended, the first ones return. So a row with a newer second version is an
update and its undoing, one with an older second version the reverse. `make test` has a row, `make test-kubernetes` all,
on the oldest and the newest API server. Everything beside the API server is simulated.
"""

import asyncio
import json
import logging
import secrets
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import product

import pytest

from client.collections.collection import cancel_transfer
from core.kube.client import KubeClient
from core.kube.resources import PODS
from core.models.phases import Phase
from tests.crash.controllers import RealCluster
from tests.crash.listing import list_everything
from tests.crash.matrix import LEDGER, compare, open_cluster, settle, summarize
from tests.crash.skew import wait_for
from tests.crash.worlds import World, open_client
from tests.nodeagent.support.simulation import TRANSFER_RESOURCES
from tests.nodeagent.support.transfers import TRANSFERS
from tests.support.apiserver import ApiServer, apply_crds, run_apiserver
from tests.support.deletion import force_delete
from tests.support.objects import JsonDict
from tests.support.versions import VERSIONS, definitions_of, golden, prune

pytestmark = [pytest.mark.integration, pytest.mark.timeout(2400)]

_STEP_SECONDS = 900
_CONFIG = json.dumps({"loadConcurrency": {"globalConfig": 2 * len(TRANSFERS)}})
_BACKUPS = {"DataUpload", "PodVolumeBackup"}


@pytest.fixture(scope="module")
def apiserver() -> Iterator[ApiServer]:
    """One kube-apiserver for all rows: each has namespaces of its own."""
    with run_apiserver(definitions_of(VERSIONS[0])) as server:
        yield server


@dataclass
class _Site:
    """An agent, and two transfers of each kind that are held in a phase; one of the two is to be canceled."""

    apiserver: ApiServer
    client: KubeClient
    held: Phase
    namespace: str = field(default_factory=lambda: f"definitions-{secrets.token_hex(4)}")
    running: list[World] = field(default_factory=list)
    canceled: list[World] = field(default_factory=list)

    @property
    def worlds(self) -> list[World]:
        return [*self.running, *self.canceled]

    async def prepare(self, version: str) -> None:
        """Make what agents need, and the volumes and transfers, with the definitions of `version`."""
        await self._build("").prepare_agents()
        for kind in TRANSFERS:
            self.running.append(await self.begin(kind, version))
            self.canceled.append(await self.begin(kind, version))

    async def begin(self, kind: str, version: str) -> World:
        world = self._build(kind)
        await world.prepare_volume()
        await world.begin()
        assert ("restoreType" in world.transfer["spec"]) is (version == "main" and kind not in _BACKUPS)
        return world

    def _build(self, kind: str) -> World:
        name = f"{self.namespace}-{secrets.token_hex(4)}"
        return World(
            self.apiserver,
            self.client,
            kind,
            name=name,
            namespace=self.namespace,
            config=_CONFIG,
            # No agent takes over from another.
            lease_seconds=60,
        )

    async def are_held(self) -> bool:
        return {await _read_phase(world) for world in self.worlds} == {self.held}


async def _read_phase(world: World) -> str:
    await world.is_done()
    return str(world.transfer.get("status", {}).get("phase", ""))


async def _are_done(worlds: list[World]) -> bool:
    return all([await world.is_done() for world in worlds])


async def _apply(apiserver: ApiServer, version: str) -> None:
    """Apply definitions as a user does, and return once the API server keeps of objects what they keep."""
    await asyncio.to_thread(apply_crds, apiserver.kubeconfig, definitions_of(version))

    async def serves() -> bool:
        return all([await asyncio.to_thread(_keeps_as, apiserver, version, kind) for kind in TRANSFERS])

    await wait_for(f"the definitions of {version} are served", serves, seconds=_STEP_SECONDS)


def _keeps_as(apiserver: ApiServer, version: str, kind: str) -> bool:
    """Return whether an object with every field of the last version is stored as by the definitions of `version`."""
    obj = golden(VERSIONS[-1], kind.lower())
    obj["metadata"] = {"namespace": "default", "name": "probe"}
    path = TRANSFER_RESOURCES[kind].path("default")
    stored = apiserver.api.request("POST", f"{path}?dryRun=All", body=obj)
    expected: JsonDict = prune(version, obj)
    return bool(stored["spec"] == expected["spec"])


async def _judge(world: World, cluster: RealCluster, version: str, phase: Phase) -> None:
    """Check the end of a transfer whose last status was written with the definitions of `version`."""
    found = await summarize(world, cluster)
    status = found["status"]
    assert status["phase"] == phase, found
    assert found["finalizers"] is None, found
    assert bool(found["data"]) is (phase is Phase.COMPLETED), found
    # Velero 1.17 has no such field.
    backed_up = phase is Phase.COMPLETED and world.kind in _BACKUPS
    assert ("incrementalBytes" in status) is (backed_up and version != "1.17.2"), found
    assert ("sourceSize" in status) is (backed_up and version == "main"), found


@pytest.mark.sample("main")
@pytest.mark.parametrize(
    ("first", "second"),
    [pytest.param(a, b, id=a if a == b else f"{a} then {b}") for a, b in product(VERSIONS, VERSIONS)],
)
async def test_every_kind_is_created_runs_and_is_canceled_whatever_definitions_come(
    apiserver: ApiServer, caplog: pytest.LogCaptureFixture, first: str, second: str
) -> None:
    await _apply(apiserver, first)
    async with open_client(apiserver) as client, open_cluster(client) as cluster, AsyncExitStack() as agents:
        accepted, moving = sites = [_Site(apiserver, client, phase) for phase in (Phase.ACCEPTED, Phase.IN_PROGRESS)]
        cluster.not_starting.add(accepted.namespace)
        cluster.not_ending.add(moving.namespace)
        for site in sites:
            await site.prepare(first)
        before = await list_everything(apiserver.api)
        for site in sites:
            await agents.enter_async_context(site.running[0].agent())
        for site in sites:
            await wait_for(f"all are {site.held}", site.are_held, seconds=_STEP_SECONDS)
        if second != first:
            await _apply(apiserver, second)
        await _end(sites, cluster)
        after = await list_everything(apiserver.api)
        for site in sites:
            assert compare(before[site.namespace], after[site.namespace], hide="*") == ([LEDGER], [])
            for world in site.worlds:
                await _judge(world, cluster, second, Phase.CANCELED if world in site.canceled else Phase.COMPLETED)
        if second != first:
            await _apply(apiserver, first)
        later = [await moving.begin(kind, first) for kind in TRANSFERS]
        await wait_for("later ones have ended", lambda: _are_done(later), seconds=_STEP_SECONDS)
        for world in later:
            await _judge(world, cluster, first, Phase.COMPLETED)
        await _remove([*accepted.worlds, *moving.worlds, *later])
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


async def _end(sites: list[_Site], cluster: RealCluster) -> None:
    """Cancel those that are to be canceled, let the others run on, and wait until all have ended."""
    for world in [world for site in sites for world in site.canceled]:
        await cancel_transfer(world.client, TRANSFER_RESOURCES[world.kind], world.namespace, world.name)
    cluster.not_starting.clear()
    cluster.not_ending.clear()
    worlds = [world for site in sites for world in site.worlds]
    await wait_for("all have ended", lambda: _are_done(worlds), seconds=_STEP_SECONDS)
    await settle(worlds[0].client, worlds)


async def _remove(worlds: list[World]) -> None:
    """Delete what the controllers would look at during all later rows."""
    for world in worlds:
        await world.client.delete(TRANSFER_RESOURCES[world.kind], world.namespace, world.name)
        if "pod" in world.transfer["spec"]:
            await force_delete(world.client, PODS, world.space, world.transfer["spec"]["pod"]["name"])

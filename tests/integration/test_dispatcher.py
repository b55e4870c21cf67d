"""Lease, admission ledger and dispatcher against a real API server: its validation, conflicts and pruning."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta

import pytest

from core.clock import SystemClock
from core.kube.client import KubeClient, Selection
from core.kube.errors import NotFoundError
from core.kube.resources import CONFIG_MAPS, DATA_UPLOADS, LEASES, PODS
from core.models.names import ADMISSIONS_CONFIGMAP, DATA_MOVER_FINALIZER, DISPATCHER_LEASE, NODE_LABEL
from nodeagent.config.keys import AgentConfig, LoadConcurrency
from nodeagent.leader.context import DispatchRules
from nodeagent.leader.dispatcher import Dispatcher
from nodeagent.leader.election import LeaderElection
from tests.crash.controllers import set_status
from tests.nodeagent.support.clusters import build_cluster
from tests.nodeagent.support.dispatching import ScriptedKind, agent_pod
from tests.nodeagent.support.transfers import data_upload
from tests.support.objects import JsonDict
from tests.support.tasks import until

pytestmark = pytest.mark.integration

CLOCK = SystemClock()
_SECONDS = 300


@asynccontextmanager
async def agent(
    client: KubeClient, namespace: str, name: str, lease_seconds: float = 6.0
) -> AsyncIterator[LeaderElection]:
    """Run what every node agent runs: an election, and the dispatcher while it leads."""
    election = LeaderElection(
        client, CLOCK, namespace=namespace, identity=name, duration=timedelta(seconds=lease_seconds)
    )
    cluster = build_cluster(client, CLOCK, node=name, check_leading=election.check)
    rules = DispatchRules(
        namespace, [ScriptedKind()], lambda: AgentConfig(load_concurrency=LoadConcurrency(prepare_queue_length=2))
    )
    dispatcher = Dispatcher(cluster, rules, on_accepted=lambda _: None)
    task = asyncio.create_task(election.run(dispatcher.run), name=name)
    try:
        yield election
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def create_transfers(client: KubeClient, namespace: str, count: int) -> None:
    for number in range(count):
        transfer = data_upload(f"du-{number}")
        transfer["metadata"] = {"name": f"du-{number}", "namespace": namespace}
        await client.create(DATA_UPLOADS, transfer)


async def create_agent_pod(client: KubeClient, namespace: str) -> None:
    pod = agent_pod("node-a")
    pod["metadata"]["namespace"] = namespace
    pod["spec"]["containers"] = [{"name": "agent", "image": "none"}]
    status = pod.pop("status")
    await client.create(PODS, pod)
    await set_status(client, PODS, pod, status)


async def phases(client: KubeClient, namespace: str) -> list[str]:
    transfers = await client.list(Selection(DATA_UPLOADS, namespace))
    return [(transfer.get("status") or {}).get("phase", "") for transfer in transfers]


async def test_the_lease_is_acquired_renewed_and_released(client: KubeClient, namespace: str) -> None:
    async with agent(client, namespace, "one", 15.0) as one:
        await until(lambda: one.may_write, seconds=_SECONDS)
        async with agent(client, namespace, "two", 15.0) as two:
            lease: JsonDict = await client.get(LEASES, namespace, DISPATCHER_LEASE)
            async with asyncio.timeout(_SECONDS):
                while lease["spec"]["renewTime"] <= lease["spec"]["acquireTime"]:
                    await asyncio.sleep(0.1)
                    lease = await client.get(LEASES, namespace, DISPATCHER_LEASE)
            assert (one.may_write, two.may_write, two.holder) == (True, False, "one")
            stop_one = next(task for task in asyncio.all_tasks() if task.get_name() == "one")
            stop_one.cancel()
            await asyncio.wait({stop_one})
            # Released, it does not have to expire.
            assert (await client.get(LEASES, namespace, DISPATCHER_LEASE))["spec"].get("holderIdentity") != "one"
            await until(lambda: two.may_write, seconds=_SECONDS)
    lease = await client.get(LEASES, namespace, DISPATCHER_LEASE)
    assert not lease["spec"].get("holderIdentity")
    assert lease["spec"]["leaseTransitions"] == 1


async def test_transfers_are_admitted_within_the_limit_over_a_change_of_leaders(
    client: KubeClient, namespace: str
) -> None:
    await create_agent_pod(client, namespace)
    await create_transfers(client, namespace, 4)
    async with agent(client, namespace, "one"):
        async with asyncio.timeout(_SECONDS):
            while (await phases(client, namespace)).count("Accepted") < 2:
                await asyncio.sleep(0.1)
    async with agent(client, namespace, "two") as two:
        await until(lambda: two.may_write, seconds=_SECONDS)
        await asyncio.sleep(2)
        assert (await phases(client, namespace)).count("Accepted") == 2
        await client.patch(DATA_UPLOADS, namespace, "du-0", {"status": {"phase": "Completed"}})
        async with asyncio.timeout(_SECONDS):
            while await phases(client, namespace) != ["Completed", "Accepted", "Accepted", ""]:
                await asyncio.sleep(0.1)
    accepted: JsonDict = await client.get(DATA_UPLOADS, namespace, "du-1")
    assert accepted["status"].keys() >= {"acceptedByNode", "acceptedTimestamp"}
    assert accepted["metadata"]["labels"][NODE_LABEL] == "node-a"
    assert accepted["metadata"]["finalizers"] == [DATA_MOVER_FINALIZER]
    ledger = await client.get(CONFIG_MAPS, namespace, ADMISSIONS_CONFIGMAP)
    assert len(ledger["data"]["uids"].split()) == 2
    queued = await client.get(DATA_UPLOADS, namespace, "du-3")
    assert queued["status"]["message"].endswith(": prepareQueueLength (2) reached")


async def test_a_missing_lease_or_ledger_is_recreated(client: KubeClient, namespace: str) -> None:
    await create_agent_pod(client, namespace)
    async with agent(client, namespace, "one") as one:
        await until(lambda: one.may_write, seconds=_SECONDS)
        await create_transfers(client, namespace, 1)
        async with asyncio.timeout(_SECONDS):
            while await phases(client, namespace) != ["Accepted"]:
                await asyncio.sleep(0.1)
        await client.delete(LEASES, namespace, DISPATCHER_LEASE)
        await client.delete(CONFIG_MAPS, namespace, ADMISSIONS_CONFIGMAP)
        with pytest.raises(NotFoundError):
            await client.get(CONFIG_MAPS, namespace, ADMISSIONS_CONFIGMAP)
        transfer = data_upload("late")
        transfer["metadata"] = {"name": "late", "namespace": namespace}
        await client.create(DATA_UPLOADS, transfer)
        async with asyncio.timeout(_SECONDS):
            while await phases(client, namespace) != ["Accepted", "Accepted"]:
                await asyncio.sleep(0.1)

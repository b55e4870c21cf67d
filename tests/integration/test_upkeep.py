"""What agents do beside the admission queue, on a real API server: leaked objects, init pods, node labels, pods."""

import asyncio
import json
from collections.abc import Callable

import pytest

from core.clock import SystemClock
from core.kube.client import KubeClient
from core.kube.resources import (
    NODES,
    PERSISTENT_VOLUME_CLAIMS,
    PODS,
    VOLUME_SNAPSHOT_CONTENTS,
    VOLUME_SNAPSHOTS,
    Resource,
)
from core.kube.transport import MERGE_PATCH, Request
from core.models.names import OWNER_UID_LABEL
from exposer.leaked_objects import delete_leaked_objects, list_leaked_objects
from exposer.workload import ONTO_ANY_NODE
from nodeagent.config.keys import LoadConcurrency, NodeRule
from nodeagent.config.value_types import LabelSelector
from nodeagent.leader.admission.pending_records import PodKey, PodWatch
from nodeagent.leader.repositories.init_pod import tolerate_any_node
from nodeagent.node.steps import OwnSlots
from tests.support.deletion import force_delete
from tests.support.objects import JsonDict, build_object

pytestmark = pytest.mark.integration

CLOCK = SystemClock()
CONTAINERS = {"initContainers": "restore-wait", "containers": "main"}
SNAPSHOT = {"source": {"volumeSnapshotContentName": "left"}}


async def create(client: KubeClient, resource: Resource, name: str, spec: JsonDict, **meta: object) -> JsonDict:
    return await client.create(resource, build_object(resource, name, metadata=meta, spec=spec))


async def create_pod(client: KubeClient, namespace: str, name: str, **meta: object) -> JsonDict:
    containers = {key: [{"name": container, "image": "none"}] for key, container in CONTAINERS.items()}
    return await create(client, PODS, name, containers, namespace=namespace, **meta)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(300):
        while not condition():
            await asyncio.sleep(0.02)


async def test_leaked_objects_are_found_by_their_label_and_deleted_in_order(client: KubeClient, namespace: str) -> None:
    labels = {OWNER_UID_LABEL: f"gone-{namespace}"}
    await create_pod(client, namespace, "left", labels=labels)
    await create_pod(client, namespace, "other")
    claim = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    await create(client, PERSISTENT_VOLUME_CLAIMS, "left", claim, namespace=namespace, labels=labels)
    content = f"left-{namespace}"
    spec = {
        "deletionPolicy": "Delete",
        "driver": "hostpath.csi.k8s.io",
        "source": {"snapshotHandle": "h"},
        "volumeSnapshotRef": {"namespace": namespace, "name": "left"},
    }
    await create(client, VOLUME_SNAPSHOT_CONTENTS, content, spec, labels=labels)
    await create(client, VOLUME_SNAPSHOTS, "left", SNAPSHOT, namespace=namespace, labels=labels)
    pending = []
    async with asyncio.timeout(300):
        while left := await list_leaked_objects(client, namespace):
            pending.append(await delete_leaked_objects(client, left[f"gone-{namespace}"]))
            # The pod has no kubelet that confirms its end, the claim no controller that removes its finalizer.
            for resource, name in ((PODS, "left"), (PERSISTENT_VOLUME_CLAIMS, "left")):
                if await client.read(resource, namespace, name) is not None:
                    await client.patch(resource, namespace, name, {"metadata": {"finalizers": None}})
                    await force_delete(client, resource, namespace, name)
    assert pending[-1] is None
    assert await client.read(VOLUME_SNAPSHOT_CONTENTS, "", content) is None
    assert await client.read(PODS, namespace, "other") is not None


async def test_a_pending_pod_may_be_given_a_toleration(client: KubeClient, namespace: str) -> None:
    pod = await create_pod(client, namespace, "init")
    before = pod["spec"]["tolerations"]
    await tolerate_any_node(client, pod)
    stored = await client.get(PODS, namespace, "init")
    assert stored["spec"]["tolerations"] == [*before, ONTO_ANY_NODE]


async def test_the_number_of_slots_follows_the_labels_of_the_node(client: KubeClient, namespace: str) -> None:
    rule = NodeRule(node_selector=LabelSelector(match_labels={"size": "big"}), number=7)
    concurrency = LoadConcurrency(global_config=2, per_node_config=(rule,))
    numbers: list[int] = []
    name = f"node-{namespace}"
    await create(client, NODES, name, {}, labels={"size": "big"})
    own = OwnSlots(client, CLOCK, name, concurrency=lambda: concurrency, on_number=numbers.append)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(own.run())
        await own.wait_known()
        assert numbers[-1] == 7
        await client.patch(NODES, "", name, {"metadata": {"labels": {"size": "small"}}})
        await until(lambda: numbers[-1] == 2)
        task.cancel()


async def test_a_followed_pod_that_changes_is_observed(client: KubeClient, namespace: str) -> None:
    await create_pod(client, namespace, "app")
    app = (namespace, "app")
    changed: list[set[PodKey]] = []
    pods = PodWatch(client, CLOCK, on_change=lambda: changed.append(pods.take_changed()))
    async with asyncio.TaskGroup() as group:
        task = group.create_task(pods.run())
        pods.follow(app)
        await until(lambda: pods.is_synced(app) and {app} in changed)
        changed.clear()
        running = {
            "name": "restore-wait",
            "state": {"running": {}},
            "ready": False,
            "restartCount": 0,
            "image": "",
            "imageID": "",
        }
        body = json.dumps({"status": {"initContainerStatuses": [running]}}).encode()
        path = f"{PODS.path(namespace, 'app')}/status"
        await client.transport.request(Request("PATCH", path, body=body, content_type=MERGE_PATCH))
        await until(lambda: {app} in changed)
        task.cancel()

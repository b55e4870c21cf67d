"""What agents do beside the admission queue, on a real API server: leaked objects, init pods."""

import asyncio

import pytest

from core.kube.client import KubeClient
from core.kube.resources import PERSISTENT_VOLUME_CLAIMS, PODS, VOLUME_SNAPSHOT_CONTENTS, VOLUME_SNAPSHOTS, Resource
from core.models.names import OWNER_UID_LABEL
from exposer.leaked_objects import delete_leaked_objects, list_leaked_objects
from exposer.workload import ONTO_ANY_NODE
from nodeagent.leader.repositories.init_pod import tolerate_any_node
from tests.support.deletion import force_delete
from tests.support.objects import JsonDict, build_object

pytestmark = pytest.mark.integration

CONTAINERS = {"initContainers": "restore-wait", "containers": "main"}
SNAPSHOT = {"source": {"volumeSnapshotContentName": "left"}}


async def create(client: KubeClient, resource: Resource, name: str, spec: JsonDict, **meta: object) -> JsonDict:
    return await client.create(resource, build_object(resource, name, metadata=meta, spec=spec))


async def create_pod(client: KubeClient, namespace: str, name: str, **meta: object) -> JsonDict:
    containers = {key: [{"name": container, "image": "none"}] for key, container in CONTAINERS.items()}
    return await create(client, PODS, name, containers, namespace=namespace, **meta)


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

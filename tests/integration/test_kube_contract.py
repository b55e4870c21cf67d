"""A real API server keeps the contract that the fake one is held to (`tests/contract`)."""

import json
from collections.abc import AsyncIterator

import pytest

from core.kube.client import Deletion
from core.kube.resources import PERSISTENT_VOLUME_CLAIMS, PODS
from core.kube.transport import MERGE_PATCH, Request
from nodeagent.runtime.transport import load_transport
from tests.contract.bench import Bench
from tests.contract.kube_contract import KubeContract
from tests.support.apiserver import ApiServer
from tests.support.deletion import force_delete

pytestmark = pytest.mark.integration


class TestApiServer(KubeContract):
    """Through the agent's own transport."""

    @pytest.fixture
    async def bench(self, apiserver: ApiServer, namespace: str) -> AsyncIterator[Bench]:
        transport, _ = await load_transport(str(apiserver.kubeconfig))
        yield Bench(transport, namespace)
        await transport.close()

    @pytest.mark.parametrize(
        ("phase", "deletion"),
        [("Pending", Deletion.STARTED), ("Running", Deletion.STARTED), ("Succeeded", Deletion.DONE)],
    )
    async def test_pod_of_a_node_has_time_to_end(self, bench: Bench, phase: str, deletion: Deletion) -> None:
        await bench.client.create(PODS, bench.build_pod("a", node="nowhere"))
        path = f"{PODS.path(bench.namespace, 'a')}/status"
        body = json.dumps({"status": {"phase": phase}}).encode()
        await bench.transport.request(Request("PATCH", path, body=body, content_type=MERGE_PATCH))
        assert await bench.client.delete(PODS, bench.namespace, "a") is deletion
        left = await bench.client.read(PODS, bench.namespace, "a")
        assert (left is None) == (deletion is Deletion.DONE)
        await force_delete(bench.client, PODS, bench.namespace, "a")

    async def test_claim_is_held_until_its_finalizer_is_removed(self, bench: Bench) -> None:
        await bench.client.create(PERSISTENT_VOLUME_CLAIMS, bench.build_claim("a"))
        assert await bench.client.delete(PERSISTENT_VOLUME_CLAIMS, bench.namespace, "a") is Deletion.STARTED
        await bench.patch(PERSISTENT_VOLUME_CLAIMS, "a", {"metadata": {"finalizers": None}})
        assert await bench.client.delete(PERSISTENT_VOLUME_CLAIMS, bench.namespace, "a") is Deletion.NOT_FOUND

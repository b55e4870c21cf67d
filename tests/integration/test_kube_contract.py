"""A real API server keeps the contract that the fake one is held to (`tests/contract`)."""

from collections.abc import AsyncIterator

import pytest

from nodeagent.transport import load_transport
from tests.contract.bench import Bench
from tests.contract.kube_contract import KubeContract
from tests.support.apiserver import ApiServer

__all__: list[str] = []

pytestmark = pytest.mark.integration


class TestApiServer(KubeContract):
    """Through the agent's own transport."""

    @pytest.fixture
    async def bench(self, apiserver: ApiServer, namespace: str) -> AsyncIterator[Bench]:
        transport, _ = await load_transport(str(apiserver.kubeconfig))
        yield Bench(transport, namespace)
        await transport.close()

"""A client of the API server that each module starts with the definitions of its versions of Velero."""

from collections.abc import AsyncIterator

import pytest

from core.kube.client import KubeClient
from tests.crash.worlds import open_client
from tests.support.apiserver import ApiServer


@pytest.fixture
async def client(apiserver: ApiServer) -> AsyncIterator[KubeClient]:
    async with open_client(apiserver) as client:
        yield client

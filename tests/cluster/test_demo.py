"""The demonstration's path on a real kubelet that has the agent, with less data than the demonstration moves."""

import pytest

from tests.cluster.bed import Bed
from tests.cluster.sharing import WITH_LOCKS, Shared, relies_on
from tests.testbed.demo import Demo

pytestmark = [pytest.mark.cluster, pytest.mark.lane(name="changing"), pytest.mark.timeout(WITH_LOCKS)]


@pytest.mark.interop("1.18.2", "ours to ours", "DataUpload, DataDownload", "S3 (versitygw): keys of a user")
def test_volume_comes_back_as_it_was(agent: Bed) -> None:
    demo = Demo(agent.env, agent.user, data_bytes=60_000_000, least_readings=1)
    filled = demo.fill()
    with relies_on(agent, Shared.AGENTS):
        assert demo.move(filled) == []

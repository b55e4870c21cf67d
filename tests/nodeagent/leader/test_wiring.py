"""The leader's half of an agent runs without the node's."""

import pytest

from core.kube.resources import LEASES
from nodeagent.leader.wiring import build_leader
from nodeagent.metrics import REPOSITORY_READY
from tests.nodeagent.support.parts import fake_parts
from tests.support.fakekube import FakeKube
from tests.support.tasks import running


@pytest.mark.looptime
async def test_the_leader_acquires_the_lease_and_releases_it() -> None:
    kube = FakeKube()
    parts = fake_parts(kube)
    leader = build_leader(parts)

    async with running(leader.run(), lead_seconds=10):
        report, metrics = leader.report(), parts.metrics.render().decode()
        parts.metrics.set(REPOSITORY_READY, 0, "app-default-kopia")

    assert report["dispatcher"]["leading"]
    assert report["dispatcher"]["holder"].startswith("node-a_")
    assert 'nodeagent_dispatcher{node="node-a"} 1.0' in metrics
    (lease,) = kube.objects(LEASES)
    assert not lease["spec"].get("holderIdentity")
    # The next leader shows them.
    assert b"repository_name=" not in parts.metrics.render()

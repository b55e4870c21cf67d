"""The leader's half of an agent runs without the node's; its check of the definitions reports a change once."""

import asyncio

import pytest

from core.kube.resources import LEASES
from core.models.storage import BlockHash
from nodeagent.leader.wiring import DefinitionCheck, build_leader
from nodeagent.metrics import REPOSITORY_READY
from tests.nodeagent.support.board import FakeBoard
from tests.nodeagent.support.parts import fake_parts
from tests.support.clock import LoopClock
from tests.support.fakekube import FakeKube
from tests.support.tasks import running
from tests.support.versions import load_definitions

pytestmark = pytest.mark.looptime


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


_LABELS = {"app.kubernetes.io/part-of": "node-agent"}


class _Scene:
    def __init__(self) -> None:
        self.kube, self.board, clock = FakeKube(), FakeBoard(), LoopClock()
        self.check = DefinitionCheck(self.kube.client, clock, self.board)

    def apply(self, version: str, **labels: str) -> None:
        for definition in load_definitions(version, **labels).values():
            self.kube.put(definition)


async def test_older_definitions_are_reported_once_and_forgotten_once_newer_are_applied() -> None:
    scene = _Scene()
    scene.apply("main", **_LABELS)
    async with running(scene.check.run(), lead_seconds=1):
        assert scene.check.report.message == ""
        scene.apply("1.18.3", **_LABELS)
        await asyncio.sleep(1000)
        ((reason, message),) = scene.board.recorded
        assert reason == "FieldsDropped"
        assert scene.check.report.to_wire() == {"message": message, "warning": True, "nextVelero": False}
        scene.apply("main", **_LABELS)
        await asyncio.sleep(300)
        assert scene.check.report.message == ""
        assert len(scene.board.recorded) == 1


@pytest.mark.parametrize(
    ("version", "labels", "expected"),
    [
        pytest.param("main", {}, BlockHash.HMAC_SHA256_128, id="velero 1.19"),
        pytest.param("main", _LABELS, None, id="ours"),
        pytest.param("1.17.2", {}, None, id="velero 1.17"),
    ],
)
async def test_new_repositories_have_the_hash_of_the_velero_whose_definitions_are_served(
    version: str, labels: dict[str, str], expected: BlockHash | None
) -> None:
    scene = _Scene()
    scene.apply(version, **labels)
    assert [await scene.check.new_block_hash() for _ in range(100)] == [expected] * 100
    # For hundreds of repositories at once, each definition is read once.
    paths = [one.path for one in scene.kube.requests]
    assert sorted(paths) == sorted(set(paths))
    # Fields that an older server does not have are no event.
    assert (scene.board.recorded, bool(scene.check.report.message)) == ([], version != "main")


@pytest.mark.parametrize("answer", [403, 500, b"{}"], ids=str)
async def test_definitions_that_cannot_be_read_leave_what_was_known(answer: int | bytes) -> None:
    scene = _Scene()
    scene.apply("main")
    await scene.check.refresh()
    scene.kube.fail_next("GET", "/customresourcedefinitions/", answer, times=20)
    assert (await scene.check.refresh()).next_velero

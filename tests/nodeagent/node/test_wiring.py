"""The node's half of an agent runs without the leader's."""

import pytest

from nodeagent.config.parse import parse_config
from nodeagent.node.wiring import build_node
from tests.nodeagent.support.parts import fake_parts
from tests.support.fakekube import FakeKube
from tests.support.tasks import running


@pytest.mark.looptime
async def test_the_node_gets_ready_and_follows_its_slots() -> None:
    parts = fake_parts(FakeKube(), '{"loadConcurrency": {"globalConfig": 3}}')
    node = build_node(parts)
    pending = node.not_ready()

    async with running(node.run(), lead_seconds=5):
        ready = node.not_ready()
        slots = [node.report()["slots"]]
        parts.live.current.update(parse_config('{"loadConcurrency": {"globalConfig": 5}}'))
        slots.append(node.report()["slots"])

    assert pending
    assert ready == []
    assert [one["total"] for one in slots] == [3, 5]

"""The number of slots of a node: rules, labels, and their changes."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from core.kube.client import KubeClient
from core.kube.transport import Retry
from core.models.base import JsonDict
from nodeagent.config.current import resolve_slots
from nodeagent.config.keys import LoadConcurrency
from nodeagent.config.parse import parse_config
from nodeagent.leader.admission.quota import NodeSlots
from nodeagent.node.steps import OwnSlots
from tests.support.clock import LoopClock
from tests.support.fakekube import FakeKube

DOCUMENT = """{"loadConcurrency": {"globalConfig": 5, "perNodeConfig": [
    {"nodeSelector": {"matchLabels": {"size": "big"}}, "number": 8},
    {"nodeSelector": {"matchLabels": {"zone": "a"}}, "number": 3},
    {"nodeSelector": {"matchExpressions": [{"key": "spot", "operator": "Exists"}]}, "number": 6}
]}}"""
RULES = parse_config(DOCUMENT).config.load_concurrency


@pytest.mark.parametrize(
    ("labels", "number"),
    [
        pytest.param({}, 5, id="no rule matches: globalConfig"),
        pytest.param({"size": "small"}, 5, id="another value"),
        pytest.param({"size": "big"}, 8, id="one rule, more than globalConfig"),
        pytest.param({"size": "big", "zone": "a"}, 3, id="the smallest of two"),
        pytest.param({"size": "big", "spot": ""}, 6, id="an expression"),
        pytest.param({"size": "big", "spot": "", "zone": "a"}, 3, id="the smallest of three"),
    ],
)
def test_the_smallest_match_wins(labels: dict[str, str], number: int) -> None:
    assert resolve_slots(labels, RULES) == number


def node(name: str, **labels: str) -> JsonDict:
    return {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}}


@dataclass
class Scene:
    """The number of an agent's own node, whose labels and configuration change."""

    kube: FakeKube = field(default_factory=FakeKube)
    concurrency: LoadConcurrency = RULES
    numbers: list[int] = field(default_factory=list)

    @asynccontextmanager
    async def following(self) -> AsyncIterator[OwnSlots]:
        clock = LoopClock()
        client = KubeClient(self.kube, Retry(clock))
        own = OwnSlots(client, clock, "node-a", concurrency=lambda: self.concurrency, on_number=self.numbers.append)
        task = asyncio.create_task(own.run())
        try:
            yield own
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.mark.looptime
async def test_the_number_follows_the_labels_of_the_node() -> None:
    scene = Scene()
    scene.kube.put(node("node-a", size="big"))
    scene.kube.put(node("node-b", zone="a"))
    async with scene.following() as own:
        await own.wait_known()
        assert scene.numbers[-1] == 8
        scene.kube.put(node("node-a", size="big", zone="a"))
        await until(lambda: scene.numbers[-1] == 3)
        scene.kube.put(node("node-a"))
        await until(lambda: scene.numbers[-1] == 5)


@pytest.mark.looptime
async def test_without_rules_the_node_is_not_read() -> None:
    scene = Scene(concurrency=LoadConcurrency(global_config=4))
    async with scene.following() as own:
        await own.wait_known()
        await asyncio.sleep(100)
        assert scene.numbers == [4]
        assert scene.kube.requests == []
        scene.kube.put(node("node-a", size="big"))
        scene.concurrency = RULES
        own.refresh()
        await until(lambda: scene.numbers[-1] == 8)
        # The number does not change until the labels are known.
        assert scene.numbers == [4, 8]
        scene.concurrency = LoadConcurrency(global_config=2)
        own.refresh()
        assert scene.numbers[-1] == 2


@pytest.mark.looptime
async def test_a_node_whose_labels_are_forbidden_has_the_global_number() -> None:
    scene = Scene()
    scene.kube.fail_next("GET", "/nodes", 403)
    async with scene.following() as own:
        await own.wait_known()
        assert set(scene.numbers) == {5}
        scene.kube.put(node("node-a", size="big"))
        async with asyncio.timeout(100):
            while scene.numbers[-1] != 8:
                await asyncio.sleep(1)


@pytest.mark.looptime
async def test_the_labels_of_other_nodes_are_read_once_a_minute_at_most() -> None:
    kube, clock = FakeKube(), LoopClock()
    kube.put(node("node-a", size="big"))
    slots = NodeSlots(KubeClient(kube, Retry(clock)), clock, lambda: RULES)
    assert [await slots.of("node-a") for _ in range(5)] == [8] * 5
    assert await slots.of("node-x") == 5
    assert len(kube.requests) == 2
    kube.put(node("node-a", zone="a"))
    await asyncio.sleep(61)
    assert await slots.of("node-a") == 3
    # What is kept of a node that is gone would stay as long as this leader.
    assert list(slots._labels) == ["node-a"]

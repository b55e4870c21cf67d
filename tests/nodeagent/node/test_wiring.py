"""The bandwidth of a node's data movers is shared and followed; its agent writes no time of its own clock."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from email.utils import format_datetime

import pytest

from core.kube.resources import DATA_UPLOADS
from core.models.names import ATTEMPTS_ANNOTATION
from core.models.phases import Phase
from core.models.transfer_settings import BandwidthLimits
from nodeagent.config.own_keys import BandwidthKeys
from nodeagent.config.parse import parse_config
from nodeagent.node.wiring import build_node, share_limits
from tests.nodeagent.support.hand_clock import NOON
from tests.nodeagent.support.parts import fake_parts
from tests.nodeagent.support.transfers import data_upload
from tests.support.fakekube import FakeKube
from tests.support.objects import JsonDict
from tests.support.tasks import running, until

pytestmark = pytest.mark.looptime

_KEY = "nodeagent.io/bandwidth"


def _keys(**keys: object) -> BandwidthKeys:
    return BandwidthKeys.model_validate(keys)


def _up(rate: int) -> BandwidthLimits:
    return BandwidthLimits(upload_bytes_per_second=rate)


@pytest.mark.parametrize(
    ("keys", "limits"),
    [
        ({}, [0, 0, 0]),
        ({"perMover": {"uploadBytesPerSecond": 500_000}}, [500_000] * 3),
        ({"perNode": {"uploadBytesPerSecond": 900_000}}, [300_000] * 3),
        ({"perLocation": {"a": {"uploadBytesPerSecond": 400_000}}}, [200_000, 200_000, 0]),
        ({"perLocation": {"unused": {"uploadBytesPerSecond": 400_000}}}, [0, 0, 0]),
        (
            {
                "perMover": {"uploadBytesPerSecond": 250_000},
                "perNode": {"uploadBytesPerSecond": 900_000},
                "perLocation": {"b": {"uploadBytesPerSecond": 100_000}},
            },
            [250_000, 250_000, 100_000],
        ),
    ],
)
def test_the_strictest_share_counts(keys: dict[str, object], limits: list[int]) -> None:
    found = share_limits(_keys(**keys), {"1": "a", "2": "a", "3": "b"}, NOON)
    assert [found[uid] for uid in "123"] == [_up(limit) for limit in limits]


def test_a_direction_without_a_limit_has_none() -> None:
    keys = _keys(perNode={"downloadBytesPerSecond": 300_000}, perMover={"uploadBytesPerSecond": 100_000})
    (found,) = share_limits(keys, {"1": "a"}, NOON).values()
    assert found == BandwidthLimits(upload_bytes_per_second=100_000, download_bytes_per_second=300_000)


async def test_the_timestamps_of_transfers_are_by_the_clock_of_the_api_server() -> None:
    node = _Node()
    node.put("a", "Prepared")
    node.parts.skew.observe(format_datetime(NOON + timedelta(hours=24), usegmt=True))
    async with node.watching():
        cr = node.cache.transfer(("DataUpload", "velero", "a"))
        assert cr is not None
        ended = await node.bandwidth.status.move(node.parts.kinds[0], cr, Phase.CANCELED)
    assert ended.status.completion_timestamp is not None
    assert ended.status.completion_timestamp - NOON >= timedelta(hours=24)


class _Node:
    """A node with transfers, and the configuration of its agent."""

    def __init__(self) -> None:
        self.kube = FakeKube()
        self.parts = fake_parts(self.kube)
        node = build_node(self.parts)
        self.cache, self.bandwidth = node.cache, node.bandwidth
        self.configure({"bandwidth": {"perNode": {"uploadBytesPerSecond": 900_000}}})

    def configure(self, own: JsonDict) -> None:
        self.parts.live.current.update(parse_config(json.dumps({"nodeagent.io": own})))

    def put(
        self, name: str, phase: str = "InProgress", limits: BandwidthLimits | None = None, *, attempts: str = "{}"
    ) -> None:
        annotations = {ATTEMPTS_ANNOTATION: attempts} | ({} if limits is None else {_KEY: limits.to_json()})
        self.kube.put(data_upload(name, node="node-a", status={"phase": phase}, annotations=annotations))

    def limits(self, name: str) -> BandwidthLimits | None:
        (raw,) = [one for one in self.kube.objects(DATA_UPLOADS) if one["metadata"]["name"] == name]
        return BandwidthLimits.from_annotations(raw["metadata"].get("annotations") or {})

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        async with running(self.cache.run()):
            await self.cache.wait_synced()
            yield

    def starting(self, name: str) -> dict[str, str | None]:
        found = self.cache.transfer(("DataUpload", "velero", name))
        assert found is not None
        return self.bandwidth.annotations(found)


async def test_a_transfer_starts_with_its_share() -> None:
    node = _Node()
    node.put("first", limits=_up(900_000))
    node.put("next", "Prepared")
    async with node.watching():
        assert node.starting("next") == {_KEY: '{"uploadBytesPerSecond":450000}'}
        assert node.bandwidth.report() == {"bandwidth": {"DataUpload/first": {"uploadBytesPerSecond": 900_000}}}
        node.configure({"bandwidth": {}})
        assert node.starting("next") == {_KEY: "{}"}
        node.configure({})
        assert node.starting("next") == {}


async def test_those_that_run_get_what_has_changed_and_those_without_limits_nothing() -> None:
    node = _Node()
    for name in ("a", "b"):
        node.put(name, limits=_up(900_000))
    node.put("without")
    node.put("ended", "Completed", _up(5))
    node.put("interrupted", limits=_up(7), attempts='{"number":2,"stage":"Waiting"}')
    async with node.watching():
        await node.bandwidth.refresh()
        assert [node.limits(name) for name in ("a", "b", "without", "ended")] == [_up(300_000)] * 2 + [None, _up(5)]
        assert node.limits("interrupted") == _up(7)
        limit = 'nodeagent_bandwidth_limit_bytes_per_second{direction="upload",node="node-a"} 900000.0'
        assert limit in node.parts.metrics.render().decode()
        patches = len([one for one in node.kube.requests if one.method == "PATCH"])
        await until(lambda: node.bandwidth.report()["bandwidth"]["DataUpload/b"] == {"uploadBytesPerSecond": 300_000})
        await node.bandwidth.refresh()
        assert len([one for one in node.kube.requests if one.method == "PATCH"]) == patches
        node.configure({})
        await node.bandwidth.refresh()
        assert [node.limits(name) for name in ("a", "b", "without")] == [BandwidthLimits()] * 2 + [None]


_INVALID = json.dumps(data_upload("a", resourceVersion="9") | {"spec": {}}).encode()


@pytest.mark.parametrize(("status", "others"), [(409, 1), (404, 1), (403, 1), (422, 1), (_INVALID, 1), (500, 0)])
async def test_a_write_that_fails_is_repeated_by_the_next_round(status: int | bytes, others: int) -> None:
    node = _Node()
    for name in ("a", "b"):
        node.put(name, limits=_up(1))
    async with node.watching():
        node.kube.fail_next("PATCH", "/datauploads/a", status, times=100)
        await node.bandwidth.refresh()
        assert [node.limits(name) for name in ("a", "b")] == [_up(1), _up((1, 450_000)[others])]
        node.kube.fulfill()
        await node.bandwidth.refresh()
        assert node.limits("a") == _up(450_000)

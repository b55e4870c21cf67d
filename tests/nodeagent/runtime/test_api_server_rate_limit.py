"""The rate limit of requests to the API server, and its `Retry-After`."""

import asyncio

import pytest

from core.kube.client import KubeClient, Selection
from core.kube.errors import ThrottledError, UnreachableError
from core.kube.resources import CONFIG_MAPS
from core.kube.transport import Request, Response, Retry, Transport
from core.kube.watch import watch_objects
from nodeagent.runtime.api_server import LimitedTransport, RateLimit
from tests.support.clock import LoopClock
from tests.support.fakekube import FakeKube

pytestmark = pytest.mark.looptime


@pytest.fixture(name="_only_granted_requests", autouse=True)
def only_granted_requests() -> None:
    """The requests here are made up; permissions are not their subject."""


def limit(*, per_second: float = 10.0, burst: int = 5) -> RateLimit:
    return RateLimit(LoopClock(), per_second=per_second, burst=burst)


def limited(kube: Transport, rate: RateLimit, answers: list[tuple[str, int]]) -> KubeClient:
    """Return a client that keeps to `rate`; verb and status of each response go to `answers`."""
    transport = LimitedTransport(kube, rate, on_answer=lambda verb, status: answers.append((verb, status)))
    return KubeClient(transport, Retry(LoopClock()))


async def test_a_burst_passes_at_once_and_the_others_at_the_rate(looptime: float) -> None:
    bucket = limit()
    for _ in range(5):
        await bucket.acquire(urgent=False)
    assert looptime == 0
    for _ in range(20):
        await bucket.acquire(urgent=False)
    assert abs(float(looptime) - 2.0) < 0.1


async def test_a_pause_fills_the_bucket_up_to_a_burst(looptime: float) -> None:
    bucket = limit()
    await asyncio.sleep(100)
    for _ in range(6):
        await bucket.acquire(urgent=False)
    assert abs(float(looptime) - 100.1) < 0.1


async def test_urgent_requests_pass_at_once_and_take_tokens_from_the_others(looptime: float) -> None:
    bucket = limit()
    for _ in range(7):
        await bucket.acquire(urgent=True)
    assert looptime == 0
    await bucket.acquire(urgent=False)
    assert abs(float(looptime) - 0.3) < 0.1


async def test_an_urgent_request_overtakes_waiting_requests(looptime: float) -> None:
    bucket = limit(burst=1)
    async with asyncio.TaskGroup() as group:
        for _ in range(50):
            group.create_task(bucket.acquire(urgent=False))
        await asyncio.sleep(1)
        await bucket.acquire(urgent=True)
        assert abs(float(looptime) - 1.0) < 0.1
    # The debt is paid in the end.
    assert abs(float(looptime) - 5.0) < 0.1


async def test_waiting_requests_pass_in_order_and_a_canceled_one_blocks_none() -> None:
    bucket, passed = limit(burst=1), []

    async def wait(number: int) -> None:
        await bucket.acquire(urgent=False)
        passed.append(number)

    tasks = [asyncio.create_task(wait(number)) for number in range(6)]
    await asyncio.sleep(0.05)
    tasks[1].cancel()
    tasks[3].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert passed == [0, 2, 4, 5]


async def test_a_requested_pause_delays_all_but_urgent_requests(looptime: float) -> None:
    bucket = limit()
    bucket.pause(3)
    await bucket.acquire(urgent=True)
    assert looptime == 0
    await bucket.acquire(urgent=False)
    assert abs(float(looptime) - 3.0) < 0.1


async def test_a_requested_pause_is_limited(looptime: float) -> None:
    bucket = limit()
    bucket.pause(86400)
    await bucket.acquire(urgent=False)
    assert abs(float(looptime) - 30.0) < 0.1


class Busy(FakeKube):
    """Rejects the first requests with 429 and Retry-After: 7."""

    refusals = 1

    async def request(self, request: Request) -> Response:
        if self.refusals:
            self.refusals -= 1
            return Response(429, b'{"message": "too many requests", "reason": "TooManyRequests"}', "7")
        return await super().request(request)


async def test_retry_after_of_one_request_delays_all(looptime: float) -> None:
    kube = Busy()
    answers: list[tuple[str, int]] = []
    client = limited(kube, limit(), answers)
    async with asyncio.TaskGroup() as group:
        for name in ("a", "b", "c"):
            group.create_task(client.read(CONFIG_MAPS, "ns", name))
            await asyncio.sleep(0.01)
        assert answers == [("GET", 429)]
        await client.urgently().read(CONFIG_MAPS, "ns", "d")
        assert looptime < 1
    assert 7 <= looptime < 8
    assert answers == [("GET", 429)] + [("GET", 404)] * 4


async def test_watches_are_limited_and_counted(looptime: float) -> None:
    kube = FakeKube()
    answers: list[tuple[str, int]] = []
    client = limited(kube, limit(per_second=1.0, burst=1), answers)
    changes = watch_objects(client, Selection(CONFIG_MAPS, "ns"), clock=LoopClock())
    async with asyncio.TaskGroup() as group:
        reading = group.create_task(anext_of(changes, 3))
        await asyncio.sleep(1.5)
        kube.put({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"namespace": "ns", "name": "m"}})
        await reading
    await changes.aclose()
    assert answers == [("GET", 200), ("WATCH", 200)]
    assert abs(float(looptime) - 1.5) < 0.1


async def anext_of(changes: object, count: int) -> None:
    for _ in range(count):
        await anext(changes)  # type: ignore[call-overload] # a generator of changes


async def test_unanswered_requests_and_rejected_watches_are_counted() -> None:
    kube = FakeKube()
    answers: list[tuple[str, int]] = []
    transport = LimitedTransport(kube, limit(), on_answer=lambda verb, status: answers.append((verb, status)))
    kube.fail_next("GET", "configmaps", "lost")
    with pytest.raises(UnreachableError):
        await transport.request(Request("GET", "/api/v1/configmaps"))
    kube.fail_next("WATCH", "configmaps", 429)
    with pytest.raises(ThrottledError):
        async with transport.stream(Request("GET", "/api/v1/configmaps")):
            pass
    assert answers == [("GET", 0), ("WATCH", 429)]


class Slow(FakeKube):
    """Responds after a second, and records how many requests were in flight."""

    waiting = 0
    most = 0

    async def request(self, request: Request) -> Response:
        self.waiting += 1
        self.most = max(self.most, self.waiting)
        await asyncio.sleep(1)
        self.waiting -= 1
        return await super().request(request)


async def test_requests_in_flight_are_limited_except_urgent_ones(looptime: float) -> None:
    kube = Slow()
    transport = LimitedTransport(kube, limit(per_second=1000, burst=1000), on_answer=lambda *_: None)
    request = Request("GET", CONFIG_MAPS.path("velero", "none"))
    async with asyncio.TaskGroup() as group:
        for _ in range(100):
            group.create_task(transport.request(request), name="request")
        await asyncio.sleep(0.5)
        most = kube.most
        await transport.request(Request("GET", CONFIG_MAPS.path("velero", "none"), urgent=True))
        assert abs(float(looptime) - 1.5) < 0.1
    assert most == 16
    assert abs(float(looptime) - 7) < 0.1

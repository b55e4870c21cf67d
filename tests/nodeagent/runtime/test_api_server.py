"""The rate limit of requests to the API server and its `Retry-After`, the ends of outages, the skew of the clock."""

import asyncio
from datetime import timedelta
from email.utils import format_datetime

import pytest

from core.kube.client import KubeClient, Selection
from core.kube.errors import ThrottledError, UnreachableError
from core.kube.resources import CONFIG_MAPS
from core.kube.transport import Request, Response, Retry, Transport
from core.kube.watch import watch_objects
from nodeagent.metrics import Metrics
from nodeagent.runtime.api_server import ClockSkew, LimitedTransport, Outages, RateLimit
from nodeagent.runtime.connection import ServerTime
from tests.nodeagent.support.hand_clock import NOON, HandClock
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
    # A pause fills the bucket up to a burst.
    await asyncio.sleep(100)
    for _ in range(6):
        await bucket.acquire(urgent=False)
    assert abs(float(looptime) - 102.1) < 0.1


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


@pytest.mark.parametrize(("requested", "seconds"), [(3, 3), (86400, 30)], ids=["short", "limited"])
async def test_a_requested_pause_delays_all_but_urgent_requests(requested: int, seconds: int, looptime: float) -> None:
    bucket = limit()
    bucket.pause(requested)
    await bucket.acquire(urgent=True)
    assert looptime == 0
    await bucket.acquire(urgent=False)
    assert abs(float(looptime) - seconds) < 0.1


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


@pytest.mark.parametrize(
    ("statuses", "ends"),
    [
        pytest.param([200, 201, 404], 0, id="none"),
        pytest.param([0, 0], 0, id="not ended yet"),
        pytest.param([0, 0, 200, 200], 1, id="no answers"),
        pytest.param([500, 503, 200], 1, id="errors of the server"),
        pytest.param([0, 409], 1, id="a rejection is an answer"),
        pytest.param([401, 401, 403], 1, id="a token that cannot be checked"),
        pytest.param([0, 200, 0, 200], 2, id="twice"),
    ],
)
def test_the_first_good_answer_after_a_failed_one_is_reported(statuses: list[int], ends: int) -> None:
    reported: list[int] = []
    outages = Outages()
    outages.subscribe(lambda: reported.append(1))
    for status in statuses:
        outages.observe(status)
    assert len(reported) == ends


DATE = format_datetime(NOON, usegmt=True)
DAY = timedelta(hours=24)


def shown(metrics: Metrics) -> float | None:
    lines = [
        line for line in metrics.render().decode().splitlines() if line.startswith("nodeagent_clock_skew_seconds{")
    ]
    return float(lines[0].split()[-1]) if lines else None


@pytest.mark.parametrize(
    ("skew", "words"),
    [
        (timedelta(seconds=59), ""),
        (timedelta(seconds=-59), ""),
        (DAY, "86400 s ahead of the API server's"),
        (-DAY, "86400 s behind the API server's"),
    ],
)
def test_the_skew_is_a_metric_and_one_warning(skew: timedelta, words: str, caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics("node-a")
    observer = ClockSkew(HandClock(skew=skew), metrics)
    assert shown(metrics) is None
    for _ in range(3):
        observer.observe(DATE)
    assert shown(metrics) == skew.total_seconds()
    assert [words in record.getMessage() for record in caplog.records] == ([True] if words else [])


def test_a_skew_that_comes_back_is_warned_about_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    clock = HandClock()
    observer = ClockSkew(clock, Metrics("node-a"))
    for clock.skew in (DAY, timedelta(), timedelta(), -DAY):
        observer.observe(DATE)
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO", "WARNING"]


def test_the_time_of_the_api_server_passes_while_the_clock_of_the_machine_is_set() -> None:
    """Otherwise an interrupted transfer could count as older than the deadline of its retries."""
    clock = HandClock(skew=-DAY)
    observer = ClockSkew(clock, Metrics("node-a"))
    observer.observe(DATE)
    clock.skew, clock.seconds = timedelta(), 60
    assert observer.now() == NOON + timedelta(seconds=60)


@pytest.mark.parametrize("date", ["", "soon", "Sat, 99 Nov 2026 12:00:00 GMT", "Sat, 21 Nov 2026 12:00:00"])
def test_an_invalid_date_is_ignored(date: str) -> None:
    metrics = Metrics("node-a")
    ClockSkew(HandClock(), metrics).observe(date)
    assert shown(metrics) is None


class Dated(FakeKube):
    """An API server that dates its responses."""

    async def request(self, request: Request) -> Response:
        return Response(200, b"{}", date=DATE)


async def test_the_time_of_a_command_passes_while_the_clock_of_the_machine_is_set() -> None:
    clock = HandClock(skew=-DAY)
    time = ServerTime(Dated(), clock)
    await time.request(Request("GET", "/api/v1/pods"))
    clock.skew, clock.seconds = timedelta(), 60
    assert time.now() == NOON + timedelta(seconds=60)


async def test_every_response_is_compared() -> None:
    seen: list[str] = []
    clock = HandClock()
    limit = RateLimit(clock, per_second=10.0, burst=5)
    transport = LimitedTransport(Dated(), limit, on_answer=lambda _verb, _status: None, on_date=seen.append)
    await transport.request(Request("GET", "/api/v1/pods"))
    assert seen == [DATE]

"""The work queue: each key is handled by one worker at a time, in order, and never lost; its faults and timers."""

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable
from datetime import timedelta

import pytest

from core.errors import AgentError
from core.kube.errors import ServerError
from nodeagent.runtime.workqueue import Faults, Requeue, Timers, WorkQueue
from tests.nodeagent.support.hand_clock import HandClock
from tests.support.clock import LoopClock
from tests.support.tasks import running

pytestmark = pytest.mark.looptime


class Worker:
    """Records when each key started; takes `seconds` for each, then does what `then` says."""

    def __init__(self, seconds: float = 1.0) -> None:
        self.seconds = seconds
        self.began: list[tuple[str, float]] = []
        self.busy: list[str] = []
        self.most_at_once = 0
        self.then: Callable[[str], Awaitable[Requeue | None]] = self._nothing

    async def _nothing(self, key: str) -> Requeue | None:
        return None

    async def __call__(self, key: str) -> Requeue | None:
        assert key not in self.busy, "one key, two workers"
        self.began.append((key, round(asyncio.get_running_loop().time(), 3)))
        self.busy.append(key)
        self.most_at_once = max(self.most_at_once, len(self.busy))
        try:
            await asyncio.sleep(self.seconds)
            return await self.then(key)
        finally:
            self.busy.remove(key)

    @property
    def keys(self) -> list[str]:
        return [key for key, _ in self.began]

    def times(self, key: str) -> list[float]:
        return [at for began, at in self.began if began == key]


async def _fail(key: str) -> Requeue | None:
    raise ServerError("503 ServiceUnavailable", status=503)


def new_queue(workers: int = 2) -> WorkQueue[str]:
    return WorkQueue(LoopClock(), name="test", workers=workers)


async def test_keys_are_handled_in_order_by_the_workers() -> None:
    queue, worker = new_queue(workers=2), Worker()
    for key in "abcde":
        queue.add(key)
    assert len(queue._ready) == 5
    async with running(queue.run(worker)):
        await asyncio.sleep(10)
    assert worker.began == [("a", 0), ("b", 0), ("c", 1), ("d", 1), ("e", 2)]
    assert worker.most_at_once == 2
    assert not queue._ready


async def test_a_ready_key_is_queued_once_and_one_in_progress_again() -> None:
    queue, worker = new_queue(), Worker()
    for _ in range(3):
        queue.add("a")
    async with running(queue.run(worker)):
        await asyncio.sleep(0.5)
        queue.add("a")
        queue.add("a")
        await asyncio.sleep(10)
    assert worker.times("a") == [0, 1]


async def test_a_key_added_repeatedly_does_not_starve_others() -> None:
    queue, worker = new_queue(workers=1), Worker()

    async def again(key: str) -> None:
        if key == "busy":
            queue.add("busy")

    worker.then = again
    for key in ("busy", "a", "b"):
        queue.add(key)
    async with running(queue.run(worker)):
        await asyncio.sleep(3.5)
    assert worker.keys == ["busy", "a", "b", "busy"]


async def test_a_requeued_key_is_handled_on_time_and_not_brought_forward() -> None:
    queue, worker = new_queue(), Worker()

    async def later(key: str) -> Requeue | None:
        return Requeue(50.0) if len(worker.began) < 3 else None

    worker.then = later
    queue.add("a")
    async with running(queue.run(worker)):
        await asyncio.sleep(10)
        queue.bring_forward()
        await asyncio.sleep(1000)
    assert worker.times("a") == [0, 51, 102]


async def test_the_earliest_of_several_times_counts_also_if_it_is_set_during_another() -> None:
    queue, worker = new_queue(), Worker()
    for seconds in (30, 10, 20):
        queue.add_after("a", seconds)
    async with running(queue.run(worker)):
        queue.add_after("late", 50)
        await asyncio.sleep(1)
        queue.add_after("early", 5)
        await asyncio.sleep(100)
    assert worker.began == [("early", 6), ("a", 10), ("late", 50)]


async def test_a_failing_key_is_retried_with_backoff_up_to_a_limit_until_it_succeeds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    queue, worker = new_queue(), Worker(seconds=0)
    worker.then = _fail
    queue.add("a")
    async with running(queue.run(worker)):
        await asyncio.sleep(3600)
        times = worker.times("a")
        worker.then = worker._nothing
        await asyncio.sleep(310)
        # The success has cleared the backoff.
        worker.then, before = _fail, len(worker.began)
        queue.add("a")
        await asyncio.sleep(1.1)
    first, second = worker.times("a")[before:]
    assert 0.5 <= second - first <= 1.0
    waits = [after - before for before, after in itertools.pairwise(times)]
    assert 0.5 <= waits[0] <= 1.0
    assert all(before <= after * 2 for before, after in itertools.pairwise(waits))
    assert 150 <= waits[-1] <= 300.1
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == len(times) + 2
    assert "test: a failed, will retry in" in warnings[0].getMessage()


async def test_an_unexpected_error_is_logged_in_full_and_blocks_no_key(caplog: pytest.LogCaptureFixture) -> None:
    queue, worker = new_queue(), Worker(seconds=0)

    async def fail(key: str) -> None:
        if key == "a":
            raise KeyError(key)

    worker.then = fail
    queue.add("a")
    queue.add("b")
    async with running(queue.run(worker)):
        await asyncio.sleep(1.5)
    assert "b" in worker.keys
    assert worker.keys.count("a") >= 2
    assert caplog.records[0].exc_info is not None


async def test_a_cancellation_from_outside_ends_no_worker() -> None:
    queue, worker = new_queue(workers=1), Worker(seconds=0)

    async def await_canceled(key: str) -> None:
        if len(worker.began) == 1:
            other = asyncio.get_running_loop().create_future()
            other.cancel()
            await other

    worker.then = await_canceled
    queue.add("a")
    async with running(queue.run(worker)):
        await asyncio.sleep(2)
        assert worker.keys == ["a", "a"]
        queue.add("b")
        await asyncio.sleep(0.1)
    assert worker.keys == ["a", "a", "b"]


async def test_keys_that_back_off_are_brought_forward_within_ten_seconds() -> None:
    keys = [f"key-{number}" for number in range(40)]
    queue, worker = new_queue(workers=40), Worker(seconds=0)
    worker.then = _fail
    for key in keys:
        queue.add(key)
    async with running(queue.run(worker)):
        await asyncio.sleep(3000)
        worker.then, before = worker._nothing, len(worker.began)
        queue.bring_forward()
        ended_at = asyncio.get_running_loop().time()
        await asyncio.sleep(10)
        seconds = [at - ended_at for _, at in worker.began[before:]]
        assert len(seconds) == len(keys)
        # Not all at once.
        assert max(seconds) - min(seconds) > 5
        await asyncio.sleep(1000)
        assert len(worker.began) == before + len(keys)


async def test_a_key_that_always_fails_is_brought_forward_once_a_minute_at_most() -> None:
    queue, worker = new_queue(), Worker(seconds=0)
    worker.then = _fail
    queue.add("a")
    async with running(queue.run(worker)):
        await asyncio.sleep(3000)
        before = len(worker.began)
        for _ in range(600):
            queue.bring_forward()
            await asyncio.sleep(1)
        assert 8 <= len(worker.began) - before <= 11


@pytest.fixture
def faults(caplog: pytest.LogCaptureFixture) -> Faults:
    caplog.set_level(logging.DEBUG)
    return Faults(logging.getLogger("faults"))


def test_an_error_is_logged_in_full_once_per_key_and_cause(faults: Faults, caplog: pytest.LogCaptureFixture) -> None:
    errors = [("a", AgentError("no")), ("a", AgentError("no")), ("b", AgentError("no")), ("a", AgentError("still no"))]
    assert [faults.report(key, "it failed", error) for key, error in errors] == [True, False, True, True]
    assert [(one.levelname, one.exc_info is not None) for one in caplog.records] == [
        ("ERROR", True),
        ("DEBUG", False),
        ("ERROR", True),
        ("ERROR", True),
    ]
    assert caplog.messages[0] == "it failed: no"
    faults.forget("b")
    assert faults.report("b", "it failed", AgentError("no"))


DAY = timedelta(hours=24)


@pytest.mark.parametrize("skew", [-DAY, DAY], ids=["a day behind", "a day ahead"])
def test_a_timer_begins_with_the_first_observation_and_again_with_another(skew: timedelta) -> None:
    clock = HandClock(100.0)
    timers = Timers(clock)
    assert timers.seconds("uid", "deletion of a") == 0.0
    clock.seconds, clock.skew = 101.0, skew
    assert timers.seconds("uid", "deletion of a") == 1.0
    clock.seconds = 700.0
    assert timers.seconds("uid", "deletion of a") == 600.0
    assert timers.seconds("uid", "deletion of b") == 0.0
    assert timers.seconds("uid", "deletion of a") == 0.0


def test_a_timer_counts_no_more_between_two_observations_than_it_may() -> None:
    clock = HandClock()
    timers = Timers(clock, most_seconds=300.0)
    for clock.seconds, counted in ((0.0, 0.0), (100.0, 100.0), (2500.0, 400.0), (2700.0, 600.0)):
        assert timers.seconds("uid") == counted


def test_only_retained_timers_take_memory() -> None:
    clock = HandClock()
    timers = Timers(clock)
    for key in ("a", "b", "c"):
        timers.seconds(key)
    timers.forget("a")
    timers.forget("unknown")
    timers.retain({"c", "d"})
    clock.seconds = 5.0
    assert list(timers._observed) == ["c"]
    assert timers.seconds("c") == 5.0

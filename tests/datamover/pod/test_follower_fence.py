"""The time of the fence, with a clock that the test moves, and a thread that looks at it often."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from datetime import timedelta

import pytest

from core.clock import SystemClock
from core.errors import ConfigError, FencedError
from core.kube.errors import UnreachableError
from datamover.pod.follower import Fence, exit_fenced, read_fence_timeout

_TIMEOUT = timedelta(seconds=0.5)


class _Fenced:
    """A fence of half a second; what it does at its end is noted instead of ending this process."""

    def __init__(self, confirm: Callable[[], Awaitable[bool]]) -> None:
        self.seconds = 0.0
        self.expired = threading.Event()
        self.working = asyncio.Event()
        self.fence = Fence(_TIMEOUT, confirm, self.expired.set, clock=SystemClock(), now=lambda: self.seconds)

    async def work(self) -> str:
        self.working.set()
        await asyncio.Event().wait()
        return "never"

    async def run(self, until: Callable[[], Awaitable[object]]) -> None:
        """Run the work until a condition is true."""
        running = asyncio.create_task(self.fence.run(self.work))
        try:
            async with asyncio.timeout(20):
                await until()
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def _confirmed() -> bool:
    return True


async def _unreachable() -> bool:
    raise UnreachableError("no route to host")


async def test_work_that_is_confirmed_goes_on() -> None:
    asked = asyncio.Event()
    questions = 0

    async def confirm() -> bool:
        nonlocal questions
        questions += 1
        fenced.seconds += 0.1
        if questions > 10:
            asked.set()
        return True

    fenced = _Fenced(confirm)
    await fenced.run(asked.wait)
    assert fenced.working.is_set()
    assert not fenced.expired.is_set()


async def test_the_result_of_the_work_is_returned_and_the_thread_ends() -> None:
    fenced = _Fenced(_confirmed)

    async def work() -> str:
        return "result"

    assert await fenced.fence.run(work) == "result"
    async with asyncio.timeout(20):
        while any(thread.name == "fence" for thread in threading.enumerate()):
            await asyncio.sleep(0.01)
    assert not fenced.expired.is_set()


@pytest.mark.parametrize("answer", [_unreachable, None], ids=["no answer", "not the attempt that runs"])
async def test_no_work_begins_before_the_attempt_is_confirmed(answer: Callable[[], Awaitable[bool]] | None) -> None:
    asked, confirmed = asyncio.Event(), False

    async def confirm() -> bool:
        asked.set()
        return confirmed or (await answer() if answer else False)

    fenced = _Fenced(confirm)

    async def begin() -> None:
        nonlocal confirmed
        await asked.wait()
        assert not fenced.working.is_set()
        confirmed = True
        await fenced.working.wait()

    await fenced.run(begin)


async def test_an_answer_is_as_old_as_its_question() -> None:
    """Such as one that waited in a socket while the process was frozen."""

    async def confirm() -> bool:
        fenced.seconds += 0.6
        return True

    fenced = _Fenced(confirm)
    await fenced.run(lambda: asyncio.to_thread(fenced.expired.wait, 20))
    assert fenced.expired.is_set()


async def test_the_fence_ends_an_event_loop_that_hangs() -> None:
    fenced = _Fenced(_confirmed)

    async def hang() -> None:
        await fenced.working.wait()
        fenced.seconds += 0.6
        assert fenced.expired.wait(20)

    await fenced.run(hang)


async def test_a_question_that_is_not_answered_is_repeated() -> None:
    repeated, questions = asyncio.Event(), 0

    async def confirm() -> bool:
        nonlocal questions
        questions += 1
        if questions > 2:
            repeated.set()
        await asyncio.Event().wait()
        return True

    fenced = _Fenced(confirm)
    await fenced.run(repeated.wait)
    assert not fenced.working.is_set()


@pytest.mark.parametrize(("text", "seconds"), [("", 120), ("30s", 30), ("2m", 120)])
def test_the_environment_can_shorten_the_time(text: str, seconds: int) -> None:
    assert read_fence_timeout({"DATA_MOVER_FENCE_TIMEOUT": text}).total_seconds() == seconds


@pytest.mark.parametrize("text", ["0", "1s", "121s", "1h"])
def test_a_time_after_which_another_attempt_may_have_begun_is_rejected(text: str) -> None:
    limits = rf'^DATA_MOVER_FENCE_TIMEOUT: must be from 2s to 2m0s: "{text}"$'
    with pytest.raises(ConfigError, match=limits):
        read_fence_timeout({"DATA_MOVER_FENCE_TIMEOUT": text})


class _EndError(Exception):
    """The process would have ended here."""


@pytest.mark.parametrize("failing", ["datamover.pod.follower.kill_children", "threading.Thread.start"])
def test_the_process_ends_also_where_its_last_words_fail(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as by the limit of threads."""

    def fail(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    def end(code: int) -> None:
        raise _EndError(code)

    monkeypatch.setattr("datamover.pod.follower.kill_children", lambda: None)
    monkeypatch.setattr(failing, fail)
    monkeypatch.setattr("os._exit", end)
    with pytest.raises(_EndError) as ended:
        exit_fenced(lambda: None)
    assert ended.value.args == (FencedError.exit_code,)

"""The custom resource of a transfer, as its data mover follows it, and the fence, with a clock that the test moves."""

import asyncio
import json
import re
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext, suppress
from datetime import timedelta

import pytest

from core.clock import SystemClock
from core.errors import AgentError, CanceledError, ConfigError, FencedError
from core.kube.client import KubeClient
from core.kube.errors import KubeError, UnreachableError
from core.kube.resources import DATA_UPLOADS
from core.kube.transport import Request, Response, Retry
from core.models.base import JsonDict
from core.models.names import ATTEMPTS_ANNOTATION
from datamover.kinds import TRANSFER_KINDS
from datamover.pod.follower import Fence, TransferFollower, WatchedTransfer, exit_fenced, read_fence_timeout
from datamover.runtime.cancellation import Canceler
from tests.nodeagent.support.transfers import data_upload
from tests.support.clock import LoopClock
from tests.support.fakekube import FakeKube
from tests.support.scripted import ScriptedTransport


async def test_a_transfer_that_cannot_be_watched_fails() -> None:
    """It would wait for its start forever, or ignore a cancel request."""

    def fail(_: Request) -> Response:
        raise ZeroDivisionError

    canceler = Canceler()
    client = KubeClient(ScriptedTransport(fail), Retry(SystemClock(), attempts=1))
    follower = TransferFollower(client, _watched(), clock=SystemClock(), canceler=canceler)
    with suppress(ZeroDivisionError):
        await follower.run()
    assert "DataUpload velero/du-1 cannot be watched: ZeroDivisionError" in str(await canceler.wait())


def _watched(attempt: int = 1) -> WatchedTransfer:
    return WatchedTransfer(TRANSFER_KINDS["data-upload"], "velero", "du-1", attempt)


@pytest.mark.looptime
@pytest.mark.parametrize("answers", [False, True])
async def test_an_attempt_ends_only_if_the_api_server_has_never_answered_its_mover(*, answers: bool) -> None:
    followed = Followed()
    if not answers:
        followed.kube.fail_next("GET", "/datauploads", "lost", times=1000)
    async with followed.running():
        await asyncio.sleep(500)
        assert not followed.canceler.requested
        followed.kube.fail_next("WATCH", "/datauploads", "lost", times=1000)
        followed.kube.watches.cut()
        await asyncio.sleep(500)
    assert followed.canceler.requested is not answers
    if not answers:
        # An outage of the API server fails no transfer.
        assert type(followed.canceler.error) is FencedError
        assert re.fullmatch("no answer from the API server for 10m0s: .*lost.*", str(followed.canceler.error))


class Followed:
    """A DataUpload on a fake API server, and its follower."""

    def __init__(self, attempt: int = 1) -> None:
        self.kube = FakeKube()
        self.canceler = Canceler()
        self.edit({})
        self.client = KubeClient(self.kube, Retry(LoopClock()))
        self.follower = TransferFollower(self.client, _watched(attempt), clock=LoopClock(), canceler=self.canceler)

    def edit(self, spec: JsonDict, **status: str) -> None:
        whole = data_upload()
        self.kube.put(whole | {"spec": whole["spec"] | spec, "status": status})

    def announce(self, number: int, stage: str, spec: JsonDict | None = None) -> None:
        """Put the transfer, InProgress, with its attempt."""
        whole = data_upload(annotations={ATTEMPTS_ANNOTATION: json.dumps({"number": number, "stage": stage})})
        self.kube.put(whole | {"spec": whole["spec"] | (spec or {}), "status": {"phase": "InProgress"}})

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.follower.run(), name="follower")
        try:
            await asyncio.sleep(0.1)
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@pytest.mark.looptime
@pytest.mark.parametrize("wrong", [{"operationTimeout": "100000000000h"}, {"cancel": "?"}], ids=["duration", "type"])
async def test_an_invalid_edit_is_ignored_until_it_is_corrected(wrong: JsonDict) -> None:
    followed = Followed()
    async with followed.running():
        followed.edit(wrong)
        await asyncio.sleep(0.1)
        followed.edit({}, phase="InProgress")
        assert (await followed.follower.wait_in_progress()).name == "du-1"
        followed.edit(wrong)
        followed.kube.compact()
        followed.kube.watches.cut()
        await asyncio.sleep(5)
        assert not followed.canceler.requested
        followed.edit({"cancel": True}, phase="InProgress")
        assert "was canceled" in str(await followed.canceler.wait())


@pytest.mark.looptime
async def test_an_invalid_transfer_that_is_being_deleted_is_canceled() -> None:
    followed = Followed()
    async with followed.running():
        whole = data_upload(finalizers=["a/b"], deletionTimestamp="2026-11-21T12:00:00Z")
        followed.kube.put(whole | {"spec": {"cancel": "?"}})
        assert "is being deleted" in str(await followed.canceler.wait())


@pytest.mark.looptime
@pytest.mark.parametrize("method", ["GET", "WATCH"])
async def test_a_page_of_a_proxy_is_no_answer(method: str) -> None:
    followed = Followed()
    followed.kube.fail_next(method, "/datauploads", b"<html>Service Unavailable</html>", times=3)
    async with followed.running():
        followed.edit({}, phase="InProgress")
        assert (await followed.follower.wait_in_progress()).name == "du-1"
        assert not followed.canceler.requested


@pytest.mark.looptime
async def test_an_attempt_starts_once_it_is_the_one_that_runs() -> None:
    """Not by what a watch that is behind shows of the one before."""
    followed = Followed(attempt=2)
    async with followed.running():
        starting = asyncio.create_task(followed.follower.wait_in_progress())
        followed.edit({}, phase="InProgress")
        for stage in ("Waiting", "Ready", "Exposing"):
            followed.announce(2, stage)
            await asyncio.sleep(0.1)
            assert not starting.done()
        followed.announce(2, "Running")
        assert (await starting).attempts.number == 2
        assert not followed.canceler.requested


@pytest.mark.looptime
@pytest.mark.parametrize("started", [False, True], ids=["before its start", "afterward"])
@pytest.mark.parametrize("spec", [{}, {"operationTimeout": "?"}], ids=["valid", "invalid"])
async def test_an_attempt_ends_when_a_later_one_has_begun(spec: JsonDict, *, started: bool) -> None:
    followed = Followed(attempt=2)
    if started:
        followed.announce(2, "Running")
    async with followed.running():
        followed.announce(3, "Waiting", spec)
        error = await followed.canceler.wait()
    assert type(error) is FencedError
    assert str(error) == "another attempt (3) has begun: attempt 2 of DataUpload velero/du-1 ended itself"


@pytest.mark.looptime
@pytest.mark.parametrize(("number", "confirmed", "error"), [(1, False, None), (2, True, None), (3, False, FencedError)])
async def test_only_the_current_attempt_is_confirmed(
    number: int, confirmed: bool, error: type[AgentError] | None
) -> None:
    followed = Followed(attempt=2)
    followed.announce(number, "Running")
    # Such as of an API server that cannot reach its storage: it does not know what another one has accepted.
    followed.kube.fail_next("GET", "/datauploads", 500)
    with pytest.raises(KubeError):
        await followed.follower.confirm()
    assert len(followed.kube.requests) == 1
    assert await followed.follower.confirm() is confirmed
    assert followed.canceler.requested is (error is not None)
    if error:
        assert type(await followed.canceler.wait()) is error


@pytest.mark.looptime
@pytest.mark.parametrize(("number", "answers"), [(1, True), (2, True), (3, True), (3, False)])
async def test_an_attempt_that_was_overtaken_fails_its_check(number: int, answers: bool) -> None:
    followed = Followed(attempt=2)
    followed.announce(number, "Running")
    ends = answers and number > 2
    if not answers:
        followed.kube.fail_next("GET", "/datauploads", 500)
    with pytest.raises(FencedError) if ends else nullcontext():
        await followed.follower.check()
    (cr,) = followed.kube.objects(DATA_UPLOADS)
    await followed.client.delete(DATA_UPLOADS, "velero", cr["metadata"]["name"])
    assert not await followed.follower.confirm()
    assert type(await followed.canceler.wait()) is (FencedError if ends else CanceledError)


class _Fenced:
    """A fence of half a second; what it does at its end is noted instead of ending this process."""

    def __init__(self, confirm: Callable[[], Awaitable[bool]]) -> None:
        self.seconds = 0.0
        self.expired = threading.Event()
        self.working = asyncio.Event()
        self.fence = Fence(
            timedelta(seconds=0.5), confirm, self.expired.set, clock=SystemClock(), now=lambda: self.seconds
        )

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
    assert await fenced.fence.run(lambda: asyncio.sleep(0, "result")) == "result"
    async with asyncio.timeout(20):
        while any(thread.name == "fence" for thread in threading.enumerate()):
            await asyncio.sleep(0.01)
    assert not fenced.expired.is_set()


@pytest.mark.parametrize("answer", ["no route to host", "not the attempt that runs", "never"])
async def test_no_work_begins_before_the_attempt_is_confirmed(answer: str) -> None:
    asked, questions, confirmed = asyncio.Event(), 0, False

    async def confirm() -> bool:
        nonlocal questions
        questions += 1
        if questions > 2:
            asked.set()
        if not confirmed and answer == "no route to host":
            raise UnreachableError(answer)
        if not confirmed and answer == "never":
            await asyncio.Event().wait()
        return confirmed

    fenced = _Fenced(confirm)

    async def begin() -> None:
        nonlocal confirmed
        await asked.wait()
        assert not fenced.working.is_set()
        confirmed = True
        await fenced.working.wait()

    await fenced.run(begin)


async def test_the_fence_ends_an_event_loop_that_hangs_and_a_mover_whose_answer_is_too_old() -> None:
    """Such as one that waited in a socket while the process was frozen: it is as old as the question."""

    async def confirm() -> bool:
        late.seconds += 0.6
        return True

    hanging, late = _Fenced(_confirmed), _Fenced(confirm)

    async def hang() -> None:
        await hanging.working.wait()
        hanging.seconds += 0.6
        assert hanging.expired.wait(20)

    await hanging.run(hang)
    await late.run(lambda: asyncio.to_thread(late.expired.wait, 20))
    assert late.expired.is_set()


@pytest.mark.parametrize(("text", "seconds"), [("", 120), ("30s", 30), ("2m", 120)])
def test_the_environment_can_shorten_the_time(text: str, seconds: int) -> None:
    assert read_fence_timeout({"DATA_MOVER_FENCE_TIMEOUT": text}).total_seconds() == seconds
    # After a longer one, another attempt may have begun.
    for invalid in ("0", "1s", "121s", "1h"):
        limits = rf'^DATA_MOVER_FENCE_TIMEOUT: must be from 2s to 2m0s: "{invalid}"$'
        with pytest.raises(ConfigError, match=limits):
            read_fence_timeout({"DATA_MOVER_FENCE_TIMEOUT": invalid})


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

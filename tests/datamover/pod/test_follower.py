"""The custom resource of a transfer, as its data mover follows it: invalid, malformed, or not to be watched."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext, suppress

import pytest

from core.clock import SystemClock
from core.errors import AgentError, CanceledError, FencedError
from core.kube.client import KubeClient
from core.kube.errors import KubeError
from core.kube.resources import DATA_UPLOADS
from core.kube.transport import Request, Response, Retry
from core.models.base import JsonDict
from core.models.names import ATTEMPTS_ANNOTATION
from datamover.kinds import TRANSFER_KINDS
from datamover.pod.follower import TransferFollower, WatchedTransfer
from datamover.runtime.cancellation import Canceler
from tests.nodeagent.support.transfers import data_upload
from tests.support.clock import LoopClock
from tests.support.fakekube import FakeKube
from tests.support.scripted import ScriptedTransport, rejection


def _broken(_: Request) -> Response:
    raise ZeroDivisionError


@pytest.mark.parametrize(
    ("script", "reported"),
    [
        (lambda _: rejection(403, "may not"), "403"),
        (_broken, "DataUpload velero/du-1 cannot be watched: ZeroDivisionError"),
    ],
    ids=["rejected", "internal error"],
)
async def test_a_transfer_that_cannot_be_watched_fails(script: Callable[[Request], Response], reported: str) -> None:
    """It would wait for its start forever, or ignore a cancel request."""
    canceler = Canceler()
    client = KubeClient(ScriptedTransport(script), Retry(SystemClock(), attempts=1))
    followed = WatchedTransfer(TRANSFER_KINDS["data-upload"], "velero", "du-1")
    follower = TransferFollower(client, followed, clock=SystemClock(), canceler=canceler)
    with suppress(ZeroDivisionError):
        await follower.run()
    assert reported in str(await canceler.wait())


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
        client = KubeClient(self.kube, Retry(LoopClock()))
        watched = WatchedTransfer(TRANSFER_KINDS["data-upload"], "velero", "du-1", attempt)
        self.follower = TransferFollower(client, watched, clock=LoopClock(), canceler=self.canceler)

    def edit(self, spec: JsonDict, **status: str) -> None:
        whole = data_upload()
        self.kube.put(whole | {"spec": whole["spec"] | spec, "status": status})

    def announce(self, number: int, stage: str, spec: JsonDict | None = None) -> None:
        """Put the transfer, InProgress, with its attempt."""
        attempts = {"number": number, "stage": stage}
        whole = data_upload(annotations={ATTEMPTS_ANNOTATION: json.dumps(attempts)})
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
        async with asyncio.timeout(1):
            assert (await followed.follower.wait_in_progress()).name == "du-1"
        followed.edit(wrong)
        followed.kube.compact()
        followed.kube.watches.cut()
        await asyncio.sleep(5)
        assert not followed.canceler.requested
        followed.edit({"cancel": True}, phase="InProgress")
        async with asyncio.timeout(1):
            assert "was canceled" in str(await followed.canceler.wait())


@pytest.mark.looptime
async def test_an_invalid_transfer_that_is_being_deleted_is_canceled() -> None:
    followed = Followed()
    async with followed.running():
        whole = data_upload(finalizers=["a/b"], deletionTimestamp="2026-11-21T12:00:00Z")
        followed.kube.put(whole | {"spec": {"cancel": "?"}})
        async with asyncio.timeout(1):
            assert "is being deleted" in str(await followed.canceler.wait())


@pytest.mark.looptime
@pytest.mark.parametrize("method", ["GET", "WATCH"])
async def test_a_page_of_a_proxy_is_no_answer(method: str) -> None:
    followed = Followed()
    followed.kube.fail_next(method, "/datauploads", b"<html>Service Unavailable</html>", times=3)
    async with followed.running():
        followed.edit({}, phase="InProgress")
        async with asyncio.timeout(60):
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
        async with asyncio.timeout(1):
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
        async with asyncio.timeout(1):
            error = await followed.canceler.wait()
    assert type(error) is FencedError
    assert str(error) == "another attempt (3) has begun: attempt 2 of DataUpload velero/du-1 ended itself"


@pytest.mark.looptime
@pytest.mark.parametrize(("number", "confirmed", "error"), [(1, False, None), (2, True, None), (3, False, FencedError)])
async def test_only_the_attempt_in_the_custom_resource_is_confirmed(
    number: int, confirmed: bool, error: type[AgentError] | None
) -> None:
    followed = Followed(attempt=2)
    followed.announce(number, "Running")
    assert await followed.follower.confirm() is confirmed
    assert followed.canceler.requested is (error is not None)
    if error:
        assert type(await followed.canceler.wait()) is error


@pytest.mark.looptime
async def test_a_transfer_that_no_longer_exists_is_not_confirmed() -> None:
    followed = Followed()
    (cr,) = followed.kube.objects(DATA_UPLOADS)
    await KubeClient(followed.kube, Retry(LoopClock())).delete(DATA_UPLOADS, "velero", cr["metadata"]["name"])
    assert not await followed.follower.confirm()
    assert type(await followed.canceler.wait()) is CanceledError


@pytest.mark.looptime
async def test_an_answer_that_is_not_the_custom_resource_confirms_nothing() -> None:
    """Such as a 500 of an API server that cannot reach its storage: it does not know what another one has accepted."""
    followed = Followed()
    followed.kube.fail_next("GET", "/datauploads", 500)
    with pytest.raises(KubeError):
        await followed.follower.confirm()
    assert len(followed.kube.requests) == 1
    assert await followed.follower.confirm()


@pytest.mark.looptime
@pytest.mark.parametrize("number", [1, 2, 3])
async def test_an_attempt_that_was_overtaken_fails_its_check(number: int) -> None:
    followed = Followed(attempt=2)
    followed.announce(number, "Running")
    with pytest.raises(FencedError) if number > 2 else nullcontext():
        await followed.follower.check()


@pytest.mark.looptime
async def test_an_attempt_without_an_answer_passes_its_check() -> None:
    followed = Followed(attempt=2)
    followed.announce(3, "Waiting")
    followed.kube.fail_next("GET", "/datauploads", 500)
    await followed.follower.check()

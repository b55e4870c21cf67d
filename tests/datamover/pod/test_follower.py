"""The custom resource of a transfer, as its data mover follows it: invalid, malformed, or not to be watched."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import pytest

from core.clock import SystemClock
from core.kube.client import KubeClient
from core.kube.retry import Retry
from core.kube.transport import Request, Response
from core.models.base import JsonDict
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


class Followed:
    """A DataUpload on a fake API server, and its follower."""

    def __init__(self) -> None:
        self.kube = FakeKube()
        self.canceler = Canceler()
        self.edit({})
        client = KubeClient(self.kube, Retry(LoopClock()))
        watched = WatchedTransfer(TRANSFER_KINDS["data-upload"], "velero", "du-1")
        self.follower = TransferFollower(client, watched, clock=LoopClock(), canceler=self.canceler)

    def edit(self, spec: JsonDict, **status: str) -> None:
        whole = data_upload()
        self.kube.put(whole | {"spec": whole["spec"] | spec, "status": status})

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

"""A transfer whose custom resource cannot be watched any more."""

from collections.abc import Callable
from contextlib import suppress

import pytest

from core.clock import SystemClock
from core.kube.client import KubeClient
from core.kube.retry import Retry
from core.kube.transport import Request, Response
from datamover.kinds import TRANSFER_KINDS
from datamover.pod.follower import TransferFollower, WatchedTransfer
from datamover.runtime.cancellation import Canceler
from tests.support.scripted import ScriptedTransport, answer, rejection


def _broken(_: Request) -> Response:
    raise ZeroDivisionError


@pytest.mark.parametrize(
    ("script", "reported"),
    [
        (lambda _: rejection(403, "may not"), "403"),
        (lambda _: answer({"metadata": {}, "items": [{"metadata": {}}]}), "invalid DataUpload"),
        (_broken, "DataUpload velero/du-1 cannot be watched: ZeroDivisionError"),
    ],
    ids=["rejected", "unreadable", "internal error"],
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

"""Steps that end although the command is interrupted, and not later than their limit."""

import asyncio
from datetime import timedelta

import pytest

from client.session import Session, StepTimeoutError
from core.kube.client import KubeClient
from core.kube.transport import Retry
from tests.support.clock import LoopClock
from tests.support.fakekube import FakeKube

pytestmark = pytest.mark.looptime


async def test_a_step_that_takes_too_long_is_an_error_that_names_it() -> None:
    async def hang() -> None:
        await asyncio.sleep(1e6)

    clock = LoopClock()
    session = Session(KubeClient(FakeKube(), Retry(clock)), clock, "velero", lambda _: None)
    with pytest.raises(StepTimeoutError, match=r"^create Job velero/x: timed out after 1m30s$"):
        await session.finish("create Job velero/x", timedelta(seconds=90), hang)

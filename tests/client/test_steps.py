"""Steps that end although the command is interrupted, and not later than their limit."""

import asyncio
from datetime import timedelta

import pytest

from client.steps import StepTimeoutError, finish
from tests.support.clock import LoopClock

pytestmark = pytest.mark.looptime


async def test_a_step_that_takes_too_long_is_an_error_that_names_it() -> None:
    async def hang() -> None:
        await asyncio.sleep(1e6)

    with pytest.raises(StepTimeoutError, match=r"^create Job velero/x: timed out after 1m30s$"):
        await finish(LoopClock(), "create Job velero/x", timedelta(seconds=90), hang)

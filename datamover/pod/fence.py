"""The fence of a data mover that writes a volume: it ends this process before another one may write there.

The next attempt starts a fixed time after it is announced in the custom resource, whether or not this mover, cut off
from the API server or frozen, can know of it. Knows the time and the end, not the custom resource.
Source: Linux, clock_gettime(2): CLOCK_BOOTTIME also counts while the machine is suspended.
"""

import asyncio
import logging
import os
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from datetime import timedelta
from typing import Any, Final, NoReturn, TypeVar

from core.clock import Clock
from core.contract import FENCE_TIMEOUT
from core.errors import ConfigError, FencedError
from core.kube.errors import KubeError
from core.models.units import format_duration
from datamover.kopia.stalls import read_duration
from datamover.runtime.cancellation import run_beside
from datamover.runtime.child import kill_children

__all__ = ["Fence", "exit_fenced", "read_fence_timeout"]

_logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_VARIABLE: Final = "DATA_MOVER_FENCE_TIMEOUT"
"""Inherited by mover pods from the node agent's DaemonSet."""

_SHORTEST: Final = timedelta(seconds=2)

_CHECKS: Final = 4
"""The API server is asked so often in the time of the fence: with the default, by each mover twice a minute."""

_RETRIES: Final = 24
"""So often while it does not answer."""

_ANSWER_PART: Final = 8
"""An answer may take so small a part of the time."""

_LOOK_SECONDS: Final = 1.0
"""How often the thread reads the clock: also the longest time that a mover goes on after it was suspended."""

_LAST_WORDS_SECONDS: Final = 1.0
"""A log or a disk that hangs must not delay the end."""


def read_fence_timeout(environment: Mapping[str, str]) -> timedelta:
    """Return how long a mover may write without an answer, from `DATA_MOVER_FENCE_TIMEOUT`, such as 1m.

    Raises:
        ConfigError: its value is not a duration, or the next attempt could start before it is over.
    """
    timeout = read_duration(environment, _VARIABLE, FENCE_TIMEOUT)
    if not _SHORTEST <= timeout <= FENCE_TIMEOUT:
        limits = f"must be from {format_duration(_SHORTEST)} to {format_duration(FENCE_TIMEOUT)}"
        raise ConfigError(f'{_VARIABLE}: {limits}: "{environment[_VARIABLE]}"')
    return timeout


def _boot_seconds() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Fence:
    """Ends the process unless the attempt is confirmed again and again while it works.

    A thread reads the clock, so that a busy event loop delays nothing.
    """

    def __init__(
        self,
        timeout: timedelta,
        confirm: Callable[[], Awaitable[bool]],
        expire: Callable[[], None],
        *,
        clock: Clock,
        now: Callable[[], float] = _boot_seconds,
    ) -> None:
        """Fence the work that is run.

        Args:
            timeout: how long the work may go on without a confirmation.
            confirm: asks the API server, and returns whether this is still the attempt that runs.
            expire: ends the process; it is called in a thread.
            clock: measures the pauses between two questions.
            now: the time in seconds, which also counts while the machine is suspended.
        """
        self._seconds = timeout.total_seconds()
        self._confirm = confirm
        self._expire = expire
        self._clock = clock
        self._now = now
        self._confirmed_at = now()

    async def run(self, work: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """Return what `work` returns, which begins once the attempt is confirmed."""
        self._confirmed_at = self._now()
        ended = threading.Event()
        threading.Thread(target=self._look, args=(ended,), name="fence", daemon=True).start()
        try:
            while not await self._ask():
                await self._clock.sleep(self._seconds / _RETRIES)
            return await run_beside(self._keep_asking, work(), name="fence")
        finally:
            ended.set()

    async def _keep_asking(self) -> None:
        confirmed = True
        while True:
            await self._clock.sleep(self._seconds / (_CHECKS if confirmed else _RETRIES))
            confirmed = await self._ask()

    async def _ask(self) -> bool:
        """Ask the API server; its answer is as old as the question."""
        asked_at = self._now()
        try:
            async with asyncio.timeout(self._seconds / _ANSWER_PART):
                confirmed = await self._confirm()
        except (KubeError, TimeoutError) as e:
            cause = e if isinstance(e, KubeError) else "timed out"
            _logger.warning("attempt not confirmed for %.0f s: %s", self._idle_seconds, cause)
            return False
        if confirmed:
            self._confirmed_at = asked_at
        return confirmed

    @property
    def _idle_seconds(self) -> float:
        return self._now() - self._confirmed_at

    def _look(self, ended: threading.Event) -> None:
        """End the process once the last confirmation is too old; runs in the thread."""
        while not ended.wait(min(_LOOK_SECONDS, self._seconds / _RETRIES)):
            if self._idle_seconds >= self._seconds:
                self._expire()
                return


def exit_fenced(leave_message: Callable[[], None]) -> NoReturn:
    """Kill all children and end the process at once, whatever its other threads do.

    Args:
        leave_message: writes the termination message.
    """
    try:
        kill_children()
        # It cannot be started where the pod has as many threads as it may have.
        writing = threading.Thread(target=leave_message, name="fence-message", daemon=True)
        writing.start()
        writing.join(_LAST_WORDS_SECONDS)
    finally:
        # The kernel kills a child that was started since.
        os._exit(FencedError.exit_code)

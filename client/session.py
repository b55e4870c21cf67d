"""What a command works with, and its steps that are carried out also if the command is interrupted meanwhile."""

import os
import signal
import stat
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from types import FrameType
from typing import Final, Self, TypeVar

from core.aio import run_shielded
from core.clock import Clock, Deadline, SystemClock
from core.errors import AgentError
from core.kube.client import KubeClient
from core.kube.types import Job, OwnerRef
from core.models.units import format_duration
from nodeagent.runtime.connection import Connection

_T = TypeVar("_T")

REQUEST_TIMEOUT: Final = timedelta(seconds=150)
"""More than the retries of a client take."""


class StepTimeoutError(AgentError):
    """A step took too long, and was canceled."""


@dataclass(frozen=True)
class Session:
    """One run of a command in the agents' cluster and namespace.

    `on_note` is called with what the user should know beside the answer, `on_progress` with what is being done whenever
    that changes, and `on_created` with each Job right after the answer to its creation. `date` returns the Date of the
    API server's last answer; None: it is not known. `now` returns the API server's time, give or take a second.
    `in_pod`: this process runs in a pod of the cluster. `owners` are the owner references of Jobs and scratch volumes:
    a command that is killed in a pod leaves nothing beyond its own Job.
    """

    client: KubeClient
    clock: Clock
    namespace: str
    on_note: Callable[[str], None]
    on_progress: Callable[[str], None] = lambda _: None
    date: Callable[[], datetime | None] = lambda: None
    now: Callable[[], datetime] = SystemClock().now
    on_created: Callable[[Job], None] = lambda _: None
    in_pod: bool = False
    owners: Sequence[OwnerRef] = ()

    @classmethod
    def of(
        cls, cluster: Connection, on_note: Callable[[str], None], on_progress: Callable[[str], None] = lambda _: None
    ) -> Self:
        """Return the run of a command that has this connection."""
        time = cluster.time
        return cls(cluster.client, SystemClock(), cluster.namespace, on_note, on_progress, lambda: time.date, time.now)

    async def finish(self, name: str, limit: timedelta, step: Callable[[], Awaitable[_T]]) -> _T:
        """Return what `step` returns, completing it also after a cancellation, which is raised then.

        Raises:
            StepTimeoutError: it did not end within `limit`; the message has its name.
        """

        async def run() -> _T:
            # In its stack, tests see that the requests of the step are a command's.
            return await step()

        try:
            return await run_shielded(run, name=name, deadline=Deadline.after(self.clock, limit))
        except TimeoutError as e:
            raise StepTimeoutError(f"{name}: timed out after {format_duration(limit)}") from e


# The signals that end a command as Ctrl-C does, so that it removes what it has made for itself.
# asyncio cancels a command on SIGINT alone; by default, others would end it before any cleanup.

_ENDING: Final = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def interrupted_by_signals() -> Generator[None]:
    """Interrupt what runs within the block by SIGTERM, and by SIGHUP unless it is ignored, as below nohup.

    Raises:
        KeyboardInterrupt: a signal came.
    """
    before = {number: signal.getsignal(number) for number in _ENDING}
    for number, handler in before.items():
        if handler is signal.SIG_DFL:
            signal.signal(number, _interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int, _frame: FrameType | None) -> None:
    if number == signal.SIGHUP:
        _leave_terminal()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # So shells without job control start commands in the background. asyncio cancels its tasks after this too.
        raise KeyboardInterrupt
    signal.raise_signal(signal.SIGINT)


def _leave_terminal() -> None:
    """Write to nothing: a terminal that has hung up answers with an error, which would end the cleanup."""
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        with suppress(OSError):
            if stat.S_ISCHR(os.fstat(fd).st_mode):
                os.dup2(null, fd)
    os.close(null)

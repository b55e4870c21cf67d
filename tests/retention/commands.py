"""Commands and schedules whose requests wait until a test lets them go on, one by one, in virtual time."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final

from core.errors import AgentError
from core.kube.errors import UnreachableError
from core.kube.transport import Request, Response
from tests.nodeagent.support.hand_clock import NOON, HandClock
from tests.support.fakekube import FakeKube

Fault = str | int | None
"""`lost`: the request does not arrive; `lost-applied`: its answer does not; a number: the HTTP status of the answer.

`stopped`, `asleep`: the process, or its machine, stops before it has the answer, until it is let go on.
"""

_CYCLES: Final = 200
"""Of the loop, in which a command arrives at its next request."""

_REQUEST_SECONDS: Final = 20.0
"""A request that was sent so long ago has failed: a process that stood still does not delete what it asked for then."""


@dataclass
class WorldClock(HandClock):
    """The right time is `seconds` after noon; all clocks of the cluster are `ahead` of it, and pods' by `skew` more."""

    ahead: timedelta = timedelta()

    def now(self) -> datetime:
        return NOON + timedelta(seconds=self.seconds) + self.ahead + self.skew


@dataclass
class _Waiting:
    """A request that was not sent, or a sleep: since or until a time; `background`: of the renewal of a Lease."""

    at_seconds: float
    future: asyncio.Future[Fault]
    background: bool = False
    request: Request | None = None


@dataclass
class Command:
    """A process with its connection and its clock. `on_answer` is called with each answer, before the process has it.

    `name` is the backup that it deletes, None: what is expired, of which `most`. `seen` is the latest time by the API
    server since it began. `blind` has the snapshots and series about which it may be wrong: they changed since.
    """

    kube: FakeKube
    clock: WorldClock
    on_answer: Callable[["Command", Request], None]
    name: str | None = None
    most: int | None = None
    seen: datetime = NOON
    blind: set[object] = field(default_factory=set)
    dead: bool = False
    paused: bool = False
    stopped: Fault = None
    slept_seconds: float = 0.0
    requests: list[_Waiting] = field(default_factory=list)
    sleeps: list[_Waiting] = field(default_factory=list)

    def start(self, run: Callable[["Command"], Awaitable[None]]) -> None:
        async def whole() -> None:
            await run(self)

        self.task = asyncio.get_running_loop().create_task(whole(), name="command")

    # -- the clock and the transport of the process --------------------------------------------

    def now(self) -> datetime:
        return self.clock.now()

    def monotonic(self) -> float:
        return self.clock.seconds - self.slept_seconds

    async def sleep(self, seconds: float) -> None:
        if not self.dead:
            await self._wait(self.sleeps, self.clock.seconds + seconds)
        if self._ended:
            raise asyncio.CancelledError

    @property
    def _ended(self) -> bool:
        return self.dead

    async def request(self, request: Request) -> Response:
        if self.dead:
            raise UnreachableError("the process was killed", status=0)
        sent = self.clock.seconds
        fault = None if _in_background() else await self._wait(self.requests, sent, request)
        if fault == "lost" or self._ended or self.clock.seconds - sent > _REQUEST_SECONDS:
            raise UnreachableError("the request was lost", status=0)
        if isinstance(fault, int):
            return Response(fault, b'{"message": "injected"}')
        response = await self.kube.request(request)
        if response.status < 300:
            self.on_answer(self, request)
        if fault in {"stopped", "asleep"}:
            await self._stop(fault)
        if fault == "lost-applied" or self._ended:
            raise UnreachableError("the answer was lost", status=0)
        return response

    async def _stop(self, how: Fault) -> None:
        began, self.stopped = self.clock.seconds, how
        await self._wait(self.requests, began)
        self.stopped = None
        if how == "asleep":
            # As on Linux: the time in which a machine sleeps is not counted.
            self.slept_seconds += self.clock.seconds - began

    async def _wait(self, queue: list[_Waiting], at_seconds: float, request: Request | None = None) -> Fault:
        waiting = _Waiting(at_seconds, asyncio.get_running_loop().create_future(), _in_background(), request)
        queue.append(waiting)
        try:
            return await waiting.future
        finally:
            queue.remove(waiting)

    # -- what a test does with it --------------------------------------------------------------

    @property
    def wakes_at(self) -> float | None:
        """When it goes on by itself; None: it waits for a request, or it has ended."""
        return None if self.sends or self.task.done() else min((one.at_seconds for one in self.sleeps), default=None)

    @property
    def _next(self) -> _Waiting | None:
        return next((one for one in self.requests if not one.future.done()), None)

    @property
    def sends(self) -> bool:
        """Whether it waits for a request."""
        return self._next is not None

    @property
    def next_request(self) -> Request | None:
        """The request that it waits for; None: it is stopped, or waits for no request."""
        return self._next.request if self._next is not None else None

    async def settle(self) -> None:
        """Let it come to its next request, sleep or end.

        Raises:
            Exception: it ended with an error that is not raised on purpose.
        """
        for _ in range(_CYCLES):
            await asyncio.sleep(0)
            if self.task.done():
                break
            if self.sends or any(not (one.background or one.future.done()) for one in self.sleeps):
                return
        assert self.task.done(), "it does not go on"
        error = None if self.task.cancelled() else self.task.exception()
        if error is not None and not isinstance(error, AgentError):
            raise error

    async def answer(self, fault: Fault = None) -> None:
        """Send its request."""
        assert self._next is not None
        self._next.future.set_result(fault)
        await self.settle()

    async def kill(self) -> None:
        """End it as SIGKILL does: no request of it arrives any more."""
        self.dead = True
        self.task.cancel()
        while not self.task.done():
            for one in [*self.requests, *self.sleeps]:
                if not one.future.done():
                    one.future.set_result(None)
            await asyncio.sleep(0)
        # A killed process reports no error; asyncio logs one that is not retrieved.
        if not self.task.cancelled():
            self.task.exception()

    async def cancel(self) -> None:
        """End it as Ctrl-C does: it cleans up."""
        self.task.cancel()
        await self.settle()


async def run_time(clock: WorldClock, commands: list[Command], seconds: float) -> None:
    """Let time pass, and wake the commands that sleep."""
    until = clock.seconds + seconds
    while True:
        due = [
            (one.at_seconds, number)
            for number, command in enumerate(commands)
            for one in command.sleeps
            if not (command.paused or command.stopped or command.task.done()) and one.at_seconds <= until
        ]
        if not due:
            break
        at_seconds, number = min(due)
        clock.seconds = max(clock.seconds, at_seconds)
        min(commands[number].sleeps, key=lambda one: one.at_seconds).future.set_result(None)
        for _ in range(20):
            await asyncio.sleep(0)
        await commands[number].settle()
    clock.seconds = max(clock.seconds, until)


def _in_background() -> bool:
    task = asyncio.current_task()
    return task is not None and task.get_name().startswith("renewal")

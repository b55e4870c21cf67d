"""A work queue of keys, and what its handlers are made of: steps whose failure stops no others, and timers.

Source: the semantics of client-go's workqueue (k8s.io/client-go/util/workqueue).
"""

import asyncio
import heapq
import logging
import math
import random
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from core.aio import run_apart
from core.clock import Backoff, Clock
from core.errors import AgentError
from core.kube.errors import AlreadyExistsError, ConflictError, NotFoundError
from core.logs import fields

_log = logging.getLogger(__name__)

_RESTART_SECONDS: Final = 10.0
"""Pause after an error, such as a list that the API server rejected."""

_R = TypeVar("_R")


async def attempt(log_fields: dict[str, Any], step: Awaitable[_R]) -> _R | None:
    """Return what `step` returns, or None if it failed; the failure is logged with `log_fields`."""
    try:
        return await step
    except ConflictError as e:
        _log.debug("conflict, will retry: %s", e, extra=log_fields)
    except (AgentError, TimeoutError) as e:
        _log.warning("step failed, will retry: %s", str(e) or "timed out", extra=log_fields)
    except Exception as e:  # noqa: BLE001 - logged with its traceback; the step is retried
        # A bug that one transfer triggers must not stop the dispatcher for all others.
        _log.error("step failed, will retry: %s", e, exc_info=e, extra=log_fields)
    return None


async def run_restarting(work: Callable[[], Coroutine[Any, Any, None]], clock: Clock, *, name: str) -> None:
    """Run `work` until canceled, again ten seconds after each AgentError, which is logged."""
    while True:
        try:
            await run_apart(work, name=name)
        except* AgentError as group:
            _log.warning("%s failed, will restart: %s", name, describe_causes(group))
        await clock.sleep(_RESTART_SECONDS)


class Faults:
    """The last error of each step that is retried, by key, so that each is logged in full once."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._reported: dict[Hashable, str] = {}

    def report(
        self,
        key: Hashable,
        message: str,
        error: BaseException,
        *,
        extra: dict[str, Any] | None = None,
        level: int = logging.ERROR,
    ) -> bool:
        """Log `error`, and return whether it differs from the last one of `key`; a repeated one is logged at DEBUG.

        The traceback is logged at the level ERROR only.
        """
        cause = f"{type(error).__name__}: {error}"
        if self._reported.get(key) == cause:
            self._log.debug("%s, same error as before: %s", message, error, extra=extra)
            return False
        self._reported[key] = cause
        exc_info = error if level >= logging.ERROR else None
        self._log.log(level, "%s: %s", message, error, exc_info=exc_info, extra=extra)
        return True

    def forget(self, key: Hashable) -> None:
        """Drop the last error of `key`: its step succeeded, or the key no longer exists."""
        self._reported.pop(key, None)


_Item = TypeVar("_Item")

_Result = TypeVar("_Result")


async def work_in_parallel(
    items: Sequence[_Item], work: Callable[[_Item], Awaitable[_Result]], *, at_a_time: int, name: str
) -> list[_Result]:
    """Run `work` on all items, `at_a_time` in parallel, and return the results in the items' order.

    Raises:
        ExceptionGroup: the errors of `work`; the remaining items are canceled.
    """
    gate = asyncio.Semaphore(at_a_time)

    async def one(item: _Item) -> _Result:
        async with gate:
            return await work(item)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(item), name=name) for item in items]
    return [task.result() for task in tasks]


def describe_causes(group: BaseExceptionGroup[BaseException]) -> str:
    """Return the messages of all errors in `group`, in one line."""
    messages = (describe_causes(e) if isinstance(e, BaseExceptionGroup) else str(e) for e in group.exceptions)
    return "; ".join(messages)


K = TypeVar("K", bound=Hashable)

LONGEST_BACKOFF_SECONDS: Final = 300.0
_BACKOFF: Final = Backoff(first_seconds=1.0, limit_seconds=LONGEST_BACKOFF_SECONDS)

_CONFLICT_SECONDS: Final = 1.0
_FAULT_SECONDS: Final = 60.0

_SPREAD_SECONDS: Final = 10.0
"""Keys that are brought forward are handled within this time, not all at once."""

_BRING_FORWARD_SECONDS: Final = 60.0
"""The time between two calls that bring keys forward: one that always fails is not retried much more often."""


@dataclass(frozen=True)
class Requeue:
    """Handle the key again after this many seconds, unless it is added before."""

    after_seconds: float


class ObjectSteps:
    """The steps of the objects of one kind: an error that concerns one object is reported, and stops no other one."""

    def __init__(self, log: logging.Logger, *, kind: str, namespace: str, failed: str) -> None:
        """Log to `log`; `failed` is the message about an error that a retry does not end."""
        self._faults = Faults(log)
        self._kind = kind
        self._namespace = namespace
        self._failed = failed

    def forget(self, name: str) -> None:
        """Drop the last error of an object that was deleted."""
        self._faults.forget(name)

    async def take(self, name: str, step: Awaitable[Requeue | None]) -> Requeue | None:
        """Return what the step of the object returns, or when to take it again; raise what a retry may end."""
        extra = fields(kind=self._kind, namespace=self._namespace, name=name)
        try:
            requeue = await step
        except (AlreadyExistsError, ConflictError, NotFoundError) as e:
            _log.debug("conflict, will retry: %s", e, extra=extra)
            return Requeue(_CONFLICT_SECONDS)
        except AgentError as e:
            if e.retry:
                raise
            self._faults.report(name, self._failed, e, extra=extra)
            return Requeue(_FAULT_SECONDS)
        self._faults.forget(name)
        return requeue


class WorkQueue(Generic[K]):
    """Keys that are ready, in order of arrival; keys that are due later; keys in progress.

    A key that is added while it is ready is there once; one that is added while it is in progress
    is handled again afterward, never by two workers at a time.
    """

    def __init__(self, clock: Clock, *, name: str, workers: int) -> None:
        self._clock = clock
        self._name = name
        self._workers = workers
        self._ready: dict[K, None] = {}
        self._working: set[K] = set()
        self._again: set[K] = set()
        self._failures: dict[K, int] = {}
        self._brought_forward_at = -math.inf
        self._faults = Faults(_log)
        self._due: dict[K, float] = {}
        self._timers: list[tuple[float, int, K]] = []
        self._timer_count = 0
        self._ready_count = asyncio.Semaphore(0)
        self._timers_changed = asyncio.Event()

    def add(self, key: K) -> None:
        """Enqueue `key`."""
        self._due.pop(key, None)
        if key in self._working:
            self._again.add(key)
            return
        if key not in self._ready:
            self._ready[key] = None
            # Wakes one worker, not all.
            self._ready_count.release()

    def holds(self, key: K) -> bool:
        """Return whether `key` is handled now, or due later."""
        return key in self._working or key in self._due

    def add_after(self, key: K, seconds: float) -> None:
        """Enqueue `key` in `seconds`; the earliest of several times counts."""
        at = self._clock.monotonic() + max(0.0, seconds)
        if key in self._due and self._due[key] <= at:
            return
        self._due[key] = at
        self._timer_count += 1
        heapq.heappush(self._timers, (at, self._timer_count, key))
        self._timers_changed.set()

    def bring_forward(self) -> None:
        """Let keys that back off after an error be due within 10 seconds, once a minute: its cause may have passed."""
        waiting = [key for key in self._failures if key in self._due]
        if not waiting:
            return
        now = self._clock.monotonic()
        if self._brought_forward_at <= now:
            self._brought_forward_at = max(now, self._brought_forward_at + _BRING_FORWARD_SECONDS)
        for key in waiting:
            spread_seconds = random.uniform(0.0, _SPREAD_SECONDS)  # noqa: S311 - not for cryptography
            self.add_after(key, self._brought_forward_at - now + spread_seconds)

    async def run(self, handle: Callable[[K], Awaitable[Requeue | None]]) -> None:
        """Call `handle` for each key until canceled; it may return when to handle the key again.

        An error of `handle` is logged once, and its key is requeued with a growing backoff.
        """
        async with asyncio.TaskGroup() as group:
            group.create_task(self._fire_timers(), name=f"{self._name}: timers")
            for number in range(self._workers):
                group.create_task(self._work(handle), name=f"{self._name}: worker {number}")

    async def _fire_timers(self) -> None:
        while True:
            now = self._clock.monotonic()
            while self._timers and self._timers[0][0] <= now:
                at, _, key = heapq.heappop(self._timers)
                # An add or an earlier timer has replaced this timer.
                if self._due.get(key) == at:
                    self.add(key)
            self._timers_changed.clear()
            pause = self._timers[0][0] - now if self._timers else None
            await self._wait_for_timers(pause)

    async def _wait_for_timers(self, pause: float | None) -> None:
        if pause is None:
            await self._timers_changed.wait()
            return
        async with asyncio.TaskGroup() as group:
            sleeper = group.create_task(self._clock.sleep(pause), name=f"{self._name}: timer")
            change = group.create_task(self._timers_changed.wait(), name=f"{self._name}: timers changed")
            await asyncio.wait((sleeper, change), return_when=asyncio.FIRST_COMPLETED)
            sleeper.cancel()
            change.cancel()

    async def _next_key(self) -> K:
        await self._ready_count.acquire()
        key = next(iter(self._ready))
        del self._ready[key]
        return key

    async def _work(self, handle: Callable[[K], Awaitable[Requeue | None]]) -> None:
        while True:
            key = await self._next_key()
            self._working.add(key)
            try:
                pause = await self._handle(handle, key)
            finally:
                self._working.discard(key)
            if key in self._again:
                self._again.discard(key)
                self.add(key)
            elif pause is not None:
                self.add_after(key, pause)

    async def _handle(self, handle: Callable[[K], Awaitable[Requeue | None]], key: K) -> float | None:
        """Return after how many seconds the key is due again, None for never."""
        try:
            requeue = await handle(key)
        except (Exception, asyncio.CancelledError) as e:
            task = asyncio.current_task()
            if isinstance(e, asyncio.CancelledError) and (task is None or task.cancelling()):
                raise
            # A bug must not stop the other keys, nor must the cancellation of something that this task awaited.
            pause = self._back_off(key)
            message = f"{self._name}: {key} failed, will retry in {pause:.1f} s"
            if isinstance(e, AgentError):
                _log.warning("%s: %s", message, e)
            else:
                self._faults.report(key, message, e)
            return pause
        self._failures.pop(key, None)
        self._faults.forget(key)
        return None if requeue is None else requeue.after_seconds

    def _back_off(self, key: K) -> float:
        self._failures[key] = failures = self._failures.get(key, 0) + 1
        return _BACKOFF.seconds_after(failures)


class Timers:
    """One timer per key, such as the UID of a transfer."""

    def __init__(
        self, clock: Clock, *, most_seconds: float = math.inf, outdated_seconds: Callable[[], float] = lambda: 0.0
    ) -> None:
        """Count at most so much between two observations: without the API server nothing can go on, or be observed.

        `outdated_seconds` returns for how long what is observed has been outdated, which does not count either.
        """
        self._clock = clock
        self._most_seconds = most_seconds
        self._outdated_seconds = outdated_seconds
        self._observed: dict[str, tuple[str, float, float]] = {}

    def seconds(self, key: str, of: str = "") -> float:
        """Return how long `of` has been observed for `key`; 0.0 at first, and after something else was observed.

        In whole milliseconds: the rest of a timeout is then 0.0, and not a rounding error, when it is over.
        """
        now = self._clock.monotonic()
        last_of, seconds, at = self._observed.get(key, ("", 0.0, now))
        passed = max(0.0, min(now - at, self._most_seconds) - self._outdated_seconds())
        seconds = seconds + passed if last_of == of else 0.0
        self._observed[key] = (of, seconds, now)
        return round(seconds, 3)

    def forget(self, key: str) -> None:
        """Remove the timer of `key`."""
        self._observed.pop(key, None)

    def retain(self, keys: AbstractSet[str]) -> None:
        """Remove all timers but the ones of `keys`."""
        for key in self._observed.keys() - keys:
            del self._observed[key]

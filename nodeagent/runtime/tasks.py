"""Steps whose failure must not stop others: one at a time, repeated, or several in parallel.

Does not know the steps, nor when one is retried; the caller decides that.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Sequence
from typing import Any, Final, TypeVar

from core.aio import run_apart
from core.clock import Clock
from core.errors import AgentError
from core.kube.errors import ConflictError

__all__ = ["Faults", "attempt", "describe_causes", "run_restarting", "work_in_parallel"]


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
    """Run `work` until canceled, again ten seconds after each of its errors, which are logged.

    Raises:
        ExceptionGroup: with an error that is not an AgentError.
    """
    while True:
        try:
            await run_apart(work, name=name)
        except* AgentError as group:
            _log.warning("%s failed, will restart: %s", name, describe_causes(group))
        await clock.sleep(_RESTART_SECONDS)


class Faults:
    """The last error of each step that is retried, by key, so that each is logged in full once."""

    def __init__(self, log: logging.Logger) -> None:
        """Log errors to `log`."""
        self._log = log
        self._reported: dict[Hashable, str] = {}

    def report(self, key: Hashable, message: str, error: BaseException, *, extra: dict[str, Any] | None = None) -> bool:
        """Log `error`, and return whether it differs from the last error of `key`.

        A new error is logged with its traceback; a repeated one at DEBUG only, since a missing
        permission would otherwise fill the log until it is granted.
        """
        cause = f"{type(error).__name__}: {error}"
        if self._reported.get(key) == cause:
            self._log.debug("%s, same error as before: %s", message, error, extra=extra)
            return False
        self._reported[key] = cause
        self._log.error("%s: %s", message, error, exc_info=error, extra=extra)
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

    Args:
        items: what to work on.
        work: called once per item.
        at_a_time: maximum number of items in progress.
        name: name of the tasks.

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

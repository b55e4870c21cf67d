"""One step on one load, whose failure holds up no other load.

Knows what is said about a step that went wrong. Does not know the step; whoever takes it looks
at the load again.

Errors that come back: each is told in full once.

Knows what was told last about each key. Does not know when a step is tried again.

The same work on several items at a time, and what went wrong in things that ran together.

Knows how many run at once, and the order of the results. Does not know the work.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Any, TypeVar

from core.errors import AgentError
from core.kube.errors import ConflictError

__all__ = ["Faults", "attempt", "describe_causes", "work_in_parallel"]


_log = logging.getLogger(__name__)


_R = TypeVar("_R")


async def attempt(told: dict[str, Any], step: Awaitable[_R]) -> _R | None:
    """Return what `step` returns, None where it went wrong; `told` are the log fields of its load."""
    try:
        return await step
    except ConflictError as e:
        _log.debug("looked at again: %s", e, extra=told)
    except (AgentError, TimeoutError) as e:
        _log.warning("looked at again: %s", str(e) or "no answer in time", extra=told)
    except Exception as e:  # noqa: BLE001 - logged with its traceback; the load is looked at again
        # A fault of ours that one load brings out must not end the dispatching of all others.
        _log.error("looked at again: %s", e, exc_info=e, extra=told)
    return None


class Faults:
    """The errors of steps that are tried again and again, by the key that they concern."""

    def __init__(self, log: logging.Logger) -> None:
        """Tell them to `log`."""
        self._log = log
        self._told: dict[Hashable, str] = {}

    def report(self, key: Hashable, message: str, error: BaseException, *, extra: dict[str, Any] | None = None) -> bool:
        """Log `error`, and return whether it is news for `key`.

        News comes with its traceback. What was told already is a line for whoever debugs:
        a right that is missing would otherwise fill the log until somebody grants it.
        """
        cause = f"{type(error).__name__}: {error}"
        if self._told.get(key) == cause:
            self._log.debug("%s, as before: %s", message, error, extra=extra)
            return False
        self._told[key] = cause
        self._log.error("%s: %s", message, error, exc_info=error, extra=extra)
        return True

    def forget(self, key: Hashable) -> None:
        """Note that `key` is well: whatever comes next is news."""
        self._told.pop(key, None)


_Item = TypeVar("_Item")


_Result = TypeVar("_Result")


async def work_in_parallel(
    items: Sequence[_Item], work: Callable[[_Item], Awaitable[_Result]], *, at_a_time: int, name: str
) -> list[_Result]:
    """Return what `work` makes of each item, in their order; the tasks are called `name`.

    Raises:
        ExceptionGroup: of what `work` raised; the other items were given up.
    """
    gate = asyncio.Semaphore(at_a_time)

    async def one(item: _Item) -> _Result:
        async with gate:
            return await work(item)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(item), name=name) for item in items]
    return [task.result() for task in tasks]


def describe_causes(group: BaseExceptionGroup[BaseException]) -> str:
    """Return the words of all errors in `group`, in one line."""
    told = (describe_causes(e) if isinstance(e, BaseExceptionGroup) else str(e) for e in group.exceptions)
    return "; ".join(told)

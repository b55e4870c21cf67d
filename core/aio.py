"""Running things together without losing any of them.

Knows how to run a step to its end although its task is being canceled. Does not know what
the steps do.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from core.clock import Deadline

__all__ = ["run_apart", "run_shielded", "wait_for_event"]

_T = TypeVar("_T")


async def run_apart(step: Callable[[], Coroutine[Any, Any, _T]], *, name: str) -> _T:
    """Return what `step` returns, run as a task of its own: for whoever goes on after its errors.

    Where a TaskGroup is at work in the step, Python before 3.13 raises the group's errors in the
    place of a cancellation that came while its tasks failed; and as it counts cancellations of its
    own as the task's, that task cannot tell whether anybody wants its end. Here the cancellation
    is raised.
    Source: https://docs.python.org/3/whatsnew/3.13.html#asyncio
    """
    caller = asyncio.current_task()
    before = caller.cancelling() if caller else 0
    task = asyncio.get_running_loop().create_task(step(), name=name)
    try:
        return await task
    except Exception as e:
        if caller and caller.cancelling() > before:
            raise asyncio.CancelledError from e
        raise


async def run_shielded(step: Callable[[], Awaitable[_T]], *, name: str, deadline: Deadline) -> _T:
    """Return what `step` returns, finishing it even if the caller is canceled meanwhile.

    A cancellation is raised after the step has ended. The step itself is canceled when
    `deadline` passes.

    Raises:
        TimeoutError: the step did not end in time.
    """

    async def bounded() -> _T:
        async with asyncio.timeout(deadline.remaining_seconds):
            return await step()

    task = asyncio.ensure_future(bounded())
    if isinstance(task, asyncio.Task):
        task.set_name(name)
    canceled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as e:
            if task.cancelled():
                raise
            canceled = e
        except Exception:  # noqa: BLE001 - the task holds it; it is raised below
            break
    if canceled is not None:
        # What the step itself failed with stays visible behind the cancellation.
        raise canceled from (None if task.cancelled() else task.exception())
    return task.result()


async def wait_for_event(event: asyncio.Event, seconds: float) -> bool:
    """Wait until `event` is set or `seconds` have passed; return whether it is set."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()

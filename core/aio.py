"""Asyncio building blocks: steps that survive or report a cancellation, waits with a timeout."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, Final, ParamSpec, TypeVar

from core.clock import Deadline

_T = TypeVar("_T")
_P = ParamSpec("_P")

_MANY: Final = 500
"""With so many objects, work of some 10 microseconds for each holds up the event loop as long as a thread costs."""


async def run_apart(step: Callable[[], Coroutine[Any, Any, _T]], *, name: str) -> _T:
    """Return what `step` returns, run as a separate task: for callers that continue after its errors.

    Before Python 3.13 a TaskGroup in the step may raise its errors instead of a cancellation that arrived while its
    tasks failed. It counts its own cancellations as the task's, so the task cannot determine whether it was canceled
    from outside. This function raises the cancellation.
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
    """Return what `step` returns, completing it even if the caller is canceled, which is raised after it has finished.

    The step is canceled, and TimeoutError raised, when `deadline` passes.
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
        # The step's own error stays visible as the cause of the cancellation.
        raise canceled from (None if task.cancelled() else task.exception())
    return task.result()


async def wait_for_event(event: asyncio.Event, seconds: float) -> bool:
    """Wait until `event` is set or `seconds` have passed; return whether it is set."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()


async def wait_for_answer(event: asyncio.Event, source: asyncio.Task[Any]) -> bool:
    """Wait until `event` is set, or `source`, which sets it, has ended; return whether it is set."""
    waiting = asyncio.create_task(event.wait(), name="answer")
    try:
        await asyncio.wait({source, waiting}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
    return event.is_set()


async def end_task(task: asyncio.Task[Any]) -> None:
    """Cancel `task`, and return once it has ended; its error is dropped."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()


async def wait_for_fd(fd: int, *, to_write: bool = False) -> None:
    """Return once `fd` can be read from, or written to."""
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    add, remove = (loop.add_writer, loop.remove_writer) if to_write else (loop.add_reader, loop.remove_reader)

    def wake() -> None:
        # The event loop may call it again before the waiter has run.
        if not ready.done():
            ready.set_result(None)

    add(fd, wake)
    try:
        await ready
    finally:
        remove(fd)


async def run_for_many(number: int, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Return what `work` returns, run in a thread if it handles a large number of objects.

    In a thread it goes on if the caller is canceled, so it must change nothing that others use.
    """
    run = partial(work, *args, **kwargs)
    return await asyncio.to_thread(run) if number > _MANY else run()

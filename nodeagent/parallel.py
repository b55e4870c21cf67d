"""The same work on several items at a time, and what went wrong in things that ran together.

Knows how many run at once, and the order of the results. Does not know the work.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

__all__ = ["tell_causes", "work_in_parallel"]

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


def tell_causes(group: BaseExceptionGroup[BaseException]) -> str:
    """Return the words of all errors in `group`, in one line."""
    told = (tell_causes(e) if isinstance(e, BaseExceptionGroup) else str(e) for e in group.exceptions)
    return "; ".join(told)

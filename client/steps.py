"""Steps of a command that are carried out also if the command is interrupted meanwhile."""

from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import TypeVar

from core.aio import run_shielded
from core.clock import Clock, Deadline
from core.errors import AgentError
from core.models.units import format_duration

_T = TypeVar("_T")


class StepTimeoutError(AgentError):
    """A step took too long, and was canceled."""


async def finish(clock: Clock, name: str, limit: timedelta, step: Callable[[], Awaitable[_T]]) -> _T:
    """Return what `step` returns, completing it also after a cancellation, which is raised then.

    Raises:
        StepTimeoutError: it did not end within `limit`.
    """
    try:
        return await run_shielded(step, name=name, deadline=Deadline.after(clock, limit))
    except TimeoutError as e:
        raise StepTimeoutError(f"{name}: timed out after {format_duration(limit)}") from e

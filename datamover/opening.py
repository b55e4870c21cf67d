"""How the first thing that is read of a repository goes together with connecting to it.

Knows the form of that alone. Does not know kopia.
"""

from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

__all__ = ["Opening", "open_at_once"]

_T = TypeVar("_T")


class Opening(Protocol):
    """Connects to a repository, and returns what a function reads of it; that may run twice."""

    async def __call__(self, read: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """Return what `read` does; connected afterwards."""
        ...


async def open_at_once(read: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
    """Return what `read` does: the repository is connected already."""
    return await read()

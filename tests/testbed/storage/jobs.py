"""Copies that run beside the loop, so that a long one blocks nothing else."""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.testbed.storage.cache import Cache

__all__ = ["Jobs"]

_WORKERS = 3
_T = TypeVar("_T")

_log = logging.getLogger(__name__)


class Jobs:
    """At most one job a key; its result is kept until it is asked for."""

    def __init__(self, cache: Cache) -> None:
        """Wake the loop through `cache` whenever a job is done."""
        self._cache = cache
        self._pool = ThreadPoolExecutor(_WORKERS)
        self._running: dict[str, Future[object]] = {}

    def result(self, key: str, work: Callable[[], _T]) -> _T | None:
        """Start `work` unless it runs; its result once it is there, else None.

        Raises:
            Exception: What `work` raised; the next call starts it again.
        """
        future = self._running.get(key)
        if future is None:
            future = self._pool.submit(work)
            self._running[key] = future
            future.add_done_callback(lambda _: self._cache.wake())
        if not future.done():
            return None
        del self._running[key]
        return future.result()  # type: ignore[return-value] # one key, one kind of work

    def keys(self) -> list[str]:
        """Keys whose work runs, or whose result was not asked for yet."""
        return list(self._running)

    def forget(self, key: str) -> bool:
        """Drop the result of a job that has ended; False while it runs."""
        future = self._running.get(key)
        if future is not None and not future.done():
            return False
        self._running.pop(key, None)
        return True

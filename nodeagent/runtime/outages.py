"""Outages of the API server, as the answers to this agent's requests show them.

Does not know what waits for the end of one; subscribers do.
"""

from collections.abc import Callable
from http import HTTPStatus

__all__ = ["Outages"]


class Outages:
    """Notifies subscribers of the first good answer after a failed one."""

    def __init__(self) -> None:
        """Assume that the API server answers."""
        self._failing = False
        self._subscribers: list[Callable[[], None]] = []

    def subscribe(self, on_end: Callable[[], None]) -> None:
        """Call `on_end` whenever an outage ends; it must not block."""
        self._subscribers.append(on_end)

    def observe(self, status: int) -> None:
        """Take in the HTTP status of an answer; 0: there was none.

        A rejection (4xx) is an answer too: the API server works.
        """
        failing = status == 0 or status >= HTTPStatus.INTERNAL_SERVER_ERROR
        ended, self._failing = self._failing and not failing, failing
        if ended:
            for on_end in self._subscribers:
                on_end()

"""Errors that come back: each is told in full once.

Knows what was told last about each key. Does not know when a step is tried again.
"""

import logging
from collections.abc import Hashable
from typing import Any

__all__ = ["Faults"]


class Faults:
    """The errors of steps that are tried again and again, by the key that they concern."""

    def __init__(self, log: logging.Logger) -> None:
        """Tell them to `log`."""
        self._log = log
        self._told: dict[Hashable, str] = {}

    def tell(self, key: Hashable, message: str, error: BaseException, *, extra: dict[str, Any] | None = None) -> bool:
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

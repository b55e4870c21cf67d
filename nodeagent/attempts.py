"""One step on one load, whose failure holds up no other load.

Knows what is said about a step that went wrong. Does not know the step; whoever takes it looks
at the load again.
"""

import logging
from collections.abc import Awaitable
from typing import Any, TypeVar

from core.errors import AgentError
from core.kube.errors import ConflictError

__all__ = ["attempt"]

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

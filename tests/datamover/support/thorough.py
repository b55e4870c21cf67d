"""How thorough the tests are that try many times: `make test-mover-full` asks for more."""

import os
from typing import Final

__all__ = ["EXAMPLES", "KILLS", "PATIENCE_SECONDS"]

_FULL: Final = os.environ.get("MOVER_TESTS") == "full"

EXAMPLES: Final = 200 if _FULL else 25
"""Random trees that go out and come back."""

KILLS: Final = 20 if _FULL else 3
"""Moments of a transfer at which a process is killed."""

PATIENCE_SECONDS: Final = 3600 if _FULL else 600
"""What all of the examples, or of the kills, may take on a busy machine."""

"""The number of repetitions of randomized tests: `make test-mover-full` sets more."""

import os
from typing import Final

_FULL: Final = os.environ.get("MOVER_TESTS") == "full"

DRAINS: Final = (10, 50, 90) if _FULL else (50,)
"""Parts of a volume, in percent, that were sent when the node is drained."""

EXAMPLES: Final = 200 if _FULL else 15
"""Random trees that are backed up and restored."""

SAME_EXAMPLES: Final = not _FULL
"""Whether each run has the same ones: what a new one finds must not stop an unrelated change."""

KILLS: Final = 20 if _FULL else 2
"""Moments of a data path at which a process is killed."""

TIMEOUT_SECONDS: Final = 3600 if _FULL else 600
"""The timeout for all examples, or all kills, on a busy machine."""

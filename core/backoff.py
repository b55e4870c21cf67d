"""How long to wait between failures.

Knows exponential growth with jitter. Does not know what failed, and does not wait itself.
"""

import random
from dataclasses import dataclass

__all__ = ["Backoff"]


@dataclass(frozen=True)
class Backoff:
    """Waits from `first_seconds` to `limit_seconds`, each twice as long as the one before."""

    first_seconds: float
    limit_seconds: float

    def seconds_after(self, failures: int) -> float:
        """Return the wait after so many failures in a row (1 is the first).

        It is between half and all of what the number says, so that those who failed together
        do not come back together.
        """
        # Beyond 2^30 the limit holds in any case, and a float does not overflow.
        full = min(self.limit_seconds, self.first_seconds * 2.0 ** min(failures - 1, 30))
        return full * random.uniform(0.5, 1.0)  # noqa: S311 - guards no secret

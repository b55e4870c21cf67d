"""`python -m benchmarks.unconfined`: the data mover without the confinement of kopia, to measure what that costs."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from datamover.__main__ import main
from datamover.kopia import private_run


@contextmanager
def _leave_unconfined(*_: object) -> Iterator[None]:
    yield None


if __name__ == "__main__":
    private_run.__dict__["confine"] = _leave_unconfined
    sys.exit(main())

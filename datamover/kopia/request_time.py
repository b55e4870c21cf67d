"""How long a request to the storage takes, by the metrics of a call of kopia that makes some anyway.

Knows which metrics say so. Does not know what follows from it.
Source: kopia 0.23.1, repo/blob/storagemetrics/storage_metrics.go, cli/observability_flags.go.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from datamover.kopia.process import counter_flags, read_counters

__all__ = ["RequestTime", "parse_request_seconds"]

_LATENCY: Final = re.compile(
    r'^kopia_blob_storage_latency_ms_(sum|count)\{method="(GetBlob-full|ListBlobs)"\} (\S+)$', re.MULTILINE
)


def parse_request_seconds(counters: str) -> float | None:
    """Return how long a request took, by kopia's metrics in Prometheus text format; None: there was none.

    It is the mean of the listings or of the downloads, whichever is less: many blobs make the first ones take
    longer, and large ones the others.
    """
    found = {(method, what): float(value) for what, method, value in _LATENCY.findall(counters)}
    means = [
        total / number / 1000
        for (method, what), total in found.items()
        if what == "sum" and (number := found.get((method, "count"), 0.0)) > 0
    ]
    return min(means, default=None)


class RequestTime:
    """Measured by the first calls with the flags of `measuring`; their files are in `folder` meanwhile."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seconds: float | None = None

    @property
    def seconds(self) -> float:
        """How long a request takes, opening a connection included, since kopia keeps few open; 0: it is not known."""
        return self._seconds or 0.0

    @contextmanager
    def measuring(self) -> Iterator[list[str]]:
        """Yield kopia's flags for one call within the block; none once the time is known, or without room for files."""
        directory = None
        if self._seconds is None:
            with suppress(OSError):
                directory = TemporaryDirectory(prefix="requests-", dir=self._folder, ignore_cleanup_errors=True)
        if directory is None:
            yield []
            return
        with directory as name:
            yield counter_flags(Path(name))
            measured = parse_request_seconds(read_counters(Path(name)))
        if measured is not None:
            self._seconds = min(measured, self._seconds or measured)

"""The progress of a data path, from kopia's metrics and lines: bytes, which neither decrease nor exceed the total.

Source: kopia 0.23.1, cli/cli_progress.go, cli/cli_restore_progress.go, internal/units.
"""

import asyncio
import math
import re
import socket
from collections.abc import Hashable, Mapping
from contextlib import closing
from datetime import datetime
from enum import Enum
from typing import Final

from core.clock import Clock
from core.contract import ProgressMessage
from core.models.base import JsonDict

_SIZE: Final = r"([\d.]+ [KMGTPE]?i?B)"
_UPLOAD_LINE: Final = re.compile(
    rf"\d+ hashing, (?P<files>\d+) hashed \({_SIZE}\), (?P<cached_files>\d+) cached \({_SIZE}\), uploaded {_SIZE}"
    rf"(?:, estimating\.*|.*?, estimated {_SIZE}(?: \([\d.]+%\))?(?: [\dhms.]+ left)?)?"
)
_RESTORE_LINE: Final = re.compile(
    rf"(?P<count>Processed \d+ \({_SIZE}\) of \d+ \({_SIZE}\))(?:, skipped \d+ \({_SIZE}\))?"
    rf"(?: {_SIZE}/s \([\d.]+%\) remaining [\dhms]+)?\.?"
)
_COUNTERS_LINE: Final = "starting prometheus metrics on"
_START_LINE: Final = "Snapshotting "
"""kopia has opened the repository. What it reads before the snapshot's own time is in its cache already. Source: kopia
0.23.1, cli/command_snapshot_create.go (snapshotSingleSource)."""
_UNITS: Final = "KMGTPE"

_ACTIVITY_METRICS: Final = (
    "kopia_content_hashed_bytes_total",
    "kopia_content_read_bytes_total",
    "kopia_blob_upload_bytes_total",
    "kopia_blob_download_full_blob_bytes_total",
    "kopia_blob_download_partial_blob_bytes_total",
    "kopia_blob_list_items_total",
)
"""While one of these increases, kopia is active: on data, or on the repository's indexes."""

_METRIC: Final = re.compile(r"^(\w+)(?:\{.*\})? (\d+(?:\.\d+)?(?:e[+-]\d+)?)$", re.MULTILINE)

_READ_SECONDS: Final = 2.0
"""The counters come from a child on this machine; if it takes longer, the child is exiting."""


class Direction(Enum):
    """The direction of the data, which determines the metrics to read."""

    BACKUP = "backup"
    RESTORE = "restore"


def parse_size(text: str) -> int:
    """Return the size that kopia writes as `91.1 MB`, rounded to one decimal place."""
    number, unit = text.split(" ")
    return round(float(number) * _unit_bytes(unit))


def _unit_bytes(unit: str) -> float:
    return (1024.0 if "i" in unit else 1000.0) ** (_UNITS.find(unit[0]) + 1)


def _least_size(text: str) -> int:
    """Return the smallest size that kopia writes like this."""
    return max(0, parse_size(text) - round(_unit_bytes(text.split(" ")[1]) / 20))


def sum_counters(text: str) -> dict[str, float]:
    """Return the metrics in Prometheus text format, summed over their labels."""
    sums: dict[str, float] = {}
    for name, value in _METRIC.findall(text):
        sums[name] = sums.get(name, 0.0) + float(value)
    return sums


class Meter:
    """Measures one data path; `total_bytes` is 0 until it is known.

    `cached_bytes` are done without being read: unchanged files of a backup, or what a restore need not write again.
    """

    def __init__(self, clock: Clock, direction: Direction) -> None:
        self._clock = clock
        self._direction = direction
        self.total_bytes = 0
        self.hashed_bytes = 0
        self.cached_bytes = 0
        self._done_bytes = 0
        self._parts_bytes = 0
        self._estimated_bytes: int | None = None
        self.snapshot_started: datetime | None = None
        """When kopia began the snapshot of a backup; None until that is known, and for a restore."""
        self._snapshot_known = asyncio.Event()
        self._sums: Mapping[str, float] = {}
        self._counted: Hashable = ()
        self._reported = False
        self._rated_at = clock.monotonic()
        self._rated_bytes = 0
        # A free port: kopia cannot report one that it chose itself.
        with closing(socket.socket()) as probe:
            probe.bind(("127.0.0.1", 0))
            self._address: tuple[str, int] = probe.getsockname()

    @property
    def arguments(self) -> list[str]:
        """kopia's flags for the progress and metrics that the meter reads."""
        return ["--progress", "--progress-update-interval=200ms", self.counter_argument]

    @property
    def counter_argument(self) -> str:
        """kopia's flag for the metrics alone."""
        host, port = self._address
        return f"--metrics-listen-addr={host}:{port}"

    @property
    def activity(self) -> Hashable:
        """A value that changes whenever kopia has read, found, sent or written something."""
        return tuple(self._sums.get(name, 0.0) for name in _ACTIVITY_METRICS), self._counted

    @property
    def new_bytes(self) -> int:
        """What a backup read and the repository did not have, before compression; with kopia's directories."""
        return self._processed - self._count("content_deduplicated")

    @property
    def stored_bytes(self) -> int:
        """The size of these after compression."""
        return self._count("content_after_compression")

    @property
    def _processed(self) -> int:
        return self._count("content_hashed" if self._direction is Direction.BACKUP else "content_read")

    def _count(self, what: str) -> int:
        return int(self._sums.get(f"kopia_{what}_bytes_total", 0))

    async def wait_snapshot_started(self) -> None:
        """Return once kopia has begun a snapshot since the last call."""
        await self._snapshot_known.wait()
        self._snapshot_known.clear()

    def take(self, line: str) -> str:
        """Parse the progress in a line of kopia's output; return the rest, such as a message that follows."""
        if upload := _UPLOAD_LINE.search(line):
            self.hashed_bytes = parse_size(upload[2])
            self.cached_bytes = parse_size(upload[4])
            self._counted = upload.groups()[:5]
            # Unless the volume's size is known exactly.
            if upload[6] and not (self.total_bytes and self._estimated_bytes is None):
                self.total_bytes = max(self.total_bytes, parse_size(upload[6]))
                self._estimated_bytes = _least_size(upload[6])
            return line[upload.end() :]
        if line.startswith(_START_LINE):
            self.snapshot_started = self._clock.now()
            self._snapshot_known.set()
            return line
        if line.startswith(_COUNTERS_LINE):
            return ""
        restored = _RESTORE_LINE.search(line)
        if restored is None:
            return line
        self._counted = (restored["count"],)
        return line[restored.end() :]

    async def read(self) -> ProgressMessage:
        """Return the progress, and the rate since the previous reading."""
        await self.refresh()
        # Where it is reported, without kopia's directories.
        moved = self.hashed_bytes if self._reported and self._direction is Direction.BACKUP else self._processed
        done = min(moved + max(self.cached_bytes, self._parts_bytes), self._most_bytes())
        self._done_bytes = max(self._done_bytes, int(done))
        return self._message()

    async def refresh(self) -> None:
        """Fetch kopia's current counters, unless it reports them."""
        if self._reported:
            return
        try:
            async with asyncio.timeout(_READ_SECONDS):
                reader, writer = await asyncio.open_connection(*self._address)
                with closing(writer):
                    writer.write(b"GET /metrics HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n")
                    self.take_counters((await reader.read()).decode(errors="replace"))
        except (OSError, TimeoutError):
            # kopia serves none before it has started and while it exits: the last ones remain valid.
            pass

    def take_report(self, report: JsonDict) -> None:
        """Take the progress of a backup as `kopia mover-backup` reports it, in bytes."""
        self._reported = True
        self.hashed_bytes, self.cached_bytes = int(report["hashed_bytes"]), int(report["cached_bytes"])
        self._counted = (report["hashed_files"], self.hashed_bytes, report["cached_files"], self.cached_bytes)
        if estimated_bytes := int(report["estimated_bytes"]):
            self.total_bytes = max(self.total_bytes, estimated_bytes)
            self._estimated_bytes = estimated_bytes
        self._sums = report["counters"]

    def finish_part(self, part_bytes: int) -> None:
        """Count a part as done: another kopia, whose counters begin at 0, restores the next one."""
        self._parts_bytes += part_bytes
        self._sums = {}

    def finish(self, total_bytes: int) -> ProgressMessage:
        """Return the last reading: all of `total_bytes`, which is exact at the end."""
        self.total_bytes = self._done_bytes = total_bytes
        return self._message()

    def _most_bytes(self) -> float:
        """Return how many bytes can be done: kopia's counters have directories and indexes too, beside the files.

        So what is done never exceeds the snapshot's size once kopia has estimated it, however it rounds what it prints.
        """
        return self.total_bytes or math.inf if self._estimated_bytes is None else self._estimated_bytes

    def _message(self) -> ProgressMessage:
        now = self._clock.monotonic()
        seconds = now - self._rated_at
        rate = max(0, round((self._done_bytes - self._rated_bytes) / seconds)) if seconds > 0 else 0
        self._rated_at, self._rated_bytes = now, self._done_bytes
        return ProgressMessage(
            # The total is an estimate and may be too low.
            total_bytes=max(self.total_bytes, self._done_bytes) if self.total_bytes else 0,
            done_bytes=self._done_bytes,
            bytes_per_second=rate,
            sent_bytes=self._count("blob_upload"),
            deduped_bytes=self._count("content_deduplicated"),
            hashed_bytes=self._count("content_hashed"),
            stored_bytes=self.stored_bytes,
            snapshot_started=self.snapshot_started,
        )

    def take_counters(self, text: str) -> None:
        """Parse kopia's counters in Prometheus text format; an empty text changes nothing."""
        if sums := sum_counters(text):
            self._sums = sums

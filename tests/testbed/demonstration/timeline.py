"""Follows a custom resource until it is final: its phases with durations, its progress with a rate.

Every figure comes from versions of the object that the API server's watch delivered. Times
are when they arrived.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from core.kube.resources import Resource
from tests.testbed.api import Api, Json
from tests.testbed.processes import LIMIT_SECONDS, BedError

FINAL = ("Completed", "Failed", "Canceled")


@dataclass(frozen=True)
class Reading:
    """Progress at a moment, and what it implies for the rest.

    Attributes:
        seconds: Since the resource was made.
        done_bytes: Moved so far.
        total_bytes: To be moved; 0 while that is being estimated.
        rate: Bytes per second since the reading before.
        eta_seconds: What the rest takes at that rate, if that is known.
    """

    seconds: float
    done_bytes: int
    total_bytes: int
    rate: float
    eta_seconds: float | None

    def __str__(self) -> str:
        total, share, eta = "?", "?", "?"
        if self.total_bytes:
            total = format_size(self.total_bytes)
            share = f"{100 * self.done_bytes / self.total_bytes:.0f}"
        if self.eta_seconds is not None:
            eta = f"{self.eta_seconds:.0f}"
        return (
            f"{format_size(self.done_bytes):>9} of {total:<9} {share:>3} %"
            f"  {format_size(self.rate):>9}/s  ETA {eta:>3} s"
        )


@dataclass
class Timeline:
    """What became of one resource.

    Attributes:
        phases: Each phase with the seconds at which it was first seen.
        readings: Progress while data moved.
        last: The last version of the object.
    """

    phases: list[tuple[str, float]] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)
    last: Json = field(default_factory=dict)

    @property
    def phase(self) -> str:
        return self.phases[-1][0] if self.phases else ""

    def take(self, item: Json, seconds: float) -> str:
        """Take another version of the object; returns the line with what is new, or nothing."""
        status = item.get("status", {})
        self.last = item
        phase = status.get("phase") or "New"
        if phase != self.phase:
            line = f"{seconds:6.1f} s  {phase:<11}"
            if self.phases:
                before, since = self.phases[-1]
                line += f" (after {seconds - since:.1f} s {before})"
            self.phases.append((phase, seconds))
            return line
        progress = status.get("progress", {})
        done, total = progress.get("bytesDone", 0), progress.get("totalBytes", 0)
        if phase == "InProgress" and done and (not self.readings or done != self.readings[-1].done_bytes):
            self.readings.append(self._reading(seconds, done, total))
            return f"{seconds:6.1f} s    {self.readings[-1]}"
        return ""

    def _reading(self, seconds: float, done: int, total: int) -> Reading:
        since, before = self.phases[-1][1], 0
        if self.readings:
            since, before = self.readings[-1].seconds, self.readings[-1].done_bytes
        rate = (done - before) / max(seconds - since, 1e-3)
        eta = (total - done) / rate if rate > 0 and total >= done else None
        return Reading(seconds, done, total, rate, eta)


def follow(api: Api, resource: Resource, item: Json, *, say: Callable[[str], None]) -> Timeline:
    """Follow a resource that was just made until it is final.

    Args:
        item: The object as it was made.
        say: Gets each line of the timeline as it comes about.
    """
    began = time.monotonic()
    timeline = Timeline()
    for version in _versions(api, resource, item):
        line = timeline.take(version, time.monotonic() - began)
        if line:
            say(line)
        if timeline.phase in FINAL:
            return timeline
    name = item["metadata"]["name"]
    raise BedError(f"{item['kind']} {name} is {timeline.phase} after {LIMIT_SECONDS} s: {timeline.last.get('status')}")


def _versions(api: Api, resource: Resource, item: Json) -> Iterator[Json]:
    """Every version of an object, as the watch delivers them; ends when the time is up."""
    metadata = item["metadata"]
    for event in api.watch(resource, "", name=metadata["name"], seconds=LIMIT_SECONDS):
        if event["object"].get("metadata", {}).get("namespace") != metadata["namespace"]:
            continue
        if event["type"] == "DELETED":
            raise BedError(f"{item['kind']} {metadata['name']} was deleted")
        yield event["object"]


def format_size(size_bytes: float) -> str:
    """Bytes in the unit that leaves at most four digits."""
    for unit in ("B", "KiB", "MiB"):
        if size_bytes < 1000:
            return f"{size_bytes:.0f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.2f} GiB"

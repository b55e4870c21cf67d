"""The life of one transfer on the test cluster, by what a watch of it and of its pod sees: its stages in seconds."""

import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, Final

from core.contract import DataPathReason
from core.kube.resources import EVENTS, PODS, Resource
from tests.cluster.bed import Bed
from tests.cluster.followed import Followed
from tests.testbed.api import ApiError, Json
from tests.testbed.demonstration.manifests import NAMESPACE
from tests.testbed.processes import wait_for

_POLL_SECONDS: Final = 0.05

_FLUSH: Final = re.compile(r"the disk took ([\d.]+) s")
"""Source: `datamover.data_path.restore`."""


@dataclass(frozen=True)
class Life:
    """The stages of a transfer in seconds.

    `accept`: from its creation; `expose`: until its pod is created, with snapshot and volume; `pod`: until the mover's
    container runs; `open`: until the data path starts, with Python; `repository`: until its repository is ready, if it
    was not; `move`: until its data is complete; `flush`: the last part of a restore, until the data is on the disk;
    `hand_over`: until it is Completed; `clean_up`: until nothing of it is left.
    `in_progress` is from InProgress to Completed, `whole` from creation to Completed.
    """

    accept: float
    expose: float
    pod: float
    open: float
    repository: float
    move: float
    flush: float
    hand_over: float
    clean_up: float
    in_progress: float
    whole: float

    @property
    def seconds(self) -> dict[str, float]:
        """The stages by their names."""
        return {one.name: getattr(self, one.name) for one in fields(self)}


@dataclass
class _Watched:
    """The versions of the objects of a kind and name, with the time at which each arrived; `end` ends the watch."""

    transfer: Followed
    resource: Resource
    seen: list[tuple[float, str, Json]] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        _, since = self.transfer.bed.api.snapshot(self.resource)
        threading.Thread(target=self._follow, args=(since,), daemon=True).start()

    def _follow(self, since: str) -> None:
        while not self.over.is_set():
            try:
                for event in self.transfer.bed.api.watch(self.resource, since, name=self.transfer.name):
                    self.seen.append((time.time(), event["type"], event["object"]))
                    since = event["object"]["metadata"]["resourceVersion"]
            except (ApiError, OSError, ValueError):
                time.sleep(_POLL_SECONDS)

    def first(self, what: str, is_it: Callable[[str, Json], bool]) -> float:
        """Wait until a version is so, and return when it arrived."""
        return wait_for(
            lambda: f"{what} of {self.transfer.name}: {self.transfer.last.get('status')}",
            lambda: next((moment for moment, change, version in list(self.seen) if is_it(change, version)), None),
            pause_seconds=_POLL_SECONDS,
        )


def live(transfer: Followed) -> Life:
    """Create the transfer, wait until nothing is left of it, and return its life; raises BedError."""
    own, pod = _Watched(transfer, transfer.resource), _Watched(transfer, PODS)
    for one in (own, pod):
        one.start()
    created = time.time()
    transfer.start()
    try:
        transfer.wait_phase("Completed")
        return _measure(created, own, pod)
    finally:
        own.over.set()
        pod.over.set()


def _measure(created: float, own: _Watched, pod: _Watched) -> Life:
    def reached(*phases: str) -> Callable[[str, Json], bool]:
        return lambda _, version: version.get("status", {}).get("phase") in phases

    accepted = own.first("Accepted", reached("Accepted", "Prepared", "InProgress"))
    pod_created = pod.first("the pod", lambda *_: True)
    running = pod.first("a running container", lambda _, version: _runs(version))
    in_progress = own.first("InProgress", reached("InProgress"))
    completed = own.first("Completed", reached("Completed"))
    gone = pod.first("the end of the pod", lambda change, _: change == "DELETED")
    released = own.first("the end of the cleanup", lambda _, version: _is_released(version))
    events = read_events(own.transfer.bed, own.transfer.name)
    started, moved = (events[one] for one in (DataPathReason.STARTED, DataPathReason.COMPLETED))
    ready, flush = events.get(DataPathReason.READY, started), _read_flush(own.transfer)
    return Life(
        accept=accepted - created,
        expose=pod_created - accepted,
        pod=running - pod_created,
        open=started - running,
        repository=ready - started,
        move=moved - ready - flush,
        flush=flush,
        hand_over=completed - moved,
        clean_up=max(gone, released) - completed,
        in_progress=completed - in_progress,
        whole=completed - created,
    )


def _runs(pod: Json) -> bool:
    states: list[dict[str, Any]] = pod.get("status", {}).get("containerStatuses") or []
    return any("running" in one["state"] or "terminated" in one["state"] for one in states)


def _is_released(version: Json) -> bool:
    ended = version.get("status", {}).get("phase") == "Completed"
    return ended and not version["metadata"].get("finalizers")


def _read_flush(transfer: Followed) -> float:
    """Return the seconds that the mover of a restore waited for the disk, by its log in the agents'; else 0.0."""
    logs = transfer.bed.user.kubectl("logs", "-n", NAMESPACE, "-l", "name=node-agent", "--tail=-1")
    found = [_FLUSH.search(line) for line in logs.splitlines() if f"name={transfer.name} " in f"{line} "]
    return next((float(one[1]) for one in reversed(found) if one), 0.0)


def read_events(bed: Bed, name: str) -> dict[str, float]:
    """Return when a mover reported what, in seconds; the end of an Event's name has it in nanoseconds."""
    return {
        one["reason"]: int(one["metadata"]["name"].rpartition(".")[2], 16) / 1e9
        for one in bed.api.objects(EVENTS, NAMESPACE)
        if one["involvedObject"]["name"] == name
    }

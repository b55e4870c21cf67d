"""A transfer that a test follows from its creation to its end, as a Velero server's watch sees it."""

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path

from core.kube.resources import EVENTS, PODS, Resource
from tests.cluster.bed import Bed
from tests.cluster.scenes import RESOURCES, is_final
from tests.testbed.api import ApiError, Json
from tests.testbed.demonstration.manifests import NAMESPACE
from tests.testbed.processes import LIMIT_SECONDS, BedError

PHASES = ["", "Accepted", "Prepared", "InProgress", "Completed"]
"""Those of a transfer that is not interrupted, and of one that is."""

_RECORDED = Path(__file__).parents[1] / "recordings" / "velero-1.18.2" / "events-on-custom-resources.json"
_DATA_PATH = "Data-Path-"

_ATTEMPTS = "nodeagent.io/attempts"
_POLL_SECONDS = 0.1


def _in_order(events: Iterable[Json]) -> list[str]:
    """The reasons of a mover's Events, in the order of their creation, each once in a row."""
    moved = [each for each in events if each["reason"].startswith(_DATA_PATH)]
    # The end of its name says when it was made, in nanoseconds and hexadecimal digits.
    moved.sort(key=lambda each: int(each["metadata"]["name"].rpartition(".")[2], 16))
    return [reason for reason, _ in itertools.groupby(each["reason"] for each in moved)]


def recorded_events(kind: str) -> list[str]:
    """Those of a transfer that Velero's mover carried out, in one go."""
    events = [each for each in json.loads(_RECORDED.read_text()) if each["involvedObject"]["kind"] == kind]
    name = events[0]["involvedObject"]["name"]
    return _in_order(each for each in events if each["involvedObject"]["name"] == name)


@dataclass
class Followed:
    """One transfer.

    Attributes:
        transfer: It as it was made.
        versions: It as it has been since, one version after the other.
    """

    bed: Bed
    transfer: Json
    versions: list[Json] = field(default_factory=list)
    _watch: threading.Thread | None = None

    @property
    def name(self) -> str:
        """Its name, which is also that of its mover pod."""
        return str(self.transfer["metadata"]["name"])

    @property
    def resource(self) -> Resource:
        """Where it is found."""
        return RESOURCES[self.transfer["kind"]]

    @property
    def last(self) -> Json:
        return self.versions[-1] if self.versions else self.transfer

    @property
    def phase(self) -> str:
        return str(self.last.get("status", {}).get("phase", ""))

    @property
    def phases(self) -> list[str]:
        """Its phases, each time that one came."""
        return [phase for phase, _ in itertools.groupby(v.get("status", {}).get("phase", "") for v in self.versions)]

    @property
    def attempts(self) -> Json:
        """The annotation with its attempts, empty in the first one."""
        found: Json = json.loads((self.last["metadata"].get("annotations") or {}).get(_ATTEMPTS, "{}"))
        return found

    @property
    def number(self) -> int:
        """The number of its attempt."""
        return int(self.attempts.get("number", 1))

    @property
    def stage(self) -> str:
        """How far its attempt is."""
        return str(self.attempts.get("stage", "Running"))

    @property
    def causes(self) -> list[str]:
        return [str(each["cause"]) for each in self.attempts.get("interruptions", [])]

    @property
    def done_bytes(self) -> list[int]:
        """`bytesDone` of each version that has it."""
        progress = [version.get("status", {}).get("progress", {}) for version in self.versions]
        return [each["bytesDone"] for each in progress if "bytesDone" in each]

    def start(self) -> None:
        """Create it, and follow it until it is final."""
        created = self.bed.api.create(self.resource, self.transfer)
        self.versions.append(created)
        self._watch = threading.Thread(target=self._follow, name=f"watch of {self.name}", daemon=True)
        self._watch.start()

    def cancel(self) -> None:
        self.bed.api.patch(self.resource, {"spec": {"cancel": True}}, name=self.name, namespace=NAMESPACE)

    def wait(self, what: str, until: Callable[["Followed"], bool], *, seconds: float = LIMIT_SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while not until(self):
            ended = is_final(self.last)
            if until(self):
                return
            if ended or time.monotonic() > deadline:
                raise BedError(f"{self.transfer['kind']} {self.name}: no {what}: {self._story()}")
            time.sleep(_POLL_SECONDS)

    def wait_phase(self, phase: str, *, seconds: float = LIMIT_SECONDS) -> None:
        self.wait(f"phase {phase}", lambda each: each.phase == phase, seconds=seconds)

    def wait_interrupted(self, *, seconds: float = LIMIT_SECONDS) -> None:
        self.wait("interruption", lambda each: each.number > 1, seconds=seconds)

    def pod(self) -> Json:
        found = self.bed.api.get(PODS, NAMESPACE, self.name)
        if found is None:
            raise BedError(f"{self.transfer['kind']} {self.name} has no mover pod: {self._story()}")
        return found

    def events(self, reason: str) -> list[str]:
        """The messages of its Events of a reason."""
        return [each["message"] for each in self._read_events() if each["reason"] == reason]

    def data_path_events(self) -> list[str]:
        """The reasons of the Events of its movers, in the order of their creation, each once in a row."""
        return _in_order(self._read_events())

    def _read_events(self) -> list[Json]:
        found = self.bed.api.objects(EVENTS, NAMESPACE)
        return [each for each in found if each["involvedObject"]["name"] == self.name]

    def _follow(self) -> None:
        deadline, is_over, is_lost = time.monotonic() + LIMIT_SECONDS, False, False
        while not is_over and time.monotonic() < deadline:
            try:
                is_over, is_lost = self._take(fresh=is_lost), False
            except (ApiError, OSError, ValueError, HTTPException):
                # The API server does not answer for a while, or no longer has the versions since.
                is_lost = True
                time.sleep(_POLL_SECONDS)

    def _take(self, *, fresh: bool) -> bool:
        """Take versions as they come, `fresh`: first the one that there is; returns whether no others will come."""
        if fresh:
            found = self.bed.api.get(self.resource, NAMESPACE, self.name)
            if found is None:
                return True
            self.versions.append(found)
        if is_final(self.last):
            return True
        for event in self.bed.api.watch(self.resource, self.last["metadata"]["resourceVersion"], name=self.name):
            if event["type"] == "ERROR":
                raise ApiError(int(event["object"].get("code", 0)), str(event["object"]))
            if event["type"] == "DELETED":
                return True
            self.versions.append(event["object"])
            if is_final(event["object"]):
                return True
        return False

    def _story(self) -> str:
        return f"{self.phases}, attempts {self.attempts}, {self.last.get('status')}"

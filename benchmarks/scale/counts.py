"""What an API server counted: requests, conflicts, bytes sent to watches.

Knows the server's own metrics. Does not know who asked: the agents have a server for
themselves (`benchmarks.scale.doors`), and what it asks itself was measured before.
Source: Kubernetes v1.34, staging/src/k8s.io/apiserver/pkg/endpoints/metrics/metrics.go: apiserver_request_total;
pkg/endpoints/handlers/response.go: apiserver_watch_events_sizes counts an event that goes to many watches once, when it
is encoded.
"""

import re
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeVar
from urllib.request import urlopen

from benchmarks.processes import BenchmarkError
from tests.testbed.api import Api

_COUNTED: Final = "apiserver_request_total|apiserver_watch_events_sizes_sum"
_LINE: Final = re.compile(rf"^({_COUNTED})\{{([^}}]*)\}} (\S+)$", re.MULTILINE)
_LABEL: Final = re.compile(r'(\w+)="([^"]*)"')
_WRITES: Final = frozenset({"POST", "PUT", "PATCH", "DELETE", "APPLY", "DELETECOLLECTION"})
_CONFLICT: Final = "409"
_What = TypeVar("_What")


@dataclass(frozen=True)
class Counts:
    """What was counted, at a time or between two times.

    `requests` by verb, resource and status code. `watched` are the bytes of events for watches, each encoded once, by
    resource. `cpu_seconds` is the server's processor time. `at_seconds` is on the monotonic clock; of a difference it
    is how long it took.
    """

    at_seconds: float
    requests: Counter[tuple[str, str, str]]
    watched: Counter[str] = field(default_factory=Counter)
    cpu_seconds: float = 0.0

    @property
    def total(self) -> int:
        """All requests."""
        return self.requests.total()

    @property
    def watch_bytes(self) -> int:
        """Bytes of the events for watches, each encoded once."""
        return self.watched.total()

    @property
    def writes(self) -> int:
        """Requests that change something."""
        return sum(number for (verb, _, _), number in self.requests.items() if verb in _WRITES)

    @property
    def conflicts(self) -> int:
        """Writes that were rejected because another client wrote first."""
        return self.conflicts_by_verb_and_resource().total()

    @property
    def conflict_share(self) -> float:
        """Which part of the writes conflicted."""
        return self.conflicts / max(1, self.writes)

    @property
    def rejected(self) -> int:
        """Requests that the server rejected as too many."""
        return sum(number for (_, _, code), number in self.requests.items() if code == "429")

    def conflicts_by_verb_and_resource(self) -> Counter[tuple[str, str]]:
        """Rejected writes by what was to be done to what."""
        found = self.requests.items()
        return Counter({(v, what): n for (v, what, code), n in found if v in _WRITES and code == _CONFLICT})

    def by_verb_and_resource(self) -> Counter[tuple[str, str]]:
        """All requests by what was done to what."""
        summed: Counter[tuple[str, str]] = Counter()
        for (verb, resource, _), number in self.requests.items():
            summed[verb, resource] += number
        return summed

    def since(self, before: "Counts", *, idle: "Counts | None" = None) -> "Counts":
        """Return what was counted since `before`, without the server's own share as seen in `idle`."""
        seconds = self.at_seconds - before.at_seconds
        own = idle or Counts(1.0, Counter())
        share = seconds / own.at_seconds
        return Counts(
            seconds,
            _difference(self.requests, before.requests, own.requests, share),
            _difference(self.watched, before.watched, own.watched, share),
            self.cpu_seconds - before.cpu_seconds - own.cpu_seconds * share,
        )


def _difference(now: Counter[_What], before: Counter[_What], own: Counter[_What], share: float) -> Counter[_What]:
    """Return what was added since `before`, without a `share` of `own`."""
    return now - before - Counter({what: round(number * share) for what, number in own.items()})


def read_counts(api: Api) -> Counts:
    """Return what the server behind `api` has counted so far, of requests for resources."""
    requests: Counter[tuple[str, str, str]] = Counter()
    watched: Counter[str] = Counter()
    metrics = api.text("GET", "/metrics")
    for name, text, value in _LINE.findall(metrics):
        labels, number = dict(_LABEL.findall(text)), int(float(value))
        if name != "apiserver_request_total":
            watched[labels["resource"]] += number
        elif labels["resource"]:
            requests[labels["verb"], labels["resource"], labels["code"]] += number
    return Counts(time.monotonic(), requests, watched, _find_metric(metrics, "process_cpu_seconds_total"))


def _find_metric(metrics: str, name: str) -> float:
    """Return the metric without labels of that name among all that a server reports."""
    found = re.search(rf"^{name} (\S+)$", metrics, re.MULTILINE)
    if found is None:
        raise BenchmarkError(f"a server does not report {name}")
    return float(found[1])


class Store(NamedTuple):
    """What etcd did: objects written by all clients, and the size of its file."""

    writes: int
    file_bytes: int


def read_store(port: int) -> Store:
    """Return what the etcd that listens on `port` has taken so far.

    Source: etcd v3.6, server/storage/mvcc/metrics.go.
    """
    with urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        metrics = answer.read().decode()
    found = [_find_metric(metrics, f"etcd_mvcc_{name}") for name in ("put_total", "db_total_size_in_bytes")]
    return Store(*map(int, found))

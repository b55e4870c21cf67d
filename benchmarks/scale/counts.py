"""What an API server counted: requests, conflicts, bytes sent to watches.

Knows the server's own metrics. Does not know who asked: the agents have a server for
themselves (`benchmarks.scale.doors`), and what it asks itself was measured before.
Source: Kubernetes v1.34, staging/src/k8s.io/apiserver/pkg/endpoints/metrics/metrics.go:
apiserver_request_total, apiserver_watch_events_sizes.
"""

import re
import time
from collections import Counter
from dataclasses import dataclass
from typing import Final
from urllib.request import urlopen

from tests.testbed.api import Api

__all__ = ["Counts", "Store", "read_counts", "read_store"]

_COUNTED: Final = "apiserver_request_total|apiserver_watch_events_sizes_sum"
_LINE: Final = re.compile(rf"^({_COUNTED})\{{([^}}]*)\}} (\S+)$", re.MULTILINE)
_STORE_LINE: Final = re.compile(r"^(etcd_mvcc_put_total|etcd_mvcc_db_total_size_in_bytes) (\S+)$", re.MULTILINE)
_LABEL: Final = re.compile(r'(\w+)="([^"]*)"')
_WRITES: Final = frozenset({"POST", "PUT", "PATCH", "DELETE", "APPLY", "DELETECOLLECTION"})
_CONFLICT: Final = "409"


@dataclass(frozen=True)
class Counts:
    """What was counted, at a time or between two times.

    `requests` by verb, resource and status code. `at_seconds` is on the monotonic clock; of a
    difference it is how long it took.
    """

    at_seconds: float
    requests: Counter[tuple[str, str, str]]
    watch_bytes: float

    @property
    def total(self) -> int:
        """All requests."""
        return self.requests.total()

    @property
    def writes(self) -> int:
        """Requests that change something."""
        return sum(number for (verb, _, _), number in self.requests.items() if verb in _WRITES)

    @property
    def conflicts(self) -> int:
        """Writes that were rejected because another client wrote first."""
        return self.conflicts_by_verb_and_resource().total()

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
        requests = self.requests - before.requests
        watch_bytes = self.watch_bytes - before.watch_bytes
        if idle is not None:
            share = seconds / idle.at_seconds
            requests = requests - Counter({what: round(number * share) for what, number in idle.requests.items()})
            watch_bytes -= idle.watch_bytes * share
        return Counts(seconds, requests, watch_bytes)


def read_counts(api: Api) -> Counts:
    """Return what the server behind `api` has counted so far, of requests for resources."""
    requests: Counter[tuple[str, str, str]] = Counter()
    watch_bytes = 0.0
    for name, text, value in _LINE.findall(api.text("GET", "/metrics")):
        labels = dict(_LABEL.findall(text))
        if name == "apiserver_watch_events_sizes_sum":
            watch_bytes += float(value)
        elif labels["resource"]:
            requests[labels["verb"], labels["resource"], labels["code"]] += int(float(value))
    return Counts(time.monotonic(), requests, watch_bytes)


@dataclass(frozen=True)
class Store:
    """What etcd has taken: objects written by all clients, and the size of its file."""

    writes: int
    file_bytes: int

    def since(self, before: "Store") -> "Store":
        """Return what was added since `before`."""
        return Store(self.writes - before.writes, self.file_bytes - before.file_bytes)


def read_store(port: int) -> Store:
    """Return what the etcd that listens on `port` has taken so far.

    Source: etcd v3.6, server/storage/mvcc/metrics.go.
    """
    with urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        found = dict(_STORE_LINE.findall(answer.read().decode()))
    return Store(int(float(found["etcd_mvcc_put_total"])), int(float(found["etcd_mvcc_db_total_size_in_bytes"])))

"""The formulas of docs/scaling.md: what a cluster's size and load cost.

Pure. Knows the costs of one transfer, one agent and one pass; a test compares them with that page. Does not know
what was measured (`benchmarks.scale.validation`).
"""

import math
from dataclasses import dataclass
from typing import Final

__all__ = ["Course", "Prediction", "predict"]

REQUESTS_A_TRANSFER: Final = 46.0
WRITES_A_TRANSFER: Final = 18.0
STORED_OBJECTS_A_TRANSFER: Final = 25.0
STORED_KIB_A_TRANSFER: Final = 66.0
KEPT_KIB_A_TRANSFER: Final = 9.0
"""Of them: a finished transfer of 3 KiB, and six Events of 1 KiB that are kept for an hour."""

EVENTS_A_TRANSFER: Final = 6.0
ENCODED_KIB_A_TRANSFER: Final = 82.0
CPU_MS_A_TRANSFER: Final = 80.0
"""With as many requests as above; the checks of its volume while it waits are more."""

KIB_A_PENDING_TRANSFER: Final = 1.4
LEDGER_BYTES_AN_ENTRY: Final = 37.0
VOLUME_CHECK_SECONDS: Final = 8.0
WATCHES_AN_AGENT: Final = 7.0
KIB_A_WATCH: Final = 190.0
WATCH_SECONDS: Final = 360.0
"""An agent renews each watch after 300 to 420 seconds."""

IDLE_CPU_PERCENT: Final = 0.024
"""In the long run; up to twice as much in two minutes in which all its watches are renewed."""

RENEWALS_A_LEASE: Final = 3
RENEWAL_BYTES: Final = 600.0
ADMISSIONS_S: Final = 75.0
ADMISSION_CPU_MS: Final = 4.0
PASS_PAUSE_S: Final = 0.1
PASS_ENTRIES_S: Final = 20_000.0
"""A pass pauses a tenth of a second, and a second more for so many reservations."""

PASS_US_A_TRANSFER: Final = 15.0
PASS_REQUESTS: Final = 4
"""What a pass asks one after the other, beside the accepts: three reads of its checks, and the write of the ledger."""

HISTORY_SECONDS: Final = 600.0
"""The API server compacts every five minutes what is older than five minutes."""

SPREAD_SECONDS: Final = 2.4
SPREAD_POWER: Final = 4
NOTICE_SECONDS: Final = 0.04
"""From the success of a candidate for the Lease until the others have observed it, after its write."""

_BUSIEST: Final = 0.95
_STEPS: Final = 2000
_KIB: Final = 1024


@dataclass(frozen=True)
class Course:
    """A cluster, and what happens in it for `seconds`; numbers of transfers at a time are means.

    `known` are all transfers that exist, `pending` the New ones, `held` those that are Accepted or Prepared,
    `checked` those of a pod's volume among them that wait for a slot. `write_seconds` is how long the API server
    takes for a write. `servers` are the API servers, each of which caches all objects but Events. `watch_events`: the
    agents do not see the files of their movers, and each watches Events.
    """

    nodes: int
    transfers: int
    seconds: float
    known: float
    pending: float
    held: float
    checked: float
    write_seconds: float = 0.01
    servers: int = 2
    lease_seconds: float = 15.0
    watch_events: bool = False

    @property
    def per_s(self) -> float:
        """How many transfers end in a second."""
        return self.transfers / self.seconds

    @property
    def renewals_delivered_s(self) -> float:
        """How many renewals of the Lease are delivered in a second, to all agents."""
        return self.nodes * RENEWALS_A_LEASE / self.lease_seconds

    @property
    def idle_requests_s(self) -> float:
        """How many requests all agents send in a second while there is no transfer."""
        return self.nodes * WATCHES_AN_AGENT / WATCH_SECONDS


@dataclass(frozen=True)
class Prediction:
    """What a course costs; the names have the units, `_s` is per second."""

    requests_per_transfer: float
    writes_per_transfer: float
    stored_objects_per_transfer: float
    encoded_kib_per_transfer: float
    events_per_transfer: float
    etcd_mib: float
    cpu_ms_per_transfer: float
    passes_s: float
    leader_cpu_percent: float
    ledger_kib: float
    leader_mib: float
    idle_requests_s: float
    watches: float
    watches_mib: float
    renewals_s: float
    renewals_kib_s: float
    takeover_seconds: float
    takeover_conflicts: float


def predict(course: Course) -> Prediction:
    """Return what `course` costs."""
    each_s = 1 / course.per_s
    passes_s, ledger_kib = _passes_s(course), course.held * LEDGER_BYTES_AN_ENTRY / _KIB
    renewals_kib_s = course.renewals_delivered_s * RENEWAL_BYTES / _KIB
    watches = course.nodes * WATCHES_AN_AGENT
    checks_s = course.checked / VOLUME_CHECK_SECONDS
    leader_seconds_s = passes_s * _pass_seconds(course) + course.per_s * ADMISSION_CPU_MS / 1000
    return Prediction(
        requests_per_transfer=REQUESTS_A_TRANSFER + (course.idle_requests_s + checks_s) * each_s,
        writes_per_transfer=WRITES_A_TRANSFER,
        stored_objects_per_transfer=STORED_OBJECTS_A_TRANSFER,
        encoded_kib_per_transfer=ENCODED_KIB_A_TRANSFER,
        events_per_transfer=STORED_OBJECTS_A_TRANSFER * course.servers
        + (EVENTS_A_TRANSFER * course.nodes if course.watch_events else 0),
        etcd_mib=_etcd_kib(course, passes_s * ledger_kib) / _KIB,
        cpu_ms_per_transfer=CPU_MS_A_TRANSFER * (1 + checks_s * each_s / REQUESTS_A_TRANSFER)
        + (course.nodes * IDLE_CPU_PERCENT / 100 + leader_seconds_s) * each_s * 1000,
        passes_s=passes_s,
        leader_cpu_percent=leader_seconds_s * 100,
        ledger_kib=ledger_kib,
        leader_mib=course.pending * KIB_A_PENDING_TRANSFER / _KIB,
        idle_requests_s=course.idle_requests_s,
        watches=watches,
        watches_mib=watches * KIB_A_WATCH / _KIB,
        renewals_s=course.renewals_delivered_s,
        renewals_kib_s=renewals_kib_s,
        takeover_seconds=course.lease_seconds + SPREAD_SECONDS,
        takeover_conflicts=_conflicts(course.nodes, NOTICE_SECONDS + course.write_seconds),
    )


def _etcd_kib(course: Course, ledger_kib_s: float) -> float:
    """Return the size of what is kept, and of the history until it is compacted."""
    history_kib_s = course.per_s * (STORED_KIB_A_TRANSFER - KEPT_KIB_A_TRANSFER) + ledger_kib_s
    return course.transfers * KEPT_KIB_A_TRANSFER + min(HISTORY_SECONDS, course.seconds) * history_kib_s


def _pass_seconds(course: Course) -> float:
    return course.known * PASS_US_A_TRANSFER / 1e6


def _passes_s(course: Course) -> float:
    """Return how many passes there are in a second, each of which writes the ledger.

    A pass follows the one before after a pause, and not before a transfer has ended. Its accepts are sequential.
    """
    alone = PASS_PAUSE_S + course.held / PASS_ENTRIES_S + _pass_seconds(course) + PASS_REQUESTS * course.write_seconds
    cycle = alone / (1 - min(_BUSIEST, course.per_s * course.write_seconds))
    return 1 / (cycle + math.exp(-course.per_s * cycle) / course.per_s)


def _conflicts(candidates: int, notice_seconds: float) -> float:
    """Return how many candidates for the Lease try before they observe the success of the first one.

    Each waits for SPREAD_SECONDS times the SPREAD_POWER-th root of a random number (`nodeagent.leader.election`).
    """
    step = SPREAD_SECONDS / _STEPS
    return sum(
        candidates
        * (_share(at + step) - _share(at))
        * (1 - _share(at)) ** (candidates - 2)
        * (candidates - 1)
        * (_share(at + notice_seconds) - _share(at))
        for at in (number * step for number in range(_STEPS))
    )


def _share(seconds: float) -> float:
    """Return which share of the candidates has tried by then."""
    return min(1.0, (seconds / SPREAD_SECONDS) ** SPREAD_POWER)

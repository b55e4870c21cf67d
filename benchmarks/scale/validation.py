"""What the formulas predict, beside what was measured with as many nodes: a table, and one line of JSON.

Knows which measurement belongs to which prediction, and the error. Does not know the formulas
(`benchmarks.scale.formulas`), nor how anything was measured.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from benchmarks.scale.formulas import (
    ADMISSIONS_S,
    IDLE_CPU_PERCENT,
    KIB_A_PENDING_TRANSFER,
    LEDGER_BYTES_AN_ENTRY,
    Course,
    Prediction,
    predict,
)
from benchmarks.scale.large import Large
from benchmarks.scale.load import AGENTS

__all__ = ["Comparison", "Validation"]

_LEASES: Final = "leases"
_KIB: Final = 1024
_MIB: Final = 1 << 20


@dataclass(frozen=True)
class Comparison:
    """One figure, as predicted and as measured; `bound`: the prediction is the most that it may be."""

    key: str
    what: str
    predicted: float
    measured: float
    bound: bool = False

    @property
    def error(self) -> float:
        """How far the prediction is from the measurement, as a fraction of the measurement."""
        error = self.predicted / self.measured - 1 if self.measured else 0.0
        return min(0.0, error) if self.bound else error


@dataclass
class Validation:
    """The scenario `large`; None where it was not done."""

    large: Large | None = None

    def summary(self) -> dict[str, float | None]:
        """Return the last line's object."""
        one = self.large
        errors = {each.key: round(each.error, 3) for each in compare(one)} if one else {}
        return {
            "agents": one.agents if one else None,
            "transfers": one.transfers if one else None,
            "limit_violations": len(one.verdict.violations) + len(one.waiting.verdict.violations) if one else None,
            "takeover_s": round(one.takeover.held_after, 1) if one and one.takeover else None,
            "takeover_admits_s": round(one.takeover.admitted_after, 1) if one and one.takeover else None,
            "worst_error": max(errors.values(), key=abs) if one else None,
            **{f"error_{key}": error for key, error in errors.items()},
        }

    def last_line(self) -> str:
        """Return the summary as one line of JSON."""
        return json.dumps(self.summary())

    def lines(self) -> Iterator[str]:
        """Yield the tables: predictions with their errors, and what else was seen."""
        if self.large is None:
            return
        yield "| figure | predicted | measured | error |"
        yield "| --- | --- | --- | --- |"
        for one in compare(self.large):
            most = "at most " if one.bound else ""
            error = "none" if one.bound and not one.error else f"{one.error:+.0%}"
            yield f"| {one.what} | {most}{one.predicted:,.4g} | {one.measured:,.4g} | {error} |"
        yield ""
        yield "| what | figure |"
        yield "| --- | --- |"
        for what, figure in _rows(self.large):
            yield f"| {what} | {figure} |"

    def details(self) -> Iterator[str]:
        """Yield what explains the figures."""
        if self.large is None:
            return
        yield from self.large.verdict.violations[:15]
        for (verb, resource), number in self.large.counts.by_verb_and_resource().most_common(40):
            yield f"  {verb:7} {resource:28} {number / self.large.transfers:7.3f}"
        for resource, number in self.large.counts.delivered.most_common():
            size = self.large.counts.watched[resource] / self.large.transfers
            yield f"  watch   {resource:28} {number / self.large.transfers:7.3f} {size:9.0f} bytes"


def _course(one: Large) -> Course:
    seen = one.occupancy
    return Course(
        nodes=one.agents,
        transfers=one.transfers,
        seconds=seen.seconds,
        known=seen.known,
        pending=seen.pending,
        held=seen.held,
        checked=seen.checked,
        write_seconds=one.counts.seconds_a_patch,
    )


def compare(one: Large) -> list[Comparison]:
    """Return every figure that a formula predicts."""
    whole = predict(_course(one))
    return [*_of_transfers(one, whole), *_of_leader(one, whole), *_of_agents(one, whole)]


def _of_transfers(one: Large, predicted: Prediction) -> list[Comparison]:
    counts, number, stored = one.counts, one.transfers, one.store
    encoded_kib = counts.watch_bytes / number / _KIB
    cpu_ms = one.load.cpu_seconds[AGENTS] / number * 1000
    return [
        Comparison("requests", "requests per transfer", predicted.requests_per_transfer, counts.total / number),
        Comparison("writes", "writes among them", predicted.writes_per_transfer, counts.writes / number),
        Comparison(
            "stored",
            "objects written to etcd per transfer",
            predicted.stored_objects_per_transfer,
            stored.writes / number,
        ),
        Comparison("etcd", "growth of etcd's file, MiB", predicted.etcd_mib, stored.file_bytes / _MIB),
        Comparison("encoded", "KiB encoded for watches per transfer", predicted.encoded_kib_per_transfer, encoded_kib),
        Comparison(
            "events", "events that etcd sends per transfer", predicted.events_per_transfer, stored.sent_events / number
        ),
        Comparison("agent_cpu", "processor time of agents per transfer, ms", predicted.cpu_ms_per_transfer, cpu_ms),
    ]


def _of_leader(one: Large, predicted: Prediction) -> list[Comparison]:
    waiting, takeover = one.waiting, one.takeover
    entry_bytes = one.ledger.size_bytes / max(1, one.ledger.entries)
    rows = [
        Comparison("ledger", "bytes of the admission ledger per reservation", LEDGER_BYTES_AN_ENTRY, entry_bytes),
        Comparison(
            "pending",
            "KiB of the leader per pending transfer",
            KIB_A_PENDING_TRANSFER,
            waiting.kib_per_transfer,
            bound=True,
        ),
        Comparison("admissions", "admissions per second, alone", ADMISSIONS_S, waiting.admissions_per_s),
    ]
    if takeover is None:
        return rows
    return [
        *rows,
        Comparison(
            "takeover", "seconds until another leader", predicted.takeover_seconds, takeover.held_after, bound=True
        ),
        Comparison("conflicts", "rejected writes then", predicted.takeover_conflicts, takeover.conflicts),
    ]


def _of_agents(one: Large, predicted: Prediction) -> list[Comparison]:
    idle, counts = one.idle, one.idle.counts
    delivered_s = counts.delivered[_LEASES] / counts.at_seconds
    return [
        Comparison("idle_cpu", "processor time of an idle agent, % of a core", IDLE_CPU_PERCENT, idle.cpu_percent),
        Comparison("watches", "watches of all agents", predicted.watches, one.watches),
        Comparison("watches_mib", "memory of the API server for them, MiB", predicted.watches_mib, one.watches_mib),
        Comparison("renewals", "renewals of the Lease delivered per second", predicted.renewals_s, delivered_s),
    ]


def _rows(one: Large) -> Iterator[tuple[str, str]]:
    seen, verdict, takeover = one.occupancy, one.verdict, one.takeover
    yield "seconds; transfers per second", f"{one.seconds:.0f}; {one.transfers / one.seconds:.1f}"
    numbers = f"{seen.pending:.0f}; {seen.held:.0f}; {seen.running:.0f}"
    yield "New; Accepted or Prepared; InProgress, on average", numbers
    yield "waiting for a slot with a volume that is checked, on average", f"{seen.checked:.0f}"
    if takeover:
        yield "another agent held the Lease after", f"{takeover.held_after:.1f} s"
        yield "it admitted a transfer after", f"{takeover.admitted_after:.1f} s"
    yield "writes with a conflict", f"{one.counts.conflict_share:.2%}"
    yield "requests rejected with 429", f"{one.counts.rejected}"
    yield "violations", f"{len(verdict.violations) + len(one.waiting.verdict.violations)}"
    yield "most Accepted or Prepared; most InProgress on a node", f"{verdict.most_held}; {verdict.most_running}"
    yield "final phases", ", ".join(f"{number} {phase}" for phase, number in sorted(verdict.final_phases.items()))
    yield "memory of the agents' API server at the end", f"{one.server_mib:.0f} MiB"
    yield "a patch took, on average", f"{one.counts.seconds_a_patch * 1000:.0f} ms"
    for name, used in sorted(one.load.cpu_seconds.items(), key=lambda item: -item[1]):
        each_ms = used / one.transfers * 1000
        yield f"cores used: {name}", f"{used / one.seconds:.2f}, {each_ms:.0f} ms per transfer"

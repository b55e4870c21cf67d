"""What was measured, and how it is shown: a table for people, figures for programs.

Knows how figures are rounded and called. Does not know how anything was measured, nor targets.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.figures import Summary
from benchmarks.scale.growth import Growth
from benchmarks.scale.judge import Verdict
from benchmarks.scale.leaders import Leaders
from benchmarks.scale.many import Many
from benchmarks.scale.waiting import Waiting

_SHOWN = 15


@dataclass
class Report:
    """All scenarios; None stands for what was not run."""

    few: Many | None = None
    many: Many | None = None
    waiting: Waiting | None = None
    growth: Growth | None = None
    kills: Leaders | None = None
    pauses: Leaders | None = None

    def summary(self) -> Summary:
        """Return the last line's object."""
        few, many, waiting, growth = self.few, self.many, self.waiting, self.growth
        idle = many.idle if many else None
        kills, pauses = self.kills, self.pauses
        violations = [len(verdict.violations) for verdict in self._verdicts().values()]
        conflicts = [one.counts.conflict_share for one in (few, many) if one]
        return {
            "limit_violations": sum(violations) if violations else None,
            "conflict_share": round(max(conflicts), 5) if conflicts else None,
            "requests_per_cr_5_agents": round(few.requests_per_transfer, 2) if few else None,
            "requests_per_cr_50_agents": round(many.requests_per_transfer, 2) if many else None,
            "watch_bytes_per_cr_5_agents": round(few.watch_bytes_per_transfer) if few else None,
            "watch_bytes_per_cr_50_agents": round(many.watch_bytes_per_transfer) if many else None,
            "idle_requests_per_s_50_agents": round(idle.requests_per_s, 2) if idle else None,
            "admissions_per_s": round(waiting.admissions_per_s, 1) if waiting else None,
            "agent_idle_mib": round(growth.idle_mib, 1) if growth else None,
            "agent_growth_mib": round(growth.after_mib - growth.idle_mib, 1) if growth else None,
            "agent_idle_cpu_percent": round(idle.cpu_percent, 3) if idle else None,
            "leader_kills_ok": kills.good if kills else None,
            "leader_pauses_ok": pauses.good if pauses else None,
        }

    def lines(self) -> Iterator[str]:
        """Yield the table."""
        yield "| scenario | what | figure |"
        yield "| --- | --- | --- |"
        for name, rows in self._rows().items():
            for what, figure in rows:
                yield f"| {name} | {what} | {figure} |"

    def details(self) -> Iterator[str]:
        """Yield what explains the figures: violations, requests by what was done to what."""
        for name, verdict in self._verdicts().items():
            for violation in verdict.violations[:_SHOWN]:
                yield f"violation, {name}: {violation}"
        for name, one in (("few", self.few), ("many", self.many)):
            if one:
                yield f"\nrequests per transfer, {name}:"
                for (verb, resource), number in one.counts.by_verb_and_resource().most_common(30):
                    yield f"  {verb:7} {resource:28} {number / one.transfers:7.3f}"
                yield f"\nconflicts, {name}:"
                for (verb, resource), number in one.counts.conflicts_by_verb_and_resource().most_common():
                    yield f"  {verb:7} {resource:28} {number:7}"

    def _rows(self) -> dict[str, list[tuple[str, str]]]:
        rows: dict[str, list[tuple[str, str]]] = {}
        for one in (self.few, self.many):
            if one:
                rows[f"{one.agents} agents, {one.transfers} transfers"] = list(_rows_of_many(one))
        if self.waiting:
            rows[f"{self.waiting.transfers} pending transfers"] = list(_rows_of_waiting(self.waiting))
        if self.growth:
            rows[f"one agent, {self.growth.transfers} transfers"] = list(_rows_of_growth(self.growth))
        for name, leaders in (("killed", self.kills), ("paused", self.pauses)):
            if leaders:
                rows[f"leader {name} {leaders.times} times"] = list(_rows_of_leaders(leaders))
        return rows

    def _verdicts(self) -> dict[str, Verdict]:
        scenarios = {
            "few": self.few,
            "many": self.many,
            "waiting": self.waiting,
            "growth": self.growth,
            "kills": self.kills,
            "pauses": self.pauses,
        }
        return {name: one.verdict for name, one in scenarios.items() if one}


def _rows_of_many(one: Many) -> Iterator[tuple[str, str]]:
    yield "seconds", f"{one.seconds:.0f}"
    yield "requests per transfer (writes)", f"{one.requests_per_transfer:.1f} ({one.writes_per_transfer:.1f})"
    yield "writes with a conflict", f"{one.counts.conflict_share:.2%}"
    yield "requests rejected with 429", f"{one.counts.rejected}"
    yield "bytes to watches per transfer", f"{one.watch_bytes_per_transfer:,.0f}"
    yield "objects written to etcd per transfer, by all components", f"{one.store.writes / one.transfers:.1f}"
    yield "growth of etcd's file per transfer", f"{one.store.file_bytes / one.transfers / 1024:.0f} KiB"
    yield "CPU of the agents' API server per transfer", f"{one.counts.cpu_seconds / one.transfers * 1000:.0f} ms"
    yield from _rows_of_verdict(one.verdict)
    if one.idle:
        yield "without transfers: requests per second", f"{one.idle.requests_per_s:.2f}"
        cpu_percent = one.idle.counts.cpu_seconds / one.idle.counts.at_seconds * 100
        yield "without transfers: CPU of the agents' API server", f"{cpu_percent:.1f} %"
        yield "without transfers: CPU of an agent that is not the leader", f"{one.idle.cpu_percent:.2f} %"


def _rows_of_waiting(one: Waiting) -> Iterator[tuple[str, str]]:
    yield "memory per pending transfer", f"{one.kib_per_transfer:.2f} KiB"
    yield "CPU of the leader while they are pending", f"{one.cpu_percent:.1f} %"
    yield "admissions per second", f"{one.admissions_per_s:.0f}"
    yield "CPU per admission", f"{one.cpu_ms_per_admission:.1f} ms"
    yield "admitted out of order", f"{one.disorder}"
    yield from _rows_of_verdict(one.verdict)


def _rows_of_growth(one: Growth) -> Iterator[tuple[str, str]]:
    yield "memory before the first transfer", f"{one.idle_mib:.1f} MiB"
    yield "memory after the last transfer", f"{one.after_mib:.1f} MiB"
    yield "peak memory", f"{one.peak_mib:.1f} MiB"
    yield "CPU per transfer", f"{one.cpu_ms_per_transfer:.0f} ms"
    yield from _rows_of_verdict(one.verdict)


def _rows_of_leaders(one: Leaders) -> Iterator[tuple[str, str]]:
    yield "another agent became leader in time", f"{one.good} times"
    yield "longest time without a leader", f"{one.longest_seconds:.1f} s"
    yield "seconds", f"{one.seconds:.0f}"
    yield from _rows_of_verdict(one.verdict)


def _rows_of_verdict(verdict: Verdict) -> Iterator[tuple[str, str]]:
    yield "violations", f"{len(verdict.violations)}"
    yield "most Accepted or Prepared; most InProgress on a node", f"{verdict.most_held}; {verdict.most_running}"
    yield (
        "final phases",
        ", ".join(f"{number} {phase}" for phase, number in sorted(verdict.final_phases.items())) or "none",
    )

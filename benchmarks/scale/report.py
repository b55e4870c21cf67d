"""What was measured, and how it is shown: a table for people, figures for programs."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from benchmarks.figures import Summary, table
from benchmarks.scale.effort import Result
from benchmarks.scale.judge import Verdict

_FIGURES: Final = (
    "limit_violations",
    "conflict_share",
    *(f"{figure}_per_cr_{agents}_agents" for figure in ("requests", "watch_bytes") for agents in (5, 50)),
    *("idle_requests_per_s_50_agents", "admissions_per_s", "agent_idle_mib", "agent_growth_mib"),
    *("agent_idle_cpu_percent", "leader_kills_ok", "leader_pauses_ok"),
)
"""The last line's values, in this order; null where the scenario was not run."""

_SHOWN: Final = 15


@dataclass
class Report:
    """The results of the scenarios that were run, by their names."""

    results: dict[str, Result] = field(default_factory=dict)

    def summary(self) -> Summary:
        """Return the last line's object; of a figure that two scenarios have, it has the larger one."""
        found: dict[str, float | None] = dict.fromkeys(_FIGURES)
        for result in self.results.values():
            violations = {"limit_violations": (found["limit_violations"] or 0) + len(result.verdict.violations)}
            for name, figure in (result.summary | violations).items():
                before = found[name]
                found[name] = figure if before is None else max(figure, before)
        return dict(found)

    def lines(self) -> Iterator[str]:
        """Yield the table, and what explains it."""
        results = self.results.values()
        rows = [[one.title, *row] for one in results for row in (*one.rows, *_rows_of_verdict(one.verdict))]
        yield from table(["scenario", "what", "figure"], rows)
        yield ""
        for name, result in self.results.items():
            yield from (f"violation, {name}: {violation}" for violation in result.verdict.violations[:_SHOWN])
            yield from result.details


def _rows_of_verdict(verdict: Verdict) -> Iterator[tuple[str, str]]:
    yield "violations", f"{len(verdict.violations)}"
    yield "most Accepted or Prepared; most InProgress on a node", f"{verdict.most_held}; {verdict.most_running}"
    phases = (f"{number} {phase}" for phase, number in sorted(verdict.final_phases.items()))
    yield "final phases", ", ".join(phases) or "none"

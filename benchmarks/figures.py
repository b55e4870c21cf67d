"""Runs by name, and what follows from them: medians, spread, ratios, the report of a benchmark."""

import json
import os
import platform
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import TypeVar

from benchmarks.processes import Measured

Summary = dict[str, float | bool | None]
"""Figures by name; None: not measured."""

_What = TypeVar("_What")


def alternate(what: Sequence[_What], number: int) -> Sequence[_What]:
    """Return what to run in round `number`: in turn from the first one and from the last one."""
    return what[:: -1 if number % 2 else 1]


class Runs:
    """Runs of programs by name, in the order in which each name came first."""

    def __init__(self) -> None:
        self._runs: defaultdict[str, list[Measured]] = defaultdict(list)

    def add(self, name: str, run: Measured) -> None:
        """Add a run."""
        self._runs[name].append(run)

    def of(self, *names: str) -> list[Measured]:
        """Return the runs of these names; without a name, all runs."""
        return [run for name in names or self._runs for run in self._runs[name]]

    def own_mib(self, *names: str) -> float:
        """Return the largest peak of the programs themselves."""
        return round(max(run.own_mib for run in self.of(*names)), 1)

    def most_mib(self, *names: str) -> float:
        """Return the largest working set of the runs of these names; without a name, of all runs."""
        return round(max(run.working_set_mib or 0.0 for run in self.of(*names)), 1)

    def seconds(self, name: str) -> float:
        """Return the median of the times."""
        return median(run.seconds for run in self._runs[name])

    def ratio(self, name: str, other: str) -> float:
        """Return the ratio of the medians of two sets of times."""
        return round(self.seconds(name) / self.seconds(other), 3)

    def paired_ratio(self, name: str, other: str, figure: Callable[[Measured], float]) -> float:
        """Return the median of all ratios of a run to the other one of its round."""
        pairs = zip(self._runs[name], self._runs[other], strict=True)
        return round(median(figure(one) / figure(two) for one, two in pairs), 3)

    def excess_mib(self, name: str, other: str) -> float | None:
        """Return how much more memory a median run has in use than others; None where none was measured."""
        ours, theirs = (_working_sets(self._runs[one]) for one in (name, other))
        return round(median(ours) - median(theirs), 1) if ours and theirs else None

    def lines(self) -> Iterator[str]:
        """Yield a table of all runs."""
        rows = []
        for name, runs in self._runs.items():
            groups, cpu = _working_sets(runs), median(run.cpu_seconds for run in runs)
            memory = [f"{median(groups):.0f}", f"{max(groups):.0f}"] if groups else ["", ""]
            rows.append([name, *spread([run.seconds for run in runs]), f"{cpu:.2f}", *memory])
        columns = ["run", "seconds: median", "least", "most", "CPU seconds: median"]
        return table([*columns, "working set in MiB: median", "most"], rows)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table."""
    for row in (columns, ["---"] * len(columns), *rows):
        yield f"| {' | '.join(row)} |"


def spread(figures: Sequence[float], digits: int = 2) -> list[str]:
    """Return the median, the least and the most."""
    return [f"{figure:.{digits}f}" for figure in (median(figures), min(figures), max(figures))]


def _working_sets(runs: Iterable[Measured]) -> list[float]:
    return [run.working_set_mib for run in runs if run.working_set_mib is not None]


def describe_machine() -> str:
    """Return the machine's size."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    model = models[0].partition(": ")[2] if models else platform.machine()
    cores = len(os.sched_getaffinity(0))
    return f"{cores} cores ({model}), {memory:.0f} GiB of memory, Linux {platform.release()}"


def say(text: str) -> None:
    """Print what is done now to standard error, with the time."""
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")


def print_report(conditions: str, lines: Iterable[str], summary: Summary) -> None:
    """Print the machine and the conditions, a table for people, and the figures as one line of JSON for programs."""
    report = [f"Machine: {describe_machine()}. {conditions}.", "", *lines, "", json.dumps(summary)]
    sys.stdout.writelines(f"{line}\n" for line in report)

"""What was measured, and how it is shown: a table for people, an object for programs.

Knows medians, ratios and targets. Does not know how anything was measured.
"""

import os
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from statistics import median
from typing import Final

from benchmarks.processes import Measured

__all__ = [
    "ConfinementFigures",
    "Figures",
    "ManyFigures",
    "ParallelFigures",
    "Row",
    "describe_machine",
    "median_seconds",
    "table",
]


class Row(StrEnum):
    """The rows of the table that have several runs."""

    UPLOAD = "upload, mover"
    BARE_UPLOAD = "upload, bare kopia"
    TUNED_UPLOAD = "upload, bare kopia with the mover's settings"
    SECOND = "second backup, nothing changed, mover"
    TUNED_SECOND = "second backup, bare kopia with the mover's settings"
    SMALL = "restore of small files, mover"
    BARE_SMALL = "restore of small files, bare kopia"
    TUNED_SMALL = "restore of small files, bare kopia with the mover's settings"
    LARGE = "restore of large files, mover"
    BARE_LARGE = "restore of large files, bare kopia"
    TUNED_LARGE = "restore of large files, bare kopia with the mover's settings"
    NO_BARRIERS = "restore of small files, cache without barriers, mover"
    BARE_NO_BARRIERS = "restore of small files, cache without barriers, bare kopia"


_RATIOS: Final = {
    "upload_ratio": (Row.UPLOAD, Row.BARE_UPLOAD),
    "restore_small_ratio": (Row.SMALL, Row.BARE_SMALL),
    "restore_small_same_settings_ratio": (Row.SMALL, Row.TUNED_SMALL),
    "restore_large_ratio": (Row.LARGE, Row.BARE_LARGE),
    "restore_large_same_settings_ratio": (Row.LARGE, Row.TUNED_LARGE),
    "restore_small_no_barriers_ratio": (Row.NO_BARRIERS, Row.BARE_NO_BARRIERS),
}

_EXCESSES: Final = {
    "upload_excess_mib": (Row.UPLOAD, Row.TUNED_UPLOAD),
    "second_backup_excess_mib": (Row.SECOND, Row.TUNED_SECOND),
    "restore_small_excess_mib": (Row.SMALL, Row.TUNED_SMALL),
    "restore_large_excess_mib": (Row.LARGE, Row.TUNED_LARGE),
}
"""The working set of the mover's group, beyond that of bare kopia with its settings."""


@dataclass
class Figures:
    """All runs, and whether targets and caches had file systems of their own; None: it could not be measured here."""

    own_disks: bool = True
    runs: dict[Row, list[Measured]] = field(default_factory=dict)
    limited: dict[str, Measured] = field(default_factory=dict)
    limited_ok: bool | None = None
    limited_many_files_ok: bool | None = None

    def add(self, row: Row, run: Measured) -> None:
        """Add a run."""
        self.runs.setdefault(row, []).append(run)

    @property
    def pairs(self) -> int:
        """How many pairs were run, of uploads or of restores, where these are fewer."""
        return min(len(self.runs[Row.UPLOAD]), len(self.runs[Row.SMALL]))

    def summary(self) -> dict[str, float | bool | None]:
        """Return the last line's object."""
        seconds = {row: median(run.seconds for run in runs) for row, runs in self.runs.items()}
        memory = {row: median(run.together_mib for run in runs) for row, runs in self.runs.items()}
        movers = [*self.runs[Row.UPLOAD], *self.runs[Row.SECOND], *self.runs[Row.SMALL], *self.runs[Row.LARGE]]
        both = [(seconds[Row.SMALL], seconds[Row.LARGE]), (seconds[Row.BARE_SMALL], seconds[Row.BARE_LARGE])]
        return {
            **{name: round(seconds[mover] / seconds[bare], 3) for name, (mover, bare) in _RATIOS.items()},
            "restore_ratio": round(sum(both[0]) / sum(both[1]), 3),
            "second_backup_s": round(seconds[Row.SECOND], 2),
            "peak_memory_ratio": round(memory[Row.UPLOAD] / memory[Row.BARE_UPLOAD], 3),
            **{name: _excess_mib(*(self.runs[row] for row in rows)) for name, rows in _EXCESSES.items()},
            "upload_cost_of_memory_setting": round(seconds[Row.TUNED_UPLOAD] / seconds[Row.BARE_UPLOAD] - 1, 3),
            "limited_256mib_ok": self.limited_ok,
            "limited_256mib_200k_files_ok": self.limited_many_files_ok,
            "mover_alone_mib": round(max(one.own_mib for one in movers), 1),
        }

    def lines(self) -> Iterator[str]:
        """Yield the table."""
        rows: dict[str, Sequence[Measured]] = {row: self.runs[row] for row in Row}
        yield from table(rows | {name: [run] for name, run in self.limited.items()})


@dataclass
class ConfinementFigures:
    """Pairs of the mover: with kopia confined, and without."""

    uploads: list[tuple[Measured, Measured]] = field(default_factory=list)
    restores: list[tuple[Measured, Measured]] = field(default_factory=list)
    own_disks: bool = True

    @property
    def pairs(self) -> int:
        """How many pairs were run."""
        return len(self.restores)

    def summary(self) -> dict[str, float]:
        """Return the last line's object: the medians of all pairs' ratios."""
        confined = [confined for confined, _ in (*self.uploads, *self.restores)]
        return {
            "confined_upload_ratio": _ratio((one.seconds, other.seconds) for one, other in self.uploads),
            "confined_restore_ratio": _ratio((one.seconds, other.seconds) for one, other in self.restores),
            "confined_upload_cpu_ratio": _ratio((one.cpu_seconds, other.cpu_seconds) for one, other in self.uploads),
            "confined_restore_cpu_ratio": _ratio((one.cpu_seconds, other.cpu_seconds) for one, other in self.restores),
            "mover_alone_mib": round(max(one.own_mib for one in confined), 1),
        }

    def lines(self) -> Iterator[str]:
        """Yield the table."""
        yield from table(
            {
                "upload, kopia confined": [confined for confined, _ in self.uploads],
                "upload, unconfined": [unconfined for _, unconfined in self.uploads],
                "restore, kopia confined": [confined for confined, _ in self.restores],
                "restore, unconfined": [unconfined for _, unconfined in self.restores],
            }
        )


@dataclass
class ManyFigures:
    """A volume of very many files and its repository: runs by name, and the number of contents of the repository."""

    files: int
    limit_mib: int
    own_disks: bool = True
    contents: int = 0
    runs: dict[str, Measured] = field(default_factory=dict)
    same: bool = False

    def summary(self) -> dict[str, float | bool | None]:
        """Return the last line's object."""
        limited = [run.working_set_mib or 0.0 for run in self.runs.values()]
        return {
            "many_files": self.files,
            "many_contents": self.contents,
            f"many_files_{self.limit_mib}mib_ok": self.same,
            "many_files_most_mib": round(max(limited), 1),
        }

    def lines(self) -> Iterator[str]:
        """Yield the table."""
        yield from table({name: [run] for name, run in self.runs.items()})


@dataclass
class ParallelFigures:
    """Uploads by the mover and by bare kopia with its settings, by the number of files in parallel; the least first."""

    own_disks: bool = True
    movers: dict[int, list[Measured]] = field(default_factory=dict)
    bare: dict[int, list[Measured]] = field(default_factory=dict)

    @property
    def pairs(self) -> int:
        """How many pairs were run with each number."""
        return min(map(len, self.bare.values()))

    def summary(self) -> dict[str, float | None]:
        """Return the last line's object: the mover compared with kopia and the least number."""
        least = self.bare[min(self.bare)]
        found: dict[str, float | None] = {}
        for number, runs in self.movers.items():
            found[f"parallel_{number}_upload_ratio"] = round(median_seconds(runs) / median_seconds(least), 3)
            found[f"parallel_{number}_upload_excess_mib"] = _excess_mib(runs, least)
        return found

    def lines(self) -> Iterator[str]:
        """Yield the table."""
        rows: dict[str, Sequence[Measured]] = {}
        for number, runs in self.movers.items():
            rows[f"upload, mover, {number} in parallel"] = runs
            rows[f"upload, bare kopia with the mover's settings, {number} in parallel"] = self.bare[number]
        yield from table(rows)


def _ratio(pairs: Iterable[tuple[float, float]]) -> float:
    return round(median(one / other for one, other in pairs), 3)


def table(rows: Mapping[str, Sequence[Measured]]) -> Iterator[str]:
    """Yield a table of all runs by what was run."""
    columns = ["seconds: median", "least", "most", "CPU seconds: median"]
    columns += ["resident memory in MiB: median", "most", "working set in MiB: median", "most"]
    yield f"| run | {' | '.join(columns)} |"
    yield f"| --- |{' --- |' * len(columns)}"
    for name, runs in rows.items():
        seconds = [run.seconds for run in runs]
        memory, groups = [run.together_mib for run in runs], _working_sets(runs)
        shown = f"{median(groups):.0f} | {max(groups):.0f}" if groups else " | "
        yield (
            f"| {name} | {median(seconds):.2f} | {min(seconds):.2f} | {max(seconds):.2f} "
            f"| {median(run.cpu_seconds for run in runs):.2f} | {median(memory):.0f} | {max(memory):.0f} | {shown} |"
        )


def _excess_mib(movers: Iterable[Measured], bare: Iterable[Measured]) -> float | None:
    ours, theirs = _working_sets(movers), _working_sets(bare)
    return round(median(ours) - median(theirs), 1) if ours and theirs else None


def _working_sets(runs: Iterable[Measured]) -> list[float]:
    return [run.working_set_mib for run in runs if run.working_set_mib is not None]


def describe_machine() -> str:
    """Return the machine's size."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    model = models[0].partition(": ")[2] if models else platform.machine()
    cores = len(os.sched_getaffinity(0))
    return f"{cores} cores ({model}), {memory:.0f} GiB of memory, Linux {platform.release()}"


def median_seconds(runs: Sequence[Measured]) -> float:
    """Return how long half of the runs took at most."""
    return median(run.seconds for run in runs)

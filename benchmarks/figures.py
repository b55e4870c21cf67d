"""What was measured, and how it is shown: a table for people, one line of JSON for programs.

Knows medians, ratios and targets. Does not know how anything was measured.
"""

import json
import os
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from benchmarks.processes import Measured

__all__ = ["ConfinementFigures", "Figures", "describe_machine", "median_seconds", "table"]


@dataclass
class Figures:
    """All runs, and whether targets and caches had file systems of their own; None: it could not be measured here."""

    mover_uploads: list[Measured] = field(default_factory=list)
    bare_uploads: list[Measured] = field(default_factory=list)
    tuned_uploads: list[Measured] = field(default_factory=list)
    second_backups: list[Measured] = field(default_factory=list)
    mover_restores: list[Measured] = field(default_factory=list)
    bare_restores: list[Measured] = field(default_factory=list)
    limited: dict[str, Measured] = field(default_factory=dict)
    own_disks: bool = True
    limited_ok: bool | None = None
    limited_many_files_ok: bool | None = None

    @property
    def pairs(self) -> int:
        """How many pairs were run."""
        return len(self.bare_restores)

    def summary(self) -> dict[str, float | bool | None]:
        """Return the last line's object."""
        uploads, bare = self.mover_uploads, self.bare_uploads
        movers = [*uploads, *self.second_backups, *self.mover_restores]
        return {
            "upload_ratio": round(median_seconds(uploads) / median_seconds(bare), 3),
            "restore_ratio": round(median_seconds(self.mover_restores) / median_seconds(self.bare_restores), 3),
            "second_backup_s": round(median_seconds(self.second_backups), 2),
            "peak_memory_ratio": round(_memory(uploads) / _memory(bare), 3),
            "upload_cost_of_memory_setting": round(median_seconds(self.tuned_uploads) / median_seconds(bare) - 1, 3),
            "limited_256mib_ok": self.limited_ok,
            "limited_256mib_200k_files_ok": self.limited_many_files_ok,
            "mover_alone_mib": round(max(one.own_mib for one in movers), 1),
        }

    def lines(self) -> Iterator[str]:
        """Yield the table."""
        rows: dict[str, Sequence[Measured]] = {
            "upload, mover": self.mover_uploads,
            "upload, bare kopia": self.bare_uploads,
            "upload, bare kopia with the mover's memory setting": self.tuned_uploads,
            "second backup, nothing changed, mover": self.second_backups,
            "restore, mover": self.mover_restores,
            "restore, bare kopia": self.bare_restores,
            **{name: [run] for name, run in self.limited.items()},
        }
        yield from table(rows)

    def last_line(self) -> str:
        """Return the summary as one line of JSON."""
        return json.dumps(self.summary())


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

    def last_line(self) -> str:
        """Return the summary as one line of JSON."""
        return json.dumps(self.summary())


def _ratio(pairs: Iterable[tuple[float, float]]) -> float:
    return round(median(one / other for one, other in pairs), 3)


def table(rows: Mapping[str, Sequence[Measured]]) -> Iterator[str]:
    """Yield a table of all runs by what was run."""
    columns = ["seconds: median", "least", "most", "CPU seconds: median"]
    columns += ["peak memory in MiB: median", "most", "peaks added: median"]
    yield f"| run | {' | '.join(columns)} |"
    yield f"| --- |{' --- |' * len(columns)}"
    for name, runs in rows.items():
        seconds = [run.seconds for run in runs]
        memory = [run.together_mib for run in runs]
        yield (
            f"| {name} | {median(seconds):.2f} | {min(seconds):.2f} | {max(seconds):.2f} "
            f"| {median(run.cpu_seconds for run in runs):.2f} "
            f"| {median(memory):.0f} | {max(memory):.0f} | {median(run.added_mib for run in runs):.0f} |"
        )


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


def _memory(runs: Sequence[Measured]) -> float:
    return median(run.together_mib for run in runs)

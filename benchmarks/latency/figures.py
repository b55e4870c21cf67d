"""What the benchmark of a storage far away shows: a table for people, an object for programs.

Knows which of kopia's settings was the best. Does not know how anything was measured.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from benchmarks.figures import median_seconds, table
from benchmarks.processes import Measured

__all__ = ["FarFigures", "Runs", "Swept"]

Runs = dict[str, list[Measured]]
"""By who ran: `mover` or `bare`."""


@dataclass
class Swept:
    """One run of bare kopia for each number of files in parallel; then the mover, and kopia with the best number."""

    tried: dict[int, Measured] = field(default_factory=dict)
    compared: Runs = field(default_factory=lambda: {"mover": [], "bare": []})

    @property
    def best(self) -> int:
        """The number with which kopia took the least time."""
        return min(self.tried, key=lambda parallel: self.tried[parallel].seconds)

    @property
    def ratio(self) -> float:
        """The mover's time compared with kopia's at its best."""
        return ratio_of(self.compared)


@dataclass
class FarFigures:
    """All runs; `in_repository` has those in the repository of many snapshots, by the round trip and what was done."""

    seconds: float
    uploads: Swept = field(default_factory=Swept)
    restores: Swept = field(default_factory=Swept)
    in_repository: dict[float, dict[str, Runs]] = field(default_factory=dict)

    def summary(self) -> dict[str, float]:
        """Return the last line's object."""
        found: dict[str, float] = {
            "far_upload_ratio": self.uploads.ratio,
            "far_upload_best_parallel": self.uploads.best,
            "far_restore_ratio": self.restores.ratio,
            "far_restore_best_parallel": self.restores.best,
        }
        for seconds, done in self.in_repository.items():
            for what, runs in done.items():
                name = f"{'far' if seconds else 'near'}_repository_{what.replace(' ', '_')}"
                found |= {f"{name}_s": round(median_seconds(runs["mover"]), 2), f"{name}_ratio": ratio_of(runs)}
        return found

    def lines(self) -> Iterator[str]:
        """Yield the table."""
        rows: Runs = {}
        for what, swept in (("upload", self.uploads), ("restore", self.restores)):
            for parallel, run in swept.tried.items():
                rows[f"{what}, bare kopia, {parallel} in parallel"] = [run]
            rows[f"{what}, bare kopia, {swept.best} in parallel, beside the mover"] = swept.compared["bare"]
            rows[f"{what}, mover"] = swept.compared["mover"]
        for seconds, done in self.in_repository.items():
            where = f"many snapshots, {seconds * 1000:.0f} ms"
            for what, runs in done.items():
                rows[f"{where}: {what}, bare kopia"] = runs["bare"]
                rows[f"{where}: {what}, mover"] = runs["mover"]
        yield from table(rows)


def ratio_of(runs: Runs) -> float:
    """Return the mover's time compared with kopia's, medians."""
    return round(median_seconds(runs["mover"]) / median_seconds(runs["bare"]), 3)

"""All runs of the mover and of bare kopia, in their order.

Knows which of them are compared, how each begins on equal terms, and when there is no time for
more of them. Does not know targets, nor how anything is shown.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Final

from benchmarks.cluster import BUCKET, Cluster
from benchmarks.disks import Disks, memory_at
from benchmarks.figures import ConfinementFigures, Figures
from benchmarks.groups import memory_group
from benchmarks.processes import BenchmarkError, Measured
from benchmarks.programs import BARE_BUCKET, TUNED, BareKopia, Mover
from benchmarks.stages import Stages
from benchmarks.tree import TreeShape, find_differences, make_tree, survey_tree
from tests.datamover.support.s3server import S3Server

__all__ = ["FULL", "LEAST_PAIRS", "QUICK", "Benchmark", "Plan", "pairs_fit"]

LEAST_PAIRS: Final = 3
"""The minimum, however long they take: a median of fewer means nothing."""

_LIMIT_MIB: Final = 256
_SHOWN_DIFFERENCES: Final = 10
_LEAVING_SECONDS: Final = 15.0
"""What remains to be done after the last pair."""


@dataclass(frozen=True)
class Plan:
    """How much is measured, and within which time."""

    tree: TreeShape
    many_files: TreeShape
    pairs: int
    confined_tree: TreeShape
    confined_pairs: int
    seconds: float = 900.0


FULL: Final = Plan(
    TreeShape(8, 125_000_000, 20_000, 10_000),
    TreeShape(0, 0, 200_000, 2_000),
    pairs=5,
    confined_tree=TreeShape(3, 100_000_000, 5_000, 10_000),
    confined_pairs=15,
)
_TINY: Final = TreeShape(1, 3_000_000, 50, 2_000)
QUICK: Final = Plan(_TINY, TreeShape(0, 0, 300, 1_000), pairs=1, confined_tree=_TINY, confined_pairs=1)


def pairs_fit(done: int, last_seconds: float, left_seconds: float) -> bool:
    """Return whether one more pair is run after so many, by the duration of the last one and the time that is left."""
    return done < LEAST_PAIRS or last_seconds + _LEAVING_SECONDS <= left_seconds


class Benchmark:
    """One pass over everything, in a folder of its own."""

    def __init__(self, plan: Plan, folder: Path, s3: S3Server, cluster: Cluster, stages: Stages) -> None:
        self._plan = plan
        self._folder = folder
        self._s3 = s3
        self._stages = stages
        self._disks = Disks(folder, stages)
        numbers = count(1)
        self._mover = Mover(cluster, folder, self._disks, numbers)
        self._unconfined = Mover(cluster, folder, self._disks, numbers, confined=False)
        self._bare = BareKopia(s3, folder / "bare.log", self._disks)
        self._template = folder / "template"
        self._figures = Figures(own_disks=self._disks.own)

    async def run(self) -> Figures:
        """Measure everything and return the figures.

        The pairs come last: then it is known how many of them there is time for.
        """
        self._stages.say("preparing: an empty repository, the mover once each way")
        await self.prepare()
        with self._tree(self._plan.tree) as tree:
            self._figures.limited_ok = await self._limited(tree, "")
            files = f"{self._plan.many_files.files:,} files "
            with self._tree(self._plan.many_files) as many:
                self._figures.limited_many_files_ok = await self._limited(many, files)
            await self._pairs(tree)
        return self._figures

    async def run_confined(self) -> ConfinementFigures:
        """Measure what the confinement of kopia costs: pairs of the mover, with it and without."""
        self._stages.say("preparing: an empty repository, each mover once each way")
        await self.prepare()
        figures = ConfinementFigures(own_disks=self._disks.own)
        with self._tree(self._plan.confined_tree) as tree:
            await self._both_ways(self._unconfined, tree)
            for number in range(self._plan.confined_pairs):
                self._stages.say(f"pair {number + 1} of {self._plan.confined_pairs}")
                movers = [self._mover, self._unconfined]
                runs = {mover: await self._both_ways(mover, tree) for mover in movers[:: 1 if number % 2 else -1]}
                confined, unconfined = (runs[mover] for mover in movers)
                figures.uploads.append((confined[0], unconfined[0]))
                figures.restores.append((confined[1], unconfined[1]))
        return figures

    async def _both_ways(self, mover: Mover, tree: Path) -> tuple[Measured, Measured]:
        """Return what an upload took, and a restore of it."""
        self._fresh_bucket(BUCKET)
        with self._stages.stage("uploads"):
            uploaded, result = await mover.back_up(tree)
        with self._disks.volume() as target:
            self._settle()
            with self._stages.stage("restores"):
                return uploaded, await mover.restore(result.snapshot_id, target)

    async def prepare(self) -> None:
        """Make an empty repository to copy, and let the mover run once each way: that compiles it."""
        with self._stages.stage("preparing"):
            self._s3.make_bucket(BUCKET)
            await self._mover.init()
            shutil.copytree(self._s3.folder / BUCKET, self._template)
            tree = make_tree(self._folder / "first", QUICK.tree)
            _, result = await self._mover.back_up(tree)
            with self._disks.volume() as target:
                await self._mover.restore(result.snapshot_id, target)

    @contextmanager
    def _tree(self, shape: TreeShape) -> Iterator[Path]:
        """Return a tree in memory until it is left: as it is on a disk once it has been read."""
        with memory_at(self._folder / f"tree-of-{shape.files}") as memory:
            self._stages.say(f"making a tree of {shape.files:,} files")
            with self._stages.stage("making trees"):
                tree = make_tree(memory / "tree", shape)
            yield tree

    async def _pairs(self, tree: Path) -> None:
        took = 0.0
        for number in range(self._plan.pairs):
            began = self._stages.seconds
            if not pairs_fit(number, took, self._plan.seconds - began):
                self._stages.say(f"no time for more than {number} pairs")
                return
            self._stages.say(f"pair {number + 1} of {self._plan.pairs}")
            snapshot_id = await self._uploads(tree, mover_first=number % 2 == 0)
            await self._restores(snapshot_id, mover_first=number % 2 == 0)
            took = self._stages.seconds - began

    async def _uploads(self, tree: Path, *, mover_first: bool) -> str:
        """Run one pair, and the third beside it; return the mover's snapshot."""
        figures = self._figures
        snapshot_id = ""
        order = ["mover", "bare", "tuned"]
        for who in order if mover_first else reversed(order):
            self._fresh_bucket(BUCKET if who == "mover" else BARE_BUCKET)
            with self._stages.stage("uploads"):
                match who:
                    case "mover":
                        measured, result = await self._mover.back_up(tree)
                        figures.mover_uploads.append(measured)
                        snapshot_id = result.snapshot_id
                    case "bare":
                        figures.bare_uploads.append(await self._bare.back_up(tree))
                    case _:
                        figures.tuned_uploads.append(await self._bare.back_up(tree, TUNED))
        self._settle()
        with self._stages.stage("second backups"):
            measured, _ = await self._mover.back_up(tree)
        figures.second_backups.append(measured)
        return snapshot_id

    async def _restores(self, snapshot_id: str, *, mover_first: bool) -> None:
        figures = self._figures
        for mover in (mover_first, not mover_first):
            with self._disks.volume() as target:
                self._settle()
                with self._stages.stage("restores"):
                    if mover:
                        figures.mover_restores.append(await self._mover.restore(snapshot_id, target))
                    else:
                        figures.bare_restores.append(await self._bare.restore(snapshot_id, target))

    async def _limited(self, tree: Path, files: str) -> bool | None:
        """Return whether a tree is restored unchanged within a memory limit; None: no permission to set one."""
        name = f"{files}within {_LIMIT_MIB} MiB"
        with memory_group(_LIMIT_MIB) as group:
            if group is None:
                self._stages.say("no permission to make control groups: the effect of a memory limit is not measured")
                return None
            self._s3.make_bucket(BARE_BUCKET)
            self._fresh_bucket(BUCKET)
            with self._disks.volume() as target:
                try:
                    self._stages.say(f"upload {name}")
                    with self._stages.stage("uploads within a memory limit"):
                        uploaded, result = await self._mover.back_up(tree, group)
                    self._stages.say(f"restore {name}")
                    with self._stages.stage("restores within a memory limit"):
                        restored = await self._mover.restore(result.snapshot_id, target, group)
                except BenchmarkError as e:
                    self._stages.say(str(e))
                    return False
                self._figures.limited |= {f"upload {name}, mover": uploaded, f"restore {name}, mover": restored}
                return self._is_same(tree, target)

    def _is_same(self, tree: Path, target: Path) -> bool:
        self._stages.say("comparing")
        with self._stages.stage("comparing"):
            differences = find_differences(survey_tree(tree), target)
        for difference in differences[:_SHOWN_DIFFERENCES]:
            self._stages.say(difference)
        return not differences

    def _fresh_bucket(self, name: str) -> None:
        """Let a bucket hold the empty repository."""
        self._s3.make_bucket(name)
        shutil.copytree(self._template, self._s3.folder / name, dirs_exist_ok=True)
        self._settle()

    def _settle(self) -> None:
        """Let nothing wait to be written to the disk, and the disk have freed what was deleted."""
        with self._stages.stage("waiting for the disk before a run"):
            os.sync()

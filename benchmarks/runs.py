"""All runs of the mover and of bare kopia, in their order.

Knows which of them are compared, how each begins on equal terms, and when there is no time for
more of them. Does not know targets, nor how anything is shown.
"""

import os
import shutil
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Final

from benchmarks.cluster import BUCKET, Cluster
from benchmarks.disks import Disks, memory_at
from benchmarks.figures import ConfinementFigures, Figures, ManyFigures, ParallelFigures, Row
from benchmarks.groups import may_limit
from benchmarks.processes import BenchmarkError, Measured
from benchmarks.programs import BARE_BUCKET, BareKopia, KopiaSettings, Mover
from benchmarks.stages import Stages
from benchmarks.tree import TreeShape, find_differences, make_tree, survey_tree
from tests.datamover.support.s3server import S3Server

__all__ = ["FULL", "LEAST_PAIRS", "QUICK", "Benchmark", "Plan", "pairs_fit"]

LEAST_PAIRS: Final = 3
"""The minimum, however long they take: a median of fewer means nothing."""

_LIMIT_MIB: Final = 256
_MANY_LIMIT_MIB: Final = 512
_SHOWN_DIFFERENCES: Final = 10
_UPLOADS_SHARE: Final = 0.4
"""Of the time that is left for pairs: those of restores have more runs."""

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
    very_many_files: TreeShape
    seconds: float = 900.0


FULL: Final = Plan(
    TreeShape(8, 125_000_000, 20_000, 10_000),
    TreeShape(0, 0, 200_000, 2_000),
    pairs=5,
    confined_tree=TreeShape(3, 100_000_000, 5_000, 10_000),
    confined_pairs=15,
    very_many_files=TreeShape(0, 0, 2_000_000, 16),
)
_TINY: Final = TreeShape(1, 3_000_000, 50, 2_000)
QUICK: Final = Plan(
    _TINY,
    TreeShape(0, 0, 300, 1_000),
    pairs=1,
    confined_tree=_TINY,
    confined_pairs=1,
    very_many_files=TreeShape(0, 0, 1_000, 16),
)


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
        self._figures = Figures(self._disks.own)

    async def run(self) -> Figures:
        """Measure everything and return the figures.

        The pairs come last: then it is known how many of them there is time for.
        """
        await self.prepare()
        with self._tree(self._plan.tree) as tree:
            self._figures.limited_ok = await self._limited(tree, "")
            files = f"{self._plan.many_files.files:,} files "
            with self._tree(self._plan.many_files) as many:
                self._figures.limited_many_files_ok = await self._limited(many, files)
            half = (self._plan.seconds - self._stages.seconds) * _UPLOADS_SHARE
            await self._pairs(self._stages.seconds + half, partial(self._uploads, tree), "uploads")
        self._s3.make_bucket(BARE_BUCKET)
        self._fresh_bucket(BUCKET)
        large, small = [await self._back_up_once(shape) for shape in self._plan.tree.apart()]
        await self._pairs(self._plan.seconds, partial(self._restores, large, small), "restores")
        return self._figures

    async def run_confined(self) -> ConfinementFigures:
        """Measure what the confinement of kopia costs: pairs of the mover, with it and without."""
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

    async def run_parallel(self) -> ParallelFigures:
        """Measure uploads with one file in parallel for each CPU, kopia's default, and with one and two more."""
        await self.prepare()
        figures = ParallelFigures(self._disks.own)
        cpus, settings = len(os.sched_getaffinity(0)), KopiaSettings.of_backups()
        with self._tree(self._plan.tree) as tree:
            for number in range(self._plan.pairs):
                step = -1 if number % 2 else 1
                for parallel in range(cpus, cpus + 3)[::step]:
                    self._stages.say(f"round {number + 1} of {self._plan.pairs}: {parallel} files in parallel")
                    runs = [
                        (figures.movers, BUCKET, partial(self._back_up, tree, parallel)),
                        (figures.bare, BARE_BUCKET, partial(self._bare.back_up, tree, settings, parallel=parallel)),
                    ]
                    for found, bucket, run in runs[::step]:
                        self._fresh_bucket(bucket)
                        with self._stages.stage("uploads"):
                            found.setdefault(parallel, []).append(await run())
        return figures

    async def run_many(self) -> ManyFigures:
        """Measure very many files within a memory limit both ways, and a small tree in their repository.

        Raises:
            BenchmarkError: a run failed, for example for lack of memory.
        """
        await self.prepare()
        self._fresh_bucket(BUCKET)
        shape = self._plan.very_many_files
        figures = ManyFigures(shape.files, _MANY_LIMIT_MIB, self._disks.own)
        files = f"{shape.files:,} files"
        with self._disks.volume() as volume:
            self._stages.say(f"making a tree of {files}")
            with self._stages.stage("making trees"):
                tree = make_tree(volume / "tree", shape)
            for name in (f"upload of {files}", "second backup, nothing changed"):
                self._stages.say(name)
                self._settle()
                with self._stages.stage("uploads within a memory limit"):
                    run, result = await self._mover.back_up(tree, _MANY_LIMIT_MIB)
                figures.runs[f"{name}, within {_MANY_LIMIT_MIB} MiB"] = run
        figures.contents = await self._bare.count_contents()
        figures.same = await self._small_among(figures)
        with self._disks.volume() as target:
            name = f"restore of {files}"
            self._stages.say(name)
            with self._stages.stage("restores within a memory limit"):
                run = await self._mover.restore(result.snapshot_id, target, _MANY_LIMIT_MIB)
            figures.runs[f"{name}, within {_MANY_LIMIT_MIB} MiB"] = run
            restored = sum(len(names) for _, _, names in os.walk(target))
        figures.same = figures.same and restored == shape.files
        return figures

    async def _small_among(self, figures: ManyFigures) -> bool:
        """Return whether a small tree is the same after an upload and a restore in the repository as it is."""
        limit, contents = _MANY_LIMIT_MIB, f"among {figures.contents:,} contents, within {_MANY_LIMIT_MIB} MiB"
        with self._tree(self._plan.confined_tree) as tree, self._disks.volume() as target:
            files = f"{self._plan.confined_tree.files:,} files"
            with self._stages.stage("uploads within a memory limit"):
                uploaded, result = await self._mover.back_up(tree, limit)
            with self._stages.stage("restores within a memory limit"):
                restored = await self._mover.restore(result.snapshot_id, target, limit)
            figures.runs |= {f"upload of {files} {contents}": uploaded, f"restore of {files} {contents}": restored}
            return self._is_same(tree, target)

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
        self._stages.say("preparing: an empty repository, the mover once each way")
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

    async def _back_up_once(self, shape: TreeShape) -> str:
        """Return the mover's snapshot of a tree; it is not measured."""
        with self._tree(shape) as tree, self._stages.stage("backups to restore"):
            _, result = await self._mover.back_up(tree)
        return result.snapshot_id

    async def _pairs(self, until: float, run: Callable[[int], Awaitable[None]], what: str) -> None:
        """Run pairs of a mover and bare kopia, as many as there is time for; `run` gets the step through their list."""
        took = 0.0
        for number in range(self._plan.pairs):
            began = self._stages.seconds
            if not pairs_fit(number, took, until - began):
                self._stages.say(f"no time for more than {number} pairs of {what}")
                return
            self._stages.say(f"{what}: pair {number + 1} of {self._plan.pairs}")
            await run(-1 if number % 2 else 1)
            took = self._stages.seconds - began

    async def _uploads(self, tree: Path, step: int) -> None:
        """Run one pair, the third beside it, and second backups of both kinds."""
        runs: list[tuple[Row, str, Callable[[], Awaitable[Measured]]]] = [
            (Row.UPLOAD, BUCKET, lambda: self._back_up(tree)),
            (Row.BARE_UPLOAD, BARE_BUCKET, lambda: self._bare.back_up(tree)),
            (Row.TUNED_UPLOAD, BARE_BUCKET, lambda: self._bare.back_up(tree, KopiaSettings.of_backups())),
        ]
        for row, bucket, run in runs[::step]:
            self._fresh_bucket(bucket)
            with self._stages.stage("uploads"):
                self._figures.add(row, await run())
        self._settle()
        with self._stages.stage("second backups"):
            self._figures.add(Row.SECOND, await self._back_up(tree))
            self._figures.add(Row.TUNED_SECOND, await self._bare.back_up(tree, KopiaSettings.of_backups()))

    async def _back_up(self, tree: Path, parallel: int = 0) -> Measured:
        measured, _ = await self._mover.back_up(tree, parallel=parallel)
        return measured

    async def _restores(self, large: str, small: str, step: int) -> None:
        """Run one pair of each tree, the third beside it, and one of small files without barriers."""
        mover, bare, settings = self._mover, self._bare, KopiaSettings.of_restores()
        runs: list[tuple[Row, Callable[[Path], Awaitable[Measured]]]] = [
            (Row.LARGE, partial(mover.restore, large)),
            (Row.BARE_LARGE, partial(bare.restore, large)),
            (Row.TUNED_LARGE, partial(bare.restore, large, settings=settings)),
            (Row.SMALL, partial(mover.restore, small)),
            (Row.BARE_SMALL, partial(bare.restore, small)),
            (Row.TUNED_SMALL, partial(bare.restore, small, settings=settings)),
            (Row.NO_BARRIERS, partial(mover.restore, small, barriers=False)),
            (Row.BARE_NO_BARRIERS, partial(bare.restore, small, barriers=False)),
        ]
        for row, run in runs[::step]:
            with self._disks.volume() as target:
                self._settle()
                with self._stages.stage("restores"):
                    self._figures.add(row, await run(target))

    async def _limited(self, tree: Path, files: str) -> bool | None:
        """Return whether a tree is restored unchanged within a memory limit; None: no permission to set one."""
        name = f"{files}within {_LIMIT_MIB} MiB"
        if not may_limit():
            self._stages.say("no permission to make control groups: the effect of a memory limit is not measured")
            return None
        self._s3.make_bucket(BARE_BUCKET)
        self._fresh_bucket(BUCKET)
        with self._disks.volume() as target:
            try:
                self._stages.say(f"upload {name}")
                with self._stages.stage("uploads within a memory limit"):
                    uploaded, result = await self._mover.back_up(tree, _LIMIT_MIB)
                self._stages.say(f"restore {name}")
                with self._stages.stage("restores within a memory limit"):
                    restored = await self._mover.restore(result.snapshot_id, target, _LIMIT_MIB)
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

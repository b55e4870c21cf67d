"""All runs with a storage that is far away, and those in a repository of many snapshots, in their order.

Knows which settings of kopia are tried. Does not know how anything is shown.
"""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from benchmarks.cluster import BUCKET, Cluster
from benchmarks.latency.figures import FarFigures, Runs
from benchmarks.latency.line import run_line
from benchmarks.processes import Measured
from benchmarks.programs import BARE_BUCKET, BareKopia
from benchmarks.runs import QUICK as QUICK_PLAN
from benchmarks.runs import Benchmark
from benchmarks.stages import Stages
from benchmarks.tree import TreeShape
from tests.datamover.support.s3server import S3Server

__all__ = ["FULL", "QUICK", "FarBenchmark", "FarPlan"]


@dataclass(frozen=True)
class FarPlan:
    """How long a round trip takes, what is moved, and which numbers of files in parallel kopia is given.

    A repository has a snapshot of each of so many volumes, which share the files of `files` evenly.
    """

    seconds: float
    tree: TreeShape
    uploads: Sequence[int]
    restores: Sequence[int]
    files: TreeShape
    volumes: int
    rounds: int


FULL: Final = FarPlan(
    0.02,
    TreeShape(0, 0, 20_000, 10_000),
    uploads=(2, 4, 8, 16, 32),
    restores=(32, 64, 128),
    files=TreeShape(0, 0, 200_000, 2_000),
    volumes=50,
    rounds=3,
)
QUICK: Final = FarPlan(
    0.02,
    TreeShape(0, 0, 100, 2_000),
    uploads=(2, 4),
    restores=(16, 32),
    files=TreeShape(0, 0, 400, 1_000),
    volumes=4,
    rounds=1,
)


class FarBenchmark(Benchmark):
    """One pass over everything, in a folder of its own."""

    def __init__(self, plan: FarPlan, folder: Path, s3: S3Server, cluster: Cluster, stages: Stages) -> None:
        super().__init__(QUICK_PLAN, folder, s3, cluster, stages)
        self._far = plan
        self._cluster = cluster
        self._found = FarFigures(plan.seconds)

    async def run_far(self) -> FarFigures:
        """Measure everything and return the figures."""
        await self.prepare()
        with self._tree(self._far.tree) as tree, self._line(self._far.seconds) as bare:
            snapshot_id = await self._sweep_uploads(tree, bare)
            await self._sweep_restores(snapshot_id, bare)
        with self._tree(self._far.files) as files:
            await self._repository(_split(files, self._far.volumes))
        return self._found

    @contextmanager
    def _line(self, seconds: float) -> Iterator[BareKopia]:
        """Let movers, and the bare kopia that is yielded, reach the bucket by a line; 0: without one."""
        line = run_line(self._s3.url, self._folder / "line", seconds) if seconds else nullcontext(self._s3.url)
        with line as url:
            s3 = replace(self._s3, url=url)
            self._cluster.put_location(s3)
            yield replace(self._bare, s3=s3)

    async def _sweep_uploads(self, tree: Path, bare: BareKopia) -> str:
        """Try kopia's settings, then alternate the best one and the mover; return a snapshot of the mover."""
        swept, snapshot_id = self._found.uploads, ""
        for parallel in self._far.uploads:
            swept.tried[parallel] = await self._upload(tree, bare, parallel)
        for who in self._turns():
            if who == "bare":
                swept.compared[who].append(await self._upload(tree, bare, swept.best))
                continue
            self._stages.say("upload, mover")
            self._fresh_bucket(BUCKET)
            with self._stages.stage("uploads"):
                measured, result = await self._mover.back_up(tree)
            swept.compared[who].append(measured)
            snapshot_id = result.snapshot_id
        return snapshot_id

    async def _upload(self, tree: Path, bare: BareKopia, parallel: int) -> Measured:
        self._stages.say(f"upload, bare kopia, {parallel} in parallel")
        self._fresh_bucket(BARE_BUCKET)
        with self._stages.stage("uploads"):
            return await bare.back_up(tree, parallel=parallel)

    async def _sweep_restores(self, snapshot_id: str, bare: BareKopia) -> None:
        swept = self._found.restores
        for parallel in self._far.restores:
            swept.tried[parallel] = await self._restore(snapshot_id, bare, parallel)
        for who in self._turns():
            kopia = bare if who == "bare" else None
            swept.compared[who].append(await self._restore(snapshot_id, kopia, swept.best))

    async def _restore(self, snapshot_id: str, bare: BareKopia | None, parallel: int = 0) -> Measured:
        """Restore by the mover, or by bare kopia with so many files in parallel; 0 is its default."""
        who = f"bare kopia, {parallel or 'as many as usual'} in parallel" if bare else "mover"
        self._stages.say(f"restore, {who}")
        with self._disks.volume() as target:
            self._settle()
            with self._stages.stage("restores"):
                if bare is None:
                    return await self._mover.restore(snapshot_id, target)
                return await bare.restore(snapshot_id, target, parallel=parallel)

    async def _repository(self, volumes: Sequence[Path]) -> None:
        """Measure the second backup of a volume and its restore, near and far, in a repository with all the others."""
        first, *others = volumes
        self._stages.say(f"backing up {len(volumes)} volumes")
        self._fresh_bucket(BARE_BUCKET)
        with self._stages.stage("filling a repository"):
            await self._bare.call("snapshot", "create", *map(str, others))
            self._s3.make_bucket(BUCKET)
            shutil.copytree(self._s3.folder / BARE_BUCKET, self._s3.folder / BUCKET, dirs_exist_ok=True)
            with self._line(0.0) as bare:
                _, result = await self._mover.back_up(first)
                await bare.back_up(first)
        for seconds in (0.0, self._far.seconds):
            runs: dict[str, Runs] = {what: {"mover": [], "bare": []} for what in ("second backup", "restore")}
            self._found.in_repository[seconds] = runs
            with self._line(seconds) as bare:
                for who in self._turns():
                    kopia = bare if who == "bare" else None
                    self._settle()
                    with self._stages.stage("second backups"):
                        again = await kopia.back_up(first) if kopia else (await self._mover.back_up(first))[0]
                    runs["second backup"][who].append(again)
                    runs["restore"][who].append(await self._restore(result.snapshot_id, kopia))

    def _turns(self) -> Iterator[str]:
        """Yield whose turn it is: in each round, the other one is first."""
        for number in range(self._far.rounds):
            yield from ("mover", "bare")[:: 1 if number % 2 == 0 else -1]


def _split(files: Path, volumes: int) -> list[Path]:
    """Return that many directories with the same number of the folders in `files`."""
    folders = sorted(files.iterdir())
    found = [files / f"volume-{number:03}" for number in range(volumes)]
    for number, folder in enumerate(folders):
        volume = found[number % volumes]
        volume.mkdir(exist_ok=True)
        folder.rename(volume / folder.name)
    return found

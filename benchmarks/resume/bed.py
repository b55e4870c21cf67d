"""What the runs of both directions have: a mover, a repository behind a limited line, and trees in memory.

Does not know what is killed when, or what is measured.
"""

import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Final

from benchmarks.cluster import BUCKET, PREFIX, RUN, leave_service_account, run_cluster
from benchmarks.disks import Disks, memory_at
from benchmarks.programs import Mover
from benchmarks.resume.movers import ResumedMover
from benchmarks.resume.relay import run_relay
from benchmarks.stages import Stages
from benchmarks.tree import TreeShape, find_differences, make_tree, survey_tree
from tests.datamover.support.s3server import S3Server, run_s3_server
from tests.testbed.pki import Authority

__all__ = ["FULL", "QUICK", "ResumeBed", "ResumePlan", "Stored", "open_bed"]

_INDEX: Final = "x"
"""kopia's index blobs begin with it; what no index names is as if it had not been sent."""

_SHOWN_DIFFERENCES: Final = 10


@dataclass(frozen=True)
class ResumePlan:
    """What is moved, over which line, how often kopia saves a checkpoint, and how often a restore lists its files.

    `kills` transfers of `kill_tree` are killed at a random moment, half of them backups, over a line that is not
    limited. Restores of it whose node is lost have a line of their own: the fence, whose times are so small a part of
    the defaults, ends the first attempt in the middle.
    """

    tree: TreeShape
    bytes_per_second: float
    checkpoint_seconds: int
    list_seconds: int
    kill_tree: TreeShape
    kills: int
    lost_bytes_per_second: float
    fence_part: int

    @property
    def kills_a_way(self) -> int:
        """How many backups are killed, and how many restores."""
        return self.kills // 2

    @property
    def settings(self) -> dict[str, str]:
        """Variables of the mover's environment."""
        return {
            "DATA_MOVER_CHECKPOINT_INTERVAL": f"{self.checkpoint_seconds}s",
            "DATA_MOVER_RESTORE_LIST_INTERVAL": f"{self.list_seconds}s",
        }


FULL: Final = ResumePlan(
    TreeShape(8, 250_000_000, 20_000, 100_000),
    bytes_per_second=25e6,
    checkpoint_seconds=10,
    list_seconds=1,
    kill_tree=TreeShape(2, 100_000_000, 2_000, 100_000),
    kills=40,
    lost_bytes_per_second=10e6,
    fence_part=10,
)
QUICK: Final = ResumePlan(
    TreeShape(4, 50_000_000, 500, 100_000),
    bytes_per_second=10e6,
    checkpoint_seconds=10,
    list_seconds=1,
    kill_tree=TreeShape(1, 20_000_000, 100, 100_000),
    kills=2,
    lost_bytes_per_second=2e6,
    fence_part=30,
)


@dataclass(frozen=True)
class Stored:
    """One blob of the repository: its size in bytes, when it was written (Unix time), and whether it is an index."""

    size_bytes: int
    at: float
    is_index: bool


@dataclass
class ResumeBed:
    """A mover, its repository in the bucket of `s3`, and the URL of a limited line to it."""

    plan: ResumePlan
    stages: Stages
    mover: ResumedMover
    disks: Disks
    folder: Path
    s3: S3Server
    limited_url: str

    def use_line(self, *, limited: bool) -> None:
        """Let movers reach the storage over the limited line, or directly."""
        self.mover.cluster.put_location(replace(self.s3, url=self.limited_url) if limited else self.s3)

    def fresh_bucket(self) -> None:
        """Let the bucket hold the empty repository."""
        self.s3.make_bucket(BUCKET)
        shutil.copytree(self._template, self.s3.folder / BUCKET, dirs_exist_ok=True)

    async def prepare(self) -> None:
        """Make an empty repository to copy, and let the mover run once: that compiles it."""
        with self.stages.stage("preparing"):
            self.s3.make_bucket(BUCKET)
            self.use_line(limited=False)
            await self.mover.mover.init()
            shutil.copytree(self.s3.folder / BUCKET, self._template)
            tree = make_tree(self.folder / "first", TreeShape(1, 1_000_000, 10, 1_000))
            self.mover.begin("DataUpload")
            await self.mover.run(tree)

    def blobs(self, since: float = 0.0) -> list[Stored]:
        """Return the blobs of the repository that were written since then (Unix time), oldest first."""
        found = []
        for file in (self.s3.folder / BUCKET / PREFIX).iterdir():
            state = file.stat()
            if file.is_file() and state.st_mtime >= since:
                found.append(Stored(state.st_size, state.st_mtime, file.name.startswith(_INDEX)))
        return sorted(found, key=lambda blob: blob.at)

    @contextmanager
    def tree(self, shape: TreeShape) -> Iterator[Path]:
        """Yield a tree in memory."""
        with memory_at(self.folder / f"tree-of-{shape.files}") as memory:
            self.stages.say(f"making a tree of {shape.files:,} files")
            with self.stages.stage("making trees"):
                tree = make_tree(memory / "tree", shape)
            yield tree

    def is_same(self, tree: Path, target: Path) -> bool:
        """Return whether two trees are the same; print differences."""
        with self.stages.stage("comparing"):
            differences = find_differences(survey_tree(tree), target)
        for difference in differences[:_SHOWN_DIFFERENCES]:
            self.stages.say(difference)
        return not differences

    @property
    def _template(self) -> Path:
        return self.folder / "template"


@asynccontextmanager
async def open_bed(plan: ResumePlan, folder: Path, stages: Stages) -> AsyncIterator[ResumeBed]:
    """Serve a cluster and a bucket in memory, and yield the bed, prepared."""
    authority = Authority(folder / "pki")
    (folder / "cluster").mkdir()
    with memory_at(RUN), memory_at(folder / "s3") as buckets, run_s3_server(buckets) as s3:
        leave_service_account(authority)
        async with (
            run_cluster(folder / "cluster", authority) as cluster,
            run_relay(s3.url, plan.bytes_per_second) as url,
        ):
            disks = Disks(folder, stages)
            mover = ResumedMover(cluster, Mover(cluster, folder, disks, count(1)), disks, plan.settings)
            bed = ResumeBed(plan, stages, mover, disks, folder, s3, url)
            await bed.prepare()
            yield bed

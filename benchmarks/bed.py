"""What benchmarks of data movers begin with: namespaces of their own, a mover, its repository, trees in memory."""

import argparse
import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Final

from benchmarks.cluster import BUCKET, RUN, Cluster, leave_service_account, run_cluster
from benchmarks.disks import Disks, memory_at
from benchmarks.figures import Summary, print_report, say
from benchmarks.processes import BenchmarkError
from benchmarks.programs import Mover
from benchmarks.tree import TreeShape, find_differences, make_tree, survey_tree
from core.contract import MoverMethod
from tests.datamover.support.s3server import S3Server, run_s3_server
from tests.support.tools import tool
from tests.testbed.pki import Authority

_INSIDE: Final = "--inside"
_NAMESPACES: Final = ("--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
"""A mount namespace for the service account and temporary file systems; a PID namespace: no process outlives it."""

_LOG: Final = RUN / "s3-access.log"
_LOGGED: Final = (f"--access-log={_LOG}",)

_FIRST_TREE: Final = TreeShape(1, 3_000_000, 50, 2_000)
_SHOWN_DIFFERENCES: Final = 10


@dataclass(frozen=True)
class Report:
    """What a run shows: its conditions, a table for people, and figures for programs."""

    conditions: str
    lines: Iterable[str]
    summary: Summary


@dataclass
class Bed:
    """A mover and its repository in a bucket of `s3`."""

    folder: Path
    s3: S3Server
    cluster: Cluster

    def __post_init__(self) -> None:
        self.disks = Disks(self.folder)
        self._numbers = count(1)
        self.mover = self.new_mover()

    def new_mover(self, *, confined: bool = True, way: MoverMethod = MoverMethod.ONE_OPEN) -> Mover:
        """Return a mover of this cluster that runs kopia in this way."""
        return Mover(self.cluster, self.folder, self.disks, self._numbers, confined=confined, way=way)

    async def prepare(self) -> None:
        """Make an empty repository to copy, and let the mover run once each way: that compiles it."""
        say("preparing: an empty repository, the mover once each way")
        self.cluster.put_location(self.s3)
        self.s3.make_bucket(BUCKET)
        await self.mover.init()
        shutil.copytree(self.s3.folder / BUCKET, self.folder / "template")
        _, result = await self.mover.back_up(make_tree(self.folder / "first", _FIRST_TREE))
        with self.disks.volume() as target:
            await self.mover.restore(result.snapshot_id, target)

    def fresh_bucket(self, name: str = BUCKET) -> None:
        """Let a bucket hold the empty repository."""
        self.s3.make_bucket(name)
        shutil.copytree(self.folder / "template", self.s3.folder / name, dirs_exist_ok=True)
        self.settle()

    def count_requests(self) -> int:
        """Return how many requests the S3 server has answered."""
        return _LOG.read_bytes().count(b"\n")

    def settle(self) -> None:
        """Let nothing wait to be written to the disk, and the disk have freed what was deleted."""
        os.sync()

    @contextmanager
    def tree(self, shape: TreeShape) -> Iterator[Path]:
        """Yield a tree in memory: as it is on a disk once it has been read."""
        with memory_at(self.folder / f"tree-of-{shape.files}") as memory:
            say(f"making a tree of {shape.files:,} files")
            tree = make_tree(memory / "tree", shape)
            yield tree

    def is_same(self, tree: Path, target: Path) -> bool:
        """Return whether two trees are the same; print differences."""
        say("comparing")
        differences = find_differences(survey_tree(tree), target)
        for difference in differences[:_SHOWN_DIFFERENCES]:
            say(difference)
        return not differences


def run_alone(parser: argparse.ArgumentParser, measure: Callable[[argparse.Namespace, Bed], Awaitable[Report]]) -> int:
    """Parse the command line, measure in namespaces of its own, and print the report; return the exit code.

    Args:
        parser: has the benchmark's own arguments; its `prog` is the module's name in `benchmarks`.
        measure: measures in a bed whose folder is removed afterwards.
    """
    parser.add_argument("--quick", action="store_true", help="tiny trees, one round: does the benchmark work?")
    parser.add_argument(
        "--folder", type=Path, help="on the disk to restore to (default: the folder of temporary files)"
    )
    parser.add_argument(_INSIDE, action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        return _run_inside(arguments, parser.prog, measure)
    for name in ("kopia", "versitygw"):
        tool(name, name)
    python = [sys.executable, "-m", f"benchmarks.{parser.prog}", _INSIDE, *sys.argv[1:]]
    return subprocess.run(["unshare", *_NAMESPACES, *python], check=False).returncode  # noqa: S603, S607


def _run_inside(
    arguments: argparse.Namespace, name: str, measure: Callable[[argparse.Namespace, Bed], Awaitable[Report]]
) -> int:
    began = time.monotonic()

    async def run(folder: Path) -> Report:
        async with _open_bed(folder) as bed:
            return await measure(arguments, bed)

    try:
        prefix = f"{name.replace('_', '-')}-"
        with tempfile.TemporaryDirectory(prefix=prefix, dir=arguments.folder) as folder:
            report = asyncio.run(run(Path(folder)))
    except BenchmarkError as e:
        say(str(e))
        return 1
    seconds = f"{time.monotonic() - began:.0f} s in all"
    print_report(f"{report.conditions}. {seconds}", report.lines, report.summary)
    return 0


@asynccontextmanager
async def _open_bed(folder: Path) -> AsyncIterator[Bed]:
    """Serve a cluster, and a bucket in memory; yield the bed, prepared."""
    authority = Authority(folder / "pki")
    (folder / "cluster").mkdir()
    with memory_at(RUN), memory_at(folder / "s3") as buckets, run_s3_server(buckets, flags=_LOGGED) as s3:
        leave_service_account(authority)
        async with run_cluster(folder / "cluster", authority) as cluster:
            bed = Bed(folder, s3, cluster)
            await bed.prepare()
            yield bed

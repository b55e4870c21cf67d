"""`python -m benchmarks.bench_mover`: what the mover costs beside kopia alone, on one machine.

Knows which runs there are and in which order. Does not know targets: who reads the last line does.
"""

import argparse
import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.cluster import BUCKET, RUN, Cluster, leave_service_account, memory_at, run_cluster
from benchmarks.figures import Figures, describe_machine
from benchmarks.groups import memory_group
from benchmarks.pages import check_page, record
from benchmarks.processes import BenchmarkError
from benchmarks.programs import BARE_BUCKET, TUNED, BareKopia, Mover
from benchmarks.tree import TreeShape, find_differences, make_tree, survey_tree
from tests.bed.pki import Authority
from tests.datamover.s3server import S3Server, run_s3_server
from tests.support.tools import tool

__all__ = ["main"]

_LIMIT_MIB: Final = 256
_SHOWN_DIFFERENCES: Final = 10
_FIGURES: Final = "figures of the data mover"
_INSIDE: Final = "--inside"
_NAMESPACES: Final = ("--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
"""A mount namespace for the service account, one of processes so that nothing outlives the benchmark."""


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    tree: TreeShape
    many_files: TreeShape
    pairs: int


_FULL: Final = Plan(TreeShape(8, 125_000_000, 20_000, 10_000), TreeShape(0, 0, 200_000, 2_000), 5)
_QUICK: Final = Plan(TreeShape(1, 3_000_000, 50, 2_000), TreeShape(0, 0, 300, 1_000), 1)


class Benchmark:
    """One pass over everything, in a folder of its own."""

    def __init__(self, plan: Plan, folder: Path, s3: S3Server, cluster: Cluster) -> None:
        self._plan = plan
        self._folder = folder
        self._s3 = s3
        self._mover = Mover(cluster, folder)
        self._bare = BareKopia(s3, folder / "bare")
        self._template = folder / "template"
        self._figures = Figures()

    async def run(self) -> Figures:
        """Measure everything and return the figures."""
        _say("preparing the trees and an empty repository")
        await self._prepare()
        tree = make_tree(self._folder / "tree", self._plan.tree)
        for number in range(self._plan.pairs):
            _say(f"pair {number + 1} of {self._plan.pairs}")
            snapshot_id = await self._uploads(tree, mover_first=number % 2 == 0)
            await self._restores(snapshot_id, mover_first=number % 2 == 0)
        with memory_group(_LIMIT_MIB) as group:
            if group is None:
                _say("nobody may make control groups here: what a memory limit does is not measured")
                return self._figures
            _say(f"the same tree within {_LIMIT_MIB} MiB")
            self._s3.make_bucket(BARE_BUCKET)
            self._figures.limited_ok = await self._limited(tree, group, f"within {_LIMIT_MIB} MiB")
            shutil.rmtree(tree)
            _say(f"{self._plan.many_files.files:,} small files within {_LIMIT_MIB} MiB")
            many = make_tree(self._folder / "many", self._plan.many_files)
            name = f"{self._plan.many_files.files:,} files within {_LIMIT_MIB} MiB"
            self._figures.limited_many_files_ok = await self._limited(many, group, name)
        return self._figures

    async def _prepare(self) -> None:
        """Make an empty repository to copy, and let the mover run once each way: that compiles it."""
        self._s3.make_bucket(BUCKET)
        await self._mover.init()
        shutil.copytree(self._s3.folder / BUCKET, self._template)
        tree = make_tree(self._folder / "first", _QUICK.tree)
        _, result = await self._mover.back_up(tree)
        await self._mover.restore(result.snapshot_id, self._folder / "first-target")

    async def _uploads(self, tree: Path, *, mover_first: bool) -> str:
        """Run one pair, and the third beside it; return the mover's snapshot."""
        figures = self._figures
        snapshot_id = ""
        order = ["mover", "bare", "tuned"]
        for who in order if mover_first else reversed(order):
            self._fresh_bucket(BUCKET if who == "mover" else BARE_BUCKET)
            match who:
                case "mover":
                    measured, result = await self._mover.back_up(tree)
                    figures.mover_uploads.append(measured)
                    snapshot_id = result.snapshot_id
                case "bare":
                    figures.bare_uploads.append(await self._bare.back_up(tree))
                case _:
                    figures.tuned_uploads.append(await self._bare.back_up(tree, TUNED))
        os.sync()
        measured, _ = await self._mover.back_up(tree)
        figures.second_backups.append(measured)
        return snapshot_id

    async def _restores(self, snapshot_id: str, *, mover_first: bool) -> None:
        figures, target = self._figures, self._folder / "target"
        for mover in (mover_first, not mover_first):
            os.sync()
            if mover:
                figures.mover_restores.append(await self._mover.restore(snapshot_id, target))
            else:
                figures.bare_restores.append(await self._bare.restore(snapshot_id, target))
            shutil.rmtree(target)

    async def _limited(self, tree: Path, group: Path, name: str) -> bool:
        """Return whether a tree goes out and comes back unchanged within the group's limit."""
        self._fresh_bucket(BUCKET)
        target = self._folder / "target"
        try:
            uploaded, result = await self._mover.back_up(tree, group)
            restored = await self._mover.restore(result.snapshot_id, target, group)
        except BenchmarkError as e:
            _say(str(e))
            return False
        self._figures.limited |= {f"upload {name}, mover": uploaded, f"restore {name}, mover": restored}
        differences = find_differences(survey_tree(tree), target)
        shutil.rmtree(target)
        for difference in differences[:_SHOWN_DIFFERENCES]:
            _say(difference)
        return not differences

    def _fresh_bucket(self, name: str) -> None:
        """Let a bucket hold the empty repository, and nothing wait to be written to the disk."""
        self._s3.make_bucket(name)
        shutil.copytree(self._template, self._s3.folder / name, dirs_exist_ok=True)
        os.sync()


async def _measure(plan: Plan, folder: Path) -> Figures:
    authority = Authority(folder / "pki")
    (folder / "cluster").mkdir()
    with memory_at(RUN), memory_at(folder / "s3") as buckets, run_s3_server(buckets) as s3:
        leave_service_account(authority)
        async with run_cluster(folder / "cluster", authority) as cluster:
            cluster.put_location(s3)
            return await Benchmark(plan, folder, s3, cluster).run()


def _table(plan: Plan, figures: Figures, seconds: float) -> list[str]:
    """Return the lines that tell the run."""
    tree = plan.tree
    moved = f"{tree.total_bytes / 1e9:.2f} GB in {tree.large_files} large and {tree.small_files:,} small files"
    return [
        f"Machine: {describe_machine()}. Tree: {moved}. {plan.pairs} pairs, {seconds:.0f} s in all.",
        "",
        *figures.lines(),
    ]


def _run_inside(arguments: argparse.Namespace) -> int:
    plan = _QUICK if arguments.quick else _FULL
    began = time.monotonic()
    try:
        if arguments.record:
            check_page(arguments.record, _FIGURES)
        with tempfile.TemporaryDirectory(prefix="bench-mover-", dir=arguments.folder) as folder:
            figures = asyncio.run(_measure(plan, Path(folder)))
    except BenchmarkError as e:
        _say(str(e))
        return 1
    table, last = _table(plan, figures, time.monotonic() - began), figures.last_line()
    if arguments.record:
        record(arguments.record, _FIGURES, [*table, "", "```json", last, "```"])
    for line in [*table, last]:
        _print(line)
    return 0


def main() -> int:
    """Measure, and print the table and the summary; return the exit code."""
    parser = argparse.ArgumentParser(prog="bench_mover", description="What the mover costs beside kopia alone.")
    parser.add_argument("--quick", action="store_true", help="tiny trees, one pair: does the benchmark work?")
    parser.add_argument("--folder", type=Path, help="where the trees lie (default: where temporary files do)")
    parser.add_argument(
        "--record", type=Path, metavar="PAGE", help="write the figures into this page, such as docs/benchmarks.md"
    )
    parser.add_argument(_INSIDE, action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        return _run_inside(arguments)
    for name in ("kopia", "versitygw"):
        tool(name, name)
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    python = [sys.executable, "-m", "benchmarks.bench_mover", _INSIDE, *sys.argv[1:]]
    return subprocess.run(["unshare", *user, *_NAMESPACES, *python], check=False).returncode  # noqa: S603, S607


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def _print(text: str) -> None:
    sys.stdout.write(f"{text}\n")


if __name__ == "__main__":
    sys.exit(main())

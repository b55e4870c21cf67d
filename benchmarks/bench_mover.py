"""`python -m benchmarks.bench_mover`: the cost of the data mover compared with kopia alone, on one machine."""

import argparse
import sys
from collections.abc import Awaitable, Callable
from typing import Final

from benchmarks.bed import Bed, Report, run_alone
from benchmarks.figures import Summary
from benchmarks.runs import FULL, QUICK, Benchmark, Plan
from benchmarks.tree import TreeShape

_Measure = Callable[[Benchmark], Awaitable[Summary]]
_WHAT: Final[dict[str, tuple[str, _Measure, Callable[[Plan], TreeShape], Callable[[Plan], int]]]] = {
    "mover": ("", Benchmark.measure_mover, lambda plan: plan.tree, lambda plan: plan.pairs),
    "confinement": (
        "compare movers with kopia confined and without",
        Benchmark.compare_confinement,
        lambda plan: plan.compared_tree,
        lambda plan: plan.compared_pairs,
    ),
    "bandwidth": (
        "compare movers with the proxy that limits the bandwidth, without a limit, and without it",
        Benchmark.compare_proxy,
        lambda plan: plan.compared_tree,
        lambda plan: plan.compared_pairs,
    ),
    "movers": (
        "compare both ways to run kopia for a backup with kopia alone",
        Benchmark.compare_movers,
        lambda plan: plan.far_tree,
        lambda plan: plan.pairs,
    ),
    "latency": (
        "compare with kopia's best settings for a storage that is far away",
        Benchmark.measure_far,
        lambda plan: plan.far_tree,
        lambda plan: plan.far_pairs,
    ),
    "many": (
        "millions of tiny files within a memory limit",
        Benchmark.measure_many,
        lambda plan: plan.very_many_files,
        lambda _: 1,
    ),
    "files": (
        "list and copy files in a device that was backed up by block, and the device",
        Benchmark.measure_files,
        lambda plan: plan.tree,
        lambda _: 1,
    ),
}
"""By option: its help, what it measures, with which tree and how often."""


async def _measure(arguments: argparse.Namespace, bed: Bed) -> Report:
    plan = QUICK if arguments.quick else FULL
    _, measure, shape, rounds = _WHAT[arguments.what]
    benchmark = Benchmark(plan, bed)
    summary = await measure(benchmark)
    conditions = f"Tree: {shape(plan).describe()}. Targets and caches: an ext4 each. {rounds(plan)} rounds"
    return Report(conditions, benchmark.runs.lines(), summary)


def main() -> int:
    """Measure, and print the table and the summary; return the exit code."""
    parser = argparse.ArgumentParser(prog="bench_mover", description="The cost of the data mover, and of kopia alone.")
    only = parser.add_mutually_exclusive_group()
    for what, (text, *_) in _WHAT.items():
        if text:
            only.add_argument(f"--{what}", action="store_const", dest="what", const=what, default="mover", help=text)
    return run_alone(parser, _measure)


if __name__ == "__main__":
    sys.exit(main())

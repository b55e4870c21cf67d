"""`python -m benchmarks.bench_cli`: what `nodeagent status` costs in a large cluster.

A real kube-apiserver with etcd holds the cluster; the command runs as a process of its own, as a person with the
permissions that docs/permissions.md lists. Its requests are counted in the audit log of the API server.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

from benchmarks.cli.person import Person
from benchmarks.cli.scene import Size, fill, own_address, serve_page
from benchmarks.figures import describe_machine
from benchmarks.processes import BenchmarkError, Command, Measured, measure
from benchmarks.scale.stage import open_client
from client.permissions import STATUS_PERMISSIONS
from core.models.base import JsonDict
from core.models.names import SERVICE_ACCOUNT
from tests.support.apiserver import ApiServer, run_apiserver

__all__ = ["main"]

_INTERPRETER: Final = "`python -m this`: the interpreter alone"
_START: Final = "`status --help`: the interpreter and all imports"


@dataclass(frozen=True)
class _Row:
    """Some runs of one command, and the requests of the last one."""

    runs: Sequence[Measured]
    requests: int = 0

    @property
    def milliseconds(self) -> float:
        return median(run.seconds for run in self.runs) * 1000

    def line(self, name: str) -> str:
        """Return the row of the table."""
        times = [run.seconds * 1000 for run in self.runs]
        memory = max(run.own_mib for run in self.runs)
        cpu = median(run.cpu_seconds for run in self.runs) * 1000
        shown = f"{self.milliseconds:.0f} | {min(times):.0f} | {max(times):.0f} | {cpu:.0f} | {memory:.0f}"
        return f"| {name} | {shown} | {self.requests or ''} |"


class _Bench:
    """One filled cluster, and a person who asks for its status."""

    def __init__(self, server: ApiServer, namespace: str, folder: Path, runs: int) -> None:
        self._namespace, self._folder, self._runs = namespace, folder, runs
        self._person = Person(server, namespace, folder, STATUS_PERMISSIONS)

    async def measure_status(self, *more: str) -> _Row:
        """Measure the command with these arguments beside the usual ones."""
        words = ["status", "--namespace", self._namespace, "--kubeconfig", str(self._person.kubeconfig), *more]
        await self._measure("nodeagent", words)
        runs = [await self._measure("nodeagent", words) for _ in range(self._runs - 1)]
        before = self._person.count_requests()
        runs.append(await self._measure("nodeagent", words))
        return _Row(runs, self._person.count_requests() - before)

    async def measure_start(self, module: str, words: Sequence[str]) -> _Row:
        """Measure a command that does not ask the cluster."""
        return _Row([await self._measure(module, words) for _ in range(self._runs)])

    async def _measure(self, module: str, words: Sequence[str]) -> Measured:
        argv = [sys.executable, "-m", module, *words]
        environment = dict(os.environ) | {"PYTHONDONTWRITEBYTECODE": "", "COLUMNS": "200"}
        return await measure(Command(argv, environment, self._folder / "output.log"))


async def _run(arguments: argparse.Namespace, folder: Path) -> tuple[list[str], JsonDict]:
    size, address = Size(arguments.nodes, arguments.transfers), own_address()
    with run_apiserver() as server, serve_page(address, size) as port:
        namespace = server.create_namespace()
        server.create_account(namespace, SERVICE_ACCOUNT)
        client = await open_client(server.kubeconfig)
        try:
            await fill(client, namespace, size, port, address)
        finally:
            await client.transport.close()
        bench = _Bench(server, namespace, folder, arguments.runs)
        rows = {
            _INTERPRETER: await bench.measure_start("this", []),
            _START: await bench.measure_start("nodeagent", ["status", "--help"]),
            "`status`": await bench.measure_status(),
            "`status -o json`": await bench.measure_status("-o", "json"),
        }
    lines = ["| command | ms: median | least | most | CPU ms | peak memory in MiB | API requests |"]
    lines += [f"| --- |{' --- |' * 6}", *(row.line(name) for name, row in rows.items())]
    status, start = rows["`status`"], rows[_START]
    summary = {
        "status_ms": round(status.milliseconds),
        "peak_mib": round(max(run.own_mib for run in status.runs), 1),
        "api_requests": status.requests,
        "start_ms": round(start.milliseconds),
    }
    return lines, summary


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench_cli", description="What nodeagent status costs in a large cluster.")
    parser.add_argument("--nodes", type=int, default=500, help="nodes with an agent (default: 500)")
    parser.add_argument("--transfers", type=int, default=10_000, help="transfers in all phases (default: 10000)")
    parser.add_argument("--runs", type=int, default=7, help="measured runs of each command (default: 7)")
    return parser.parse_args()


def main() -> int:
    """Measure, and print the table and the summary."""
    arguments = _parse()
    try:
        with tempfile.TemporaryDirectory(prefix="bench-cli-") as folder:
            lines, summary = asyncio.run(_run(arguments, Path(folder)))
    except BenchmarkError as e:
        sys.stderr.write(f"error: {e}\n")
        return 1
    size = f"{arguments.transfers} transfers on {arguments.nodes} nodes"
    table = [f"{describe_machine()}; {size}; {arguments.runs} runs", "", *lines]
    sys.stdout.write("\n".join([*table, ""]) + "\n")
    sys.stdout.write(f"{json.dumps(summary)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

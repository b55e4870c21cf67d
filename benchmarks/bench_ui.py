"""`python -m benchmarks.bench_ui`: what `nodeagent ui` costs in a large cluster, and how soon a page is there.

A real kube-apiserver with etcd holds the cluster; the command runs as a process of its own, as a person with the
permissions that docs/permissions.md lists, and Chromium opens its pages. Nothing changes in the cluster, so it is idle.
"""

import argparse
import asyncio
import json
import re
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Final

from benchmarks.cli.person import Person
from benchmarks.cli.scene import Size, fill, own_address, serve_page
from benchmarks.figures import describe_machine
from benchmarks.processes import BenchmarkError
from benchmarks.scale.stage import open_client
from client.permissions import DESCRIBE_PERMISSIONS, STATUS_PERMISSIONS
from core.models.base import JsonDict
from core.models.names import SERVICE_ACCOUNT
from tests.client.support.browser import visit
from tests.support.apiserver import run_apiserver
from tests.support.ui_command import running_ui

__all__ = ["main"]

_PATHS: Final = ("/", "/transfers", "/transfers?state=active&sort=node", "/queue", "/nodes/node-001", "/repositories")
_START_SECONDS: Final = 60.0
_PAINT: Final = """async () => {
  for (;;) {
    const [paint] = performance.getEntriesByName("first-contentful-paint");
    if (paint) return paint.startTime;
    await new Promise((resume) => setTimeout(resume, 10));
  }
}"""


@dataclass
class _Found:
    """What was measured: the first paint of each page in ms, and of the server."""

    paints: dict[str, list[float]] = field(default_factory=dict)
    ready_seconds: float = 0.0
    peak_mib: float = 0.0
    idle_per_minute: float = 0.0

    @property
    def slowest_ms(self) -> float:
        return max(median(times) for times in self.paints.values())


def _peak_mib(pid: int) -> float:
    """Return the largest resident memory that the process ever had. Source: proc(5), VmHWM."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(encoding="utf-8"))
    return int(found[1]) / 1024 if found else 0.0


async def _measure(namespace: str, person: Person, arguments: argparse.Namespace) -> _Found:
    found, loop = _Found(), asyncio.get_running_loop()
    began = loop.time()
    words = ("--namespace", namespace, "--kubeconfig", str(person.kubeconfig))
    async with running_ui(*words) as (pid, url), visit(url) as tab:
        page = tab.page
        await page.get_by_text("The cluster is").wait_for(timeout=_START_SECONDS * 1000)
        found.ready_seconds = loop.time() - began
        for path in _PATHS * arguments.runs:
            await tab.open(path)
            found.paints.setdefault(path, []).append(await page.evaluate(_PAINT))
        before = person.count_requests()
        await asyncio.sleep(arguments.idle_seconds)
        found.idle_per_minute = (person.count_requests() - before) * 60 / arguments.idle_seconds
        found.peak_mib = _peak_mib(pid)
    return found


async def _run(arguments: argparse.Namespace, folder: Path) -> _Found:
    size, address = Size(arguments.nodes, arguments.transfers), own_address()
    with run_apiserver() as server, serve_page(address, size) as port:
        namespace = server.create_namespace()
        server.create_account(namespace, SERVICE_ACCOUNT)
        client = await open_client(server.kubeconfig)
        try:
            await fill(client, namespace, size, port, address)
        finally:
            await client.transport.close()
        permissions = (*STATUS_PERMISSIONS, *DESCRIBE_PERMISSIONS)
        return await _measure(namespace, Person(server, namespace, folder, permissions), arguments)


def _table(found: _Found) -> list[str]:
    rows = [
        f"| `{path}` | {median(times):.0f} | {min(times):.0f} | {max(times):.0f} |"
        for path, times in found.paints.items()
    ]
    return [
        "| page | first paint in ms: median | least | most |",
        "| --- | --- | --- | --- |",
        *rows,
        "",
        f"The first page was there {found.ready_seconds:.1f} s after the start of the command.",
    ]


def _summary(found: _Found) -> JsonDict:
    return {
        "first_paint_ms_10k": round(found.slowest_ms),
        "server_peak_mib_10k": round(found.peak_mib, 1),
        "api_requests_per_minute_idle": round(found.idle_per_minute, 1),
        "ready_s": round(found.ready_seconds, 1),
    }


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench_ui", description="What nodeagent ui costs in a large cluster.")
    parser.add_argument("--nodes", type=int, default=500, help="nodes with an agent (default: 500)")
    parser.add_argument("--transfers", type=int, default=10_000, help="transfers in all phases (default: 10000)")
    parser.add_argument("--runs", type=int, default=7, help="how often each page is opened (default: 7)")
    parser.add_argument("--idle-seconds", type=int, default=180, help="how long requests are counted (default: 180)")
    return parser.parse_args()


def main() -> int:
    """Measure, and print the table and the summary."""
    arguments = _parse()
    try:
        with tempfile.TemporaryDirectory(prefix="bench-ui-") as folder:
            found = asyncio.run(_run(arguments, Path(folder)))
    except BenchmarkError as e:
        sys.stderr.write(f"error: {e}\n")
        return 1
    size = f"{arguments.transfers} transfers on {arguments.nodes} nodes"
    table = [f"{describe_machine()}; {size}; each page {arguments.runs} times", "", *_table(found)]
    summary = json.dumps(_summary(found))
    sys.stdout.write("\n".join([*table, ""]) + "\n")
    sys.stdout.write(f"{summary}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

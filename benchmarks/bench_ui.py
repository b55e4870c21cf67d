"""`python -m benchmarks.bench_ui`: what `nodeagent ui` costs in a large cluster, and how soon a page is there.

The command runs as a process of its own, as a person with the permissions that docs/permissions.md lists, and Chromium
opens its pages. Nothing changes in the cluster, so it is idle.
"""

import argparse
import asyncio
import sys
from collections.abc import Iterable
from statistics import median
from typing import Final

from benchmarks.figures import Summary, spread, table
from benchmarks.large_cluster import Person, claim_name, run_in_large_cluster
from benchmarks.processes import read_peak
from benchmarks.scale.manifests import app_namespace
from client.permissions import DESCRIBE_PERMISSIONS, STATUS_PERMISSIONS
from tests.client.support.browser import visit
from tests.support.ui_command import running_ui

_PATHS: Final = (
    *("/", "/?volumes=1", "/volumes/{volume}", "/transfers", "/transfers?state=active&sort=node", "/queue"),
    *("/nodes/node-001", "/repositories"),
)
_START_SECONDS: Final = 60.0
_PAINT: Final = """async () => {
  for (;;) {
    const [paint] = performance.getEntriesByName("first-contentful-paint");
    if (paint) return paint.startTime;
    await new Promise((resume) => setTimeout(resume, 10));
  }
}"""


async def _measure(arguments: argparse.Namespace, person: Person) -> tuple[Iterable[str], Summary]:
    loop, paints = asyncio.get_running_loop(), dict[str, list[float]]()
    began = loop.time()
    async with running_ui(*person.flags) as (pid, url), visit(url) as tab:
        page = tab.page
        await page.get_by_text("The cluster is").wait_for(timeout=_START_SECONDS * 1000)
        ready_seconds = loop.time() - began
        await page.get_by_text("volumes protected").wait_for(timeout=_START_SECONDS * 1000)
        volume = f"{app_namespace(person.namespace, 0)}/{claim_name(0)}"
        for path in _PATHS * arguments.runs:
            await tab.open(path.format(volume=volume))
            paints.setdefault(path, []).append(await page.evaluate(_PAINT))
        before = person.count_requests()
        await asyncio.sleep(arguments.idle_seconds)
        idle_per_minute = (person.count_requests() - before) * 60 / arguments.idle_seconds
        peak_mib = read_peak(pid) / 1024
    rows = [[f"`{path}`", *spread(ms, 0)] for path, ms in paints.items()]
    return table(["page", "first paint in ms: median", "least", "most"], rows), {
        "first_paint_ms_10k": round(max(map(median, paints.values()))),
        "server_peak_mib_10k": round(peak_mib, 1),
        "api_requests_per_minute_idle": round(idle_per_minute, 1),
        "ready_s": round(ready_seconds, 1),
    }


def main() -> int:
    """Measure, and print the table and the summary."""
    parser = argparse.ArgumentParser(prog="bench_ui", description="What nodeagent ui costs in a large cluster.")
    parser.add_argument("--idle-seconds", type=int, default=180, help="how long requests are counted (default: 180)")
    return run_in_large_cluster(parser, (*STATUS_PERMISSIONS, *DESCRIBE_PERMISSIONS), _measure)


if __name__ == "__main__":
    sys.exit(main())

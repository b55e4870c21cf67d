"""`python -m benchmarks.bench_cli`: what `nodeagent status` and `volumes` cost in a large cluster, and Python alone.

Each command runs as a process of its own, as a person with the permissions that docs/permissions.md lists. Its requests
are counted in the audit log of the API server.
"""

import argparse
import os
import sys
from collections.abc import Iterable
from typing import Final

from benchmarks.figures import Runs, Summary, alternate
from benchmarks.large_cluster import Person, run_in_large_cluster
from benchmarks.processes import Command, measure
from client.permissions import STATUS_PERMISSIONS

_START: Final = "`status --help`: the interpreter and all imports"
_STATUS: Final = "`status`"
_VOLUMES: Final = "`volumes`"


async def _measure(arguments: argparse.Namespace, person: Person) -> tuple[Iterable[str], Summary]:
    status = ["nodeagent", "status", *person.flags]
    commands = {
        "`python -m this`: the interpreter alone": ["this"],
        _START: ["nodeagent", "status", "--help"],
        _STATUS: status,
        "`status -o json`": [*status, "-o", "json"],
        _VOLUMES: ["nodeagent", "volumes", f"--agent-namespace={person.namespace}", "--kubeconfig", person.kubeconfig],
    }
    environment = dict(os.environ) | {"PYTHONDONTWRITEBYTECODE": "", "COLUMNS": "200"}
    runs, requests = Runs(), dict[str, int]()
    # The first round compiles.
    for number in range(arguments.runs + 1):
        for name, words in alternate(list(commands.items()), number):
            before = person.count_requests()
            command = Command([sys.executable, "-m", *words], environment, person.folder / "output.log")
            run = await measure(command)
            if number:
                runs.add(name, run)
            requests[name] = person.count_requests() - before
    return runs.lines(), {
        "status_ms": round(runs.seconds(_STATUS) * 1000),
        "peak_mib": runs.own_mib(_STATUS),
        "api_requests": requests[_STATUS],
        "volumes_ms": round(runs.seconds(_VOLUMES) * 1000),
        "volumes_peak_mib": runs.own_mib(_VOLUMES),
        "volumes_api_requests": requests[_VOLUMES],
        "start_ms": round(runs.seconds(_START) * 1000),
    }


def main() -> int:
    """Measure, and print the table and the summary."""
    parser = argparse.ArgumentParser(prog="bench_cli", description="What status and volumes cost in a large cluster.")
    return run_in_large_cluster(parser, STATUS_PERMISSIONS, _measure)


if __name__ == "__main__":
    sys.exit(main())

"""The node agent of a Velero release: its own program, for one node.

Knows the program's command line. It finds no `/host_pods`, so it moves no volumes of pods. It listens on port 8080 of
every address, as the server does (`tests.velero.server`).
Source: Velero v1.18.2, pkg/cmd/cli/nodeagent/server.go.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from tests.support.tools import tool
from tests.testbed.processes import Component, Supervisor

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.apiserver import ApiServer


@contextmanager
def running_agent(version: str, server: ApiServer, folder: Path, *, namespace: str, node: str) -> Iterator[Component]:
    """Run the agent of the release on `node` until the end of the block."""
    folder.mkdir(parents=True)
    supervisor = Supervisor(folder / "logs")
    environment = {
        "HOME": str(folder),
        "NODE_NAME": node,
        "VELERO_NAMESPACE": namespace,
        "VELERO_SCRATCH_DIR": str(folder),
    }
    argv: list[str | Path] = [
        tool(f"velero-{version}", "velero"),
        "node-agent",
        "server",
        f"--namespace={namespace}",
        f"--kubeconfig={server.kubeconfig}",
        "--metrics-address=127.0.0.1:8085",
        "--log-level=debug",
    ]
    try:
        yield supervisor.start("velero-node-agent", argv, env=environment)
    finally:
        supervisor.stop()

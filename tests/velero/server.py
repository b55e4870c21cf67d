"""The programs of a Velero release: its server with its controller of backup repositories only, and its node agent.

Knows their command lines. They listen on port 8080 of every address, whatever their flags say, so they need a network
namespace of their own, which `make test-velero` makes. The agent finds no `/host_pods`, so it moves no volumes of pods.
Source: Velero v1.18.2, pkg/cmd/server/server.go, pkg/cmd/cli/nodeagent/server.go; controller-runtime's metrics server.
"""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.apiserver import ApiServer, apply_crds
from tests.support.tools import tool
from tests.testbed.processes import Component, Supervisor

_OFF = {
    "1.17.2": (
        "backup,backup-operations,backup-deletion,backup-finalizer,backup-sync,download-request,gc,restore,"
        "restore-operations,schedule,server-status-request,restore-finalizer"
    )
}
_OFF["1.18.3"] = f"backup-queue,{_OFF['1.17.2']}"
"""Every controller that can be switched off, but that of backup repositories."""


def apply_definitions(version: str, server: ApiServer, folder: Path) -> None:
    """Apply the custom resource definitions that the release's installer has."""
    velero = str(tool(f"velero-{version}", "velero"))
    argv = [velero, "install", "--crds-only", "--dry-run", "-o", "yaml"]
    printed = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True, timeout=60).stdout
    (folder / "definitions.yaml").write_text(printed)
    apply_crds(server.kubeconfig, folder)


@contextmanager
def _running(
    version: str, words: list[str], server: ApiServer, folder: Path, namespace: str, **environment: str
) -> Iterator[Component]:
    supervisor = Supervisor(folder / "logs")
    environment |= {"HOME": str(folder), "VELERO_NAMESPACE": namespace, "VELERO_SCRATCH_DIR": str(folder)}
    argv: list[str | Path] = [
        tool(f"velero-{version}", "velero"),
        *words,
        f"--namespace={namespace}",
        f"--kubeconfig={server.kubeconfig}",
        "--metrics-address=127.0.0.1:8085",
        "--log-level=debug",
    ]
    try:
        yield supervisor.start(f"velero-{words[0]}", argv, env=environment)
    finally:
        supervisor.stop()


@contextmanager
def running_server(version: str, server: ApiServer, folder: Path, namespace: str) -> Iterator[Component]:
    """Run the server of the release in `namespace` until the end of the block; it has no plug-ins."""
    plugins = folder / "plugins"
    plugins.mkdir(parents=True)
    words = [
        "server",
        f"--plugin-dir={plugins}",
        f"--disable-controllers={_OFF[version]}",
        "--store-validation-frequency=0s",
        "--profiler-address=",
    ]
    with _running(version, words, server, folder, namespace) as component:
        yield component


@contextmanager
def running_agent(version: str, server: ApiServer, folder: Path, *, namespace: str, node: str) -> Iterator[Component]:
    """Run the agent of the release on `node` until the end of the block."""
    folder.mkdir(parents=True)
    with _running(version, ["node-agent", "server"], server, folder, namespace, NODE_NAME=node) as component:
        yield component

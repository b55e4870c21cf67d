"""The server of a Velero release: its own program, with its controller of backup repositories only.

Knows the program's command line. It listens on port 8080 of every address, whatever its flags say, so it needs a
network namespace of its own, which `make test-velero` makes.
Source: Velero v1.18.2, pkg/cmd/server/server.go; controller-runtime's metrics server.
"""

from __future__ import annotations

import subprocess
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.support.tools import tool
from tests.testbed.processes import Component, Supervisor

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.apiserver import ApiServer

_OFF = {
    "1.17.2": (
        "backup,backup-operations,backup-deletion,backup-finalizer,backup-sync,download-request,gc,restore,"
        "restore-operations,schedule,server-status-request,restore-finalizer"
    ),
}
_OFF["1.18.3"] = f"backup-queue,{_OFF['1.17.2']}"
"""Every controller that can be switched off, but that of backup repositories."""


@dataclass(frozen=True)
class VeleroServer:
    """A server that runs; `component` has its log."""

    component: Component

    def log(self) -> str:
        return self.component.log.read_text(errors="replace")


def apply_definitions(version: str, server: ApiServer, folder: Path) -> None:
    """Apply the custom resource definitions that the release's installer has."""
    velero = str(tool(f"velero-{version}", "velero"))
    argv = [velero, "install", "--crds-only", "--dry-run", "-o", "yaml"]
    printed = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True, timeout=60).stdout
    path = folder / "definitions.yaml"
    path.write_text(printed)
    kubectl = [str(tool("kubernetes", "kubectl")), f"--kubeconfig={server.kubeconfig}"]
    subprocess.run([*kubectl, "apply", "--server-side", "--force-conflicts", "-f", str(path)], check=True, timeout=60)
    subprocess.run([*kubectl, "wait", "crd", "--all", "--for=condition=Established"], check=True, timeout=60)


@contextmanager
def running_server(version: str, server: ApiServer, folder: Path, namespace: str) -> Iterator[VeleroServer]:
    """Run the server of the release in `namespace` until the end of the block; it has no plug-ins."""
    plugins = folder / "plugins"
    plugins.mkdir(parents=True)
    supervisor = Supervisor(folder / "logs")
    environment = {"HOME": str(folder), "VELERO_NAMESPACE": namespace, "VELERO_SCRATCH_DIR": str(folder)}
    argv: list[str | Path] = [
        tool(f"velero-{version}", "velero"),
        "server",
        f"--namespace={namespace}",
        f"--kubeconfig={server.kubeconfig}",
        f"--plugin-dir={plugins}",
        f"--disable-controllers={_OFF[version]}",
        "--store-validation-frequency=0s",
        "--metrics-address=127.0.0.1:8085",
        "--profiler-address=",
        "--log-level=debug",
    ]
    try:
        yield VeleroServer(supervisor.start("velero", argv, env=environment))
    finally:
        supervisor.stop()

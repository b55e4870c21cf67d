"""The released sidecar by which the CSI driver says which blocks have changed; only tests that need it start it.

Source: kubernetes-csi/external-snapshot-metadata v1.0.0, README.md and deploy/example/csi-driver.
"""

import base64
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from core.kube.resources import SNAPSHOT_METADATA_SERVICES
from tests.support.objects import build_object
from tests.support.sockets import free_port
from tests.support.tools import tool
from tests.testbed.api import Api
from tests.testbed.pki import Authority
from tests.testbed.processes import Supervisor
from tests.testbed.storage.objects import DRIVER

AUDIENCE = "bed-changes"
"""Tokens for the service have it."""


@dataclass(frozen=True)
class ChangesService:
    """The service as it runs: its address, the certificate of its authority (PEM), and its process."""

    address: str
    ca: str
    supervisor: Supervisor


@contextmanager
def serving_changes(api: Api, csi_socket: str, folder: Path, *, host: str, label: str) -> Iterator[ChangesService]:
    """Run the sidecar of a driver while the context lasts, and announce it with a label.

    Args:
        api: The cluster's; the sidecar has its permissions.
        csi_socket: Where the driver listens.
        folder: For the log and the certificates, of an authority of its own; it is created.
        host: An address of this machine that clients reach.
        label: The value of the label.
    """
    authority = Authority(folder)
    serving = authority.issue("serving", user="csi-snapshot-metadata", addresses=(f"IP:{host}",))
    port, health_port = free_port(), free_port()
    argv = [str(tool("csi", "csi-snapshot-metadata")), f"--kubeconfig={api.kubeconfig}", f"--csi-address={csi_socket}"]
    argv += [f"--port={port}", f"--http-endpoint=127.0.0.1:{health_port}"]
    supervisor = Supervisor(folder)
    supervisor.start("sidecar", [*argv, f"--tls-cert={serving.certificate}", f"--tls-key={serving.key}"])
    try:
        supervisor.wait("the service of changed blocks", lambda: _is_healthy(health_port))
        service = ChangesService(f"{host}:{port}", authority.pair.certificate.read_text(), supervisor)
        ca_cert = base64.b64encode(service.ca.encode()).decode()
        spec = {"address": service.address, "audience": AUDIENCE, "caCert": ca_cert}
        announced = build_object(SNAPSHOT_METADATA_SERVICES, DRIVER, metadata={"labels": {"test": label}}, spec=spec)
        api.create(SNAPSHOT_METADATA_SERVICES, announced)
        yield service
    finally:
        api.delete(SNAPSHOT_METADATA_SERVICES, "", DRIVER)
        supervisor.stop()


def _is_healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False

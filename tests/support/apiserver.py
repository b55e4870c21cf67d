"""A real kube-apiserver with etcd, and nothing else, for the integration tests.

There is no controller: nothing creates `default` service accounts, collects garbage, binds PVCs or
finalizes a namespace. Tests do what a controller would do. Requires neither root nor a network
beyond loopback.
"""

import json
import secrets
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from core.kube.resources import (
    CLUSTER_ROLE_BINDINGS,
    CUSTOM_RESOURCE_DEFINITIONS,
    NAMESPACES,
    SCHEDULES,
    SERVICE_ACCOUNTS,
)
from tests.support.objects import build_object
from tests.support.tools import tool
from tests.testbed.api import Api, Json
from tests.testbed.controlplane import ControlPlane, Endpoint
from tests.testbed.processes import BedError, Supervisor

_ROOT = Path(__file__).parents[2]
_AGENT_CRDS = _ROOT / "deploy" / "crds"
_SNAPSHOT_CRDS = _ROOT / "tests" / "testbed" / "crds"
_TOKEN_SECONDS = 3600
_START_ATTEMPTS = 3


@dataclass(frozen=True)
class ApiServer:
    """A running API server, and the credentials of its administrator.

    Attributes:
        url: `https://127.0.0.1:<port>`.
        kubeconfig: The administrator's, as JSON, which every YAML reader reads too.
        ca: The certificate that the server's own is signed with.
        token: A token of a service account bound to `cluster-admin`.
        audit_log: One JSON document a line, for each request, at level Metadata.
        api: A blocking client with the administrator's permissions.
    """

    url: str
    kubeconfig: Path
    ca: Path
    token: str
    audit_log: Path
    api: Api
    plane: ControlPlane

    def create_namespace(self) -> str:
        """Create a namespace with the service account `default`; return its name."""
        name = f"test-{secrets.token_hex(4)}"
        self.api.create(NAMESPACES, {"metadata": {"name": name}})
        self.create_account(name, "default")
        return name

    def create_account(self, namespace: str, name: str) -> None:
        """Create a service account; pods are rejected without one."""
        self.api.create(SERVICE_ACCOUNTS, {"metadata": {"namespace": namespace, "name": name}})

    def account_token(self, namespace: str, name: str) -> str:
        """Return a token of an existing service account, to test its permissions."""
        return _request_token(self.api, namespace, name)

    def account_kubeconfig(self, namespace: str, name: str, folder: Path) -> Path:
        """Return a kubeconfig in `folder` of an existing service account."""
        path = folder / f"{namespace}-{name}.kubeconfig"
        self.plane.write_kubeconfig(path, None, token=self.account_token(namespace, name))
        return path

    def kubectl(self, *arguments: str) -> str:
        """Run kubectl as the administrator, and return what it printed."""
        argv: list[str | Path] = [tool("kubernetes", "kubectl"), "--kubeconfig", self.kubeconfig, *arguments]
        return subprocess.run(argv, check=True, capture_output=True, text=True).stdout

    def audit_events(self) -> list[Json]:
        """Return all events in the audit log."""
        lines = self.audit_log.read_text().splitlines()
        return [json.loads(line) for line in lines]


@contextmanager
def run_apiserver(definitions: Path = _AGENT_CRDS) -> Iterator[ApiServer]:
    """Run an API server with custom resources, by default those of the project; remove everything on exit."""
    folder = Path(tempfile.mkdtemp(prefix="node-agent-api-"))
    try:
        supervisor, plane = _start(folder)
        try:
            apply_crds(plane.kubeconfig, definitions, _SNAPSHOT_CRDS)
            api = Api(plane.kubeconfig)
            yield ApiServer(
                url=plane.endpoint.url,
                kubeconfig=plane.kubeconfig,
                ca=plane.authority.pair.certificate,
                token=_administrator_token(api),
                audit_log=plane.audit_log,
                api=api,
                plane=plane,
            )
        finally:
            supervisor.stop()
    finally:
        shutil.rmtree(folder)


def apply_crds(kubeconfig: Path, *folders: Path) -> None:
    """Apply all custom resource definitions in `folders`; return when they are served."""
    kubectl: list[str | Path] = [tool("kubernetes", "kubectl"), "--kubeconfig", kubeconfig]
    files = [file for folder in folders for file in sorted(folder.glob("*.yaml"))]
    # A kustomize folder has one file that is not an object.
    chosen = [("-f", file) for file in files if file.name != "kustomization.yaml"]
    _run([*kubectl, "apply", "--server-side", *(part for pair in chosen for part in pair)])
    _run([*kubectl, "wait", "crd", "--all", "--for=condition=Established", "--timeout=30s"])


def serve_schedules(server: ApiServer) -> None:
    """Let the server accept Schedules of Velero, whatever is in them, and return when they are served."""
    names = {"kind": SCHEDULES.kind, "listKind": "ScheduleList", "plural": SCHEDULES.plural, "singular": "schedule"}
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {"name": SCHEDULES.version, "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    spec = {"group": SCHEDULES.group, "scope": "Namespaced", "names": names, "versions": [version]}
    definition = build_object(CUSTOM_RESOURCE_DEFINITIONS, SCHEDULES.full_name, spec=spec)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "schedules.yaml").write_text(json.dumps(definition), encoding="utf-8")
        apply_crds(server.kubeconfig, Path(folder))


def _start(folder: Path) -> tuple[Supervisor, ControlPlane]:
    """Start on free ports; retry, since a port may be used before the server listens."""
    attempt = 1
    while True:
        here = folder / str(attempt)
        supervisor = Supervisor(here / "logs")
        plane = ControlPlane(here, _free_endpoint(), supervisor)
        try:
            plane.start()
        except BedError:
            supervisor.stop()
            if attempt == _START_ATTEMPTS:
                raise
            attempt += 1
        else:
            return supervisor, plane


def _free_endpoint() -> Endpoint:
    sockets = [socket.socket() for _ in range(3)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    port, etcd_port, etcd_peer_port = (each.getsockname()[1] for each in sockets)
    for each in sockets:
        each.close()
    return Endpoint("127.0.0.1", port, etcd_port, etcd_peer_port, advertised="127.0.0.1")


def _administrator_token(api: Api) -> str:
    namespace, name = "kube-system", "test-administrator"
    subject = {"kind": "ServiceAccount", "namespace": namespace, "name": name}
    api.create(SERVICE_ACCOUNTS, {"metadata": {"namespace": namespace, "name": name}})
    bindings = CLUSTER_ROLE_BINDINGS
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"}
    body = {"metadata": {"name": name}, "roleRef": role, "subjects": [subject]}
    api.create(bindings, body)
    return _request_token(api, namespace, name)


def _request_token(api: Api, namespace: str, name: str) -> str:
    body: Json = {"spec": {"expirationSeconds": _TOKEN_SECONDS}}
    response = api.request("POST", SERVICE_ACCOUNTS.path(namespace, name, subresource="token"), body=body)
    token: str = response["status"]["token"]
    return token


def _run(argv: list[str | Path]) -> None:
    done = subprocess.run(list(map(str, argv)), capture_output=True, text=True, check=False)
    if done.returncode:
        raise BedError(f"{' '.join(map(str, argv))} ended with {done.returncode}: {done.stderr}")

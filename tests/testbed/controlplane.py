"""etcd and kube-apiserver: how they are started, with which certificates and settings.

Serves the whole cluster and the integration tests, which need an API server only.
Knows nothing of nodes.

Source: https://kubernetes.io/docs/reference/command-line-tools-reference/kube-apiserver/
"""

import json
import os
import ssl
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from tests.support.tools import tool
from tests.testbed.pki import Authority, KeyPair
from tests.testbed.processes import Supervisor
from tests.testbed.settings import SERVICE_RANGE

_AUDIT_POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [{"level": "Metadata"}],
}
"""Who did what with which object: enough to compare with the permissions in `deploy/`. A watch is logged when it
begins, not only when it ends, which may be after the tests."""


@dataclass(frozen=True)
class Endpoint:
    """Where the parts of a control plane listen, and how it calls itself to pods."""

    host: str
    port: int
    etcd_port: int
    etcd_peer_port: int
    advertised: str

    @property
    def url(self) -> str:
        return f"https://{self.host}:{self.port}"


class ControlPlane:
    """An API server with its store, in a folder that must not be used by another one."""

    def __init__(self, folder: Path, endpoint: Endpoint, supervisor: Supervisor) -> None:
        """Make the certificates and the administrator's kubeconfig; start nothing."""
        self.endpoint = endpoint
        self.authority = Authority(folder / "pki")
        self.kubeconfig = folder / "admin.kubeconfig"
        self.audit_log = supervisor.logs / "audit.log"
        self._folder = folder
        self._supervisor = supervisor
        self.admin = self.authority.issue("admin", user="bed-admin", group="system:masters")
        self.write_kubeconfig(self.kubeconfig, self.admin)
        self._serving = self.authority.issue(
            "kube-apiserver",
            user="kube-apiserver",
            addresses=(f"IP:{endpoint.host}", f"IP:{endpoint.advertised}", "DNS:localhost"),
        )
        self.accounts = self.authority.issue("service-accounts", user="service-accounts")
        """The pair that signs tokens of service accounts."""

    def write_kubeconfig(self, path: Path, pair: KeyPair | None, *, token: str = "", url: str = "") -> None:
        """Write a kubeconfig that authenticates with a certificate, or else with a token.

        `url` is another API server's than the first one's.
        """
        user = {"token": token}
        if pair is not None:
            user = {"client-certificate": str(pair.certificate), "client-key": str(pair.key)}
        cluster = {"server": url or self.endpoint.url, "certificate-authority": str(self.authority.pair.certificate)}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "bed", "cluster": cluster}],
            "users": [{"name": "user", "user": user}],
            "contexts": [{"name": "bed", "context": {"cluster": "bed", "user": "user"}}],
            "current-context": "bed",
        }
        path.write_text(json.dumps(config, indent=1))
        path.chmod(0o600)

    def start(self) -> None:
        """Start both and return once the API server is ready."""
        self._start_etcd()
        self._start_api_server()
        self._supervisor.wait("the API server", self.is_ready)

    def start_second(self, port: int) -> str:
        """Start another API server on the same store, and return its URL once it is ready.

        It knows no nodes: without the authorizer for them it watches no pods and volumes itself.
        """
        url = f"https://{self.endpoint.host}:{port}"
        others = {"secure-port": port, "authorization-mode": "RBAC", "audit-log-path": f"{self.audit_log}.second"}
        flags = _flags(self._api_server_flags() | others)
        self._supervisor.start("kube-apiserver-second", [_kube_apiserver(), *flags])
        self._supervisor.wait("the second API server", lambda: self.is_ready(url))
        return url

    def is_ready(self, url: str = "") -> bool:
        """Whether the API server, or the one at `url`, reports that it is ready."""
        context = ssl.create_default_context(cafile=str(self.authority.pair.certificate))
        context.load_cert_chain(self.admin.certificate, self.admin.key)
        try:
            with urllib.request.urlopen(f"{url or self.endpoint.url}/readyz", context=context, timeout=2) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return False

    def _start_etcd(self) -> None:
        client = f"http://127.0.0.1:{self.endpoint.etcd_port}"
        peer = f"http://127.0.0.1:{self.endpoint.etcd_peer_port}"
        flags = {
            "data-dir": self._folder / "etcd",
            "listen-client-urls": client,
            "advertise-client-urls": client,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": f"default={peer}",
            "log-level": "warn",
        }
        # Nothing here has to survive a power cut, and fsync is most of what a write costs.
        self._supervisor.start("etcd", [tool("etcd", "etcd"), *_flags(flags), "--unsafe-no-fsync"])

    def _start_api_server(self) -> None:
        self._supervisor.start("kube-apiserver", [_kube_apiserver(), *_flags(self._api_server_flags())])

    def _api_server_flags(self) -> dict[str, object]:
        policy = self._folder / "audit-policy.json"
        policy.write_text(json.dumps(_AUDIT_POLICY))
        return {
            "etcd-servers": f"http://127.0.0.1:{self.endpoint.etcd_port}",
            "bind-address": self.endpoint.host,
            "secure-port": self.endpoint.port,
            "advertise-address": self.endpoint.advertised,
            # Kubernetes 1.37 refuses to publish an address of loopback.
            "endpoint-reconciler-type": "none" if self.endpoint.advertised.startswith("127.") else "lease",
            "cert-dir": self._folder / "pki",
            "tls-cert-file": self._serving.certificate,
            "tls-private-key-file": self._serving.key,
            "client-ca-file": self.authority.pair.certificate,
            "kubelet-client-certificate": self.admin.certificate,
            "kubelet-client-key": self.admin.key,
            "kubelet-preferred-address-types": "InternalIP",
            "service-account-issuer": "https://kubernetes.default.svc",
            "service-account-key-file": self.accounts.certificate,
            "service-account-signing-key-file": self.accounts.key,
            "service-cluster-ip-range": SERVICE_RANGE,
            "authorization-mode": "Node,RBAC",
            "allow-privileged": "true",
            "audit-policy-file": policy,
            "audit-log-path": self.audit_log,
            "audit-log-maxsize": 4096,
        }


def _kube_apiserver() -> Path:
    """Return the API server; `KUBERNETES` names the tool of another release, as `make test-kubernetes` does."""
    return tool(os.environ.get("KUBERNETES", "kubernetes"), "kube-apiserver")


def _flags(flags: dict[str, object]) -> list[str]:
    return [f"--{name}={value}" for name, value in flags.items()]

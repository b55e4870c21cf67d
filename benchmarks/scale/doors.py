"""Two API servers on one store: one for the agents, one for all others.

What the first one counts is the agents' alone, whatever simulated kubelets, movers and watchers ask of the second.
"""

import os
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from benchmarks.processes import BenchmarkError
from benchmarks.scale.counts import Counts, Store, read_counts, read_store
from benchmarks.scale.kubelet import KubeletAddress, PodDirectories
from core.models.names import SERVICE_ACCOUNT
from tests.support.apiserver import ApiServer, run_apiserver
from tests.support.sockets import free_port
from tests.support.tools import tool
from tests.testbed.api import Api

_DEPLOY: Final = Path(__file__).parents[2] / "deploy" / "agent"
_MOUNT: Final = """\
patches:
- patch: |
    apiVersion: apps/v1
    kind: DaemonSet
    metadata: {{name: node-agent, namespace: velero}}
    spec:
      template:
        spec:
          containers:
          - name: node-agent
            volumeMounts:
            - {{mountPath: /host_pods, $patch: delete}}
            - {{name: host-pods, mountPath: {path}, readOnly: true}}
"""
"""How the agents see the simulated kubelets' directories, in a kustomization."""

_IDLE_SECONDS: Final = 20.0
"""Its own renewals come every ten seconds at most."""


@dataclass(frozen=True)
class Doors:
    """How the API servers are reached.

    `agents_api` is the administrator's client of the agents' server; `own_share` what that
    server asks itself while no other client does. `environment` is what real agents run in, beside ours.
    """

    server: ApiServer
    agents_url: str
    agents_api: Api
    own_share: Counts
    kubelet: KubeletAddress
    folder: Path
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def others(self) -> Path:
        """The kubeconfig of all others: the administrator's."""
        return self.server.kubeconfig

    def count(self, before: Counts | None = None) -> Counts:
        """Return what the agents' server counted, or counted since `before`, without its own share."""
        counts = read_counts(self.agents_api)
        return counts if before is None else counts.since(before, idle=self.own_share)

    def read_store(self) -> Store:
        """Return what etcd has stored so far, from all clients."""
        return read_store(self.server.plane.endpoint.etcd_port)

    @property
    def pods(self) -> PodDirectories:
        """The kubelet's directories of pods, as the agents have them mounted."""
        return PodDirectories(self.folder / "pods")

    def install_agents(self, namespace: str) -> Path:
        """Apply the agents' manifests to `namespace`; return the kubeconfig that acts as their account."""
        folder = self.folder / namespace
        folder.mkdir()
        relative = os.path.relpath(_DEPLOY, folder.resolve())
        patch = _MOUNT.format(path=self.pods.root)
        (folder / "kustomization.yaml").write_text(f"namespace: {namespace}\nresources:\n- {relative}\n{patch}")
        argv = [tool("kubernetes", "kubectl"), "--kubeconfig", self.others, "apply", "-k", folder]
        done = subprocess.run(list(map(str, argv)), capture_output=True, text=True, check=False)  # noqa: S603 - kubectl
        if done.returncode:
            raise BenchmarkError(f"the agents' manifests cannot be applied: {done.stderr}")
        path = folder / "agents.kubeconfig"
        token = self.server.account_token(namespace, SERVICE_ACCOUNT)
        self.server.plane.write_kubeconfig(path, None, token=token, url=self.agents_url)
        return path


@contextmanager
def open_doors(folder: Path) -> Iterator[Doors]:
    """Run both servers; leaves nothing behind."""
    with run_apiserver() as server:
        url = server.plane.start_second(free_port())
        admin = folder / "agents-admin.kubeconfig"
        server.plane.write_kubeconfig(admin, server.plane.admin, url=url)
        api = Api(admin)
        yield Doors(server, url, api, _measure_own_share(api), make_kubelet(server), folder, _as_in_the_image(folder))


def make_kubelet(server: ApiServer) -> KubeletAddress:
    """Return where the kubelets of `server` may listen."""
    pair = server.plane.authority.issue("scale-kubelet", user="system:node:scale", addresses=("IP:127.0.0.1",))
    return KubeletAddress(free_port(), pair.certificate, pair.key)


def _measure_own_share(api: Api) -> Counts:
    before = read_counts(api)
    time.sleep(_IDLE_SECONDS)
    return read_counts(api).since(before)


def _as_in_the_image(folder: Path) -> dict[str, str]:
    """Return the environment in which Python keeps what it compiled, without docstrings and assertions."""
    compiled = str(folder / "compiled")
    return {"PYTHONOPTIMIZE": "2", "PYTHONPYCACHEPREFIX": compiled, "PYTHONDONTWRITEBYTECODE": ""}

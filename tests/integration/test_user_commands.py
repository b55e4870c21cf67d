"""Commands for users against a real API server, with the permissions that docs/permissions.md lists and no others."""

from pathlib import Path

import pytest
import yaml

from client.permissions import REPO_PERMISSIONS
from core.kube.resources import BACKUP_REPOSITORIES, BACKUP_STORAGE_LOCATIONS, DAEMON_SETS, JOBS, LEASES, PODS
from tests.integration.person import Done, Person
from tests.support.apiserver import ApiServer
from tests.support.terminal import run_interrupted
from tests.testbed.api import Json

pytestmark = pytest.mark.integration

_ROOT = Path(__file__).parents[2]
_DAEMONSET = _ROOT / "deploy" / "agent" / "daemonset.yaml"
_NAME = "app-default-kopia"
_NODE = "node-a"


class _Cluster(Person):
    """A namespace with agents, a repository, and a user with the permissions of `nodeagent repo`."""

    def prepare(self) -> None:
        self.grant(REPO_PERMISSIONS)
        spec = {"provider": "aws", "objectStorage": {"bucket": "b"}}
        self.create(BACKUP_STORAGE_LOCATIONS, "default", spec=spec)
        spec = {"volumeNamespace": "app", "backupStorageLocation": "default", "repositoryType": "kopia"}
        status = {"phase": "Ready", "lastMaintenanceTime": "2026-11-21T10:00:00Z"}
        self.create(BACKUP_REPOSITORIES, _NAME, spec=spec | {"maintenanceFrequency": "1h0m0s"}, status=status)

    def put_agent(self, address: str, port: int) -> None:
        """Create the DaemonSet, the leader's pod at the address, and its Lease."""
        daemonset = yaml.safe_load(_DAEMONSET.read_text(encoding="utf-8"))
        (container,) = daemonset["spec"]["template"]["spec"]["containers"]
        container["args"] = ["serve", f"--status-address=:{port}"]
        self.create(DAEMON_SETS, "node-agent", spec=daemonset["spec"])
        containers = [{"name": "c", "image": "i"}]
        labels = {"role": "node-agent"}
        self.create(PODS, "agent", metadata={"labels": labels}, spec={"nodeName": _NODE, "containers": containers})
        self.set_status(PODS, "agent", phase="Running", podIP=address, podIPs=[{"ip": address}])
        self.create(LEASES, "node-agent-dispatcher", spec={"holderIdentity": f"{_NODE}_1"})

    def repo(self, *words: str) -> Done:
        return self.run("repo", *words, "-n", self.namespace)

    @property
    def jobs(self) -> list[Json]:
        return self.api.objects(JOBS, self.namespace)


@pytest.fixture
def cluster(apiserver: ApiServer, namespace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> _Cluster:
    return _Cluster(apiserver, namespace, tmp_path, capsys)


def test_the_job_of_a_report_is_accepted_and_deleted(cluster: _Cluster) -> None:
    cluster.put_agent("192.0.2.1", 1)
    code, out, err = cluster.repo("report", _NAME, "--timeout=1s")
    assert (code, out) == (1, "")
    assert f"error: Job {cluster.namespace}/{_NAME}-report-" in err
    assert "did not end within 1s" in err
    assert cluster.jobs == []


@pytest.mark.processes
def test_an_interrupted_report_deletes_its_job(cluster: _Cluster) -> None:
    cluster.put_agent("192.0.2.1", 1)
    words = ["repo", "report", _NAME, "-n", cluster.namespace, "--kubeconfig", str(cluster.kubeconfig)]
    assert run_interrupted(words, lambda: len(cluster.jobs) == 1)[0] == ""
    assert cluster.jobs == []

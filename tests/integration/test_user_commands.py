"""Commands for users against a real API server, with the permissions that docs/permissions.md lists and no others."""

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from client.permissions import REPO_PERMISSIONS
from core.kube.resources import BACKUP_REPOSITORIES, BACKUP_STORAGE_LOCATIONS, DAEMON_SETS, JOBS, LEASES, PODS, Resource
from core.kube.transport import MERGE_PATCH
from core.models.base import JsonDict
from nodeagent.__main__ import main
from tests.support.apiserver import ApiServer
from tests.support.interrupts import run_interruptible
from tests.support.rbac import grant
from tests.support.status_page import forwarded_address, serve_status_page

pytestmark = pytest.mark.integration

_ROOT = Path(__file__).parents[2]
_DAEMONSET = _ROOT / "deploy" / "agent" / "daemonset.yaml"
_ROLES = Resource("Role", "roles", "rbac.authorization.k8s.io")
_BINDINGS = Resource("RoleBinding", "rolebindings", "rbac.authorization.k8s.io")
_NAME = "app-default-kopia"
_NODE = "node-a"


class _Cluster:
    """A namespace with agents, a repository, and a user with the permissions of `nodeagent repo`."""

    def __init__(self, apiserver: ApiServer, namespace: str, folder: Path) -> None:
        self.api, self.namespace = apiserver.api, namespace
        apiserver.create_account(namespace, "user")
        grant(self.api, namespace, "user", REPO_PERMISSIONS)
        self.kubeconfig = apiserver.account_kubeconfig(namespace, "user", folder)
        spec = {"provider": "aws", "objectStorage": {"bucket": "b"}}
        self.create(BACKUP_STORAGE_LOCATIONS, "default", spec=spec)
        spec = {"volumeNamespace": "app", "backupStorageLocation": "default", "repositoryType": "kopia"}
        status = {"phase": "Ready", "lastMaintenanceTime": "2026-11-21T10:00:00Z"}
        self.create(BACKUP_REPOSITORIES, _NAME, spec=spec | {"maintenanceFrequency": "1h0m0s"}, status=status)

    def create(self, resource: Resource, name: str, **more: Any) -> JsonDict:
        meta = {"name": name, "namespace": self.namespace} | more.pop("metadata", {})
        typed = {"apiVersion": resource.api_version, "kind": resource.kind, "metadata": meta}
        stored: JsonDict = self.api.request("POST", resource.path(self.namespace), body=typed | more)
        return stored

    def put_agent(self, address: str, port: int) -> None:
        """Create the DaemonSet, the leader's pod at the address, and its Lease."""
        daemonset = yaml.safe_load(_DAEMONSET.read_text(encoding="utf-8"))
        (container,) = daemonset["spec"]["template"]["spec"]["containers"]
        container["args"] = ["serve", f"--status-address=:{port}"]
        self.create(DAEMON_SETS, "node-agent", spec=daemonset["spec"])
        containers = [{"name": "c", "image": "i"}]
        labels = {"role": "node-agent"}
        self.create(PODS, "agent", metadata={"labels": labels}, spec={"nodeName": _NODE, "containers": containers})
        path = PODS.path(self.namespace, "agent", subresource="status")
        status = {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}]}
        self.api.request("PATCH", path, body={"status": status}, content_type=MERGE_PATCH)
        self.create(LEASES, "node-agent-dispatcher", spec={"holderIdentity": f"{_NODE}_1"})

    def run(self, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
        code = main(["repo", *words, "-n", self.namespace, "--kubeconfig", str(self.kubeconfig)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    @property
    def jobs(self) -> list[JsonDict]:
        items: list[JsonDict] = self.api.request("GET", JOBS.path(self.namespace))["items"]
        return items


@pytest.fixture
def cluster(apiserver: ApiServer, namespace: str, tmp_path: Path) -> _Cluster:
    return _Cluster(apiserver, namespace, tmp_path)


def test_the_leader_is_asked_through_the_api_server(cluster: _Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        address = forwarded_address()
    except OSError:
        pytest.skip("this machine has no address but loopback")
    said = {"hold": "window", "due": "2026-11-21T11:00:00Z", "overdue": True}
    page = {"dispatcher": {"holder": "", "leading": True}, "maintenance": {_NAME: said}}
    with serve_status_page(address, json.dumps(page).encode()) as port:
        cluster.put_agent(address, port)
        code, out, err = cluster.run(capsys, "get", "-o", "json")
        described = cluster.run(capsys, "describe", _NAME)
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["notes"] == []
    following = found["repositories"][0]["next"]
    assert (following["hold"], following["overdue"], following["fromLeader"]) == ("window", True, True)
    assert described[0] == 0
    assert described[2] == ""


def test_without_an_agent_it_is_computed(cluster: _Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = cluster.run(capsys, "describe", _NAME)
    assert code == 0
    assert "Next maintenance:" in out
    assert "note: the leader did not answer" in err
    assert "node-agent-dispatcher does not exist" in err


def test_the_job_of_a_report_is_accepted_and_deleted(cluster: _Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.put_agent("192.0.2.1", 1)
    code, out, err = cluster.run(capsys, "report", _NAME, "--timeout=1s")
    assert (code, out) == (1, "")
    assert f"error: Job {cluster.namespace}/{_NAME}-report-" in err
    assert "did not end within 1s" in err
    assert cluster.jobs == []


@pytest.mark.processes
def test_an_interrupted_report_deletes_its_job(cluster: _Cluster) -> None:
    cluster.put_agent("192.0.2.1", 1)
    words = ["repo", "report", _NAME, "-n", cluster.namespace, "--kubeconfig", str(cluster.kubeconfig)]
    with run_interruptible(words) as process:
        until = time.monotonic() + 60
        while not cluster.jobs and process.poll() is None and time.monotonic() < until:
            time.sleep(0.1)
        assert len(cluster.jobs) == 1
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert "Traceback" not in err
    assert cluster.jobs == []

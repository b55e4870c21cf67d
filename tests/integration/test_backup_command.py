"""`nodeagent backup` against a real API server, with the permissions that docs/permissions.md lists and no others."""

import json
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from client.permissions import BACKUP_PERMISSIONS
from core.kube.resources import (
    BACKUP_STORAGE_LOCATIONS,
    DAEMON_SETS,
    DATA_UPLOADS,
    PERSISTENT_VOLUME_CLAIMS,
    POD_VOLUME_BACKUPS,
    PODS,
    STORAGE_CLASSES,
    VOLUME_SNAPSHOT_CLASSES,
    VOLUME_SNAPSHOTS,
    Resource,
)
from core.kube.transport import MERGE_PATCH
from core.models.base import JsonDict
from nodeagent.__main__ import main
from nodeagent.runtime.permissions import Permission
from tests.support.apiserver import ApiServer
from tests.support.interrupts import run_interruptible
from tests.support.rbac import grant
from tests.support.terminal import open_terminal

pytestmark = pytest.mark.integration

_RBAC = "rbac.authorization.k8s.io"
_BOTH = ("--pvc", "data", "--pvc", "files")


class _Cluster:
    """Agents and two PVCs in one namespace: `data` has a driver with snapshots, a pod mounts `files`."""

    def __init__(self, apiserver: ApiServer, namespace: str, folder: Path) -> None:
        self.api, self.namespace, self.driver = apiserver.api, namespace, f"{namespace}.example.com"
        apiserver.create_account(namespace, "user")
        self.kubeconfig = apiserver.account_kubeconfig(namespace, "user", folder)
        template = {
            "metadata": {"labels": {"role": "node-agent"}},
            "spec": {"containers": [{"name": "c", "image": "i"}]},
        }
        selector = {"matchLabels": {"role": "node-agent"}}
        self.create(DAEMON_SETS, "node-agent", spec={"selector": selector, "template": template})
        self.create(BACKUP_STORAGE_LOCATIONS, "default", spec={"provider": "aws", "objectStorage": {"bucket": "b"}})
        self.create(STORAGE_CLASSES, namespace, provisioner=self.driver)
        self.create(VOLUME_SNAPSHOT_CLASSES, namespace, driver=self.driver, deletionPolicy="Delete")
        for name, storage_class in (("data", namespace), ("files", "none")):
            spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
            self.create(PERSISTENT_VOLUME_CLAIMS, name, spec=spec | {"storageClassName": storage_class})
            self.set_status(PERSISTENT_VOLUME_CLAIMS, name, phase="Bound")
        container = {"name": "c", "image": "i", "volumeMounts": [{"name": "vol", "mountPath": "/data"}]}
        volume = {"name": "vol", "persistentVolumeClaim": {"claimName": "files"}}
        self.create(PODS, "writer", spec={"nodeName": "node-a", "containers": [container], "volumes": [volume]})
        self.set_status(PODS, "writer", phase="Running")

    def create(self, resource: Resource, name: str, **more: Any) -> None:
        meta = {"name": name} | ({"namespace": self.namespace} if resource.namespaced else {})
        typed = {"apiVersion": resource.api_version, "kind": resource.kind, "metadata": meta}
        path = resource.path(self.namespace if resource.namespaced else "")
        self.api.request("POST", path, body=typed | more)

    def set_status(self, resource: Resource, name: str, **status: Any) -> None:
        path = resource.path(self.namespace, name, subresource="status")
        self.api.request("PATCH", path, body={"status": status}, content_type=MERGE_PATCH)

    def move(self, resource: Resource, name: str, **status: Any) -> None:
        """Set the status of a transfer, which is no subresource."""
        path = resource.path(self.namespace, name)
        self.api.request("PATCH", path, body={"status": status}, content_type=MERGE_PATCH)

    def grant(self, permissions: Sequence[Permission] = BACKUP_PERMISSIONS) -> None:
        """Give the user these permissions."""
        grant(self.api, self.namespace, "user", permissions)

    @property
    def words(self) -> list[str]:
        return ["--agent-namespace", self.namespace, "--kubeconfig", str(self.kubeconfig)]

    def run(self, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
        own = ["-n", self.namespace] if words[0] in {"create", "get"} else []
        code = main(["backup", *words, *own, *self.words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    def made(self) -> list[JsonDict]:
        kinds = (VOLUME_SNAPSHOTS, DATA_UPLOADS, POD_VOLUME_BACKUPS)
        return [one for kind in kinds for one in self.api.request("GET", kind.path(self.namespace))["items"]]


@pytest.fixture
def cluster(apiserver: ApiServer, namespace: str, tmp_path: Path) -> _Cluster:
    return _Cluster(apiserver, namespace, tmp_path)


def test_a_backup_is_created_shown_and_canceled_with_the_listed_permissions(
    cluster: _Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.grant()
    code, out, err = cluster.run(capsys, "create", "night", *_BOTH, "--ttl", "1h", "--labels", "team=a", "-o", "json")
    assert (code, err) == (0, "checking the volumes of night\n")
    made = cluster.made()
    assert [one["kind"] for one in made] == ["VolumeSnapshot", "DataUpload", "PodVolumeBackup"]
    assert {one["metadata"]["labels"].get("nodeagent.io/backup") for one in made} == {"night"}
    created = json.loads(out)
    assert cluster.run(capsys, "create", "night", *_BOTH, "-o", "json")[:2] == (0, out)
    assert json.loads(cluster.run(capsys, "get", "-o", "json")[1])["backups"] == [created]
    code, out, _ = cluster.run(capsys, "cancel", "night")
    assert (code, out.count("\n")) == (0, 3)
    assert [one["spec"].get("cancel") for one in cluster.made()] == [None, True, True]
    assert "Canceling" in cluster.run(capsys, "describe", "night")[1]


def test_what_the_api_server_rejects_is_found_before_anything_is_created(
    cluster: _Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.grant()
    code, out, err = cluster.run(capsys, "create", "night", *_BOTH, "--labels", "team=a b")
    assert (code, out, cluster.made()) == (1, "", [])
    assert f"error: PVC {cluster.namespace}/data cannot be backed up, nothing was created: create (dry run) Data" in err


@pytest.mark.parametrize(
    ("missing", "verb", "named"),
    [
        pytest.param(PERSISTENT_VOLUME_CLAIMS, "get", 'cannot get resource "persistentvolumeclaims"', id="claims"),
        pytest.param(VOLUME_SNAPSHOTS, "create", 'cannot create resource "volumesnapshots"', id="snapshots"),
        pytest.param(POD_VOLUME_BACKUPS, "create", 'cannot create resource "podvolumebackups"', id="transfers"),
        pytest.param(PODS, "list", 'cannot list resource "pods"', id="pods"),
        pytest.param(STORAGE_CLASSES, "list", 'cannot list resource "storageclasses"', id="classes"),
    ],
)
def test_a_missing_permission_is_one_line_and_nothing_is_created(
    cluster: _Cluster, capsys: pytest.CaptureFixture[str], missing: Resource, verb: str, named: str
) -> None:
    cluster.grant([one for one in BACKUP_PERMISSIONS if one.resource is not missing or verb not in one.verbs])
    claims = ("--pvc", "data") if missing is STORAGE_CLASSES else _BOTH
    code, out, err = cluster.run(capsys, "create", "night", *claims)
    assert (code, out, cluster.made()) == (1, "", [])
    error = err.splitlines()[-1]
    assert error.startswith("error: ")
    assert named in error


@pytest.mark.processes
def test_a_terminal_shows_what_each_volume_does(cluster: _Cluster) -> None:
    cluster.grant()
    words = ["backup", "create", "night", *_BOTH, "-n", cluster.namespace, "--wait", *cluster.words]
    with open_terminal(words) as terminal:
        terminal.read_until("/files +New")
        _, upload, pod_backup = (one["metadata"]["name"] for one in cluster.made())
        cluster.move(DATA_UPLOADS, upload, phase="InProgress", progress={"totalBytes": 2**30, "bytesDone": 2**29})
        terminal.read_until(r"/data +InProgress +512\.0 MiB / 1\.0 GiB 50%")
        cluster.move(DATA_UPLOADS, upload, phase="Completed", progress={"totalBytes": 2**30, "bytesDone": 2**30})
        terminal.read_until("/data +Completed")
        cluster.move(POD_VOLUME_BACKUPS, pod_backup, phase="Failed", message="disk full\x1b[2J")
        assert terminal.finish()[0] == 1, terminal.text
    ending = terminal.text.splitlines()[-3:]
    assert ending == [
        "backup night is PartiallyFailed: 1/2 volumes, 1.0 GiB",
        "note: the backup has the data of volumes only: no manifests, and no hooks run",
        f"error: backup night is PartiallyFailed: PVC {cluster.namespace}/files is Failed: disk full\\x1b[2J",
    ]
    assert "\x1b[2J" not in terminal.raw


@pytest.mark.processes
def test_an_interrupted_wait_leaves_the_backup_alone(cluster: _Cluster) -> None:
    cluster.grant()
    words = ["backup", "create", "night", *_BOTH, "-n", cluster.namespace, "--wait", *cluster.words]
    with run_interruptible(words) as process:
        until = time.monotonic() + 60
        while len(cluster.made()) < 3 and process.poll() is None and time.monotonic() < until:
            time.sleep(0.1)
        assert len(cluster.made()) == 3
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert "Traceback" not in err
    assert "nodeagent backup cancel night" in err
    assert [one["spec"].get("cancel") for one in cluster.made()] == [None, None, None]


def test_without_a_cluster_one_line_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config"
    server = {"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}
    context = {"name": "c", "context": {"cluster": "c", "user": "u"}}
    users = [{"name": "u", "user": {}}]
    config.write_text(json.dumps({"current-context": "c", "clusters": [server], "contexts": [context], "users": users}))
    assert main(["backup", "get", "--kubeconfig", str(config)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: the cluster cannot be reached: ")
    assert captured.err.count("\n") == 1

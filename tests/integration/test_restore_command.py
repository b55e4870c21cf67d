"""`nodeagent restore` against a real API server, with the permissions that docs/permissions.md lists and no others."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from client.permissions import RESTORE_PERMISSIONS
from core.kube.resources import (
    DATA_DOWNLOADS,
    DATA_UPLOADS,
    NAMESPACES,
    PERSISTENT_VOLUME_CLAIMS,
    STORAGE_CLASSES,
    Resource,
)
from core.kube.transport import MERGE_PATCH
from core.models.backups import SavedClaim
from core.models.base import JsonDict
from nodeagent.__main__ import main
from nodeagent.runtime.permissions import Permission
from tests.support.apiserver import ApiServer
from tests.support.rbac import grant

pytestmark = pytest.mark.integration

_RBAC = "rbac.authorization.k8s.io"


class _Cluster:
    """A completed backup `night` of the PVC `data` in one namespace, in which it does not exist any more."""

    def __init__(self, apiserver: ApiServer, namespace: str, folder: Path) -> None:
        self.api, self.namespace = apiserver.api, namespace
        apiserver.create_account(namespace, "user")
        self.kubeconfig = apiserver.account_kubeconfig(namespace, "user", folder)
        self.create(STORAGE_CLASSES, namespace, provisioner="p.example.com")
        claim = SavedClaim(
            namespace=namespace, name="data", size="1Gi", storage_class=namespace, access_modes=("ReadWriteOnce",)
        )
        annotations = {
            "nodeagent.io/backup": "night",
            "nodeagent.io/backup-volumes": "1",
            "nodeagent.io/claim": claim.text,
        }
        meta = {"labels": {"nodeagent.io/backup": "night"}, "annotations": annotations}
        spec = {
            "snapshotType": "CSI",
            "csiSnapshot": {"volumeSnapshot": "v", "storageClass": "c", "snapshotClass": "s"},
            "sourceNamespace": namespace,
            "sourcePVC": "data",
            "backupStorageLocation": "default",
            "operationTimeout": "10m0s",
        }
        self.create(DATA_UPLOADS, "night-1", meta=meta, spec=spec)
        path = DATA_UPLOADS.path(namespace, "night-1")
        done = {"status": {"phase": "Completed", "snapshotID": "s1"}}
        self.api.request("PATCH", path, body=done, content_type=MERGE_PATCH)

    def create(self, resource: Resource, name: str, **more: Any) -> None:
        meta = {"name": name} | ({"namespace": self.namespace} if resource.namespaced else {}) | more.pop("meta", {})
        typed = {"apiVersion": resource.api_version, "kind": resource.kind, "metadata": meta}
        self.api.request("POST", resource.path(self.namespace if resource.namespaced else ""), body=typed | more)

    def grant(self, permissions: Sequence[Permission] = RESTORE_PERMISSIONS) -> None:
        """Give the user these permissions."""
        grant(self.api, self.namespace, "user", permissions)

    def run(self, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
        own = ["--agent-namespace", self.namespace, "--kubeconfig", str(self.kubeconfig)]
        code = main(["restore", *words, *own])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    def made(self, namespace: str = "") -> list[JsonDict]:
        kinds = {PERSISTENT_VOLUME_CLAIMS: namespace or self.namespace, DATA_DOWNLOADS: self.namespace}
        return [one for kind, place in kinds.items() for one in self.api.request("GET", kind.path(place))["items"]]


@pytest.fixture
def cluster(apiserver: ApiServer, namespace: str, tmp_path: Path) -> _Cluster:
    return _Cluster(apiserver, namespace, tmp_path)


_CREATE = ("create", "back", "--from-backup", "night")


def test_a_restore_is_created_shown_repeated_and_canceled_with_the_listed_permissions(
    cluster: _Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.grant()
    code, out, err = cluster.run(capsys, *_CREATE, "-o", "json")
    assert (code, err) == (0, "checking the volumes of back\n")
    claim, transfer = cluster.made()
    assert claim["spec"]["selector"] == {"matchLabels": {"velero.io/dynamic-pv-restore": transfer["metadata"]["name"]}}
    assert (claim["spec"]["storageClassName"], transfer["spec"]["snapshotID"]) == (cluster.namespace, "s1")
    assert cluster.run(capsys, *_CREATE, "-o", "json")[:2] == (0, out)
    assert cluster.made() == [claim, transfer]
    assert json.loads(cluster.run(capsys, "get", "-o", "json")[1])["restores"] == [json.loads(out)]
    assert cluster.run(capsys, "cancel", "back")[0] == 0
    assert cluster.made()[1]["spec"]["cancel"] is True
    assert "Canceling" in cluster.run(capsys, "describe", "back")[1]


def test_a_namespace_that_is_missing_is_created(cluster: _Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.grant()
    new = f"{cluster.namespace}-new"
    code, _, err = cluster.run(capsys, *_CREATE, "--namespace-mappings", f"{cluster.namespace}:{new}")
    assert (code, f"note: namespace {new} was created" in err) == (0, True), err
    claim, transfer = cluster.made(new)
    assert claim["metadata"]["name"] == "data"
    assert transfer["spec"]["targetVolume"]["namespace"] == new


def test_a_claim_that_exists_is_named_and_stays_as_it_is(cluster: _Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.grant()
    spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    cluster.create(PERSISTENT_VOLUME_CLAIMS, "data", spec=spec)
    before = cluster.made()
    code, out, err = cluster.run(capsys, *_CREATE)
    assert (code, out, cluster.made()) == (1, "", before)
    assert err.splitlines()[-1].startswith(
        f"error: PVC {cluster.namespace}/data exists already, and restores go to new"
    )


@pytest.mark.parametrize(
    ("missing", "verb", "named"),
    [
        pytest.param(DATA_UPLOADS, "list", 'cannot list resource "datauploads"', id="backups"),
        pytest.param(PERSISTENT_VOLUME_CLAIMS, "create", 'cannot get resource "persistentvolumeclaims"', id="claims"),
        pytest.param(DATA_DOWNLOADS, "create", 'cannot get resource "datadownloads"', id="transfers"),
        pytest.param(NAMESPACES, "create", 'cannot create resource "persistentvolumeclaims"', id="namespaces"),
    ],
)
def test_a_missing_permission_is_one_line_and_nothing_is_created(
    cluster: _Cluster, capsys: pytest.CaptureFixture[str], missing: Resource, verb: str, named: str
) -> None:
    cluster.grant([one for one in RESTORE_PERMISSIONS if one.resource is not missing or verb not in one.verbs])
    words = ("--namespace-mappings", f"{cluster.namespace}:{cluster.namespace}-none") if missing is NAMESPACES else ()
    code, out, err = cluster.run(capsys, *_CREATE, *words)
    assert (code, out, cluster.made()) == (1, "", [])
    error = err.splitlines()[-1]
    assert error.startswith("error: ")
    if missing is NAMESPACES:
        assert "not found" in error
    else:
        assert named in error


def test_without_a_cluster_one_line_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config"
    server = {"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}
    context = {"name": "c", "context": {"cluster": "c", "user": "u"}}
    users = [{"name": "u", "user": {}}]
    config.write_text(json.dumps({"current-context": "c", "clusters": [server], "contexts": [context], "users": users}))
    for words in (["restore", "get"], ["backup", "get", "--from-storage-location", "default"]):
        assert main([*words, "--kubeconfig", str(config)]) == 2
        captured = capsys.readouterr()
        assert (captured.out, captured.err.splitlines()[-1].startswith("error: the cluster cannot be reached: ")) == (
            *("", True),
        )

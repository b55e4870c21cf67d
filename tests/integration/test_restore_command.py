"""`nodeagent restore` against a real API server, with the permissions that docs/permissions.md lists and no others."""

import json
from pathlib import Path

import pytest

from client.permissions import RESTORE_PERMISSIONS
from core.kube.resources import DATA_DOWNLOADS, DATA_UPLOADS, PERSISTENT_VOLUME_CLAIMS, STORAGE_CLASSES
from core.models.backups import SavedClaim
from tests.integration.person import Done, Person
from tests.support.apiserver import ApiServer
from tests.testbed.api import Json

pytestmark = pytest.mark.integration


class _Cluster(Person):
    """A completed backup `night` of the PVC `data` in one namespace, in which it does not exist any more."""

    def prepare(self) -> None:
        namespace = self.namespace
        self.install_agents()
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
        self.create(DATA_UPLOADS, "night-1", metadata=meta, spec=spec)
        self.set_status(DATA_UPLOADS, "night-1", phase="Completed", snapshotID="s1")

    def restore(self, *words: str) -> Done:
        return self.run("restore", *words, "--agent-namespace", self.namespace)

    def made(self, namespace: str = "") -> list[Json]:
        kinds = {PERSISTENT_VOLUME_CLAIMS: namespace or self.namespace, DATA_DOWNLOADS: self.namespace}
        return [one for kind, place in kinds.items() for one in self.api.objects(kind, place)]


@pytest.fixture
def cluster(apiserver: ApiServer, namespace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> _Cluster:
    return _Cluster(apiserver, namespace, tmp_path, capsys)


_CREATE = ("create", "back", "--from-backup", "night")


def test_a_restore_is_created_shown_repeated_and_canceled_with_the_listed_permissions(cluster: _Cluster) -> None:
    cluster.grant(RESTORE_PERMISSIONS)
    code, out, err = cluster.restore(*_CREATE, "-o", "json")
    assert (code, err) == (0, "checking the volumes of back\n")
    claim, transfer = cluster.made()
    assert claim["spec"]["selector"] == {"matchLabels": {"velero.io/dynamic-pv-restore": transfer["metadata"]["name"]}}
    assert (claim["spec"]["storageClassName"], transfer["spec"]["snapshotID"]) == (cluster.namespace, "s1")
    assert cluster.restore(*_CREATE, "-o", "json")[:2] == (0, out)
    assert cluster.made() == [claim, transfer]
    assert json.loads(cluster.restore("get", "-o", "json")[1])["restores"] == [json.loads(out)]
    assert cluster.restore("cancel", "back")[0] == 0
    assert cluster.made()[1]["spec"]["cancel"] is True
    assert "Canceling" in cluster.restore("describe", "back")[1]


def test_a_namespace_that_is_missing_is_created(cluster: _Cluster) -> None:
    cluster.grant(RESTORE_PERMISSIONS)
    new = f"{cluster.namespace}-new"
    code, _, err = cluster.restore(*_CREATE, "--namespace-mappings", f"{cluster.namespace}:{new}")
    assert (code, f"note: namespace {new} was created" in err) == (0, True), err
    claim, transfer = cluster.made(new)
    assert claim["metadata"]["name"] == "data"
    assert transfer["spec"]["targetVolume"]["namespace"] == new


def test_a_claim_that_exists_is_named_and_stays_as_it_is(cluster: _Cluster) -> None:
    cluster.grant(RESTORE_PERMISSIONS)
    spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    cluster.create(PERSISTENT_VOLUME_CLAIMS, "data", spec=spec)
    before = cluster.made()
    code, out, err = cluster.restore(*_CREATE)
    assert (code, out, cluster.made()) == (1, "", before)
    assert err.splitlines()[-1].startswith(
        f"error: PVC {cluster.namespace}/data exists already, and restores go to new"
    )

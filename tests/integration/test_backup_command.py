"""`nodeagent backup` against a real API server, with the permissions that docs/permissions.md lists and no others."""

import json
from pathlib import Path

import pytest

from client.permissions import BACKUP_PERMISSIONS
from core.kube.resources import (
    BACKUP_STORAGE_LOCATIONS,
    DATA_UPLOADS,
    PERSISTENT_VOLUME_CLAIMS,
    POD_VOLUME_BACKUPS,
    PODS,
    STORAGE_CLASSES,
    VOLUME_SNAPSHOT_CLASSES,
    VOLUME_SNAPSHOTS,
)
from tests.integration.person import Done, Person
from tests.support.apiserver import ApiServer
from tests.support.terminal import run_interrupted
from tests.testbed.api import Json

pytestmark = pytest.mark.integration

_BOTH = ("--pvc", "data", "--pvc", "files")


class Backups(Person):
    """A person, agents and two PVCs in one namespace: `data` has a driver with snapshots, a pod mounts `files`."""

    def prepare(self) -> None:
        driver = f"{self.namespace}.example.com"
        self.install_agents()
        self.create(BACKUP_STORAGE_LOCATIONS, "default", spec={"provider": "aws", "objectStorage": {"bucket": "b"}})
        self.create(STORAGE_CLASSES, self.namespace, provisioner=driver)
        self.create(VOLUME_SNAPSHOT_CLASSES, self.namespace, driver=driver, deletionPolicy="Delete")
        for name, storage_class in (("data", self.namespace), ("files", "none")):
            spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
            self.create(PERSISTENT_VOLUME_CLAIMS, name, spec=spec | {"storageClassName": storage_class})
            self.set_status(PERSISTENT_VOLUME_CLAIMS, name, phase="Bound")
        container = {"name": "c", "image": "i", "volumeMounts": [{"name": "vol", "mountPath": "/data"}]}
        volume = {"name": "vol", "persistentVolumeClaim": {"claimName": "files"}}
        self.create(PODS, "writer", spec={"nodeName": "node-a", "containers": [container], "volumes": [volume]})
        self.set_status(PODS, "writer", phase="Running")

    @property
    def words(self) -> list[str]:
        return ["--agent-namespace", self.namespace, "--kubeconfig", str(self.kubeconfig)]

    def backup(self, *words: str) -> Done:
        own = ["-n", self.namespace] if words[0] in {"create", "get"} else []
        return self.run("backup", *words, *own, "--agent-namespace", self.namespace)

    def made(self) -> list[Json]:
        kinds = (VOLUME_SNAPSHOTS, DATA_UPLOADS, POD_VOLUME_BACKUPS)
        # Items of a list have no kind.
        return [{"kind": kind.kind, **one} for kind in kinds for one in self.api.objects(kind, self.namespace)]


@pytest.fixture
def cluster(apiserver: ApiServer, namespace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Backups:
    return Backups(apiserver, namespace, tmp_path, capsys)


def test_a_backup_is_created_shown_and_canceled_with_the_listed_permissions(cluster: Backups) -> None:
    cluster.grant(BACKUP_PERMISSIONS)
    code, out, err = cluster.backup("create", "night", *_BOTH, "--ttl", "1h", "--labels", "team=a", "-o", "json")
    assert (code, err) == (0, "checking the volumes of night\n")
    made = cluster.made()
    assert [one["kind"] for one in made] == ["VolumeSnapshot", "DataUpload", "PodVolumeBackup"]
    assert {one["metadata"]["labels"].get("nodeagent.io/backup") for one in made} == {"night"}
    created = json.loads(out)
    assert cluster.backup("create", "night", *_BOTH, "-o", "json")[:2] == (0, out)
    assert json.loads(cluster.backup("get", "-o", "json")[1])["backups"] == [created]
    code, out, _ = cluster.backup("cancel", "night")
    assert (code, out.count("\n")) == (0, 3)
    assert [one["spec"].get("cancel") for one in cluster.made()] == [None, True, True]
    assert "Canceling" in cluster.backup("describe", "night")[1]


def test_what_the_api_server_rejects_is_found_before_anything_is_created(cluster: Backups) -> None:
    cluster.grant(BACKUP_PERMISSIONS)
    code, out, err = cluster.backup("create", "night", *_BOTH, "--annotations", f"note={'x' * 2**18}")
    assert (code, out, cluster.made()) == (1, "", [])
    assert f"error: PVC {cluster.namespace}/data cannot be backed up, nothing was created: create (dry run) Data" in err


@pytest.mark.processes
def test_an_interrupted_wait_leaves_the_backup_alone(cluster: Backups) -> None:
    cluster.grant(BACKUP_PERMISSIONS)
    words = ["backup", "create", "night", *_BOTH, "-n", cluster.namespace, "--wait", *cluster.words]
    out, err = run_interrupted(words, lambda: len(cluster.made()) == 3)
    assert out == ""
    assert "nodeagent backup cancel night" in err
    assert [one["spec"].get("cancel") for one in cluster.made()] == [None, None, None]

"""Transfers that a user writes: minimal fields and unusual names."""

import shutil
from pathlib import Path

import pytest

from core.models.base import JsonDict
from tests.datamover.support.plainkopia import PlainKopia
from tests.datamover.support.pods import TRANSFER, MoverPod
from tests.datamover.support.trees import describe_tree
from tests.support.fakekube import FakeKube

pytestmark = pytest.mark.processes

_SOURCE = {
    "backupStorageLocation": "default",
    "sourceNamespace": "app",
    "operationTimeout": "10m",
    "dataMoverConfig": None,
}


def _minimal(kind: str, spec: JsonDict) -> JsonDict:
    """Return a transfer with minimal metadata."""
    return {
        "apiVersion": "velero.io/v2alpha1",
        "kind": kind,
        "metadata": {"name": TRANSFER, "namespace": "velero"},
        "spec": spec,
        "status": {"phase": "InProgress"},
    }


@pytest.fixture
async def pod(tmp_path: Path, _new_repository: Path) -> MoverPod:
    """A pod whose repository exists and is Ready."""
    shutil.copytree(_new_repository, tmp_path / "backups" / "kopia" / "app")
    pod = MoverPod(FakeKube(), tmp_path)
    pod.put_repository(phase="Ready")
    return pod


async def test_a_data_upload_without_labels_and_with_null_settings_succeeds(
    pod: MoverPod, tmp_path: Path, kopia_program: Path
) -> None:
    """Velero then sets the tag of the operation to an empty value."""
    (tmp_path / "volume").mkdir()
    (tmp_path / "volume" / "ü 文").write_text("x")
    pod.kube.put(_minimal("DataUpload", {**_SOURCE, "snapshotType": "CSI", "sourcePVC": "data"}))
    assert await pod.run("data-upload", tmp_path / "volume") == 0, pod.message
    plain_kopia = PlainKopia(kopia_program, pod.folder)
    plain_kopia.connect(pod.folder / "backups" / "kopia" / "app")
    (snapshot,) = plain_kopia.snapshots()
    assert snapshot["tags"]["tag:velero.io/async-operation-id"] == ""
    target = {"pvc": "data", "pv": "", "namespace": "app"}
    pod.kube.put(_minimal("DataDownload", {**_SOURCE, "snapshotID": pod.result["snapshotID"], "targetVolume": target}))
    (tmp_path / "target").mkdir()
    assert await pod.run("data-download", tmp_path / "target") == 0, pod.message
    assert describe_tree(tmp_path / "target") == describe_tree(tmp_path / "volume")

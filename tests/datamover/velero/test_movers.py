"""Our data mover and the ones of Velero's releases restore what the other backed up."""

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from core.kube.resources import NAMESPACES
from tests.datamover.support.pods import CLOUD, TRANSFER, MoverPod
from tests.datamover.support.s3server import S3Server
from tests.datamover.support.trees import describe_tree
from tests.datamover.velero.movers import VeleroMover
from tests.support.apiserver import ApiServer, run_apiserver
from tests.support.fakekube import FakeKube
from tests.velero.server import apply_definitions

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(900)]

_KINDS = [("DataUpload", "DataDownload"), ("PodVolumeBackup", "PodVolumeRestore")]
_BUCKET = "velero"
_CACHED = ("cache/CACHEDIR.TAG", "cache/kept")
"""What Velero leaves out of backups, and we do not (docs/velero-differences.md)."""


@pytest.fixture(scope="module", params=["1.17.2", "1.18.3"])
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def server(version: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """An API server with the custom resources of that version."""
    with run_apiserver() as server:
        apply_definitions(version, server, tmp_path_factory.mktemp("velero"))
        server.api.create(NAMESPACES, {"metadata": {"name": "velero"}})
        yield server


@pytest.fixture
def velero(version: str, server: ApiServer, tmp_path: Path) -> VeleroMover:
    return VeleroMover(version, server, tmp_path)


@pytest.fixture
async def pod(s3: S3Server, tmp_path: Path) -> MoverPod:
    """Our data mover's cluster, with a new repository in an empty bucket."""
    s3.make_bucket(_BUCKET)
    pod = MoverPod(FakeKube(), tmp_path)
    pod.put_secret(CLOUD["name"], CLOUD["key"], s3.credentials_file)
    config = {"region": "us-east-1", "s3ForcePathStyle": "true", "s3Url": s3.url}
    pod.put_location(config, bucket=_BUCKET, credential=CLOUD)
    await pod.create_repository()
    return pod


def _content(root: Path) -> dict[str, tuple[object, ...]]:
    """Describe a volume without what a restore leaves in it for the workload."""
    shutil.rmtree(root / ".velero", ignore_errors=True)
    return describe_tree(root)


@pytest.mark.parametrize("kinds", _KINDS, ids=["volumes", "pod volumes"])
async def test_velero_restores_what_we_backed_up(
    pod: MoverPod, velero: VeleroMover, tree: Path, tmp_path: Path, kinds: tuple[str, str]
) -> None:
    (backup, restore), target = kinds, tmp_path / "target"
    target.mkdir()
    pod.put_transfer(restore, snapshotID=(await pod.transfer(backup, tree))["snapshotID"])
    velero.run(pod, restore, TRANSFER, target)
    assert _content(target) == _content(tree)


@pytest.mark.parametrize("kinds", _KINDS, ids=["volumes", "pod volumes"])
async def test_we_restore_what_velero_backed_up(
    pod: MoverPod, velero: VeleroMover, tree: Path, tmp_path: Path, kinds: tuple[str, str]
) -> None:
    (backup, restore), target = kinds, tmp_path / "target"
    target.mkdir()
    pod.put_transfer(backup)
    result = json.loads(velero.run(pod, backup, TRANSFER, tree))
    await pod.transfer(restore, target, snapshotID=result["snapshotID"])
    for cached in _CACHED:
        (tree / cached).unlink()
    assert _content(target) == _content(tree)


@pytest.mark.parametrize("backup", ["DataUpload", "PodVolumeBackup"])
async def test_our_backup_continues_the_one_of_velero(
    pod: MoverPod, velero: VeleroMover, tree: Path, backup: str
) -> None:
    """Nothing has changed since: both are of one source with one history.

    What Velero leaves out is sent. Of a volume's snapshot, which was taken some time before, files are also read whose
    last change is after all times of files: Velero's snapshot does not say whether it has that change.
    """
    pod.put_transfer(backup)
    first = json.loads(velero.run(pod, backup, TRANSFER, tree))
    # A snapshot that was begun after this one was created would be no parent. The API server cuts off nearly a second.
    await asyncio.sleep(1)
    await pod.transfer(backup, tree)
    assert pod.result["snapshotID"] != first["snapshotID"]
    cached = {tree / name for name in _CACHED}
    files = {path: path.lstat() for path in tree.rglob("*") if path.is_symlink() or path.is_file()}
    newest_ns = max(status.st_mtime_ns for path, status in files.items() if path not in cached)
    doubtful = {path for path, status in files.items() if status.st_ctime_ns > newest_ns and backup == "DataUpload"}
    assert pod.result["incrementalBytes"] == sum(files[path].st_size for path in cached | doubtful)

"""Whole transfers: their settings, unusual ones, their secrets, and two clusters in one location."""

import asyncio
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from core.models.base import JsonDict
from core.models.names import BANDWIDTH_ANNOTATION
from core.models.transfer_settings import BandwidthLimits
from datamover.kopia.repository import Repository
from datamover.runtime.resources import ResourceLimits
from tests.datamover.support.backup_movers import BACKUP_VERB, plain_only
from tests.datamover.support.plainkopia import PASSWORD, PlainKopia
from tests.datamover.support.pods import TRANSFER, MoverPod
from tests.datamover.support.s3proxy import S3Proxy
from tests.datamover.support.s3server import S3Server
from tests.datamover.support.trees import describe_tree, make_tree
from tests.support.fakekube import FakeKube

pytestmark = pytest.mark.processes

_CPUS = 2
"""The limits of the pod in these tests."""


def _flags(record: Path, verb: str) -> set[str]:
    """Return the flags of the last call of `verb`."""
    called = [line.split() for line in record.read_text().splitlines() if f" {verb} " in line]
    return {word for word in called[-1] if word.startswith("--")}


@dataclass(frozen=True)
class _Way:
    """The two kinds that back up and restore a volume, and the fields of their settings."""

    out: str
    back: str
    key: str

    async def go(self, pod: MoverPod, tree: Path, settings: dict[str, str]) -> None:
        given: dict[str, Any] = {self.key: settings}
        backup = await pod.transfer(self.out, tree, **given)
        shutil.rmtree(pod.folder / "out", ignore_errors=True)
        await pod.transfer(self.back, pod.folder / "out", snapshotID=backup["snapshotID"], **given)


_SNAPSHOT_DATA = _Way("DataUpload", "DataDownload", "dataMoverConfig")
_POD_VOLUMES = _Way("PodVolumeBackup", "PodVolumeRestore", "uploaderSettings")
_NAMES = ["snapshot data", "pod volumes"]


@plain_only
@pytest.mark.sample("snapshot data")
@pytest.mark.parametrize("way", [_SNAPSHOT_DATA, _POD_VOLUMES], ids=_NAMES)
async def test_settings_are_passed_to_kopia(
    pod: MoverPod, tree: Path, record: Path, way: _Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy machine, requests may take as long as to a storage that is far away.
    monkeypatch.setattr(Repository, "request_seconds", 0.001)
    await way.go(pod, tree, {})
    assert f"--parallel={_CPUS + 1}" in _flags(record, "snapshot create")
    assert f"--parallel={2 * _CPUS}" in _flags(record, "restore")
    assert "--write-sparse-files" not in _flags(record, "restore")
    await way.go(pod, tree, {"ParallelFilesUpload": "5", "ParallelFilesDownload": "3", "WriteSparseFiles": "true"})
    assert "--parallel=5" in _flags(record, "snapshot create")
    assert {"--parallel=3", "--write-sparse-files"} <= _flags(record, "restore")


@plain_only
async def test_more_files_are_moved_in_parallel_from_a_storage_that_is_far_away_unless_settings_say_how_many(
    tree: Path, tmp_path: Path, proxy: S3Proxy, record: Path
) -> None:
    # Far more than what changes the number; a busy machine only adds to it.
    proxy.latency_seconds = 0.05
    limits = ResourceLimits(_CPUS, 512 << 20)
    pod = MoverPod(FakeKube(), tmp_path, limits=limits)
    pod.put_bucket(proxy.server, proxy.server.make_bucket("far"), url=proxy.url)
    await pod.create_repository()
    named = {"ParallelFilesUpload": "9", "ParallelFilesDownload": "3"}
    most = limits.adapted_restore_workers(proxy.latency_seconds, 0)
    for settings, backup, restore in (({}, 3, most), (named, 9, 3)):
        record.write_text("")
        await _SNAPSHOT_DATA.go(pod, tree, settings)
        # Also before the first backup of a volume: one that was killed may have left exclusions in the policy.
        assert record.read_text().count("policy show") == 1
        assert f"--parallel={backup}" in _flags(record, "snapshot create")
        assert f"--parallel={restore}" in _flags(record, "restore")
        # kopia ignores what is more than its policy for the volume has.
        assert f"--max-parallel-file-reads={backup}" in record.read_text()


@plain_only
async def test_a_backup_behind_a_proxy_has_few_connections(pod: MoverPod, tree: Path, record: Path) -> None:
    """Each holds some 500 KiB that kopia believes sent, and waits only a minute for the answer."""
    pod.limits = ResourceLimits(16)
    await pod.transfer("DataUpload", tree)
    assert "--parallel=17" in _flags(record, "snapshot create")
    pod.annotations = {BANDWIDTH_ANNOTATION: BandwidthLimits().to_json()}
    await pod.transfer("DataUpload", tree)
    assert "--parallel=6" in _flags(record, "snapshot create")


@plain_only
@pytest.mark.parametrize("way", [_SNAPSHOT_DATA, _POD_VOLUMES], ids=_NAMES)
async def test_a_snapshot_with_more_entries_than_the_memory_suffices_for_is_restored_in_parts_or_reported(
    pod: MoverPod, tree: Path, record: Path, monkeypatch: pytest.MonkeyPatch, way: _Way
) -> None:
    await way.go(pod, tree, {})
    monkeypatch.setattr("datamover.runtime.resources._LEAST_ENTRIES", 23)
    pod.limits = ResourceLimits(_CPUS, 100 << 20)
    record.write_text("")
    await way.go(pod, tree, {})
    parts = way is _SNAPSHOT_DATA
    assert (record.read_text().count(" --mode=local ") > 1) is parts
    entries = len([*tree.rglob("*")])
    text = f"the snapshot has {entries} entries, and kopia keeps all of them in memory: the limit suffices for about 23"
    assert (("Data-Path-Warning", text) in pod.events()) is not parts


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


async def test_a_data_upload_without_labels_and_with_null_settings_succeeds(
    pod: MoverPod, plain_kopia: PlainKopia, tmp_path: Path
) -> None:
    """Velero then sets the tag of the operation to an empty value."""
    (tmp_path / "volume").mkdir()
    (tmp_path / "volume" / "ü 文").write_text("x")
    pod.kube.put(_minimal("DataUpload", {**_SOURCE, "snapshotType": "CSI", "sourcePVC": "data"}))
    assert await pod.run("data-upload", tmp_path / "volume") == 0, pod.message
    (snapshot,) = plain_kopia.snapshots()
    assert snapshot["tags"]["tag:velero.io/async-operation-id"] == ""
    target = {"pvc": "data", "pv": "", "namespace": "app"}
    pod.kube.put(_minimal("DataDownload", {**_SOURCE, "snapshotID": pod.result["snapshotID"], "targetVolume": target}))
    assert await pod.run("data-download", tmp_path / "target") == 0, pod.message
    assert describe_tree(tmp_path / "target") == describe_tree(tmp_path / "volume")


async def _run_everything(pod: MoverPod, tree: Path) -> str:
    """Initialize, back up, restore, fail, and return all messages and Events."""
    await pod.create_repository()
    reported = [pod.message]
    await pod.transfer("DataUpload", tree)
    reported.append(pod.message)
    await pod.transfer("DataDownload", pod.folder / "target", snapshotID=pod.result["snapshotID"])
    pod.put_secret("velero-repo-credentials", "repository-password", "quite another one")
    pod.put_transfer("DataUpload")
    assert await pod.run("data-upload", tree) == 12
    return "".join([*reported, pod.message, str(pod.events())])


async def test_no_secret_is_in_arguments_logs_messages_or_remaining_files(
    s3: S3Server, tree: Path, tmp_path: Path, record: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    pod = MoverPod(FakeKube(), tmp_path)
    pod.put_bucket(s3, s3.make_bucket("secrets"))
    reported = await _run_everything(pod, tree)
    lines = record.read_text()
    left = [path.read_bytes() for path in tmp_path.glob("datamover-*/**/*") if path.is_file()]
    assert BACKUP_VERB in lines
    assert left
    for secret in (PASSWORD, "quite another one", s3.secret_key):
        assert secret not in f"{lines}{reported}{caplog.text}"
        assert not any(secret.encode() in content for content in left)


def _cluster(folder: Path, name: str) -> MoverPod:
    (folder / name).mkdir()
    pod = MoverPod(FakeKube(), folder / name, cluster=name)
    pod.put_location({"fspath": str(folder / "backups")}, provider="velero.io/fs")
    pod.put_repository()
    pod.put_transfer("DataUpload")
    return pod


async def test_two_clusters_back_up_at_once_and_restore_their_own(tmp_path: Path) -> None:
    (tmp_path / "backups").mkdir()
    pods = [_cluster(tmp_path, name) for name in ("one", "two")]
    volumes = [make_tree(tmp_path / pod.cluster / "volume") for pod in pods]
    for pod, volume in zip(pods, volumes, strict=True):
        (volume / "cluster").write_text(pod.cluster)
    assert await asyncio.gather(*(pod.init() for pod in pods)) == [0, 0]
    assert len({pod.result["uniqueID"] for pod in pods}) == 1
    assert sum(pod.result.get("created", False) for pod in pods) == 1
    for pod in pods:
        pod.put_repository(phase="Ready")
    backups = (pod.run("data-upload", volume) for pod, volume in zip(pods, volumes, strict=True))
    assert await asyncio.gather(*backups) == [0, 0]
    for pod in pods:
        pod.put_transfer("DataDownload", snapshotID=pod.result["snapshotID"])
    pods[0].put_job()
    assert await pods[0].maintain() == 0, pods[0].message
    for pod, volume in zip(pods, volumes, strict=True):
        (target := tmp_path / pod.cluster / "target").mkdir()
        assert await pod.run("data-download", target) == 0, pod.message
        assert describe_tree(target) == describe_tree(volume)

"""Settings of a custom resource are passed to kopia, and unknown ones are reported."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from core.models.names import BANDWIDTH_ANNOTATION
from core.models.transfer_settings import BandwidthLimits
from datamover.kopia.repository import Repository
from datamover.runtime.resources import ResourceLimits
from tests.datamover.support.backup_movers import plain_only
from tests.datamover.support.commandlines import record_kopia
from tests.datamover.support.pods import MoverPod
from tests.support.fakekube import FakeKube

pytestmark = pytest.mark.processes

_FLAGS = {
    "DataUpload": "data-upload",
    "DataDownload": "data-download",
    "PodVolumeBackup": "pod-volume-backup",
    "PodVolumeRestore": "pod-volume-restore",
}

_CPUS = 2
"""The limits of the pod in these tests."""


@pytest.fixture
def pod(tmp_path: Path, _new_repository: Path) -> MoverPod:
    """A pod whose repository exists and is Ready."""
    shutil.copytree(_new_repository, tmp_path / "backups" / "kopia" / "app")
    pod = MoverPod(FakeKube(), tmp_path)
    pod.put_repository(phase="Ready")
    return pod


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return record_kopia(tmp_path, monkeypatch)


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
        pod.put_transfer(self.out, **given)
        assert await pod.run(_FLAGS[self.out], tree) == 0
        shutil.rmtree(pod.folder / "out", ignore_errors=True)
        (pod.folder / "out").mkdir()
        pod.put_transfer(self.back, snapshotID=pod.result["snapshotID"], **given)
        assert await pod.run(_FLAGS[self.back], pod.folder / "out") == 0


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
async def test_a_backup_behind_a_proxy_has_few_connections(pod: MoverPod, tree: Path, record: Path) -> None:
    """Each holds some 500 KiB that kopia believes sent, and waits only a minute for the answer."""
    pod.limits = ResourceLimits(16)
    pod.put_transfer("DataUpload")
    assert await pod.run("data-upload", tree) == 0
    assert "--parallel=17" in _flags(record, "snapshot create")
    pod.annotations = {BANDWIDTH_ANNOTATION: BandwidthLimits().to_json()}
    pod.put_transfer("DataUpload")
    assert await pod.run("data-upload", tree) == 0
    assert "--parallel=6" in _flags(record, "snapshot create")


async def test_unknown_settings_are_reported_and_ignored(pod: MoverPod, tree: Path) -> None:
    unknown: dict[str, Any] = {"NewSetting": "x", "Another": "y"}
    pod.put_transfer("DataUpload", dataMoverConfig=unknown)
    assert await pod.run("data-upload", tree) == 0
    reported = "ignored settings: Another (unknown), NewSetting (unknown)"
    assert ("Data-Path-Warning", reported) in pod.events()


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

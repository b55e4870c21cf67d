"""Restores in pod mode: each type, volume mode and DeleteExtraFiles, from the custom resource to the result."""

import itertools
import os
import shutil
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest

from core.contract import RestoreResult, VolumeMode, VolumePath
from core.kube.resources import DATA_DOWNLOADS
from core.models.phases import Attempts
from core.models.transfer_settings import InPlace
from datamover.data_path.restore import RestoreParameters
from datamover.data_path.resume import ResumeSettings
from tests.datamover.support.pods import FLAGS, MoverPod
from tests.datamover.support.trees import describe_tree

pytestmark = pytest.mark.processes

_SETTINGS = {"DataDownload": "dataMoverConfig", "PodVolumeRestore": "uploaderSettings"}


@dataclass(frozen=True)
class _Row:
    """A restore as its custom resource asks for it."""

    kind: str
    restore_type: str
    delete: bool

    @property
    def settings(self) -> dict[str, str]:
        return {"DeleteExtraFiles": str(self.delete).lower()}

    @property
    def rule(self) -> InPlace | None:
        """What the data mover makes of it; None: a plain restore."""
        return InPlace.of(self.restore_type, self.settings)

    def put(self, pod: MoverPod) -> None:
        spec: dict[str, Any] = {_SETTINGS[self.kind]: self.settings, "restoreType": self.restore_type}
        if self.kind == "DataDownload" and self.rule:
            spec["targetVolume"] = {"namespace": "app", "pvc": "data", "pv": "pv-7"}
        pod.put_transfer(self.kind, **{"snapshotID": pod.result["snapshotID"], **spec})


def _rows(*kinds: str) -> list[Any]:
    return [
        pytest.param(_Row(*row), id="-".join((row[0], row[1] or "empty", "delete" if row[2] else "keep")))
        for row in itertools.product(kinds, ("", "none", "full", "incremental"), (True, False))
    ]


@pytest.mark.sample(
    "DataDownload-incremental-delete",
    "PodVolumeRestore-incremental-keep",
    "PodVolumeRestore-full-delete",
    "DataDownload-none-delete",
)
@pytest.mark.parametrize("row", _rows("DataDownload", "PodVolumeRestore"))
async def test_a_file_system_becomes_the_snapshot(pod: MoverPod, tree: Path, row: _Row) -> None:
    before, rule = describe_tree(tree), row.rule
    await pod.transfer("DataUpload", tree)
    total_bytes = pod.result["totalBytes"]
    (tree / "setuid").write_text("changed")
    (tree / "extra").write_text("of mine")
    (tree / ".velero").mkdir()
    (tree / ".velero" / "uid-of-an-earlier-restore").touch()
    row.put(pod)
    assert await pod.run(FLAGS[row.kind], tree) == 0
    expected: dict[str, Any] = {"target": {"byPath": str(tree), "volumeMode": "Filesystem"}, "totalBytes": total_bytes}
    written = {"incrementalBytes": 1 if rule.incremental else total_bytes} if rule else {}
    assert pod.result == expected | written
    assert "Data-Path-Warning" not in pod.reasons()
    done = {"DataDownload": "uid-of-an-earlier-restore", "PodVolumeRestore": "uid-of-restore"}[row.kind]
    assert [path.name for path in (tree / ".velero").iterdir()] == [done]
    shutil.rmtree(tree / ".velero")
    # A plain restore, into a new volume, never deletes.
    assert (tree / "extra").exists() is not (row.delete and rule is not None)
    (tree / "extra").unlink(missing_ok=True)
    assert describe_tree(tree) == before


@pytest.mark.sample("DataDownload-incremental-delete")
@pytest.mark.parametrize("row", _rows("DataDownload"))
async def test_a_device_is_written_as_a_whole(pod: MoverPod, tmp_path: Path, row: _Row) -> None:
    device, rule = tmp_path / "device", row.rule
    content = bytes(range(256)) * 4096
    device.write_bytes(content)
    await pod.transfer("DataUpload", device, VolumeMode.BLOCK)
    device.write_bytes(b"x" * len(content))
    row.put(pod)
    assert await pod.run("data-download", device, VolumeMode.BLOCK) == 0
    expected: dict[str, Any] = {"target": {"byPath": str(device), "volumeMode": "Block"}, "totalBytes": len(content)}
    assert pod.result == expected | ({"fallbackFull": True} if rule and rule.incremental else {})
    assert device.read_bytes() == content


@pytest.fixture
def restore(monkeypatch: pytest.MonkeyPatch) -> AsyncMock:
    restore = AsyncMock(return_value=RestoreResult(target=VolumePath(by_path="/", volume_mode=""), total_bytes=1))
    monkeypatch.setattr("datamover.pod.transfer.restore", restore)
    return restore


async def _parameters(pod: MoverPod, kind: str, restore: AsyncMock, volume: Path, **more: Any) -> RestoreParameters:
    pod.put_transfer(kind, snapshotID="k1")
    pod.mounts = volume / "mountinfo"
    pod.mounts.write_text(f"1 0 0:1 / {volume} rw - ext4 /dev/x rw\n")
    assert await pod.run(FLAGS[kind], volume, VolumeMode.FILESYSTEM, **more) == 0, pod.message
    assert restore.await_args is not None
    parameters = restore.await_args.args[1]
    assert isinstance(parameters, RestoreParameters)
    return parameters


async def test_what_a_restore_is_told(pod: MoverPod, tmp_path: Path, restore: AsyncMock) -> None:
    """No list is put into the volume of a pod; another attempt compares what it writes to a device."""
    found = await _parameters(pod, "DataDownload", restore, tmp_path)
    uid = pod.stored(DATA_DOWNLOADS)[0]["metadata"]["uid"]
    assert found.resume == ResumeSettings(uid, timedelta(seconds=5))
    assert not found.again
    assert not found.require_attributes
    pod.attempts = Attempts(number=2)
    for text, interval in (("1m", timedelta(minutes=1)), ("0", timedelta())):
        pod.environment = {**os.environ, "DATA_MOVER_RESTORE_LIST_INTERVAL": text}
        found = await _parameters(pod, "DataDownload", restore, tmp_path, require_attributes=True)
        assert found.resume is not None
        assert (found.resume.interval, found.again, found.require_attributes) == (interval, True, True)
    assert (await _parameters(pod, "PodVolumeRestore", restore, tmp_path)).resume is None


async def test_a_pod_volume_that_is_restored_is_not_written_again(pod: MoverPod, tree: Path, tmp_path: Path) -> None:
    """The agent did not see its end; the application may have started, and changed its files."""
    snapshot_id = (await pod.transfer("PodVolumeBackup", tree))["snapshotID"]
    pod.put_transfer("PodVolumeRestore", snapshotID=snapshot_id)
    target = tmp_path / "target"
    target.mkdir()
    assert await pod.run("pod-volume-restore", target) == 0, pod.message
    first = pod.result
    next(path for path in target.rglob("*") if path.is_file() and path.stat().st_size).write_text("newer")
    before = _states(target)
    pod.attempts = Attempts(number=2)
    await pod.transfer("PodVolumeRestore", target, snapshotID=snapshot_id)
    assert pod.result == first
    assert _states(target) == before


def _states(root: Path) -> list[tuple[Path, int, int]]:
    """Return inode and ctime of everything in it: one of them changes when it is written."""
    found = [(path, path.lstat()) for path in (root, *sorted(root.rglob("*")))]
    return [(path, status.st_ino, status.st_ctime_ns) for path, status in found]

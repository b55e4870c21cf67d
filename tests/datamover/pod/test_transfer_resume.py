"""Which restores list what they finish, which compare what they write, and which write nothing."""

import os
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest

from core.contract import RestoreResult, VolumeMode, VolumePath
from core.kube.resources import DATA_DOWNLOADS
from core.models.phases import Attempts
from datamover.data_path.restore import RestoreParameters
from datamover.data_path.resume import ResumeSettings
from tests.datamover.support.pods import FLAGS, MoverPod

pytestmark = pytest.mark.processes


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


async def test_a_pod_volume_that_an_earlier_attempt_has_restored_is_not_written_again(
    pod: MoverPod, tree: Path, tmp_path: Path
) -> None:
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
    """Return inode and ctime of everything in it, of which one changes when it is written."""
    found = [(path, path.lstat()) for path in (root, *sorted(root.rglob("*")))]
    return [(path, status.st_ino, status.st_ctime_ns) for path, status in found]

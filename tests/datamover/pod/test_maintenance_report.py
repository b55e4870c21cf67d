"""What else a maintenance does: the snapshot report at its end, which fails and delays nothing, and old checkpoints."""

from datetime import timedelta
from pathlib import Path
from unittest.mock import AsyncMock

import pytest

from core.contract import MaintenanceMode, MaintenanceResult, parse_result
from core.errors import RepositoryError
from core.kube.resources import DATA_UPLOADS
from core.snapshot_contract import REPORTED_LINE, SnapshotTotal
from datamover.pod import maintenance
from datamover.pod.snapshot_report import SnapshotReporter
from tests.datamover.support.checkpoints import leave_device_checkpoint
from tests.datamover.support.plainkopia import PlainKopia
from tests.datamover.support.pods import MoverPod

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]


@pytest.fixture
def snapshot(plain_kopia: PlainKopia, tmp_path: Path) -> str:
    """The ID of a snapshot that a person made in the repository of the pod."""
    (data := tmp_path / "data").mkdir()
    (data / "file").write_bytes(b"12345")
    return plain_kopia.snapshot(data)


async def test_a_maintenance_reports_on_request(
    released: MoverPod, snapshot: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await released.maintain(report_snapshots=True) == 0, released.message
    result = parse_result(MaintenanceResult, released.message)
    assert result.mode is MaintenanceMode.FULL
    assert result.report is not None
    assert result.report.unknown == SnapshotTotal(count=1, bytes=5)
    assert result.report.unread is not None
    assert result.report.unread.endswith("kopia cannot read Velero's files in a storage of the type filesystem")
    (line,) = REPORTED_LINE.find(capsys.readouterr().out)
    assert (line.id, line.reason, line.command) == (snapshot, "it has no tags: no data mover made it", None)
    # So does one with nothing to do, and only one that is asked.
    assert await released.maintain() == 0, released.message
    assert parse_result(MaintenanceResult, released.message).report is None
    assert await released.maintain(report_snapshots=True) == 0, released.message
    result = parse_result(MaintenanceResult, released.message)
    assert result.mode is MaintenanceMode.NONE
    assert result.report is not None


@pytest.mark.parametrize("error", ["the storage does not answer", "timed out after 0s"])
async def test_a_failed_report_fails_no_maintenance(
    released: MoverPod, monkeypatch: pytest.MonkeyPatch, error: str
) -> None:
    if error == "timed out after 0s":
        monkeypatch.setattr(maintenance, "_REPORT_TIMEOUT", timedelta())
    else:
        monkeypatch.setattr(SnapshotReporter, "run", AsyncMock(side_effect=RepositoryError(error)))
    assert await released.maintain(report_snapshots=True) == 0, released.message
    result = parse_result(MaintenanceResult, released.message)
    assert (result.mode, result.report, result.report_error) == (MaintenanceMode.FULL, None, error)


async def test_a_checkpoint_is_deleted_once_nothing_continues_from_it(
    released: MoverPod, plain_kopia: PlainKopia, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A day after it was saved."""
    pod, kopia = released, plain_kopia
    pod.put_transfer("DataUpload")
    (transfer,) = pod.stored(DATA_UPLOADS)
    uids = (transfer["metadata"]["uid"], "uid-of-a-deleted-one")
    for uid in uids:
        leave_device_checkpoint(kopia, tmp_path, uid)
    (data := tmp_path / "data").mkdir()
    complete = kopia.snapshot(data)
    ids = {one.get("tags", {}).get("tag:nodeagent.io/transfer-uid"): one["id"] for one in kopia.snapshots()}
    own, deleted = (ids[uid] for uid in uids)

    async def maintain() -> set[str]:
        kopia.run("maintenance", "set", "--pause-full=0s")
        assert await pod.maintain(ignore_foreign=True) == 0, pod.message
        assert pod.result["mode"] == "full"
        return {one["id"] for one in kopia.snapshots()}

    assert await maintain() == {own, deleted, complete}
    monkeypatch.setattr(maintenance, "_CHECKPOINT_AGE", timedelta(0))
    # A transfer cannot be read: only its own one stays.
    pod.kube.put({**transfer, "metadata": {**transfer["metadata"], "labels": "none"}, "status": "Failed"})
    assert await maintain() == {own, complete}
    pod.put_transfer("DataUpload")
    assert await maintain() == {own, complete}
    pod.put_transfer("DataUpload", phase="Failed")
    assert await maintain() == {complete}

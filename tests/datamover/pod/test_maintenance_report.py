"""What else a maintenance does: the snapshot report at its end, which fails and delays nothing, and old checkpoints."""

from datetime import timedelta
from pathlib import Path

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


async def test_a_maintenance_that_is_asked_reports_snapshots_after_it(
    released: MoverPod, snapshot: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await released.maintain(report_snapshots=True) == 0, released.message
    result = parse_result(MaintenanceResult, released.message)
    assert result.mode is MaintenanceMode.FULL
    assert result.report is not None
    assert result.report.unknown == SnapshotTotal(count=1, bytes=5)
    assert result.report.unread is not None
    assert result.report.unread.endswith("kopia cannot read Velero's files in a storage of the type filesystem")
    lines = [found for line in capsys.readouterr().out.splitlines() if (found := REPORTED_LINE.parse(line))]
    assert [(one.id, one.reason, one.command) for one in lines] == [
        (snapshot, "it has no tags: no data mover made it", None)
    ]

    # So does one with nothing to do, and only one that is asked.
    assert await released.maintain() == 0, released.message
    assert parse_result(MaintenanceResult, released.message).report is None
    assert await released.maintain(report_snapshots=True) == 0, released.message
    result = parse_result(MaintenanceResult, released.message)
    assert result.mode is MaintenanceMode.NONE
    assert result.report is not None


async def test_a_report_that_fails_fails_no_maintenance(released: MoverPod, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(_: SnapshotReporter) -> None:
        raise RepositoryError("the storage does not answer")

    monkeypatch.setattr(SnapshotReporter, "run", fail)
    assert await released.maintain(report_snapshots=True) == 0, released.message
    result = parse_result(MaintenanceResult, released.message)
    assert result.mode is MaintenanceMode.FULL
    assert (result.report, result.report_error) == (None, "the storage does not answer")


async def test_a_report_that_does_not_end_is_given_up(released: MoverPod, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maintenance, "_REPORT_TIMEOUT", timedelta())
    assert await released.maintain(report_snapshots=True) == 0, released.message
    result = parse_result(MaintenanceResult, released.message)
    assert result.mode is MaintenanceMode.FULL
    assert result.report_error == "timed out after 0s"


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

"""The snapshot report at the end of a maintenance: it fails and delays nothing."""

from datetime import timedelta
from pathlib import Path

import pytest

from core.contract import MaintenanceMode, MaintenanceResult, parse_result
from core.errors import RepositoryError
from core.snapshot_contract import REPORTED_LINE, SnapshotTotal
from datamover.pod import maintenance
from datamover.pod.snapshot_report import SnapshotReporter
from tests.datamover.support.plainkopia import PlainKopia
from tests.datamover.support.pods import MoverPod

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]


@pytest.fixture
def released(pod: MoverPod) -> MoverPod:
    """A pod of a Job that the leader has released."""
    pod.put_job()
    return pod


@pytest.fixture
def snapshot(pod: MoverPod, kopia_program: Path, tmp_path: Path) -> str:
    """The ID of a snapshot that a person made in the repository of the pod."""
    assert pod.folder == tmp_path
    kopia = PlainKopia(kopia_program, tmp_path)
    kopia.connect(tmp_path / "backups" / "kopia" / "app")
    data = tmp_path / "data"
    data.mkdir()
    (data / "file").write_bytes(b"12345")
    kopia.run("snapshot", "create", str(data))
    return str(kopia.snapshots()[0]["id"])


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

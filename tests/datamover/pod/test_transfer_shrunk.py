"""A backup with far fewer files than the one before, and what its result says about it."""

from datetime import UTC, datetime
from pathlib import Path

import pytest
from msgspec import UNSET
from msgspec.structs import replace

from core.contract import BackupResult, parse_result
from core.models.backups import Shrinkage
from core.models.names import SHRUNK_ANNOTATION
from tests.datamover.support.pods import MoverPod

pytestmark = pytest.mark.processes


async def _back_up(pod: MoverPod, volume: Path, files: int) -> BackupResult:
    """Back the volume up with so many files in it; the earlier transfer is gone then."""
    volume.mkdir(exist_ok=True)
    for file in volume.iterdir():
        file.unlink()
    for number in range(files):
        (volume / f"{number}").write_text("1234")
    pod.put_transfer("DataUpload")
    assert await pod.run("data-upload", volume) == 0, pod.message
    return parse_result(BackupResult, pod.message)


def _put_acknowledged(pod: MoverPod, shrunk: BackupResult) -> None:
    assert isinstance(shrunk.shrunk, Shrinkage)
    known = replace(shrunk.shrunk, acknowledged=datetime(2026, 1, 1, tzinfo=UTC))
    spec = {"snapshotType": "CSI", "sourceNamespace": "app", "sourcePVC": "data", "backupStorageLocation": "default"}
    meta = {"namespace": "velero", "name": "before", "annotations": {SHRUNK_ANNOTATION: known.to_json()}}
    status = {"phase": "Completed", "snapshotID": shrunk.snapshot_id}
    kind = {"apiVersion": "velero.io/v2alpha1", "kind": "DataUpload"}
    pod.kube.put(kind | {"metadata": meta, "spec": spec | {"operationTimeout": "10m0s"}, "status": status})


async def test_a_backup_is_shrunk_until_another_one_confirms_it(pod: MoverPod, tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    full = await _back_up(pod, volume, 120)
    shrunk = await _back_up(pod, volume, 10)
    again = await _back_up(pod, volume, 5)
    confirmed = await _back_up(pod, volume, 5)

    assert [one.files for one in (full, shrunk, again, confirmed)] == [120, 10, 5, 5]
    assert (full.shrunk, confirmed.shrunk) == (UNSET, UNSET)
    wanted = Shrinkage(bytes=40, full_bytes=480, full_snapshot=full.snapshot_id, files=10, full_files=120)
    assert shrunk.shrunk == wanted
    assert again.shrunk == replace(wanted, bytes=20, files=5)
    assert shrunk.note == "shrunk: the volume has 10 files with 40 bytes, and had 120 files with 480 bytes"


async def test_the_next_is_compared_with_one_that_somebody_has_acknowledged(pod: MoverPod, tmp_path: Path) -> None:
    await _back_up(pod, tmp_path / "volume", 120)
    _put_acknowledged(pod, await _back_up(pod, tmp_path / "volume", 10))
    assert (await _back_up(pod, tmp_path / "volume", 8)).shrunk is UNSET

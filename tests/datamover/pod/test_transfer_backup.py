"""Backups in pod mode: attempts, `spec.parentSnapshot`, `ReadAllFiles`, far fewer files than before, and others."""

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final
from unittest.mock import Mock

import pytest
from msgspec import UNSET
from msgspec.structs import replace

from core.clock import SystemClock
from core.contract import BackupResult, parse_progress, parse_result
from core.errors import DataPathError
from core.kube.client import KubeClient
from core.kube.transport import Retry
from core.models.backups import Shrinkage
from core.models.names import ATTEMPT_TAG, ATTEMPTS_ANNOTATION, SHRUNK_ANNOTATION, TRANSFER_UID_TAG
from core.models.phases import Attempts
from core.models.transfers import DataUpload
from datamover.kinds import TRANSFER_KINDS
from datamover.pod.transfer import backs_up_alone
from tests.datamover.support.plainkopia import PlainKopia
from tests.datamover.support.pods import MoverPod
from tests.datamover.support.s3proxy import S3Proxy
from tests.datamover.support.trees import make_large_file
from tests.support.fakekube import FakeKube
from tests.support.objects import JsonDict

pytestmark = pytest.mark.processes

_TOLERANCE = timedelta(seconds=10)


async def test_a_snapshot_has_its_attempt_and_replaces_earlier_ones(
    pod: MoverPod, tree: Path, plain_kopia: PlainKopia
) -> None:
    """One that completes late leaves the snapshot of a later one, which is the result of the transfer."""
    for number, left in ((1, ["1"]), (3, ["3"]), (2, ["3", "2"])):
        pod.attempts = Attempts(number=number)
        await pod.transfer("DataUpload", tree)
        found = plain_kopia.snapshots()
        assert [one["tags"][f"tag:{ATTEMPT_TAG}"] for one in found] == left
        assert len({one["tags"][f"tag:{TRANSFER_UID_TAG}"] for one in found}) == 1
        assert found[-1]["id"] == pod.result["snapshotID"]


async def test_no_snapshot_is_left_of_a_volume_that_was_unmounted_meanwhile(
    pod: MoverPod, tree: Path, plain_kopia: PlainKopia, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later backup that has as little would not be Shrunk."""
    check = Mock(side_effect=[None, DataPathError("unmounted")])
    monkeypatch.setattr("datamover.pod.transfer.check_mounted", check)
    pod.put_transfer("PodVolumeBackup")
    assert await pod.run("pod-volume-backup", tree) == DataPathError.exit_code
    assert (pod.message, plain_kopia.snapshots()) == ("unmounted", [])


@pytest.mark.timeout(180)
@pytest.mark.sample("near")
@pytest.mark.parametrize("latency_seconds", [0.0, 0.5], ids=["near", "far"])
async def test_the_reported_start_is_kopias_own_however_slow_the_storage_is(
    proxy: S3Proxy, tmp_path: Path, kopia_program: Path, latency_seconds: float
) -> None:
    """With a far one, opening the repository takes longer than a checkpoint's start may differ."""
    s3 = proxy.server
    pod = MoverPod(FakeKube(), tmp_path)
    pod.put_bucket(s3, s3.make_bucket("slow"), url=proxy.url)
    (tmp_path / "termination-log").touch()
    await pod.create_repository()
    proxy.latency_seconds = latency_seconds
    await pod.transfer("DataUpload", make_large_file(tmp_path / "volume" / "file", 1).parent)
    kopia = PlainKopia(kopia_program, tmp_path)
    kopia.run("repository", "connect", *s3.kopia_flags("slow"))
    (snapshot,) = kopia.snapshots()
    readings = [parse_progress(text) for reason, text in pod.events() if reason == "Data-Path-Progress"]
    (start,) = {one.snapshot_started for one in readings if one.snapshot_started is not None}
    assert start is not None
    assert abs(start - datetime.fromisoformat(snapshot["startTime"])) <= _TOLERANCE


_MIB = 1 << 20
_NOTE = "read everything, since spec.parentSnapshot is not usable: "


async def _back_up(pod: MoverPod, volume: Path, **spec: Any) -> BackupResult:
    await pod.transfer("DataUpload", volume, **spec)
    return parse_result(BackupResult, pod.message)


@pytest.mark.sample("PodVolumeBackup")
@pytest.mark.parametrize("kind", ["DataUpload", "PodVolumeBackup"])
async def test_a_backup_reads_all_only_where_no_parent_is_wanted(pod: MoverPod, tmp_path: Path, kind: str) -> None:
    volume = tmp_path / "volume"
    settings = {"DataUpload": "dataMoverConfig", "PodVolumeBackup": "uploaderSettings"}[kind]
    make_large_file(volume / "file", 2)
    pod.mounts = tmp_path / "mountinfo"
    pod.mounts.write_text(f"1 0 0:1 / {volume} rw - ext4 /dev/x rw\n")
    none, auto = {"parentSnapshot": "none"}, {"parentSnapshot": "auto"}
    specs: list[dict[str, Any]] = [{}, {"parentSnapshot": ""}, auto, none, {settings: {"ReadAllFiles": "true"}}]
    found = [(await pod.transfer(kind, volume, **spec))["incrementalBytes"] // _MIB for spec in specs]
    assert found == [2, 0, 0, 2, 2]
    assert "note" not in pod.result


async def test_the_last_complete_snapshot_may_be_named_and_any_other_is_noted(pod: MoverPod, tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    make_large_file(volume / "file", 2)
    first = await _back_up(pod, volume)
    other = await _back_up(pod, volume, sourcePVC="other")
    latest = await _back_up(pod, volume, parentSnapshot=first.snapshot_id)
    older = await _back_up(pod, volume, parentSnapshot=first.snapshot_id)
    foreign = await _back_up(pod, volume, parentSnapshot=other.snapshot_id)
    unknown = await _back_up(pod, volume, parentSnapshot="0123456789abcdef0123456789abcdef")
    invalid = await _back_up(pod, volume, parentSnapshot="--all")
    assert (latest.incremental_bytes, bool(latest.note)) == (0, False)
    assert {one.incremental_bytes for one in (older, foreign, unknown, invalid)} == {2 * _MIB}
    assert [one.fallback_full for one in (latest, older, invalid)] == [UNSET, True, True]
    assert older.note == f"{_NOTE}snapshot {first.snapshot_id}: it is not the last complete one of its source"
    source = "snapshot-data-upload-download/kopia/app/other"
    assert foreign.note == f"{_NOTE}snapshot {other.snapshot_id}: it is of the source {source}"
    assert unknown.note == f"{_NOTE}snapshot 0123456789abcdef0123456789abcdef: it is not in the repository"
    assert re.fullmatch(rf'{_NOTE}invalid snapshot ID: "--all"', str(invalid.note))
    assert ("Data-Path-Warning", older.note) in pod.events()


async def _back_up_files(pod: MoverPod, volume: Path, files: int) -> BackupResult:
    """Back the volume up with so many files in it; the earlier transfer is gone then."""
    volume.mkdir(exist_ok=True)
    for file in volume.iterdir():
        file.unlink()
    for number in range(files):
        (volume / f"{number}").write_text("1234")
    return await _back_up(pod, volume)


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
    full = await _back_up_files(pod, volume, 120)
    shrunk = await _back_up_files(pod, volume, 10)
    again = await _back_up_files(pod, volume, 5)
    confirmed = await _back_up_files(pod, volume, 5)
    assert [one.files for one in (full, shrunk, again, confirmed)] == [120, 10, 5, 5]
    assert (full.shrunk, confirmed.shrunk) == (UNSET, UNSET)
    wanted = Shrinkage(bytes=40, full_bytes=480, full_snapshot=full.snapshot_id, files=10, full_files=120)
    assert shrunk.shrunk == wanted
    assert again.shrunk == replace(wanted, bytes=20, files=5)
    assert shrunk.note == "shrunk: the volume has 10 files with 40 bytes, and had 120 files with 480 bytes"


async def test_the_next_is_compared_with_one_that_somebody_has_acknowledged(pod: MoverPod, tmp_path: Path) -> None:
    await _back_up_files(pod, tmp_path / "volume", 120)
    _put_acknowledged(pod, await _back_up_files(pod, tmp_path / "volume", 10))
    assert (await _back_up_files(pod, tmp_path / "volume", 8)).shrunk is UNSET


_SOURCE: Final = "snapshot-data-upload-download/kopia/app/data"


_START: Final = datetime(2026, 11, 30, 12, tzinfo=UTC)


def _put(kube: FakeKube, name: str, phase: str, start: datetime = _START, **spec: Any) -> JsonDict:
    whole = {"snapshotType": "CSI", "sourceNamespace": "app", "sourcePVC": "data", "backupStorageLocation": "default"}
    annotations = {ATTEMPTS_ANNOTATION: Attempts(starts=(start,)).to_json()}
    raw = {
        "apiVersion": "velero.io/v2alpha1",
        "kind": "DataUpload",
        "metadata": {"namespace": "velero", "name": name, "annotations": annotations},
    }
    return kube.put(raw | {"spec": {**whole, "operationTimeout": "10m0s", **spec}, "status": {"phase": phase}})


async def _is_alone(kube: FakeKube) -> bool:
    own = DataUpload.parse(_put(kube, "own", "InProgress"))
    client = KubeClient(kube, Retry(SystemClock(), attempts=1))
    return await backs_up_alone(client, TRANSFER_KINDS["data-upload"], own, _SOURCE)


@pytest.mark.parametrize(
    ("phase", "spec", "alone"),
    [
        ("InProgress", {}, False),
        ("Canceling", {}, False),
        ("Prepared", {}, True),
        ("Completed", {}, True),
        ("InProgress", {"sourcePVC": "other"}, True),
        ("InProgress", {"sourceNamespace": "other"}, True),
    ],
)
async def test_only_a_running_transfer_of_the_same_source_counts(phase: str, spec: dict[str, str], alone: bool) -> None:
    kube = FakeKube()
    _put(kube, "another", phase, _START - timedelta(hours=1), **spec)
    assert await _is_alone(kube) is alone


@pytest.mark.parametrize("phase", ["Completed", "Failed", "InProgress"])
@pytest.mark.parametrize(
    ("seconds", "spec", "alone"), [(10, {}, False), (-10, {}, False), (60, {}, True), (0, {"sourcePVC": "other"}, True)]
)
async def test_one_that_began_at_the_same_time_counts(
    phase: str, seconds: float, spec: dict[str, str], alone: bool
) -> None:
    """It may have left a checkpoint."""
    kube = FakeKube()
    _put(kube, "another", phase, _START + timedelta(seconds=seconds), **spec)
    assert await _is_alone(kube) is (alone and (phase != "InProgress" or bool(spec)))


async def test_it_is_not_alone_if_that_cannot_be_found_out() -> None:
    kube = FakeKube()
    kube.fail_next("GET", "datauploads", 403)
    assert not await _is_alone(kube)
    _put(kube, "another", "InProgress", backupStorageLocation=5)
    assert not await _is_alone(kube)

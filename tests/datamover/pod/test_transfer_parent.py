"""`spec.parentSnapshot` and `ReadAllFiles` of a backup: what is read, and what the result says about it."""

import re
from pathlib import Path

import pytest
from msgspec import UNSET

from core.contract import BackupResult, parse_result
from tests.datamover.support.pods import MoverPod
from tests.datamover.support.trees import make_large_file

pytestmark = pytest.mark.processes

_MIB = 1 << 20
_NOTE = "read everything, since spec.parentSnapshot is not usable: "


async def _back_up(pod: MoverPod, volume: Path, **spec: str) -> BackupResult:
    pod.put_transfer("DataUpload", **spec)
    assert await pod.run("data-upload", volume) == 0, pod.message
    return parse_result(BackupResult, pod.message)


@pytest.mark.sample("PodVolumeBackup")
@pytest.mark.parametrize("kind", ["DataUpload", "PodVolumeBackup"])
async def test_a_backup_reads_again_what_its_parent_has_only_where_none_is_asked_for(
    pod: MoverPod, tmp_path: Path, kind: str
) -> None:
    volume = tmp_path / "volume"
    flag, settings = {
        "DataUpload": ("data-upload", "dataMoverConfig"),
        "PodVolumeBackup": ("pod-volume-backup", "uploaderSettings"),
    }[kind]
    make_large_file(volume / "file", 2)
    pod.mounts = tmp_path / "mountinfo"
    pod.mounts.write_text(f"1 0 0:1 / {volume} rw - ext4 /dev/x rw\n")
    found = []

    none, auto = {"parentSnapshot": "none"}, {"parentSnapshot": "auto"}
    for spec in ({}, {"parentSnapshot": ""}, auto, none, {settings: {"ReadAllFiles": "true"}}):
        pod.put_transfer(kind, **spec)
        assert await pod.run(flag, volume) == 0, pod.message
        found.append(pod.result["incrementalBytes"] // _MIB)

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

"""Transfers in pod mode, from the custom resource to the termination message."""

import asyncio
import json
import os
import shutil
from pathlib import Path
from unittest.mock import ANY

import pytest

from core.contract import EVENTS_VARIABLE, BackupResult, VolumeMode, parse_result
from core.kube.resources import DATA_UPLOADS, EVENTS
from core.models.backups import SavedClaim
from core.models.names import (
    BACKUP_ANNOTATION,
    BACKUP_TAG,
    BACKUP_VOLUMES_ANNOTATION,
    BACKUP_VOLUMES_TAG,
    CLAIM_ANNOTATION,
    CLAIM_TAG,
    CLUSTER_TAG,
    NODE_LABEL,
)
from core.models.phases import Attempts
from datamover.kopia.references import ListedSnapshot
from tests.datamover.support.backup_movers import BACKUP_VERB, ONE_OPEN
from tests.datamover.support.plainkopia import PlainKopia
from tests.datamover.support.pods import MoverPod
from tests.datamover.support.processes import running_kopia
from tests.datamover.support.trees import describe_tree, make_large_file
from tests.support.clock import LoopClock
from tests.support.fakekube import FakeKube

pytestmark = pytest.mark.processes


@pytest.mark.interop("1.18.2", "ours to ours", "DataUpload, DataDownload", "file system")
async def test_a_data_upload_and_a_data_download_restore_a_volume(
    pod: MoverPod, tree: Path, tmp_path: Path, plain_kopia: PlainKopia
) -> None:
    await pod.transfer("DataUpload", tree)
    backup = parse_result(BackupResult, pod.message)
    _check_events(pod, backup.total_bytes)
    await pod.transfer("DataDownload", tmp_path / "target", snapshotID=backup.snapshot_id)
    assert describe_tree(tmp_path / "target") == describe_tree(tree)
    assert pod.result == {
        "target": {"byPath": str(tmp_path / "target"), "volumeMode": "Filesystem"},
        "totalBytes": backup.total_bytes,
    }
    (snapshot,) = plain_kopia.snapshots()
    assert snapshot["source"]["path"] == "snapshot-data-upload-download/kopia/app/data"
    # The last ones are ours.
    assert snapshot["tags"] == {
        "tag:snapshot-requester": "snapshot-data-upload-download",
        "tag:snapshot-uploader": "kopia",
        "tag:velero.io/async-operation-id": "du-1",
        "tag:nodeagent.io/transfer-uid": pod.stored(DATA_UPLOADS)[0]["metadata"]["uid"],
        "tag:nodeagent.io/attempt": "1",
        **({"tag:nodeagent.io/changes-until": ANY} if ONE_OPEN else {}),
    }


@pytest.mark.parametrize("kind", ["DataUpload", "PodVolumeBackup"])
async def test_a_snapshot_names_backup_and_claim(kind: str, pod: MoverPod, tree: Path, plain_kopia: PlainKopia) -> None:
    """Colons, commas, spaces and quotes of the claim's JSON reach kopia's tag unchanged, and the listing has it."""
    labels = {"a:b, c": 'd=e "f"', "grün": "\n\\"}
    claim = SavedClaim(namespace="app", name="data", size="1Gi", access_modes=("ReadWriteOnce",), labels=labels)
    named = {BACKUP_ANNOTATION: "night.1", BACKUP_VOLUMES_ANNOTATION: "2", CLAIM_ANNOTATION: claim.text}
    pod.cluster, pod.annotations = "uid-1", named
    pod.mounts = pod.folder / "mounts"
    pod.mounts.write_text(f"device {tree} ext4 rw 0 0\n")
    await pod.transfer(kind, tree)
    (listed,) = map(ListedSnapshot.from_wire, plain_kopia.snapshots())
    assert (listed.tag(CLUSTER_TAG), listed.tag(BACKUP_TAG), listed.tag(BACKUP_VOLUMES_TAG)) == (
        "uid-1",
        "night.1",
        "2",
    )
    assert SavedClaim.from_json(listed.tag(CLAIM_TAG) or "") == claim


def _check_events(pod: MoverPod, total: int) -> None:
    """Check the Events of a completed transfer."""
    events = pod.events()
    events = events[-1 - events[::-1].index(("Data-Path-Started", "Data path for transfer-1 started")) :]
    assert events[0] == ("Data-Path-Started", "Data path for transfer-1 started")
    assert events[-2:] == [
        ("Data-Path-Completed", pod.message),
        ("Data-Path-Stopped", "Data path for transfer-1 stopped"),
    ]
    last = _last_progress(pod)
    assert (last["totalBytes"], last["doneBytes"]) == (total, total)
    # By this label an agent that does not see their files watches the Events of all its movers at once.
    assert all(event["metadata"]["labels"] == {NODE_LABEL: "node-a"} for event in pod.kube.objects(EVENTS))


async def test_events_are_also_files(
    pod: MoverPod, tree: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (files := tmp_path / "events").mkdir()
    pod.environment = {**os.environ, EVENTS_VARIABLE: str(files)}
    await pod.transfer("DataUpload", tree)
    newest = {event["reason"]: event["message"] for event in pod.kube.objects(EVENTS)}
    assert {path.name: json.loads(path.read_text())["message"] for path in files.iterdir()} == newest
    assert {path.stat().st_mode & 0o777 for path in files.iterdir()} == {0o644}
    # They are recorded also where they cannot be written.
    pod.environment = {**os.environ, EVENTS_VARIABLE: str(tmp_path / "absent")}
    await pod.transfer("DataUpload", tree)
    _check_events(pod, parse_result(BackupResult, pod.message).total_bytes)
    assert f"cannot write an Event to {tmp_path}/absent: No such file or directory" in caplog.text


async def test_the_last_progress_contains_all_sent_and_deduplicated_bytes(pod: MoverPod, tmp_path: Path) -> None:
    """Also of a transfer that ends before the first reading, and with data that is sent after the last."""

    def stored_bytes() -> int:
        return sum(path.stat().st_size for path in pod.repository.rglob("*.f"))

    before = stored_bytes()
    make_large_file(tmp_path / "volume" / "one", 5)
    await pod.transfer("DataUpload", tmp_path / "volume")
    first, sent = _last_progress(pod), stored_bytes() - before
    shutil.copy(tmp_path / "volume" / "one", tmp_path / "volume" / "same")
    assert await pod.run("data-upload", tmp_path / "volume") == 0
    second = _last_progress(pod)
    assert first["totalBytes"] == first["doneBytes"] == 5 << 20
    assert first["sentBytes"] == pytest.approx(sent, rel=0.01)
    assert second["totalBytes"] == 10 << 20
    assert second["sentBytes"] < 1 << 20
    assert second["dedupedBytes"] == pytest.approx(5 << 20, rel=0.01)


def _last_progress(pod: MoverPod) -> dict[str, int]:
    reported = [message for reason, message in pod.events() if reason == "Data-Path-Progress"]
    return dict(json.loads(reported[-1]))


@pytest.mark.interop("1.18.2", "ours to ours", "PodVolumeBackup, PodVolumeRestore", "file system")
async def test_a_pod_volume_is_restored_with_the_done_file(pod: MoverPod, tree: Path, tmp_path: Path) -> None:
    await pod.transfer("PodVolumeBackup", tree)
    target = tmp_path / "target"
    await pod.transfer("PodVolumeRestore", target, snapshotID=pod.result["snapshotID"])
    assert [path.name for path in (target / ".velero").iterdir()] == ["uid-of-restore"]
    shutil.rmtree(target / ".velero")
    # Another restore follows.
    assert await pod.run("pod-volume-restore", target, followed=True) == 0, pod.message
    assert describe_tree(target) == describe_tree(tree)


@pytest.mark.parametrize("by_hand", [False, True])
async def test_a_second_attempt_trusts_the_done_file_of_the_first_alone(
    pod: MoverPod, tree: Path, tmp_path: Path, *, by_hand: bool
) -> None:
    """People create one by hand, and a pod may have another volume of the same PVC."""
    await pod.transfer("PodVolumeBackup", tree)
    target, snapshot = tmp_path / "target", pod.result["snapshotID"]
    await pod.transfer("PodVolumeRestore", target, snapshotID=snapshot)
    done = target / ".velero" / "uid-of-restore"
    (target / "a" / "b" / "c" / "file 1").unlink()
    if by_hand:
        done.write_bytes(b"")
    pod.attempts = Attempts(number=2)
    await pod.transfer("PodVolumeRestore", target, snapshotID=snapshot)
    assert done.exists()
    shutil.rmtree(target / ".velero")
    assert (describe_tree(target) == describe_tree(tree)) is by_hand


@pytest.mark.cause("volume-not-mounted")
@pytest.mark.parametrize("flag", ["pod-volume-backup", "pod-volume-restore"])
async def test_a_pod_volume_that_is_not_mounted_fails_the_transfer(pod: MoverPod, tmp_path: Path, flag: str) -> None:
    backup = flag == "pod-volume-backup"
    pod.put_transfer("PodVolumeBackup" if backup else "PodVolumeRestore", **({} if backup else {"snapshotID": "k1"}))
    root = "/var/lib/kubelet/pods/0b1c/volumes/kubernetes.io~csi/pvc-1/mount"
    pod.mounts = tmp_path / "mountinfo"
    pod.mounts.write_text(f"700 699 8:1 {root} {tmp_path} ro,relatime master:1 - ext4 /dev/sda1 rw\n")
    assert await pod.run(flag, tmp_path) != 0
    assert f"volume of the workload pod is not mounted on the node: {root} is a plain directory" in pod.message
    assert not (tmp_path / ".velero").exists()


async def test_nothing_moves_before_the_phase_is_in_progress(pod: MoverPod, tree: Path) -> None:
    pod.put_transfer("DataUpload", phase="Prepared")
    async with asyncio.TaskGroup() as group:
        running = group.create_task(pod.run("data-upload", tree))
        await pod.wait_for(lambda: any("watch" in request.query for request in pod.kube.requests))
        assert not pod.events()
        assert not any(request.method == "POST" for request in pod.kube.requests)
        pod.put_transfer("DataUpload")
    assert running.result() == 0


@pytest.mark.looptime
async def test_the_first_progress_arrives_within_a_second_however_long_the_repository_takes(tmp_path: Path) -> None:
    """Counted from when the mover observes InProgress."""
    pod = MoverPod(FakeKube(), tmp_path, LoopClock())
    pod.put_repository(phase="New")
    pod.put_transfer("DataUpload")
    async with asyncio.TaskGroup() as group:
        group.create_task(pod.run("data-upload", tmp_path))
        await pod.wait_for(lambda: bool(pod.reasons()))
        async with asyncio.timeout(1):
            await pod.wait_for(lambda: "Data-Path-Progress" in dict(pod.events()))
        pod.signal()
    assert pod.reasons()[0] == "Data-Path-Started"


@pytest.mark.parametrize(
    ("spec", "phase", "why"),
    [
        ({"cancel": True}, "Prepared", "was canceled"),
        ({}, "Canceling", "was canceled"),
        ({}, "Failed", "is already Failed"),
        ({}, None, "no longer exists"),
    ],
)
async def test_a_transfer_that_is_to_end_or_has_ended_is_canceled(
    pod: MoverPod, tree: Path, spec: dict[str, bool], phase: str | None, why: str
) -> None:
    if phase:
        pod.put_transfer("DataUpload", phase=phase, **spec)
    assert await pod.run("data-upload", tree) == 14
    assert pod.message == f"DataUpload velero/transfer-1 {why}: data path is canceled"


async def test_a_cancel_kills_kopia_and_leaves_nothing(pod: MoverPod, tmp_path: Path, plain_kopia: PlainKopia) -> None:
    make_large_file(tmp_path / "volume" / "large", 100)
    pod.put_transfer("DataUpload")
    async with asyncio.TaskGroup() as group:
        running = group.create_task(pod.run("data-upload", tmp_path / "volume"))
        await pod.wait_for(lambda: "Data-Path-Started" in pod.reasons() and bool(running_kopia(BACKUP_VERB)))
        pod.put_transfer("DataUpload", cancel=True)
        async with asyncio.timeout(2):
            await asyncio.shield(running)
    assert running.result() == 14
    assert pod.message == "DataUpload velero/transfer-1 was canceled: data path is canceled"
    assert pod.reasons() == ["Data-Path-Started", "Data-Path-Canceled", "Data-Path-Stopped"]
    assert plain_kopia.snapshots() == []


async def test_only_a_backup_of_files_reads_the_grace_for_a_checkpoint(pod: MoverPod, tree: Path) -> None:
    pod.put_transfer("DataUpload")
    pod.environment = {**os.environ, "DATA_MOVER_CHECKPOINT_INTERVAL": "1s"}
    assert await pod.run("data-upload", tree) == 2
    assert pod.message == 'DATA_MOVER_CHECKPOINT_INTERVAL: must be from 10s to 45m0s: "1s"'
    pod.environment = {**os.environ, "DATA_MOVER_CHECKPOINT_GRACE": "1h"}
    assert await pod.run("data-upload", tree) == 2
    assert pod.message.startswith("DATA_MOVER_CHECKPOINT_GRACE: must be less than the grace period of the pod")
    assert await pod.run("data-upload", tree, VolumeMode.BLOCK) == 11
    assert pod.message.startswith("back up ")
    pod.put_transfer("DataDownload", snapshotID="k1")
    assert await pod.run("data-download", tree) == 11
    assert pod.message.startswith("snapshot k1: ")


async def test_events_that_cannot_be_recorded_do_not_fail_a_transfer(pod: MoverPod, tree: Path) -> None:
    pod.put_transfer("DataUpload")
    pod.kube.fail_next("POST", "/events", 500, times=100)
    assert await pod.run("data-upload", tree) == 0
    assert pod.result["totalBytes"] > 0


async def test_a_rejected_watch_fails_the_transfer(pod: MoverPod, tree: Path) -> None:
    pod.put_transfer("DataUpload")
    pod.kube.fail_next("GET", "/datauploads", 403)
    assert await pod.run("data-upload", tree) == 1
    assert pod.message.startswith("list DataUpload velero: 403")


async def test_no_repository_is_created_in_a_read_only_location(tmp_path: Path) -> None:
    (tmp_path / "backups" / "kopia" / "app").mkdir(parents=True)
    pod = MoverPod(FakeKube(), tmp_path)
    pod.put_location({"fspath": str(tmp_path / "backups")}, provider="velero.io/fs", accessMode="ReadOnly")
    pod.put_repository()
    assert await pod.init() == 12
    assert "cannot create it: its BackupStorageLocation is read-only" in pod.message
    assert not list((tmp_path / "backups" / "kopia" / "app").glob("kopia.*"))

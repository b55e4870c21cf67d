"""The attempts of a backup in a pod: what it reports of its start, and what its snapshot says about it."""

from datetime import datetime, timedelta
from pathlib import Path

import pytest

from core.contract import parse_progress
from core.models.names import ATTEMPT_TAG, TRANSFER_UID_TAG
from core.models.phases import Attempts
from tests.datamover.support.plainkopia import PlainKopia
from tests.datamover.support.pods import MoverPod
from tests.datamover.support.s3proxy import run_s3_proxy
from tests.datamover.support.s3server import S3Server
from tests.datamover.support.trees import make_large_file
from tests.support.fakekube import FakeKube

pytestmark = pytest.mark.processes

_TOLERANCE = timedelta(seconds=10)


def _connect(pod: MoverPod, kopia_program: Path) -> PlainKopia:
    kopia = PlainKopia(kopia_program, pod.folder)
    kopia.connect(pod.folder / "backups" / "kopia" / "app")
    return kopia


async def test_a_snapshot_has_the_attempt_in_its_tags_and_those_it_overtook_are_removed(
    pod: MoverPod, tree: Path, kopia_program: Path
) -> None:
    pod.put_transfer("DataUpload")
    assert await pod.run("data-upload", tree) == 0, pod.message
    kopia = _connect(pod, kopia_program)
    (first,) = kopia.snapshots()
    pod.attempts = Attempts(number=2)
    pod.put_transfer("DataUpload")
    assert await pod.run("data-upload", tree) == 0, pod.message
    (second,) = kopia.snapshots()
    assert [one["tags"][f"tag:{ATTEMPT_TAG}"] for one in (first, second)] == ["1", "2"]
    assert len({one["tags"][f"tag:{TRANSFER_UID_TAG}"] for one in (first, second)}) == 1
    assert second["id"] == pod.result["snapshotID"]


async def test_an_attempt_that_completes_late_leaves_the_snapshot_of_a_later_one(
    pod: MoverPod, tree: Path, kopia_program: Path
) -> None:
    """It is the result of the transfer."""
    for number in (3, 2):
        pod.attempts = Attempts(number=number)
        pod.put_transfer("DataUpload")
        assert await pod.run("data-upload", tree) == 0, pod.message
    found = _connect(pod, kopia_program).snapshots()
    assert [one["tags"][f"tag:{ATTEMPT_TAG}"] for one in found] == ["3", "2"]


@pytest.mark.timeout(180)
@pytest.mark.sample("near")
@pytest.mark.parametrize("latency_seconds", [0.0, 0.5], ids=["near", "far"])
async def test_the_reported_start_is_kopias_own_however_slow_the_storage_is(
    s3: S3Server, tmp_path: Path, kopia_program: Path, latency_seconds: float
) -> None:
    """With a far one, opening the repository takes longer than a checkpoint's start may differ."""
    s3.make_bucket("slow")
    volume = make_large_file(tmp_path / "volume" / "file", 1).parent
    with run_s3_proxy(s3) as proxy:
        pod = MoverPod(FakeKube(), tmp_path)
        pod.put_location(
            {"s3Url": proxy.url, "region": "us-east-1"}, bucket="slow", credential={"name": "cloud", "key": "key"}
        )
        pod.put_secret("cloud", "key", s3.credentials_file)
        pod.put_repository()
        (tmp_path / "termination-log").touch()
        assert await pod.init() == 0, pod.message
        pod.put_repository(phase="Ready")
        proxy.latency_seconds = latency_seconds
        pod.put_transfer("DataUpload")
        assert await pod.run("data-upload", volume) == 0, pod.message
    kopia = PlainKopia(kopia_program, tmp_path)
    keys = (f"--access-key={s3.access_key}", f"--secret-access-key={s3.secret_key}")
    address = (f"--endpoint={s3.url.removeprefix('http://')}", "--disable-tls", "--prefix=kopia/app/")
    kopia.run("repository", "connect", "s3", "--bucket=slow", *address, *keys)
    (snapshot,) = kopia.snapshots()
    readings = [parse_progress(text) for reason, text in pod.events() if reason == "Data-Path-Progress"]
    (start,) = {one.snapshot_started for one in readings if one.snapshot_started is not None}
    assert start is not None
    assert abs(start - datetime.fromisoformat(snapshot["startTime"])) <= _TOLERANCE


async def test_an_invalid_interval_of_checkpoints_fails_the_backup(pod: MoverPod, tree: Path) -> None:
    pod.environment = {**pod.environment, "DATA_MOVER_CHECKPOINT_INTERVAL": "1s"}
    pod.put_transfer("DataUpload")
    assert await pod.run("data-upload", tree) != 0
    assert pod.message == 'DATA_MOVER_CHECKPOINT_INTERVAL: must be from 10s to 45m0s: "1s"'

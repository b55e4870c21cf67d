"""A backup whose pod is stopped in mid-transfer: one of files keeps what it has sent, and a cancel leaves nothing."""

import asyncio
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from core.contract import DataPathReason, ProgressMessage, TrackedSnapshot, VolumeMode, parse_progress
from core.models.phases import Attempts
from datamover.runtime.signals import StopSignal
from tests.datamover.support.backup_movers import BACKUP_VERB
from tests.datamover.support.plainkopia import IDENTITY, PlainKopia
from tests.datamover.support.pods import MoverPod
from tests.datamover.support.processes import running_kopia
from tests.datamover.support.s3proxy import Fault, S3Proxy
from tests.datamover.support.s3server import S3Server
from tests.datamover.support.thorough import DRAINS
from tests.datamover.support.trees import make_large_file
from tests.support.fakekube import FakeKube

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

_FILES = 24
_FILE_MIB = 10 if max(DRAINS) > 50 else 2
"""At 90 %, more must be left than the pack of 10 MB that kopia is about to write."""

_MIB = 1 << 20
_VOLUME_BYTES = _FILES * _FILE_MIB * _MIB
_DEVICE_MIB = 32
_CANCELED = "data path is canceled"
_SAVED = "kopia saved a checkpoint, so the next backup of the volume does not send again what was sent"
_STOPPED = "the data mover was stopped by SIGTERM"
_KILLED = f"{_STOPPED}; it was killed before kopia had saved a checkpoint: {_CANCELED}"


@dataclass
class _Bed:
    """A mover pod, the proxy through which it reaches its bucket, a volume or device, and kopia by itself."""

    pod: MoverPod
    proxy: S3Proxy
    bucket: str
    volume: Path
    kopia: PlainKopia

    def put(self, **spec: Any) -> None:
        # One file at a time, so that little more is read than sent.
        files = {"dataMoverConfig": {"ParallelFilesUpload": "1"}}
        self.pod.put_transfer(
            "DataUpload", **({"datamover": "velero-block"} if self.volume.is_file() else files), **spec
        )

    async def run(self, tracked: TrackedSnapshot | None = None) -> int:
        """Back up the volume in a new process, and return the exit code."""
        self.pod.stop = StopSignal()
        mode = VolumeMode.BLOCK if self.volume.is_file() else VolumeMode.FILESYSTEM
        return await self.pod.run("data-upload", self.volume, mode, tracked=tracked)

    async def run_until(self, sent_bytes: int, tracked: TrackedSnapshot | None = None) -> asyncio.Task[int]:
        """Back up the volume until so much of it was sent, and hold the rest; return the running mover."""
        self.proxy.hold_bytes = self.proxy.stored_bytes + sent_bytes
        running = asyncio.create_task(self.run(tracked))
        await self.pod.wait_for(lambda: self.proxy.holding)
        assert not running.done()
        return running

    def cancel(self) -> None:
        self.put(cancel=True)

    def signal(self) -> None:
        self.pod.signal()

    async def drain(self) -> None:
        """Send the signal, and wait until kopia has it too: then there is a message in case that the pod is killed."""
        self.pod.signal()
        await self.pod.wait_for(lambda: self.pod.message == _KILLED)

    def readings(self) -> list[ProgressMessage]:
        """The progress in the Events, oldest first."""
        return [parse_progress(text) for reason, text in self.pod.events() if reason == DataPathReason.PROGRESS]

    async def sent_by_next_backup(self, tracked: TrackedSnapshot | None = None) -> int:
        """Back up the volume again, and return how many bytes that sent; only its snapshot is there then."""
        before = self.proxy.stored_bytes
        assert await self.run(tracked) == 0, self.pod.message
        assert [one["id"] for one in self.kopia.snapshots()] == [self.pod.result["snapshotID"]]
        return self.proxy.stored_bytes - before

    def content(self) -> bytes:
        """What the newest snapshot has of a device."""
        root = self.kopia.snapshots()[-1]["rootEntry"]["obj"]
        (entry,) = json.loads(self.kopia.run("show", root))["entries"]
        return self.kopia.run("show", entry["obj"])


@pytest.fixture(scope="module")
def volume(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drain") / "volume"
    for number in range(_FILES):
        make_large_file(folder / f"directory {number % 3}" / f"file {number}", _FILE_MIB)
    return folder


@pytest.fixture(scope="module")
def new_bucket(s3: S3Server, tmp_path_factory: pytest.TempPathFactory, kopia_program: Path) -> Path:
    """A bucket with an empty repository, whose packs are small."""
    s3.make_bucket("drain")
    folder = tmp_path_factory.mktemp("bucket")
    kopia = PlainKopia(kopia_program, folder)
    kopia.run("repository", "create", *s3.kopia_flags("drain"), *IDENTITY)
    kopia.run("repository", "set-parameters", "--max-pack-size-mb=10")
    return Path(shutil.move(s3.folder / "drain", folder))


@pytest.fixture
def bed(
    s3: S3Server, proxy: S3Proxy, new_bucket: Path, tmp_path: Path, volume: Path, kopia_program: Path
) -> Iterator[_Bed]:
    # Not the bucket of the test before, in which the server may store another object.
    bucket = f"drain-{uuid.uuid4()}"
    shutil.copytree(new_bucket, s3.folder / bucket)
    kopia = PlainKopia(kopia_program, tmp_path)
    kopia.run("repository", "connect", *s3.kopia_flags(bucket), *IDENTITY)
    pod = MoverPod(FakeKube(), tmp_path)
    pod.put_bucket(s3, bucket, url=proxy.url)
    pod.put_repository(phase="Ready")
    (tmp_path / "termination-log").touch()
    bed = _Bed(pod, proxy, bucket, volume, kopia)
    bed.put()
    yield bed
    shutil.rmtree(s3.folder / bucket, ignore_errors=True)


@pytest.fixture
def device_bed(bed: _Bed, tmp_path: Path) -> _Bed:
    """One whose volume is a device that is backed up by block."""
    bed.volume = make_large_file(tmp_path / "device", _DEVICE_MIB)
    bed.put()
    return bed


@pytest.mark.parametrize("percent", DRAINS)
async def test_the_next_backup_does_not_send_again_what_a_drained_one_has_sent(bed: _Bed, percent: int) -> None:
    running = await bed.run_until(_VOLUME_BYTES * percent // 100)
    await bed.drain()
    bed.proxy.hold_bytes = 0
    assert await running == 14
    sent = bed.proxy.stored_bytes
    assert bed.pod.message == f"{_STOPPED}; {_SAVED}: {_CANCELED}"
    assert bed.pod.reasons() == ["Data-Path-Started", "Data-Path-Canceled", "Data-Path-Stopped"]
    (checkpoint,) = bed.kopia.snapshots()
    assert checkpoint["incomplete"] == "canceled"
    assert "pins" not in checkpoint
    assert sent + await bed.sent_by_next_backup() <= 1.05 * _VOLUME_BYTES
    assert bed.pod.result["totalBytes"] == _VOLUME_BYTES
    assert ("Data-Path-Warning", "removed 1 incomplete snapshots of earlier backups") in bed.pod.events()


@pytest.mark.thorough
async def test_the_next_attempt_reads_only_what_the_checkpoint_of_a_drained_one_lacks(bed: _Bed) -> None:
    """What it reads again is found in the repository: of the file that was being read."""
    running = await bed.run_until(_VOLUME_BYTES // 2)
    await bed.drain()
    bed.proxy.hold_bytes = 0
    await running
    (start,) = {one.snapshot_started for one in bed.readings() if one.snapshot_started is not None}
    bed.pod.attempts = Attempts(number=2, starts=(start,))
    bed.put()
    await bed.sent_by_next_backup()
    assert "Data-Path-Warning" not in bed.pod.reasons()
    assert bed.readings()[-1].deduped_bytes <= 2 * _FILE_MIB * _MIB


async def test_without_the_grace_the_next_backup_sends_everything_again(bed: _Bed) -> None:
    """As a cancel does: kopia is killed, and the packs that it has sent are in no index."""
    bed.pod.environment = {**os.environ, "DATA_MOVER_CHECKPOINT_GRACE": "0"}
    running = await bed.run_until(_VOLUME_BYTES // 2)
    bed.pod.signal()
    async with asyncio.timeout(2):
        assert await asyncio.shield(running) == 14
    bed.proxy.hold_bytes = 0
    assert bed.pod.message == f"{_STOPPED}: {_CANCELED}"
    assert bed.kopia.snapshots() == []
    assert await bed.sent_by_next_backup() >= _VOLUME_BYTES


async def test_kopia_is_killed_after_the_grace_if_the_storage_does_not_answer(bed: _Bed) -> None:
    """A second signal changes nothing."""
    bed.pod.environment = {**os.environ, "DATA_MOVER_CHECKPOINT_GRACE": "3s"}
    running = await bed.run_until(_VOLUME_BYTES // 10)
    bed.proxy.fail(Fault.REFUSE)
    await bed.drain()
    bed.pod.signal()
    assert await running == 14
    assert bed.pod.message == f"{_STOPPED}; kopia did not save a checkpoint within 3s: {_CANCELED}"
    assert not running_kopia(BACKUP_VERB)


async def test_a_cancel_during_the_grace_kills_kopia_at_once(bed: _Bed) -> None:
    running = await bed.run_until(_VOLUME_BYTES // 10)
    await bed.drain()
    assert running_kopia(BACKUP_VERB)
    bed.cancel()
    async with asyncio.timeout(2):
        assert await asyncio.shield(running) == 14
    bed.proxy.hold_bytes = 0
    assert bed.pod.message == f"DataUpload velero/transfer-1 was canceled: {_CANCELED}"
    assert bed.kopia.snapshots() == []


async def test_a_checkpoint_whose_indexes_cannot_be_written_is_not_reported_as_saved(bed: _Bed) -> None:
    """kopia has printed its snapshot before."""
    running = await bed.run_until(_VOLUME_BYTES // 10)
    bed.proxy.denied = f"PUT /{bed.bucket}/kopia/app/x"
    await bed.drain()
    bed.proxy.hold_bytes = 0
    assert await running == 14
    assert bed.pod.message == f"{_STOPPED}; kopia saved no checkpoint: kopia exited with code 1: {_CANCELED}"
    assert bed.kopia.snapshots() == []


@pytest.mark.parametrize("end", [_Bed.cancel, _Bed.signal], ids=["spec.cancel", "SIGTERM"])
async def test_a_cancel_of_a_backup_by_block_leaves_nothing_complete_and_the_next_one_is_right(
    device_bed: _Bed, end: Callable[[_Bed], None]
) -> None:
    bed = device_bed
    assert await bed.run() == 0, bed.pod.message
    before, first = bed.kopia.snapshots(), bed.volume.read_bytes()
    make_large_file(bed.volume, _DEVICE_MIB)
    # Some packs are written, and the next one waits.
    running = await bed.run_until(5 * _MIB)
    end(bed)
    async with asyncio.timeout(2):
        assert await asyncio.shield(running) == 14
    assert bed.pod.message.endswith(_CANCELED)
    assert running_kopia("block-write") == []
    bed.proxy.hold_bytes = 0
    assert (bed.kopia.snapshots(), bed.content()) == (before, first)
    bed.put()
    assert await bed.run() == 0, bed.pod.message
    assert [one["id"] for one in bed.kopia.snapshots()] == [before[0]["id"], bed.pod.result["snapshotID"]]
    assert bed.pod.result["incrementalBytes"] == _DEVICE_MIB * _MIB
    assert bed.content() == bed.volume.read_bytes()


async def test_a_drained_backup_by_block_goes_on_in_the_next_attempt(device_bed: _Bed) -> None:
    """What its checkpoint has is not sent again, although the storage held back its end."""
    bed, snapshot = device_bed, TrackedSnapshot("snapshot-1", "volume-1", "du-1")
    make_large_file(bed.volume, 2 * _DEVICE_MIB)
    running = await bed.run_until(5 * _MIB, snapshot)
    await bed.drain()
    bed.proxy.hold_bytes = 0
    assert await running == 14
    assert "kopia saved a checkpoint" in bed.pod.message
    (left,) = bed.kopia.snapshots()
    bed.pod.attempts = Attempts(number=2)
    bed.put()
    lacking_bytes = 2 * _DEVICE_MIB * _MIB - left["stats"]["totalSize"]
    assert await bed.sent_by_next_backup(snapshot) <= lacking_bytes + _MIB
    assert bed.content() == bed.volume.read_bytes()

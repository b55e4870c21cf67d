"""A backup by block that is canceled while blocks are sent leaves nothing complete, and the next one is right."""

import asyncio
import json
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from core.contract import TrackedSnapshot, VolumeMode
from core.models.phases import Attempts
from datamover.runtime.signals import StopSignal
from tests.datamover.support.plainkopia import IDENTITY, PlainKopia
from tests.datamover.support.pods import MoverPod
from tests.datamover.support.processes import running_kopia
from tests.datamover.support.s3proxy import S3Proxy
from tests.datamover.support.s3server import S3Server
from tests.datamover.support.trees import make_large_file
from tests.support.fakekube import FakeKube

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

_MIB = 1 << 20
_DEVICE_MIB = 32


@dataclass(frozen=True)
class _Bed:
    """A mover pod, the proxy before its bucket, the device, and kopia by itself on the bucket."""

    pod: MoverPod
    proxy: S3Proxy
    device: Path
    kopia: PlainKopia

    def put(self, **spec: Any) -> None:
        self.pod.put_transfer("DataUpload", datamover="velero-block", **spec)

    async def run(self, tracked: TrackedSnapshot | None = None) -> int:
        self.pod.stop = StopSignal()
        return await self.pod.run("data-upload", self.device, VolumeMode.BLOCK, tracked=tracked)

    def cancel(self) -> None:
        self.put(cancel=True)

    def signal(self) -> None:
        self.pod.signal()

    def content(self) -> bytes:
        """What the newest snapshot has."""
        root = self.kopia.snapshots()[-1]["rootEntry"]["obj"]
        (entry,) = json.loads(self.kopia.run("show", root))["entries"]
        return self.kopia.run("show", entry["obj"])


@pytest.fixture
def bed(s3: S3Server, proxy: S3Proxy, tmp_path: Path, kopia_program: Path) -> _Bed:
    bucket = s3.make_bucket(f"block-cancel-{uuid.uuid4()}")
    kopia = PlainKopia(kopia_program, tmp_path)
    kopia.run("repository", "create", *s3.kopia_flags(bucket), *IDENTITY)
    kopia.run("repository", "set-parameters", "--max-pack-size-mb=10")
    pod = MoverPod(FakeKube(), tmp_path)
    pod.put_bucket(s3, bucket, url=proxy.url)
    pod.put_repository(phase="Ready")
    return _Bed(pod, proxy, make_large_file(tmp_path / "device", _DEVICE_MIB), kopia)


@pytest.mark.parametrize("end", [_Bed.cancel, _Bed.signal], ids=["spec.cancel", "SIGTERM"])
async def test_a_cancel_in_mid_transfer_leaves_nothing_complete(bed: _Bed, end: Callable[[_Bed], None]) -> None:
    bed.put()
    assert await bed.run() == 0, bed.pod.message
    before, first = bed.kopia.snapshots(), bed.device.read_bytes()
    make_large_file(bed.device, _DEVICE_MIB)
    # Some packs are written, and the next one waits.
    bed.proxy.hold_bytes = bed.proxy.stored_bytes + 5 * _MIB
    running = asyncio.create_task(bed.run())
    await bed.pod.wait_for(lambda: bed.proxy.holding)
    assert not running.done()
    end(bed)
    async with asyncio.timeout(2):
        assert await asyncio.shield(running) == 14
    assert bed.pod.message.endswith("data path is canceled")
    assert running_kopia("block-write") == []
    bed.proxy.hold_bytes = 0
    assert bed.kopia.snapshots() == before
    assert bed.content() == first
    bed.put()
    assert await bed.run() == 0, bed.pod.message
    assert [one["id"] for one in bed.kopia.snapshots()] == [before[0]["id"], bed.pod.result["snapshotID"]]
    assert bed.pod.result["incrementalBytes"] == _DEVICE_MIB * _MIB
    assert bed.content() == bed.device.read_bytes()


async def test_a_drained_backup_goes_on_in_the_next_attempt(bed: _Bed) -> None:
    """What its checkpoint has is not sent again, although the storage held back its end."""
    snapshot = TrackedSnapshot("snapshot-1", "volume-1", "du-1")
    make_large_file(bed.device, 2 * _DEVICE_MIB)
    bed.put()
    bed.proxy.hold_bytes = bed.proxy.stored_bytes + 5 * _MIB
    running = asyncio.create_task(bed.run(snapshot))
    await bed.pod.wait_for(lambda: bed.proxy.holding)
    bed.signal()
    # Its message in case that the pod is killed: kopia gets the signal then.
    await bed.pod.wait_for(bed.pod.context.termination_file.exists)
    bed.proxy.hold_bytes = 0
    assert await running == 14
    assert "kopia saved a checkpoint" in bed.pod.message
    (left,) = bed.kopia.snapshots()
    bed.pod.attempts = Attempts(number=2)
    bed.put()
    stored_bytes = bed.proxy.stored_bytes
    assert await bed.run(snapshot) == 0, bed.pod.message
    assert bed.proxy.stored_bytes - stored_bytes <= 2 * _DEVICE_MIB * _MIB - left["stats"]["totalSize"] + _MIB
    assert [one["id"] for one in bed.kopia.snapshots()] == [bed.pod.result["snapshotID"]]
    assert bed.content() == bed.device.read_bytes()

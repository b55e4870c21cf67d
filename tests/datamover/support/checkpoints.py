"""A backup that is stopped once kopia has saved a checkpoint."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

from core.models.names import CHECKPOINT_DEVICE_TAG, TRANSFER_UID_TAG
from datamover.kopia.backup_process import GracefulStop
from datamover.runtime.cancellation import Canceler
from datamover.runtime.signals import StopSignal
from tests.datamover.support.backup_movers import BACKUP_VERB
from tests.datamover.support.plainkopia import PlainKopia
from tests.datamover.support.processes import running_kopia
from tests.datamover.support.trees import make_large_file


def _manifests(repository: Path) -> int:
    return sum(1 for _ in repository.glob("q*/**/*.f"))


def _has_checkpoint(kopia: PlainKopia, least_bytes: int) -> bool:
    found = (one["rootEntry"]["summ"]["size"] for one in kopia.snapshots() if "incomplete" in one)
    return any(size >= least_bytes for size in found)


@asynccontextmanager
async def kopia_frozen_after_a_checkpoint(
    repository: Path,
    kopia: PlainKopia,
    *,
    least_bytes: int = 0,
    until: Callable[[], bool] | None = None,
    verb: str = BACKUP_VERB,
) -> AsyncIterator[int]:
    """Enter once a backup has saved a checkpoint, with kopia stopped; yield its PID.

    Args:
        repository: its directory.
        kopia: reads it.
        least_bytes: the size of the files in the checkpoint.
        until: is asked instead after each one.
        verb: the command of the kopia.
    """
    done = until or (lambda: _has_checkpoint(kopia, least_bytes))
    async with asyncio.timeout(200):
        while not (found := running_kopia(verb)):
            await asyncio.sleep(0.002)
        before = _manifests(repository)
        while not done():
            os.kill(found[0].pid, signal.SIGCONT)
            while _manifests(repository) == before:
                await asyncio.sleep(0.002)
            os.kill(found[0].pid, signal.SIGSTOP)
            before = _manifests(repository)
    yield found[0].pid


class Drain:
    """A signal that stops a backup as the end of its pod does; `stop` is for its parameters."""

    def __init__(self) -> None:
        self._signals = StopSignal()
        self.stop = GracefulStop(Canceler(), timedelta(seconds=25), lambda _: None)
        self.stop.listen(self._signals)

    async def signal(self, pid: int) -> None:
        """Send the signal, and let the stopped kopia go on once it is handled."""
        self._signals._take(signal.SIGTERM, None)
        while not self.stop.signaled:
            await asyncio.sleep(0.002)
        os.kill(pid, signal.SIGCONT)


def leave_device_checkpoint(kopia: PlainKopia, folder: Path, transfer_uid: str) -> None:
    """Back a device up by block that takes a minute to read; kill kopia once it has saved a checkpoint."""
    device = make_large_file(folder / f"device of {transfer_uid}", 10)
    os.truncate(device, 64 << 30)
    fd = os.open(device, os.O_RDONLY)
    flags = ("--source=default@default:device", f"--device-fd={fd}", f"--device-size={64 << 30}")
    names = {TRANSFER_UID_TAG: transfer_uid, CHECKPOINT_DEVICE_TAG: "device"}
    tags = {f"tag:{name}": value for name, value in names.items()}
    decision = {"parallel": 1, "checkpoint": {"path": transfer_uid, "tags": tags, "seconds": 0.1}}
    with kopia.start("block-write", *flags, fd=fd) as running:
        assert running.stdin
        running.stdin.write(json.dumps(decision).encode())
        running.stdin.close()
        while not any(one["source"]["path"] == transfer_uid for one in kopia.snapshots()):
            assert running.poll() is None
        running.kill()
    os.close(fd)

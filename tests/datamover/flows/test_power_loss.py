"""The power fails in mid-restore: the next attempt, on another node, finds a volume that equals an uninterrupted one.

The file system is shut down without its journal being flushed, as xfstests do: what was written and not synced is lost.
Source: Linux, fs/ext4/ext4.h (EXT4_IOC_SHUTDOWN, EXT4_GOING_FLAGS_NOLOGFLUSH).
"""

import asyncio
import fcntl
import os
import signal
import struct
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from datamover.kopia.repository import Repository
from datamover.runtime.child import sync_file_system
from tests.datamover.support.backup_movers import RESTORE_VERB
from tests.datamover.support.loopdevice import make_ext4, mounted_image
from tests.datamover.support.plainkopia import PlainKopia
from tests.datamover.support.processes import running_kopia
from tests.datamover.support.resuming import (
    Seed,
    has_listed,
    kill_restore,
    list_of,
    make_seed,
    make_volume,
    restore_all,
)

pytestmark = pytest.mark.processes

_SHUTDOWN = 0x8004587D
_NO_LOG_FLUSH = 2


@contextmanager
def _mounted(image: Path, folder: Path) -> Iterator[Path]:
    with mounted_image(image, folder, "commit=300"):
        yield folder / "volume"


def _lose_power(volume: Path) -> None:
    fd = os.open(volume, os.O_RDONLY)
    try:
        fcntl.ioctl(fd, _SHUTDOWN, struct.pack("I", _NO_LOG_FLUSH))
    finally:
        os.close(fd)


def _copy_disk(image: Path, copy: Path) -> None:
    """Copy what the disk holds: a process that began meanwhile, in mounts of its own, may keep the first mounted."""
    subprocess.run(["cp", "--sparse=always", image, copy], check=True)


@pytest.fixture
def seed(repository: Path, kopia: PlainKopia, tmp_path: Path) -> Seed:
    return make_seed(make_volume(tmp_path / "volume", files=2000), repository, kopia)


class _SlowDisk:
    """Syncs until there is a list, and then hangs."""

    def __init__(self, listed: Callable[[], bool]) -> None:
        self._listed = listed
        self.hangs = False

    async def sync(self, fd: int, folder: Path) -> None:
        if self._listed():
            self.hangs = True
            await asyncio.Event().wait()
        await sync_file_system(fd, folder)


def _count(target: Path) -> int:
    return sum(len(names) for _, _, names in os.walk(target))


def _long_after(target: Path, disk: _SlowDisk) -> Callable[[], bool]:
    """Return whether 100 more files were written since the disk hangs, until which kopia is halted."""
    counts: list[int] = []

    def check() -> bool:
        count = _count(target)
        if not counts and count >= 100:
            _signal_kopia(signal.SIGCONT if disk.hangs else signal.SIGSTOP)
            counts.extend([count] if disk.hangs else [])
        return bool(counts) and count >= counts[0] + 100

    return check


def _signal_kopia(number: signal.Signals) -> None:
    for one in running_kopia(RESTORE_VERB):
        os.kill(one.pid, number)


async def _restore_until_power_loss(
    movers: Repository, seed: Seed, tmp_path: Path, disk_left: Path, patched: pytest.MonkeyPatch
) -> bool:
    """Break a restore to a new file system off by a power loss; return whether files were lost on `disk_left`."""
    image = tmp_path / "image"
    make_ext4(image, 256 << 20)
    with _mounted(image, tmp_path / "first node") as target:
        disk = _SlowDisk(has_listed(target, 1))
        patched.setattr("datamover.data_path.resume.sync_file_system", disk.sync)
        await kill_restore(movers, seed.restore_to(target), _long_after(target, disk))
        written = _count(target)
        _lose_power(target)
    _copy_disk(image, disk_left)
    with _mounted(disk_left, tmp_path / "second node") as target:
        return _count(target) < written


async def test_a_restore_continues_after_a_power_loss(
    mover_repository: Repository, seed: Seed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk_left = tmp_path / "disk left"
    with monkeypatch.context() as patched:
        # Whatever calls sync(2) on this machine at that moment also writes this file system: then nothing is lost.
        for _ in range(5):
            if lost := await _restore_until_power_loss(mover_repository, seed, tmp_path, disk_left, patched):
                break
    assert lost
    with _mounted(disk_left, tmp_path / "second node") as target:
        assert _count(target)
        assert list_of(target).exists()
        assert await restore_all(mover_repository, seed.restore_to(target))
        seed.check(target)

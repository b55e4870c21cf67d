"""Restores that are killed, and continued by another attempt."""

import asyncio
import os
import random
import stat
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from datamover.data_path.restore import RestoreParameters, restore
from datamover.data_path.resume import ResumeSettings
from datamover.kopia.repository import Repository
from tests.datamover.support.data_paths import restore_data_path, restore_parameters
from tests.datamover.support.plainkopia import PlainKopia
from tests.datamover.support.trees import describe_tree, make_tree

_UID = "6b4c1a1e-uid"
OLD_NS = 1_600_000_000_123_456_789
_FILES = 1000
_HEADER_BYTES = 200
"""More than the list's first line has."""


def make_volume(root: Path, files: int = _FILES) -> Path:
    """Create a tree with everything that `make_tree` has, and enough files for a kill between two of them."""
    make_tree(root)
    rng = random.Random(2)
    for number in range(files):
        path = root / f"d{number % 30}" / f"e{number % 3}" / f"f{number}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(rng.randbytes(rng.randrange(1, 8000)))
        path.chmod(rng.choice([0o600, 0o644, 0o4755]))
        os.chown(path, number % 7, number % 5)
        if number % 50 == 0:
            (path.parent / f"l{number}").symlink_to(path.name)
    (root / "d1").chmod(0o500)
    for path in sorted(root.rglob("*"), reverse=True):
        # kopia rounds a link's time to microseconds.
        time_ns = OLD_NS // 1000 * 1000 if path.is_symlink() else OLD_NS
        os.utime(path, ns=(time_ns, time_ns), follow_symlinks=False)
    os.utime(root, ns=(OLD_NS, OLD_NS))
    return root


def _describe(root: Path) -> dict[str, tuple[object, ...]]:
    """Return all that a restore determines of each entry, also the times of directories and the holes of files."""
    found = {name: (entry, (root / name).lstat()) for name, entry in describe_tree(root).items()}
    return {
        name: (*entry, status.st_mtime_ns, status.st_blocks if stat.S_ISREG(status.st_mode) else 0)
        for name, (entry, status) in found.items()
    }


@dataclass(frozen=True)
class Seed:
    """A repository with one snapshot, and what an uninterrupted restore of it leaves: the one of kopia itself."""

    repository: Path
    snapshot_id: str
    reference: Path

    def restore_to(self, target: Path, uid: str = _UID) -> RestoreParameters:
        """Return a restore with a list that is written as often as possible."""
        resume = ResumeSettings(uid, timedelta(milliseconds=1))
        return restore_parameters(self.snapshot_id, target, sparse=True, resume=resume)

    def check(self, target: Path) -> None:
        """Check that the target equals the reference."""
        found, wanted = _describe(target), _describe(self.reference)
        assert found.keys() == wanted.keys()
        assert [(name, found[name], wanted[name]) for name in found if found[name] != wanted[name]] == []


def make_seed(volume: Path, repository: Path, kopia: PlainKopia) -> Seed:
    """Back up the volume into the repository, to which kopia is connected."""
    snapshot_id, reference = kopia.snapshot(volume, source="some/volume"), volume.with_name("reference")
    kopia.run("restore", snapshot_id, str(reference), "--mode=local", "--write-sparse-files")
    return Seed(repository, snapshot_id, reference)


def list_of(target: Path, uid: str = _UID) -> Path:
    return target / f".nodeagent-restore-{uid}"


async def restore_all(movers: Repository, parameters: RestoreParameters) -> int:
    """Restore until the end, and return how many bytes were done without being written."""
    data_path = restore_data_path()
    await restore(movers, parameters, data_path)
    return data_path.meter.cached_bytes


def has_listed(target: Path, files: int) -> Callable[[], bool]:
    """Return a function that returns whether a restore has listed so many files more than now, by the list's size."""
    path = list_of(target)
    before = path.stat().st_size if path.exists() else _HEADER_BYTES
    # Each file adds 8 bytes, and 20 more if it is the only one of a batch.
    return lambda: path.exists() and path.stat().st_size >= before + 28 * files


async def kill_restore(movers: Repository, parameters: RestoreParameters, when: Callable[[], bool]) -> bool:
    """Restore, and kill kopia and what is done beside it as soon as `when` returns True; False: all ended before."""
    running = asyncio.create_task(restore(movers, parameters, restore_data_path()))
    async with asyncio.timeout(60):
        while not running.done() and not when():
            await asyncio.sleep(0.005)
        killed = running.cancel()
        with suppress(asyncio.CancelledError):
            await running
    return killed

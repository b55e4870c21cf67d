"""A restore that is killed and continued equals an uninterrupted one, whatever happened to the target meanwhile."""

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from core.errors import DataPathError
from datamover.data_path.finished import FinishedList
from datamover.data_path.parts import PartRestorer
from datamover.data_path.restore import RestoreParameters
from datamover.data_path.resume import ResumeSettings
from datamover.kopia.repository import Repository
from datamover.storage.providers import FileStorage
from tests.datamover.support.plainkopia import PlainKopia
from tests.datamover.support.repositories import opened
from tests.datamover.support.resuming import (
    OLD_NS,
    Seed,
    has_listed,
    kill_restore,
    list_of,
    make_seed,
    make_volume,
    restore_all,
)
from tests.datamover.support.thorough import KILLS, TIMEOUT_SECONDS
from tests.support.tasks import until

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def seed(_new_repository: Path, tmp_path_factory: pytest.TempPathFactory, kopia_program: Path) -> Seed:
    folder = tmp_path_factory.mktemp("seed")
    kopia = PlainKopia(kopia_program, folder)
    kopia.connect(repository := Path(shutil.copytree(_new_repository, folder / "repository")))
    return make_seed(make_volume(folder / "volume"), repository, kopia)


@pytest.fixture
def movers(seed: Seed) -> Iterator[Repository]:
    with opened(FileStorage(seed.repository)) as found:
        yield found


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "target"


@pytest.fixture(autouse=True)
def sync(monkeypatch: pytest.MonkeyPatch) -> AsyncMock:
    """Record finished files all the time, without the syncs, which take long while other tests write."""
    monkeypatch.setattr("datamover.data_path.resume._WALK_COST", 1)
    monkeypatch.setattr("datamover.data_path.restore.sync_file_system", AsyncMock())
    # A busy disk would keep the list back until kopia, which waits for no disk, has ended.
    monkeypatch.setattr(os, "fdatasync", lambda _: None)
    sync = AsyncMock()
    monkeypatch.setattr("datamover.data_path.resume.sync_file_system", sync)
    return sync


def _files(target: Path) -> dict[Path, tuple[int, int]]:
    """Return the inode and ctime of each file of the snapshot."""
    paths = (path for path in target.rglob("*") if path != list_of(target))
    return {
        path: (status.st_ino, status.st_ctime_ns)
        for path in paths
        if path.is_file() and not path.is_symlink() and (status := path.stat())
    }


def _end_after(monkeypatch: pytest.MonkeyPatch, condition: Callable[[], bool]) -> None:
    """Let kopia's part of a restore end only when the condition holds: on a busy machine it ends before any list."""
    restore_parts = PartRestorer.restore

    async def restore_and_wait(*arguments: Any) -> None:
        await restore_parts(*arguments)
        await until(condition, seconds=60, every=0.005)

    monkeypatch.setattr(PartRestorer, "restore", restore_and_wait)


async def _interrupt(movers: Repository, wanted: RestoreParameters, target: Path) -> None:
    """Kill a restore once 30 files are listed."""
    with pytest.MonkeyPatch.context() as patched:
        _end_after(patched, lambda: False)
        assert await kill_restore(movers, wanted, has_listed(target, 30))


@pytest.mark.timeout(TIMEOUT_SECONDS)
async def test_a_restore_that_is_killed_equals_an_uninterrupted_one(
    movers: Repository, seed: Seed, tmp_path: Path
) -> None:
    """What was listed before a kill is not written again, and counts as done."""
    number = 0
    while number < KILLS:
        target = tmp_path / f"target {number}"
        wanted = seed.restore_to(target)
        kept, killed = [], True
        for listed in (1 + number * 200 // KILLS, 20):
            killed = killed and await kill_restore(movers, wanted, has_listed(target, listed))
            kept.append((listed, _files(target)))
        if not killed:
            # On a busy machine kopia may end before the list has so many files.
            shutil.rmtree(target)
            continue
        done = await restore_all(movers, wanted)
        seed.check(target)
        after = _files(target)
        same = [[path for path in before if after.get(path) == before[path]] for _, before in kept]
        assert all(len(paths) >= listed for paths, (listed, _) in zip(same, kept, strict=True))
        assert done >= max(sum(path.stat().st_size for path in paths) for paths in same) / 2
        shutil.rmtree(target)
        number += 1


def _exchange_content(path: Path) -> None:
    path.write_bytes(b"x" * path.stat().st_size)
    os.utime(path, ns=(OLD_NS, OLD_NS))


def _put_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/etc/passwd")


def _exchange_directory(path: Path) -> None:
    os.chown(path.parent, 99, 99)
    path.parent.chmod(0o777)


def _leave_partial(path: Path) -> None:
    """As kopia has one: with the size of the snapshot's file, and, which is unlikely, a time that is near its time."""
    path.write_bytes(bytes(path.stat().st_size))
    os.utime(path, ns=(OLD_NS + 10**9, OLD_NS + 10**9))


async def test_what_changed_between_attempts_is_written_again(movers: Repository, seed: Seed, target: Path) -> None:
    """What the snapshot does not have is removed: whatever is in the volume came from an earlier attempt."""
    await _interrupt(movers, wanted := seed.restore_to(target), target)
    finished = [path for path in _files(target) if path.stat().st_mtime_ns == OLD_NS]
    changes = (_exchange_content, _put_link, _exchange_directory, _leave_partial)
    for number, path in enumerate(finished[:80]):
        changes[number % len(changes)](path)
    (target / "link").unlink(missing_ok=True)
    (target / "link").symlink_to("/etc/passwd")
    assert await restore_all(movers, wanted)
    seed.check(target)


@pytest.mark.timeout(240)
async def test_a_restore_in_parts_is_continued_too(movers: Repository, seed: Seed, target: Path) -> None:
    """With the times of one kopia, which restores directories by placeholders, and files alone."""
    wanted = replace(seed.restore_to(target), fitting_entries=400)
    await _interrupt(movers, wanted, target)
    assert await restore_all(movers, replace(wanted, again=True))
    seed.check(target)


@pytest.mark.parametrize("lost", [True, False], ids=["lost", "not to be kept"])
async def test_without_a_list_everything_is_written_again(
    movers: Repository, seed: Seed, target: Path, lost: bool
) -> None:
    """Also what has the size and time of the snapshot's file; others stay: nothing says where files are from."""
    await _interrupt(movers, wanted := seed.restore_to(target), target)
    if lost:
        list_of(target).unlink()
    else:
        wanted = replace(wanted, resume=ResumeSettings("6b4c1a1e-uid", timedelta(0)))
    (target / "foreign").touch()
    for path in [path for path in _files(target) if path.stat().st_mtime_ns == OLD_NS][:20]:
        _exchange_content(path)
    assert await restore_all(movers, wanted) == 0
    assert not list_of(target).exists()
    (target / "foreign").unlink()
    os.utime(target, ns=(OLD_NS, OLD_NS))
    seed.check(target)


async def test_an_error_of_the_disk_that_a_record_finds_fails_the_restore(
    movers: Repository, seed: Seed, target: Path, sync: AsyncMock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel reports it once, so the sync at the end would not find it."""
    _end_after(monkeypatch, lambda: sync.called)
    sync.side_effect = DataPathError("cannot write restored data: Input/output error")
    with pytest.raises(DataPathError, match=r"Input/output error$"):
        await restore_all(movers, seed.restore_to(target))
    assert sync.await_count == 1


async def test_a_restore_goes_on_if_its_files_cannot_be_listed_or_the_file_system_syncs_no_directory(
    movers: Repository, seed: Seed, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
        patched.setattr(FinishedList, "append", full)
        _end_after(patched, lambda: full.called)
        await restore_all(movers, seed.restore_to(target))
    full.assert_called_once()
    seed.check(target)
    shutil.rmtree(target)
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.EINVAL, "Invalid argument")))
    await restore_all(movers, seed.restore_to(target))
    seed.check(target)


async def test_files_are_listed_after_the_sync_that_follows_their_end(
    movers: Repository, seed: Seed, target: Path, sync: AsyncMock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list is empty while the first sync runs, and it ends before the restore does."""
    sizes: list[int] = []
    _end_after(monkeypatch, lambda: bool(sizes))
    sync.side_effect = lambda *_: sizes.append(list_of(target).stat().st_size)
    await restore_all(movers, seed.restore_to(target))
    assert sizes == sorted(sizes)
    header = {"version": 1, "transfer": "6b4c1a1e-uid", "snapshot": seed.snapshot_id}
    assert sizes[0] == len(json.dumps(header)) + 1
    assert not list_of(target).exists()

"""Failing data paths: a clear error, and no incomplete snapshot."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from core.errors import DataPathError, KopiaError
from datamover.kopia.process import KopiaAnswer
from datamover.kopia.repository import Repository
from datamover.kopia.snapshots import delete_snapshot
from datamover.local.command import LocalMover
from tests.datamover.conftest import build_local_mover
from tests.datamover.support.backup_movers import BACKUP_VERB
from tests.datamover.support.plainkopia import PlainKopia
from tests.datamover.support.processes import running_kopia
from tests.datamover.support.trees import describe_tree, make_large_file

pytestmark = pytest.mark.processes

_UNREADABLE = Path("/proc/sys/net/ipv4/route")
"""A directory whose file `flush` cannot be read, not even by root."""


def _packs(repository: Path) -> list[Path]:
    """Return the data blobs in the repository."""
    return [path for path in repository.glob("p*/**/*") if path.is_file()]


async def _until_half_way(repository: Path, verb: str = BACKUP_VERB) -> int:
    """Return kopia's process ID once part of the data has been sent."""
    async with asyncio.timeout(30):
        while not (_packs(repository) and (found := running_kopia(verb))):
            await asyncio.sleep(0.005)
    return found[0].pid


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_large_file(tmp_path_factory.mktemp("large") / "file", 80).parent


async def test_a_read_error_fails_the_backup_names_the_file_and_leaves_no_snapshot(
    repository: Path, kopia: PlainKopia
) -> None:
    with pytest.raises(KopiaError, match=f"back up {_UNREADABLE}: 1 entries could not be read, the first: flush: "):
        await build_local_mover(str(repository)).back_up(_UNREADABLE, "", None)
    assert kopia.snapshots() == []


async def test_an_incomplete_snapshot_is_not_restored(repository: Path, kopia: PlainKopia, tmp_path: Path) -> None:
    kopia.run("snapshot", "create", str(_UNREADABLE), "--fail-fast", "--json", fails=True)
    (incomplete,) = kopia.snapshots()
    with pytest.raises(DataPathError, match=r"cannot restore snapshot .*: 1 entries could not be read"):
        await build_local_mover(str(repository)).restore(incomplete["id"], tmp_path / "out", None)
    assert not (tmp_path / "out").exists()


async def _back_up_and_end_kopia(mover: LocalMover, volume: Path, repository: Path, number: signal.Signals) -> None:
    """Back up, and send kopia a signal half way."""
    async with asyncio.TaskGroup() as group:
        ender = group.create_task(_until_half_way(repository))
        ender.add_done_callback(lambda found: os.kill(found.result(), number))
        try:
            await mover.back_up(volume, "", None)
        finally:
            await ender


async def test_the_snapshot_that_kopia_saves_on_sigterm_is_deleted(
    repository: Path, large: Path, kopia: PlainKopia
) -> None:
    with pytest.raises(ExceptionGroup) as failed:
        await _back_up_and_end_kopia(build_local_mover(str(repository)), large, repository, signal.SIGTERM)
    assert failed.group_contains(KopiaError, match=f"back up {large}: it is incomplete")
    assert kopia.snapshots() == []


async def test_a_killed_kopia_leaves_a_repository_that_the_next_backup_uses(
    repository: Path, large: Path, tmp_path: Path
) -> None:
    mover = build_local_mover(str(repository))
    with pytest.raises(ExceptionGroup) as failed:
        await _back_up_and_end_kopia(mover, large, repository, signal.SIGKILL)
    backup = await mover.back_up(large, "", None)
    await mover.restore(backup.snapshot_id, tmp_path / "out", None)
    assert failed.group_contains(KopiaError, match="kopia was killed by signal 9")
    assert describe_tree(tmp_path / "out") == describe_tree(large)


async def test_a_restore_that_fails_reports_the_cause(repository: Path, tree: Path, tmp_path: Path) -> None:
    """First a target that is not a directory, then a repository whose data is damaged."""
    mover = build_local_mover(str(repository))
    backup = await mover.back_up(tree, "", None)
    (tmp_path / "file").write_text("a file")
    with pytest.raises(DataPathError, match=r"target /.*/file is not a directory"):
        await mover.restore(backup.snapshot_id, tmp_path / "file", None)
    for pack in _packs(repository):
        pack.write_bytes(b"\0" * pack.stat().st_size)
    with pytest.raises(KopiaError, match=rf"restore snapshot {backup.snapshot_id} to [^\n]*\n(.*\n)*.*decrypt"):
        await mover.restore(backup.snapshot_id, tmp_path / "out", None)


async def test_a_snapshot_that_a_killed_kopia_reported_but_did_not_write_needs_no_deletion(
    mover_repository: Repository,
) -> None:
    await mover_repository.connect()
    await delete_snapshot(mover_repository.kopia, "0123456789abcdef0123456789abcdef")


def test_an_error_contains_kopias_lines_without_status_lines() -> None:
    lines = ["Snapshotting default@default:a/b ...", "Unable to estimate", "upload error: no such file or directory"]
    reported = str(KopiaAnswer("back up /volume", 1, b"", lines).error())
    assert reported == "back up /volume: kopia exited with code 1\nupload error: no such file or directory"

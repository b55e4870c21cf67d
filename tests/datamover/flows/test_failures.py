"""Failing data paths, and faults of storage and volumes: a clear error for each, and no incomplete snapshot."""

import asyncio
import os
import re
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from core.errors import DataPathError, KopiaCrashError, KopiaError
from datamover.kopia.process import KopiaAnswer
from datamover.kopia.repository import Repository
from datamover.kopia.snapshots import delete_snapshot
from datamover.local.command import LocalMover
from tests.datamover.conftest import build_local_mover
from tests.datamover.support.backup_movers import BACKUP_VERB
from tests.datamover.support.mounts import mounted
from tests.datamover.support.plainkopia import PASSWORD, PlainKopia
from tests.datamover.support.pods import MoverPod
from tests.datamover.support.processes import children_of, running_kopia
from tests.datamover.support.trees import make_large_file

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
    with pytest.raises(
        KopiaError, match=f"back up {_UNREADABLE}: 1 entries could not be backed up, the first: flush: "
    ):
        await build_local_mover(str(repository)).back_up(_UNREADABLE, "", None)
    assert kopia.snapshots() == []


async def test_an_incomplete_snapshot_is_not_restored(repository: Path, kopia: PlainKopia, tmp_path: Path) -> None:
    kopia.run("snapshot", "create", str(_UNREADABLE), "--fail-fast", "--json", fails=True)
    (incomplete,) = kopia.snapshots()
    with pytest.raises(DataPathError, match=r"cannot restore snapshot .*: 1 entries could not be backed up"):
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


async def test_a_full_disk_fails_the_restore_and_names_the_file(local_mover: LocalMover, tmp_path: Path) -> None:
    file = make_large_file(tmp_path / "volume" / "file of 20 MiB", 20)
    backup = await local_mover.back_up(file.parent, "", None)
    with (
        mounted(tmp_path / "small", "size=5m") as target,
        pytest.raises(
            KopiaError,
            match=rf"^restore snapshot {backup.snapshot_id} to {target}: the disk is full\n(.*\n)*.*file of 20 MiB",
        ),
    ):
        await local_mover.restore(backup.snapshot_id, target, None)


async def test_a_target_that_is_not_writable_is_reported(local_mover: LocalMover, tree: Path, tmp_path: Path) -> None:
    backup = await local_mover.back_up(tree, "", None)
    with (
        mounted(tmp_path / "fixed", "ro") as target,
        pytest.raises(
            KopiaError, match=rf"^restore snapshot {backup.snapshot_id} to {target}: the file system is read-only"
        ),
    ):
        await local_mover.restore(backup.snapshot_id, target, None)


async def test_a_node_whose_disk_is_full_is_reported(pod: MoverPod, tree: Path, tmp_path: Path) -> None:
    with mounted(tmp_path / "scratch", "nr_inodes=2") as scratch:
        pod.environment = {**os.environ, "VELERO_SCRATCH_DIR": str(scratch)}
        pod.put_transfer("DataUpload")
        assert await pod.run("data-upload", tree) == DataPathError.exit_code
    assert re.fullmatch(rf"cannot use {scratch}/.*/repository.config: No space left on device", pod.message)


def _indexes(repository: Path) -> list[Path]:
    return [path for path in repository.glob("x*/**/*") if path.is_file()]


def _manifests(repository: Path) -> list[Path]:
    return [path for path in repository.glob("q*/**/*") if path.is_file()]


def _format(repository: Path) -> list[Path]:
    return [*repository.glob("kopia.repository*")]


@pytest.mark.sample("zeros-_indexes", "cut-_packs", "gone-_format")
@pytest.mark.parametrize("found", [_indexes, _manifests, _packs, _format])
@pytest.mark.parametrize("damage", ["zeros", "cut", "gone"])
async def test_a_damaged_repository_is_reported(
    repository: Path, tree: Path, tmp_path: Path, found: Callable[[Path], list[Path]], damage: str
) -> None:
    backup = await build_local_mover(str(repository)).back_up(tree, "", None)
    files = found(repository)
    assert files
    for file in files:
        if damage == "zeros":
            file.write_bytes(bytes(file.stat().st_size))
        elif damage == "cut":
            os.truncate(file, file.stat().st_size // 2)
        else:
            file.unlink()
    with pytest.raises(DataPathError) as failed:
        await build_local_mover(str(repository)).restore(backup.snapshot_id, tmp_path / "out", None)
    first = str(failed.value).splitlines()[0]
    assert str(repository) in first or backup.snapshot_id in first
    assert re.search("damaged|file is missing|is not in the repository|no repository found", first)
    assert "damaged" in first or damage == "gone"
    assert PASSWORD not in str(failed.value)


async def _interrupt(pod: MoverPod, flag: str, volume: Path, number: signal.Signals) -> int:
    """Run the data mover; send the signal to its kopia, once that is about to move data, and return the exit code."""

    def moving() -> list[int]:
        return [
            one.pid
            for one in children_of(os.getpid())
            if " --progress " in one.arguments
            or (" mover-backup " in one.arguments and _reads(one.pid, "file"))
            or (" mover-restore " in one.arguments and any(volume.iterdir()))
        ]

    async with asyncio.TaskGroup() as group:
        running = group.create_task(pod.run(flag, volume))
        await pod.wait_for(lambda: bool(moving()))
        # Go handles signals once its runtime has started.
        await pod.wait_for(lambda: bool(_caught(moving()[0]) & 1 << number - 1) or number is signal.SIGKILL)
        os.kill(moving()[0], number)
    return running.result()


def _reads(pid: int, name: str) -> bool:
    """Return whether a process has a file of that name open; kopia may be in a jail."""
    with suppress(OSError):
        return any(fd.readlink().name == name for fd in Path(f"/proc/{pid}/fd").iterdir())
    return False


def _caught(pid: int) -> int:
    """Return the mask of the signals that a process handles."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:"))


@pytest.mark.parametrize(
    ("number", "shown"),
    [(signal.SIGKILL, "kopia was killed by signal 9"), (signal.SIGSEGV, "kopia crashed: SIG")],
    ids=["killed", "crashed"],
)
async def test_a_backup_whose_kopia_crashes_says_so(
    pod: MoverPod, tmp_path: Path, number: signal.Signals, shown: str
) -> None:
    make_large_file(tmp_path / "volume" / "file", 100)
    pod.put_transfer("DataUpload")
    assert await _interrupt(pod, "data-upload", tmp_path / "volume", number) == KopiaCrashError.exit_code
    assert pod.message.startswith(f"back up {tmp_path / 'volume'}: {shown}")
    assert pod.reasons()[-2:] == ["Data-Path-Failed", "Data-Path-Stopped"]

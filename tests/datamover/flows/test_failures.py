"""Failing data paths, and faults of storage and volumes: a clear error for each, and no incomplete snapshot."""

import asyncio
import os
import re
import signal
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
from tests.datamover.support.processes import children_of, moves_data, running_kopia
from tests.datamover.support.trees import make_large_file

pytestmark = pytest.mark.processes

_UNREADABLE = Path("/proc/sys/net/ipv4/route")
"""A directory whose file `flush` cannot be read, not even by root."""


_PACKS = "p*/**/*"
"""The data blobs in a repository."""


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


async def test_the_snapshot_that_kopia_saves_on_sigterm_is_deleted(
    local_mover: LocalMover, repository: Path, tmp_path: Path, kopia: PlainKopia
) -> None:
    volume = make_large_file(tmp_path / "volume" / "file", 80).parent
    running = asyncio.create_task(local_mover.back_up(volume, "", None))
    async with asyncio.timeout(30):
        while not (any(repository.glob(f"{_PACKS}.f")) and (found := running_kopia(BACKUP_VERB))):
            await asyncio.sleep(0.005)
    os.kill(found[0].pid, signal.SIGTERM)
    with pytest.raises(KopiaError, match=f"back up {volume}: it is incomplete"):
        await running
    assert kopia.snapshots() == []


async def test_a_target_that_is_not_a_directory_is_named(local_mover: LocalMover, tree: Path, tmp_path: Path) -> None:
    backup = await local_mover.back_up(tree, "", None)
    (tmp_path / "file").write_text("a file")
    with pytest.raises(DataPathError, match=r"target /.*/file is not a directory"):
        await local_mover.restore(backup.snapshot_id, tmp_path / "file", None)


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


_BLOBS = {"indexes": "x*/**/*", "manifests": "q*/**/*", "packs": _PACKS, "format": "kopia.repository*"}


@pytest.mark.sample("zeros-indexes", "*-packs", "gone-format")
@pytest.mark.parametrize("damaged", _BLOBS)
@pytest.mark.parametrize("damage", ["zeros", "cut", "gone"])
async def test_a_damaged_repository_is_reported(
    repository: Path, tree: Path, tmp_path: Path, damaged: str, damage: str
) -> None:
    backup = await build_local_mover(str(repository)).back_up(tree, "", None)
    files = [path for path in repository.glob(_BLOBS[damaged]) if path.is_file()]
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
    assert "decrypt" in str(failed.value) or (damaged, damage) != ("packs", "zeros")
    assert PASSWORD not in str(failed.value)


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
    volume = make_large_file(tmp_path / "volume" / "file", 100).parent

    def moving() -> list[int]:
        found = [one for one in children_of(os.getpid()) if moves_data(one.arguments)]
        return [one.pid for one in found if " --progress " in one.arguments or _reads(one.pid, "file")]

    pod.put_transfer("DataUpload")
    running = asyncio.create_task(pod.run("data-upload", volume))
    await pod.wait_for(lambda: bool(moving()))
    # Go handles signals once its runtime has started.
    await pod.wait_for(lambda: bool(_caught(moving()[0]) & 1 << number - 1) or number is signal.SIGKILL)
    os.kill(moving()[0], number)
    assert await running == KopiaCrashError.exit_code
    assert pod.message.startswith(f"back up {volume}: {shown}")
    assert pod.reasons()[-2:] == ["Data-Path-Failed", "Data-Path-Stopped"]

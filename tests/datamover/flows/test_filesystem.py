"""The effect of a live file system on a backup, and what kopia keeps: see docs/limits.md."""

import asyncio
import os
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from datamover.arguments import LocalBackup
from datamover.kopia.stalls import EndlessFiles
from datamover.local.command import LocalMover
from tests.datamover.support.backup_movers import BACKUP_VERB, plain_only
from tests.datamover.support.data_paths import copy_volume
from tests.datamover.support.mounts import need_root
from tests.datamover.support.plainkopia import PlainKopia
from tests.datamover.support.processes import running_kopia
from tests.datamover.support.trees import describe_tree, make_large_file
from tests.datamover.support.unconfined import put_kopia_without_chown

pytestmark = pytest.mark.processes


@asynccontextmanager
async def _kopia_reading() -> AsyncIterator[None]:
    """Enter once kopia reads the volume."""
    async with asyncio.timeout(30):
        while not running_kopia(BACKUP_VERB):
            await asyncio.sleep(0.001)
    yield


async def test_it_is_known_what_a_confined_kopia_reads(local_mover: LocalMover, tmp_path: Path) -> None:
    file, files, seen = make_large_file(tmp_path / "volume" / "file", 40), EndlessFiles(), set[str]()
    async with asyncio.TaskGroup() as group:
        running = group.create_task(local_mover.back_up(file.parent, "", None))
        while not running.done():
            seen |= {one.path for one in files.observe()}
            await asyncio.sleep(0.02)
    assert str(file) in seen


@plain_only
async def test_content_that_changes_under_the_same_size_and_time_is_backed_up_where_all_files_are_read(
    local_mover: LocalMover, tmp_path: Path, kopia: PlainKopia
) -> None:
    file = tmp_path / "volume" / "file"
    file.parent.mkdir()
    for text, read_all in (("old", False), ("new", False), ("new", True)):
        file.write_text(text)
        os.utime(file, ns=(0, 0))
        wanted = LocalBackup(file.parent, read_all_files=read_all)
        await local_mover.back_up(file.parent, "", None, wanted=wanted)
    old, unnoticed, new = (one["rootEntry"]["obj"] for one in kopia.snapshots())
    assert old == unnoticed != new


async def test_files_that_are_deleted_before_they_are_read_are_skipped(local_mover: LocalMover, tmp_path: Path) -> None:
    volume = make_large_file(tmp_path / "volume" / "a", 40).parent
    (volume / "z").mkdir()
    for number in range(500):
        (volume / "z" / str(number)).touch()
    async with asyncio.TaskGroup() as group:
        running = group.create_task(local_mover.back_up(volume, "", None))
        async with _kopia_reading():
            for path in (volume / "z").iterdir():
                path.unlink()
    await local_mover.restore(running.result().snapshot_id, tmp_path / "out", None)
    assert (tmp_path / "out" / "a").read_bytes() == (volume / "a").read_bytes()
    assert {path.name for path in (tmp_path / "out" / "z").iterdir()} <= {str(number) for number in range(500)}


@pytest.mark.sample("grow")
@pytest.mark.parametrize("change", ["grow", "shrink"])
async def test_a_file_that_changes_during_the_backup_is_kept_as_it_was_read(
    local_mover: LocalMover, tmp_path: Path, change: str
) -> None:
    """Its start is unchanged; how much of the change is kept depends on the moment."""
    file = make_large_file(tmp_path / "volume" / "file", 40)
    before = file.read_bytes()
    async with asyncio.TaskGroup() as group:
        running = group.create_task(local_mover.back_up(file.parent, "", None))
        async with _kopia_reading():
            if change == "grow":
                with file.open("ab") as growing:
                    growing.write(b"more" * 1000)
            else:
                os.truncate(file, 1 << 20)
    backup = running.result()
    await local_mover.restore(backup.snapshot_id, tmp_path / "out", None)
    kept = (tmp_path / "out" / "file").read_bytes()
    assert len(kept) >= 1 << 20
    assert (before + b"more" * 1000).startswith(kept.rstrip(b"\0"))
    assert backup.total_bytes == len(kept)


async def test_sockets_pipes_and_devices_are_left_out_and_only_sockets_are_not_named(
    local_mover: LocalMover, tmp_path: Path
) -> None:
    volume = tmp_path / "volume"
    volume.mkdir()
    (volume / "file").write_text("kept")
    os.mkfifo(volume / "pipe")
    (volume / "link.kopia-entry").symlink_to("file")
    names = {"pipe", "link.kopia-entry"}
    if os.geteuid() == 0:
        os.mknod(volume / "null", 0o20666, os.makedev(1, 3))
        names.add("null")
    with socket.socket(socket.AF_UNIX) as here:
        here.bind(str(volume / "socket"))
    backup, out = await copy_volume(local_mover, volume)
    assert [path.name for path in out.iterdir()] == ["file"]
    note, _, examples = str(backup.note).partition(", for example ")
    assert note.startswith(f"left out {len(names)} pipes, devices, and links")
    assert set(examples.split(", ")) == names


async def test_a_new_file_system_is_restored(local_mover: LocalMover, tree: Path, tmp_path: Path) -> None:
    """`lost+found` on both sides is a directory like any other."""
    for folder in (tree, tmp_path / "out"):
        (folder / "lost+found").mkdir(parents=True, mode=0o700)
    (tree / "lost+found" / "#12").write_text("found again")
    _, out = await copy_volume(local_mover, tree)
    assert describe_tree(out) == describe_tree(tree)


# -- not kept by kopia ------------------------------------------------------------------------------------------------
_ACCESS_LIST = struct.pack("<I", 2) + b"".join(
    struct.pack("<HHI", tag, rights, who)
    for tag, rights, who in [
        (1, 6, 2**32 - 1),
        (2, 7, 12345),
        (4, 4, 2**32 - 1),
        (16, 7, 2**32 - 1),
        (32, 4, 2**32 - 1),
    ]
)
"""Source: linux/posix_acl_xattr.h: user 12345 has all permissions."""


async def test_of_files_and_directories_kopia_keeps_less_than_a_file_system_has(
    local_mover: LocalMover, tmp_path: Path
) -> None:
    """A directory gets the latest time of its contents; hard links become files."""
    file = make_large_file(tmp_path / "volume" / "folder" / "file", 1)
    (file.parent / "same").hardlink_to(file)
    attributes = {"user.note": b"x", "system.posix_acl_access": _ACCESS_LIST}
    for name, value in attributes.items():
        os.setxattr(file, name, value)
    os.utime(file, ns=(1_000_000_000, 2_000_000_000))
    os.utime(file.parent, ns=(1_000_000_000, 1_000_000_000))
    backup, out = await copy_volume(local_mover, tmp_path / "volume")
    first, second = (out / "folder" / name for name in ("file", "same"))
    assert first.stat().st_atime_ns != 1_000_000_000
    assert {one.stat().st_mtime_ns for one in (first, second, first.parent)} == {2_000_000_000}
    assert not first.samefile(second)
    assert first.read_bytes() == second.read_bytes() == file.read_bytes()
    assert backup.total_bytes == 2 << 20
    assert attributes.keys() <= set(os.listxattr(file))
    assert not attributes.keys() & set(os.listxattr(first))


async def test_an_owner_that_the_target_rejects_is_ignored(
    local_mover: LocalMover, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with NFS with root squash; Velero's restore continues likewise."""
    need_root("owners")
    file = make_large_file(tmp_path / "volume" / "file", 1)
    os.chown(file, 12345, 12345)
    backup = await local_mover.back_up(file.parent, "", None)
    put_kopia_without_chown(tmp_path, monkeypatch)
    await local_mover.restore(backup.snapshot_id, tmp_path / "out", None)
    restored = tmp_path / "out" / "file"
    assert restored.read_bytes() == file.read_bytes()
    assert (restored.stat().st_uid, file.stat().st_uid) == (0, 12345)


async def test_a_name_that_grows_to_the_limit_of_the_file_system_is_restored(
    local_mover: LocalMover, tmp_path: Path
) -> None:
    """85 bytes that are not UTF-8 are 255 bytes as kopia keeps them."""
    folder = tmp_path / "volume" / os.fsdecode(b"\xe9" * 85)
    folder.mkdir(parents=True)
    (folder / os.fsdecode(b"\xff" * 85)).write_text("content")
    _, out = await copy_volume(local_mover, folder.parent)
    assert (out / ("\ufffd" * 85) / ("\ufffd" * 85)).read_text() == "content"

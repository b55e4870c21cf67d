"""Files in the image of a device, read by a real debugfs: what is found, what is refused, and what damage does."""

import asyncio
import os
import random
import re
import shutil
import signal
import stat
import struct
import subprocess
from pathlib import Path
from unittest.mock import AsyncMock

import pytest

from core.errors import AgentError, DataPathError
from core.snapshot_contract import FileType
from datamover.data_path.block import HEAD_BYTES
from datamover.kopia.snapshot_files import StoredEntry
from datamover.pod import device_files
from datamover.pod.device_files import DeviceFiles, recognize
from tests.datamover.support.confining import use_means
from tests.datamover.support.disks import LONG, ODD, TIME_NS, make_disk, opened_disk, read_file
from tests.datamover.support.processes import children_of

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

_EXT = {1024 + 56: b"\x53\xef"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_disk(tmp_path_factory.mktemp("disk"))


@pytest.fixture
def disk(made: tuple[Path, Path]) -> Path:
    return made[1]


def _head(parts: dict[int, bytes]) -> bytes:
    head = bytearray(HEAD_BYTES)
    for offset, content in parts.items():
        head[offset : offset + len(content)] = content
    return bytes(head)


@pytest.mark.parametrize(
    ("parts", "name"),
    [
        ({0: b"XFSB"}, "has xfs:"),
        ({65600: b"_BHRfS_M"}, "has btrfs:"),
        ({0: b"LUKS\xba\xbe\x00\x02"}, "has LUKS (encrypted):"),
        ({512: b"LABELONE"}, "has an LVM physical volume:"),
        ({510: b"\x55\xaa", 512: b"EFI PART"}, "has a partition table (GPT):"),
        ({510: b"\x55\xaa"}, "has a partition table (MBR):"),
        ({3: b"NTFS    ", 510: b"\x55\xaa"}, "has NTFS:"),
        ({4086: b"SWAPSPACE2"}, "has swap space:"),
        ({1024: struct.pack("<I", 0xF2F52010)}, "has f2fs:"),
        ({4096: struct.pack("<I", 0xA92B4EFC)}, "has a member of a RAID array:"),
        ({0: b"XFSB", **_EXT}, "has xfs and ext4:"),
        ({}, "has no known file system:"),
        ({1024 + 0x60: b"\x08", **_EXT}, "has a journal of ext4 on its own:"),
    ],
)
def test_what_is_not_ext_is_refused_by_its_name(parts: dict[int, bytes], name: str) -> None:
    with pytest.raises(DataPathError, match=re.escape(f"the device {name}")):
        recognize(_head(parts))


def test_a_journal_that_was_not_replayed_is_said() -> None:
    assert recognize(_head(_EXT)) is None
    assert recognize(_head({510: b"\x55\xaa", **_EXT})) is None
    assert "its journal was not replayed" in (recognize(_head({1024 + 0x60: b"\x04", **_EXT})) or "")


async def _list(files: DeviceFiles, path: str = "") -> list[StoredEntry]:
    return [one async for one in files.list(await files.find(path))]


@pytest.mark.parametrize("means", ["landlock", "jail", "chroot"])
async def test_files_are_as_they_were_whatever_confines_debugfs(
    means: str, made: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_means(means, monkeypatch)
    source, disk = made
    async with opened_disk(disk, tmp_path / "look") as (files, _):
        listed = {one.name: one.describe() for one in await files.complete(await _list(files))}
        assert list(listed) == ["long", "lost+found", ODD, "small", "sub"]
        small = listed["small"]
        assert (small.mode, small.user_id, small.group_id, small.size_bytes) == ("4640", 100_000, 70_000, 3)
        assert small.modified == f"2023-11-14T22:13:20.{TIME_NS % 10**9}Z"
        assert (listed["sub"].type, listed["long"].type) == (FileType.DIRECTORY, FileType.LINK)
        assert await files.read_link(await files.find("long")) == LONG
        assert await files.read_link(await files.find("sub/deep/link")) == "../large"
        assert await read_file(files, ODD) == b"two"
        found = {one.name: one.size async for one in files.walk(await files.find("sub")) if one.type is FileType.FILE}
    assert found == {name: (source / "sub" / name).stat().st_size for name in ("large", "sparse")}
    assert [*(tmp_path / "look").rglob("jail-*")] == []


async def test_inodes_are_read_in_the_order_of_the_device(disk: Path, tmp_path: Path) -> None:
    async with opened_disk(disk, tmp_path / "look") as (files, _):
        entries = [*await _list(files), *await _list(files, "sub")]
        run, read = files.debugfs.run, list[int]()

        async def watch(command: str, what: str) -> list[str]:
            read.append(int(re.findall(r"<(\d+)>", command)[0]))
            return await run(command, what)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(files.debugfs, "run", watch)
            completed = await files.complete(entries)
    assert completed == entries
    assert read == sorted(int(one.object_id) for one in entries)
    assert read != [int(one.object_id) for one in entries]


async def test_paths_lead_through_no_link_and_a_name_that_is_meant_is_named(disk: Path, tmp_path: Path) -> None:
    async with opened_disk(disk, tmp_path / "look") as (files, _):
        with pytest.raises(DataPathError, match=r"has no sub/lagre \(did you mean large\?\)"):
            await files.find("/sub//lagre")
        with pytest.raises(DataPathError, match="is no directory but a link, which is not followed"):
            await files.find("sub/deep/link/x")


@pytest.mark.parametrize("means", ["landlock", "jail", "chroot"])
async def test_debugfs_opens_nothing_else(
    means: str, disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_means(means, monkeypatch)
    secret, stolen = tmp_path / "secret", tmp_path / "stolen"
    shutil.copy(disk, secret)
    async with opened_disk(disk, tmp_path / "look") as (files, _):
        await files.debugfs.run(f"dump <2> {stolen}", "it")
        assert "while trying to open" in (await files.debugfs.run(f"close\nopen {secret}", "it"))[-1]
    assert not stolen.exists()


async def test_names_that_differ_only_in_bytes_that_are_not_utf_8_stay_apart(tmp_path: Path) -> None:
    source, disk = tmp_path / "files", tmp_path / "disk"
    for name in (b"d\xe4", b"d\xf6", b"only\xe4"):
        (source / os.fsdecode(name)).mkdir(parents=True)
        (source / os.fsdecode(name) / "file").write_bytes(name)
    subprocess.run(["/sbin/mkfs.ext4", "-q", "-d", source, disk, "8M"], check=True)
    async with opened_disk(disk, tmp_path / "look") as (files, _):
        listed = [one.name for one in await _list(files)]
        content = [await read_file(files, f"{name}/file") for name in listed if name != "lost+found"]
    assert listed == ["d\\xe4", "d\\xf6", "lost+found", "only\ufffd"]
    assert content == [b"d\xe4", b"d\xf6", b"only\xe4"]


async def test_a_crash_is_an_error(disk: Path, tmp_path: Path) -> None:
    async with opened_disk(disk, tmp_path / "look") as (files, _):
        (child,) = (one for one in children_of(os.getpid()) if "debugfs" in one.arguments)
        os.kill(child.pid, signal.SIGSEGV)
        with pytest.raises(DataPathError, match=r"cannot read directory /: debugfs: it ended \(-11\)"):
            await files.find("small")


async def test_what_takes_too_long_is_an_error(disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened_disk(disk, tmp_path / "look") as (files, _):
        (child,) = (one for one in children_of(os.getpid()) if "debugfs" in one.arguments)
        os.kill(child.pid, signal.SIGSTOP)
        with pytest.raises(DataPathError, match="debugfs did not answer within 0 s"):
            await files.debugfs.run("ls -l <2>", "it", seconds=0.1)


async def test_what_waits_for_a_block_is_not_held_against_debugfs(
    disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Fetching:
        error = None

        @property
        def fetching(self) -> bool:
            os.kill(child.pid, signal.SIGCONT)
            return True

    async with opened_disk(disk, tmp_path / "look") as (files, _):
        (child,) = (one for one in children_of(os.getpid()) if "debugfs" in one.arguments)
        monkeypatch.setattr(files.debugfs, "_image", Fetching())
        os.kill(child.pid, signal.SIGSTOP)
        assert await files.debugfs.run("ls -l <2>", "it", seconds=0.1)


async def _read_all(files: DeviceFiles) -> dict[str, tuple[str, str]]:
    found = {}
    async for one in files.walk(await files.find("")):
        target = await files.read_link(one) if one.type is FileType.LINK else ""
        found[one.name] = (stat.filemode(int(one.mode, 8)), target)
    return found


async def test_damage_is_an_error_or_changes_only_what_it_hit(disk: Path, tmp_path: Path) -> None:
    """Nothing that a tenant writes into a file system ends otherwise than in a list or an error."""
    content, dice, failed = disk.read_bytes(), random.Random(7), 0
    starts = [at for at in range(0, len(content), 4096) if any(content[at : at + 4096])][:60]
    for seed in range(12):
        damaged = bytearray(content)
        for _ in range(dice.choice((1, 20, 400))):
            at = dice.choice(starts) + dice.randrange(4096)
            damaged[at] = dice.randrange(256)
        # The magic stays, so that debugfs gets to see it.
        damaged[1024 + 56 : 1024 + 58] = b"\x53\xef"
        image = tmp_path / f"damaged-{seed}"
        image.write_bytes(damaged)
        try:
            async with opened_disk(image, tmp_path / f"look-{seed}") as (files, _):
                assert len(await _read_all(files)) < 1000
        except AgentError:
            failed += 1
        image.unlink()
    assert failed > 2


async def test_a_machine_without_debugfs_says_so(disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_files, "_FOLDERS", str(tmp_path))
    with pytest.raises(DataPathError, match="the image has no debugfs"):
        async with opened_disk(disk, tmp_path / "look"):
            pass


@pytest.mark.parametrize("size", [1 << 32 | len(LONG), 0], ids=["endless", "empty"])
async def test_a_link_whose_target_is_none_is_an_error(disk: Path, tmp_path: Path, size: int) -> None:
    image = Path(shutil.copy(disk, tmp_path / "image"))
    subprocess.run(["/sbin/debugfs", "-w", "-R", f"sif long size {size}", image], check=True, capture_output=True)
    async with opened_disk(image, tmp_path / "look") as (files, _):
        link = await files.find("long")
        with pytest.raises(DataPathError, match=f"cannot read link long: debugfs: its target has {size} bytes"):
            async with asyncio.timeout(5):
                await files.read_link(link)


async def test_a_pipe_that_became_a_link_is_not_followed(disk: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    async with opened_disk(disk, tmp_path / "look") as (files, _):
        files.pipe.symlink_to(tmp_path / "secret")
        with pytest.raises(DataPathError, match="cannot open the pipe"):
            files.open_pipe()


async def test_a_link_of_which_nothing_arrives_is_an_error(
    disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened_disk(disk, tmp_path / "look") as (files, _):
        link = await files.find("long")
        monkeypatch.setattr(DeviceFiles, "copy_content", AsyncMock())
        with pytest.raises(DataPathError, match="cannot read link long: "):
            await files.read_link(link)

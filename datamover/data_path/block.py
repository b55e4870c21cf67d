"""Block devices: a kopia snapshot holds one as a directory with a single file, the device's bytes.

kopia reads a device from its standard input, so that no byte passes through this process. It writes one to its standard
output, from where a thread copies it: kopia itself would fill every hole with zeros. The copy punches holes where the
data is zero, and writes zeros where the device does not support that.
Source: tests/recordings/velero-1.18.2/block-kopia-snapshots.json; Linux, fallocate(2); block/fops.c (a hole in a device
reads as zeros, or is rejected).
"""

import ctypes
import errno
import fcntl
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from core.errors import DataPathError
from datamover.data_path.run import DataPath
from datamover.kopia.backup_process import device_flags, read_blocks
from datamover.kopia.process import KopiaFiles
from datamover.kopia.repository import Repository
from datamover.kopia.snapshot_files import find_only_file
from datamover.kopia.snapshots import Snapshot
from datamover.runtime.cancellation import ShouldStop, run_in_background
from datamover.runtime.child import WRITING, sync_device
from datamover.runtime.work_dir import attempting

_PUNCH_HOLE: Final = 0x02
_KEEP_SIZE: Final = 0x01
"""Source: linux/falloc.h."""

_PIECE_BYTES: Final = 64 * 1024
"""The smallest hole: a multiple of every device's sector, and few enough in a device of terabytes."""

_BUFFER_BYTES: Final = 16 * _PIECE_BYTES
_ZEROS: Final = bytes(_BUFFER_BYTES)

_HOLE_BYTES: Final = 256 * _BUFFER_BYTES
"""The largest hole at a time: meanwhile kopia waits, which must not look like a stall."""

_UNSUPPORTED: Final = frozenset({errno.EOPNOTSUPP, errno.ENOSYS})
"""The device does not support holes; any other error may concern one range only."""


class HoleWriter:
    """Writes to an open device sequentially, from its start."""

    def __init__(self, fd: int, *, compare: bool = False) -> None:
        """Write to `fd`; with `compare`, what the device has already is not written."""
        self._fd = fd
        self._holes = True
        self._compare = compare
        self._fallocate = ctypes.CDLL(None, use_errno=True).fallocate
        self._fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
        self.written_bytes = 0
        """Written or kept so far, without zeros that are still to be written."""
        self._zeros = 0

    def close(self) -> None:
        """Close the device."""
        os.close(self._fd)

    def write(self, data: memoryview) -> None:
        """Write the next bytes, except for the last call a multiple of the smallest hole; raises OSError."""
        if self._zeros >= _HOLE_BYTES:
            self._put_zeros()
        start = 0
        for at in range(0, len(data), _PIECE_BYTES):
            piece = data[at : at + _PIECE_BYTES]
            # Most pieces that are not zero differ in the first byte, which avoids the comparison.
            if piece[0] or bytes(piece) != _ZEROS[: len(piece)]:
                self._put_zeros()
            else:
                self._put(data[start:at])
                start = at + len(piece)
                self._zeros += len(piece)
        self._put(data[start:])

    def finish(self) -> int:
        """Write the remaining zeros, and return how many bytes of the device are written."""
        self._put_zeros()
        return self.written_bytes

    def _put(self, data: memoryview) -> None:
        if not self._compare:
            self._write(data)
            return
        there = os.pread(self._fd, len(data), self.written_bytes)
        for at in range(0, len(data), _PIECE_BYTES):
            piece = data[at : at + _PIECE_BYTES]
            if bytes(piece) == there[at : at + len(piece)]:
                self.written_bytes += len(piece)
            else:
                self._write(piece)

    def _write(self, data: memoryview) -> None:
        while data:
            count = os.pwrite(self._fd, data, self.written_bytes)
            self.written_bytes += count
            data = data[count:]

    def _put_zeros(self) -> None:
        """Punch a hole for the zeros before this position, or write them."""
        count, self._zeros = self._zeros, 0
        if not count:
            return
        if self._holes and self._punch(count):
            self.written_bytes += count
            return
        for at in range(0, count, _BUFFER_BYTES):
            self._put(memoryview(_ZEROS)[: min(_BUFFER_BYTES, count - at)])

    def _punch(self, count: int) -> bool:
        if self._fallocate(self._fd, _PUNCH_HOLE | _KEEP_SIZE, self.written_bytes, count) == 0:
            return True
        self._holes = ctypes.get_errno() not in _UNSUPPORTED
        return False


def copy_stream(source: int, target: HoleWriter, stop: ShouldStop) -> int:
    """Copy `source` to `target` until its end, close both, and return the number of bytes. Raises OSError of either."""
    try:
        with suppress(OSError):
            fcntl.fcntl(source, fcntl.F_SETPIPE_SZ, _BUFFER_BYTES)
        # One buffer for the whole copy: allocating one per read would cost more than the copy.
        with memoryview(bytearray(_BUFFER_BYTES)) as buffer:
            while not stop() and (count := _fill(buffer, source)):
                target.write(buffer[:count])
        return target.finish()
    finally:
        os.close(source)
        target.close()


def _fill(buffer: memoryview, fd: int) -> int:
    """Read into the buffer until it is full or the stream ends, and return how many bytes it holds."""
    filled = 0
    while filled < len(buffer) and (count := os.readv(fd, [buffer[filled:]])):
        filled += count
    return filled


@asynccontextmanager
async def open_device(path: Path, flags: int, data_path: DataPath) -> AsyncIterator[tuple[int, int]]:
    """Open a device, or a file in its place, and yield its descriptor and size in bytes; raises DataPathError."""

    def open_and_measure(_: ShouldStop) -> tuple[int, int]:
        fd = os.open(path, flags | os.O_CLOEXEC)
        size = os.lseek(fd, 0, os.SEEK_END)
        os.lseek(fd, 0, os.SEEK_SET)
        return fd, size

    try:
        fd, size = await data_path.run_in_thread(open_and_measure, f"opening device {path}")
    except OSError as e:
        # Linux, block/bdev.c: a file system that is mounted anywhere on the node has it exclusively.
        if flags & os.O_EXCL and e.errno == errno.EBUSY:
            holders = _list_holders(path)
            whose = f" ({', '.join(holders)})" if holders else ""
            raise DataPathError(
                f"cannot open device {path}: it is mounted or used otherwise on this node{whose}, "
                "and must not be while it is restored into"
            ) from e
        raise DataPathError(f"cannot open device {path}: {e.strerror}") from e
    try:
        yield fd, size
    finally:
        # The last one to close a device waits until what was written to it is on the disk.
        async with run_in_background(lambda _: os.close(fd), name="device-close"):
            pass


_BLOCK_DEVICES: Final = Path("/sys/dev/block")


def _list_holders(device: Path) -> list[str]:
    """Return which devices of LVM or md the node has made of a device or its partitions, as far as it says so."""
    number = device.stat().st_rdev
    place = _BLOCK_DEVICES / f"{os.major(number)}:{os.minor(number)}"
    found = []
    for holder in sorted([*place.glob("holders/*"), *place.glob("*/holders/*")]):
        try:
            found.append(f"{holder.name} {(holder / 'dm' / 'name').read_text().strip()}")
        except OSError:
            found.append(holder.name)
    return found


HEAD_BYTES: Final = 72 * 1024
"""The length of the beginning of a device that has all signatures below."""

_FILE_SYSTEMS: Final = (
    (0, b"XFSB", "xfs"),  # Linux, fs/xfs/libxfs/xfs_format.h: XFS_SB_MAGIC
    (1024 + 56, b"\x53\xef", "ext4"),  # include/uapi/linux/magic.h: EXT4_SUPER_MAGIC; of ext2 and ext3 too
    (65536 + 64, b"_BHRfS_M", "btrfs"),  # include/uapi/linux/btrfs_tree.h: BTRFS_MAGIC
    (1024, b"\x10\x20\xf5\xf2", "f2fs"),  # include/uapi/linux/magic.h: F2FS_SUPER_MAGIC
    (65536, b"\x01\x16\x19\x70", "gfs2"),  # include/uapi/linux/gfs2_ondisk.h: GFS2_MAGIC, big endian
    (3, b"EXFAT   ", "exfat"),  # fs/exfat/exfat_raw.h: STR_EXFAT
    (54, b"FAT1", "vfat"),  # util-linux 2.38, libblkid/src/superblocks/vfat.c
    (82, b"FAT32   ", "vfat"),  # as before
)
"""Offset and signature of each file system, and its name for mount(8); ext2 and ext3 have the one of ext4."""

_OTHERS: Final = (
    (3, b"NTFS    ", "NTFS"),  # Linux, fs/ntfs3/ntfs.h: struct NTFS_BOOT
    (4086, b"SWAPSPACE2", "swap space"),  # util-linux 2.38, libblkid/src/superblocks/swap.c
    (0, b"LUKS\xba\xbe", "LUKS (encrypted)"),  # cryptsetup 2.6, lib/luks2/luks2.h: LUKS2_MAGIC_1ST
    (512, b"LABELONE", "an LVM physical volume"),  # LVM2 2.03, lib/label/label.h: LABEL_ID
    (4096, b"\xfc\x4e\x2b\xa9", "a member of a RAID array"),  # Linux, include/uapi/linux/raid/md_p.h: MD_SB_MAGIC
    (0, b"bluestore block device", "a disk of Ceph (BlueStore)"),  # util-linux 2.38, superblocks/bluestore.c
    (512, b"EFI PART", "a partition table (GPT)"),  # Linux, block/partitions/efi.h: GPT_HEADER_SIGNATURE
)

_BOOT_SECTOR: Final = (510, b"\x55\xaa", "a partition table (MBR)")
"""Only if nothing else was found: several of the above have it too. Source: Linux, block/partitions/msdos.c."""


def name_contents(head: bytes) -> list[str]:
    """Return what a device has that begins with `head`, its first HEAD_BYTES: names of file systems come first."""
    table = (*_FILE_SYSTEMS, *_OTHERS)
    found = list(dict.fromkeys(name for offset, magic, name in table if head.startswith(magic, offset)))
    offset, magic, name = _BOOT_SECTOR
    return found or ([name] if head.startswith(magic, offset) else [])


async def read_file_system(device: Path, data_path: DataPath) -> str | None:
    """Return which file system a device has, as mount(8) names it; None: none that is known here.

    Raises DataPathError if the device cannot be opened or read.
    """
    async with open_device(device, os.O_RDONLY, data_path) as (fd, _):
        with attempting(f"read device {device}"):
            head = await data_path.run_in_thread(lambda _: os.pread(fd, HEAD_BYTES, 0), f"reading device {device}")
    known = {name for *_, name in _FILE_SYSTEMS}
    return next((name for name in name_contents(head) if name in known), None)


@dataclass(frozen=True)
class DeviceRestore:
    """The restore of a snapshot to the device `target`, until it is on the disk.

    With `compare`, what the device has already is not written. An `existing` device must not be mounted on this node,
    nor used by its kernel otherwise, such as by LVM: that could write over what is restored. It cannot be meanwhile.
    Each method raises a DataPathError if the target is smaller than the data, or in use, or the snapshot is not one of
    a device, and nothing was written; and a KopiaError if it is damaged, or the data path failed.
    """

    repository: Repository
    snapshot: Snapshot
    target: Path
    data_path: DataPath
    compare: bool = False
    existing: bool = False

    async def write_stream(self) -> None:
        """Write the snapshot's only file sequentially."""
        snapshot, target, data_path = self.snapshot, self.target, self.data_path
        device = await find_only_file(self.repository, snapshot)
        async with self._open(os.O_RDWR if self.compare else os.O_WRONLY) as (fd, _):
            ours, kopias = os.pipe()
            writer = HoleWriter(os.dup(fd), compare=self.compare)
            copy = partial(copy_stream, ours, writer)
            async with run_in_background(copy, name="device-writer") as copying:
                attempted = f"restore {device.name} of snapshot {snapshot.snapshot_id} to device {target}"
                files, kopia = KopiaFiles(stdout_fd=kopias), self.repository.kopia
                try:
                    answer = await self.repository.run(
                        partial(data_path.run, kopia, attempted, "show", device.object_id, files=files)
                    )
                finally:
                    # So that the copy reaches the end of the stream.
                    os.close(kopias)
                try:
                    written = await data_path.wait_for_progress(
                        copying, f"writing to device {target}", lambda: writer.written_bytes
                    )
                except OSError as e:
                    # kopia failed too then: nothing read its output.
                    raise answer.error(f"cannot write to the device: {e.strerror}") from e
            answer.check()
            if written != snapshot.size_bytes:
                raise answer.error(f"wrote {written} of {snapshot.size_bytes} bytes")

    async def write_blocks(self, workers: int) -> int:
        """Write a snapshot by block, some blocks at a time; return how many bytes were written, or became zeros."""
        snapshot, data_path = self.snapshot, self.data_path
        async with self._open(os.O_RDWR) as (fd, size):
            arguments = [
                f"--root={snapshot.root_object}",
                f"--size={snapshot.size_bytes}",
                f"--parallel={workers}",
                *(["--compare"] if self.compare else []),
                *device_flags(fd, size),
            ]
            attempted = f"restore snapshot {snapshot.snapshot_id} to device {self.target}"
            kopia, meter = self.repository.kopia, data_path.meter
            read = partial(read_blocks, kopia, attempted, *arguments, device_fd=fd, listener=data_path, meter=meter)
            answer = (await self.repository.run(partial(data_path.guard, attempted, read))).check()
            done = answer.document()
            placed, kept = int(done["written_bytes"]) + int(done["zeroed_bytes"]), int(done["kept_bytes"])
            if placed + kept != snapshot.size_bytes:
                raise answer.error(f"wrote {placed + kept} of {snapshot.size_bytes} bytes")
            return placed

    @asynccontextmanager
    async def _open(self, flags: int) -> AsyncIterator[tuple[int, int]]:
        """Open the device, and yield its descriptor and size; wait at the end until all is on the disk."""
        snapshot, target, data_path = self.snapshot, self.target, self.data_path
        async with open_device(target, flags | (os.O_EXCL if self.existing else 0), data_path) as (fd, size):
            if size < snapshot.size_bytes:
                raise DataPathError(
                    f"device {target} is too small: it has {size} bytes, snapshot {snapshot.snapshot_id} "
                    f"has {snapshot.size_bytes} (nothing was written)"
                )
            if self.compare:
                await data_path.run_in_thread(partial(_forget_cached, fd, target), f"syncing device {target}")
            yield fd, size
            await data_path.wait_for(sync_device(fd, target), WRITING)


def _forget_cached(fd: int, device: Path, _: ShouldStop) -> None:
    """Have the device itself read: after a failed write the kernel's cache differs from it."""
    with attempting(f"write restored data of {device} to the disk"):
        os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

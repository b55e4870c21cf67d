"""Images of devices with a file system, made without a mount, and what is read from them without kopia."""

import os
import random
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from datamover.pod.device_files import DeviceFiles, create_image, open_image
from datamover.runtime.lazy_file import BLOCK_BYTES

ODD: Final = "new\nline\x1b[31m \\x41 ü"
LONG: Final = "sub/" + "long/" * 50
TIME_NS: Final = 1_700_000_000_123_456_789


def make_disk(folder: Path) -> tuple[Path, Path]:
    """Create files, and an ext4 image of them; return both."""
    files, disk = folder / "files", folder / "disk"
    (files / "sub" / "deep").mkdir(parents=True)
    (files / "small").write_bytes(b"one")
    (files / "small").chmod(0o4640)
    (files / ODD).write_bytes(b"two")
    (files / "sub" / "large").write_bytes(random.Random(3).randbytes(5_000_001))
    with (files / "sub" / "sparse").open("wb") as file:
        file.truncate(20_000_000)
        file.seek(1_000_000)
        file.write(b"middle")
    (files / "sub" / "deep" / "link").symlink_to("../large")
    (files / "long").symlink_to(LONG)
    os.mkfifo(files / "sub" / "pipe")
    os.utime(files / "small", ns=(TIME_NS, TIME_NS))
    fraction = TIME_NS % 10**9 << 2
    # Not a multiple of a block by which devices are backed up.
    with disk.open("xb") as file:
        file.truncate(40 * BLOCK_BYTES + 4096)
    subprocess.run(["/sbin/mkfs.ext4", "-q", "-b", "4096", "-d", files, disk], check=True)
    for field in ("uid 100000", "gid 70000", f"mtime_extra {fraction}"):
        subprocess.run(["/sbin/debugfs", "-w", "-R", f"sif small {field}", disk], check=True, capture_output=True)
    return files, disk


@asynccontextmanager
async def opened_disk(disk: Path, folder: Path) -> AsyncIterator[tuple[DeviceFiles, list[int]]]:
    """Open an image that is somewhere else; yield its files, and the numbers of the blocks that were fetched."""
    folder.mkdir()
    fetched: list[int] = []
    with disk.open("rb") as source, create_image(folder, disk.stat().st_size) as image:

        async def fetch(first: int, count: int) -> None:
            fetched.extend(range(first, first + count))
            content = os.pread(source.fileno(), count * BLOCK_BYTES, first * BLOCK_BYTES)
            os.pwrite(image.fd, content, first * BLOCK_BYTES)

        image.fetch = fetch
        async with open_image(image, folder) as files:
            yield files, fetched


async def read_file(files: DeviceFiles, path: str) -> bytes:
    """Return the content of a small file, which the pipe has room for."""
    entry = await files.find(path)
    ours, theirs = files.open_pipe()
    try:
        await files.copy_content(entry, theirs)
        return os.read(ours, 65536)
    finally:
        os.close(ours)
        os.close(theirs)

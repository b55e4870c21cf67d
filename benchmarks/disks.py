"""File systems that hold the files of one run and are deleted as a whole: in memory, or on the disk.

Source: mount(8), "Loop-device support": the loop device is removed with the mount; mke2fs(8); ext4(5).
"""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Final

_IMAGE_BYTES: Final = 16 << 30
"""More than any run writes. The image is sparse: it takes what is written."""

_BYTES_AN_INODE: Final = 8192
"""One for each of hundreds of thousands of small files."""

_MAKE: Final = ("mkfs.ext4", "-q", "-m", "0", "-i", str(_BYTES_AN_INODE), "-O", "inline_data", "-E")
"""Millions of tiny files are in their inodes, and take no block each."""

_LAZILY: Final = "lazy_itable_init=1,lazy_journal_init=1,nodiscard"
"""The image is new, all of it reads as zero already."""

_VOLUME: Final = "loop,noinit_itable"
"""Nothing is written in the background but what a program wrote."""


@contextmanager
def memory_at(folder: Path) -> Iterator[Path]:
    """Let a folder be an empty one in memory, in this mount namespace."""
    folder.mkdir(parents=True, exist_ok=True)
    _run("mount", "-t", "tmpfs", "tmpfs", folder)
    try:
        yield folder
    finally:
        _run("umount", folder)


@contextmanager
def replaced(path: Path, file: Path) -> Iterator[None]:
    """Let a file or folder have the content of another one, in this mount namespace."""
    _run("mount", "--bind", file, path)
    try:
        yield
    finally:
        _run("umount", path)


@contextmanager
def snapshot_of(volume: Path, folder: Path) -> Iterator[Path]:
    """Yield what a data mover gets of the test bed's driver: a copy of a copy, which the disk still writes."""
    image = _run("losetup", "-nO", "BACK-FILE", _run("findmnt", "-no", "SOURCE", "--target", volume))
    first, second, mounted = folder / "snapshot", folder / "volume", folder / "mounted"
    _run("cp", "--sparse=always", image, first)
    _run("cp", "--sparse=always", first, second)
    mounted.mkdir()
    _run("mount", "-o", "loop", second, mounted)
    try:
        yield mounted
    finally:
        _run("umount", mounted)


class Disks:
    """Makes empty file systems on the disk that holds a folder: ext4 in a file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers = count(1)

    @contextmanager
    def volume(self) -> Iterator[Path]:
        """Yield an empty folder to restore to, on a file system of its own: what was flushed there is on the disk."""
        folder = self._folder / f"disk-{next(self._numbers)}"
        image = folder.with_suffix(".image")
        folder.mkdir()
        with image.open("wb") as file:
            file.truncate(_IMAGE_BYTES)
        _run(*_MAKE, _LAZILY, image)
        _run("mount", "-o", _VOLUME, image, folder)
        # Not the top folder: it has `lost+found`.
        files = folder / "files"
        files.mkdir()
        try:
            yield files
        finally:
            _run("umount", folder)
            image.unlink()
            folder.rmdir()

    @contextmanager
    def cache(self) -> Iterator[Path]:
        """Return an empty folder for temporary files, on a file system of its own as well, until it is left."""
        with self.volume() as files:
            try:
                yield files
            finally:
                # What is not yet written never is: removing it takes less time.
                shutil.rmtree(files)


def _run(*argv: str | Path) -> str:
    done = subprocess.run(argv, check=True, capture_output=True, text=True)  # noqa: S603 - words and paths of our own
    return done.stdout.strip()

"""Files and directories in a kopia snapshot: finding one by its path, listing a directory, reading blocks of a file.

No link is followed: a link is an entry like any other.
Source: kopia 0.23.1, snapshot/manifest.go (DirEntry), snapshot/snapshotfs/dir_writer.go (a directory is one JSON
document); tools/kopia/program/block_fetch.go.
"""

import asyncio
import difflib
import os
import re
import stat
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import islice
from typing import Final

import msgspec

from core.aio import end_task, wait_for_answer
from core.errors import ContractError, DataPathError, Translated
from core.models.base import parse_time
from core.snapshot_contract import FileEntry, FileType
from datamover.kopia.backup_process import device_flags
from datamover.kopia.location_files import open_output, read_directories
from datamover.kopia.private_run import write_all
from datamover.kopia.process import KopiaFiles, Listener
from datamover.kopia.repository import Repository
from datamover.kopia.snapshots import Snapshot
from datamover.runtime.lazy_file import LazyFile
from datamover.runtime.work_dir import escape_controls

_COMPARED_NAMES: Final = 10_000
"""How many names of a directory may be what is meant: each takes a few microseconds."""

_TYPES: Final = {"f": FileType.FILE, "d": FileType.DIRECTORY, "s": FileType.LINK}

_OCTAL: Final = re.compile("[0-7]{1,11}")
_GO_BITS: Final = ((1 << 23, stat.S_ISUID), (1 << 22, stat.S_ISGID), (1 << 20, stat.S_ISVTX))
"""Bits of Go's fs.FileMode, and of the mode of a file. Source: Go 1.26, io/fs/fs.go."""


class _Summary(msgspec.Struct):
    size: int = 0
    files: int = 0


class StoredEntry(msgspec.Struct, rename={"object_id": "obj", "kind": "type", "summary": "summ", "modified": "mtime"}):
    """One entry of a directory as kopia keeps it: what it is, its attributes, and the object with its content."""

    name: str
    kind: str = ""
    object_id: str = ""
    mode: str = ""
    size: int = 0
    modified: str = ""
    uid: int = 0
    gid: int = 0
    summary: _Summary = msgspec.field(default_factory=_Summary)

    def __post_init__(self) -> None:
        """Read the mode as the permissions of a file, and one that is none as empty."""
        mode = parse_mode(self.mode)
        self.mode = "" if mode is None else f"{mode:04o}"

    @property
    def type(self) -> FileType:
        """What it is."""
        return _TYPES.get(self.kind, FileType.OTHER)

    def describe(self) -> FileEntry:
        """Return it as a command reads it."""
        directory = self.type is FileType.DIRECTORY
        return FileEntry(
            name=self.name,
            type=self.type,
            mode=self.mode,
            user_id=self.uid,
            group_id=self.gid,
            size_bytes=self.summary.size if directory else self.size,
            files=self.summary.files if directory else 0,
            modified=self.modified,
        )


def convert_mode(mode: int) -> int:
    """Return the permissions of a file that Go's fs.FileMode is of, which kopia keeps."""
    return stat.S_IMODE(mode & 0o777 | sum(bit for go, bit in _GO_BITS if mode & go))


def parse_mode(text: str) -> int | None:
    """Return the permissions of an entry as kopia writes its mode, an octal number; None: it is none."""
    return convert_mode(int(text, 8)) if _OCTAL.fullmatch(text) else None


def parse_time_ns(text: str) -> int:
    """Return a time in UTC as kopia writes it, with up to nine digits of a second; raises ContractError."""
    seconds, _, fraction = text.removesuffix("Z").partition(".")
    try:
        return int(parse_time(f"{seconds}Z").timestamp()) * 10**9 + int(fraction.ljust(9, "0")[:9])
    except ValueError as e:
        raise ContractError(f'not a time: "{text[:50]}"') from e


async def find_entry(repository: Repository, snapshot: Snapshot, path: str) -> StoredEntry:
    """Return the entry at a path below the volume, without a name at an empty one; a DataPathError suggests a name."""
    root = StoredEntry("", "d", snapshot.root_object, summary=_Summary(snapshot.size_bytes, snapshot.entries))
    return await find_below(root, path, partial(read_directory, repository))


async def find_below(
    found: StoredEntry, path: str, read: Callable[[StoredEntry], AsyncIterator[StoredEntry]]
) -> StoredEntry:
    """Return the entry at a path below a directory, as `find_entry`; `read` yields the entries of one."""
    names = [name for name in path.split("/") if name]
    if strange := [name for name in names if name in {".", ".."}]:
        raise DataPathError(f'path {_show(names)}: "{strange[0]}" is no name of a file')
    for depth, name in enumerate(names):
        if found.type is not FileType.DIRECTORY:
            raise DataPathError(f"{_show(names[:depth])} is no directory but a {found.type}, which is not followed")
        entry, others = None, list[str]()
        async for one in read(found):
            if one.name == name:
                entry = one
            elif len(others) < _COMPARED_NAMES:
                others.append(one.name)
        if entry is None:
            close = difflib.get_close_matches(name, others, n=1)
            hint = f" (did you mean {escape_controls(close[0])}?)" if close else ""
            raise DataPathError(f"the snapshot has no {_show(names[: depth + 1])}{hint}")
        found = entry
    return found


async def find_only_file(repository: Repository, snapshot: Snapshot) -> StoredEntry:
    """Return the only file of a block device's snapshot, the device, with its size; raises DataPathError."""
    root = await find_entry(repository, snapshot, "")
    entries = [one async for one in read_directory(repository, root, most=2)]
    if len(entries) != 1 or entries[0].type is not FileType.FILE:
        raise DataPathError(f"snapshot {snapshot.snapshot_id} is not one of a block device: it has no single file")
    if snapshot.by_block:
        # kopia has whole blocks.
        entries[0].size = snapshot.size_bytes
    return entries[0]


@asynccontextmanager
async def fetch_blocks(repository: Repository, file: StoredEntry, image: LazyFile) -> AsyncIterator[None]:
    """Have kopia, which opens the repository once, fetch what is read from the image of a stored file.

    A read raises KopiaError if the repository cannot be opened, or the file is damaged, and as `Repository.guard`.
    """
    reading, requests_fd = os.pipe()
    fetched, attempted = asyncio.Event(), f"read blocks of {escape_controls(file.name)}"

    def take(line: str) -> None:
        if line.startswith('{"fetched"'):
            fetched.set()

    files = KopiaFiles(stdin_fd=reading, on_output=take, inherited_fd=image.fd)
    flags = [f"--object={file.object_id}", *device_flags(image.fd, image.size_bytes)]
    call = repository.kopia.move_data(attempted, "block-fetch", *flags, files=files, listener=Listener())
    child = asyncio.create_task(call, name="block-fetch")
    # A request that kopia does not read fails then.
    child.add_done_callback(lambda _: os.close(reading))

    async def fetch(first: int, count: int) -> None:
        fetched.clear()
        write_all(requests_fd, f"{first} {count}\n".encode())
        # What is fetched at once is little: kopia need not say how far it is.
        if not await repository.guard(attempted, partial(wait_for_answer, fetched, child)):
            raise (await child).check().error("it ended early")

    image.fetch = fetch
    try:
        yield
    finally:
        image.fetch = None
        os.close(requests_fd)
        await end_task(child)


async def read_directory(
    repository: Repository, directory: StoredEntry, *, most: int | None = None
) -> AsyncIterator[StoredEntry]:
    """Yield the entries of a directory, which may be millions, in no order. Raises KopiaError if it cannot be read."""
    with open_output(repository.work_dir) as file:
        attempted = f"read directory {escape_controls(directory.name) or '/'} of {repository.description}"
        answer = await repository.call(attempted, "show", directory.object_id, output_fd=file.fileno())
        with Translated(msgspec.ValidationError, answer.error, "kopia's output is not a directory"):
            # `None` is no entry.
            for entry in islice(next(read_directories(answer, file), [None]), most):
                yield msgspec.convert(entry, StoredEntry)


def _show(names: Sequence[str]) -> str:
    return escape_controls("/".join(names))

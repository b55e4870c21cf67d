"""Files of an ext2, ext3 or ext4 file system in the image of a device, read by Debian's debugfs without a mount.

debugfs is fed what a tenant has made: it is confined to the image and one pipe, in memory and in time, and gets numbers
of inodes only. What it prints must be what is expected, line by line; anything else is an error.
Source: e2fsprogs 1.47.0, debugfs/debugfs.c (main, source_file, do_idump), ls.c (names are escaped), dump.c;
Linux, Documentation/filesystems/ext4/inodes.rst.
"""

import asyncio
import os
import platform
import re
import resource
import shutil
import stat
import struct
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from core.aio import end_task, wait_for_answer
from core.errors import AgentError, DataPathError
from core.snapshot_contract import FileType
from datamover.data_path.block import HEAD_BYTES, name_contents
from datamover.kopia.private_run import write_all
from datamover.kopia.repository import Repository
from datamover.kopia.snapshot_files import StoredEntry, fetch_blocks, find_below
from datamover.runtime.child import ChildCommand, ChildExit, ChildFiles, run_child
from datamover.runtime.confinement import Bounds, confine, find_means
from datamover.runtime.lazy_file import LazyFile
from datamover.runtime.work_dir import attempting, escape_controls, open_fifo

_PROGRAM: Final = "debugfs"
_FOLDERS: Final = "/usr/sbin:/sbin"
_IMAGE: Final = "device"

_LOADERS: Final = {"x86_64": "/lib64/ld-linux-x86-64.so.2", "aarch64": "/lib/ld-linux-aarch64.so.1"}
"""The program that starts dynamic ones: a jail needs only copies of what it reads then, none that can be executed.
Source: glibc, sysdeps/unix/sysv/linux/{x86_64,aarch64}/shlib-versions."""

_LIBRARY: Final = re.compile(r"=> (/\S+) \(")
_VERSION: Final = re.compile(r"debugfs \d[\w.~-]* \([\w-]+\)")
_LISTED: Final = re.compile(r".\s*(\d+).\s+([0-7]{1,6}) \(\d+\)\s+-?\d+\s+-?\d+\s+(\d+) .{17} (.*)")
_ESCAPED: Final = re.compile(rb"\\x([0-9a-f]{2})")
_DUMPED: Final = re.compile(r"([0-7]{4})  ((?:[0-9a-f]{4} ){8}) ")

_MEMORY_BYTES: Final = 512 << 20
_COMMAND_SECONDS: Final = 600.0

_SUPERBLOCK: Final = 1024
_ROOT: Final = 2
_DIRTY: Final = 0x4
_JOURNAL_DEVICE: Final = 0x8
_ENCRYPTED: Final = 0x800
_LINK_BYTES: Final = 60
"""A shorter target of a link is in the inode."""

_LONGEST_LINK: Final = 4095

_INODE: Final = struct.Struct("<HHI8xi4xH6xI4x60s8xI8xHH")
"""The fields of an inode that are read, as `_Inode.parse` names them; the block has the target of a short link."""

_OLD_INODE_BYTES: Final = 128
_INODE_BYTES: Final = 0x90
"""As much of one as is needed; old ones end before the nanoseconds of times."""

_TIMES_BYTES: Final = 12

_NOT_REPLAYED: Final = (
    "the file system was in use: its journal was not replayed, so the last changes may be missing or unreadable"
)


def recognize(head: bytes) -> str | None:
    """Return a note about the ext file system that begins with `head`, HEAD_BYTES of it; None: none is needed.

    Raises:
        DataPathError: it is another one, or none; the message has its name.
    """
    found = name_contents(head)
    if found != ["ext4"]:
        what = f"has {' and '.join(found)}" if found else "has no known file system"
        raise DataPathError(
            f"the device {what}: only files in ext2, ext3 or ext4 can be read; "
            "copy the device (backup cp --device), or restore the volume"
        )
    (features,) = struct.unpack_from("<I", head, _SUPERBLOCK + 0x60)
    if features & _JOURNAL_DEVICE:
        raise DataPathError("the device has a journal of ext4 on its own: it has no files")
    return _NOT_REPLAYED if features & _DIRTY else None


@dataclass(frozen=True)
class _Inode:
    """An inode; `target` is of a link whose target is short, else None."""

    mode: int
    uid: int
    gid: int
    size: int
    modified: str
    encrypted: bool
    target: bytes | None

    @classmethod
    def parse(cls, raw: bytes) -> "_Inode":
        mode, uid, size, mtime, gid, flags, block, size_high, uid_high, gid_high = _INODE.unpack_from(raw)
        nanoseconds = 0
        if len(raw) >= _INODE_BYTES and struct.unpack_from("<H", raw, _OLD_INODE_BYTES)[0] >= _TIMES_BYTES:
            (extra,) = struct.unpack_from("<I", raw, 0x88)
            mtime, nanoseconds = mtime + ((extra & 3) << 32), min(extra >> 2, 10**9 - 1)
        time = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=mtime)
        # As debugfs takes it; of a directory, it may be something else.
        size |= 0 if stat.S_ISDIR(mode) else size_high << 32
        return cls(
            mode=mode,
            uid=uid | uid_high << 16,
            gid=gid | gid_high << 16,
            size=size,
            modified=f"{time:%Y-%m-%dT%H:%M:%S}.{nanoseconds:09d}Z",
            encrypted=bool(flags & _ENCRYPTED),
            target=block[:size] if stat.S_ISLNK(mode) and 0 < size < _LINK_BYTES else None,
        )


_KINDS: Final = {stat.S_IFREG: "f", stat.S_IFDIR: "d", stat.S_IFLNK: "s", stat.S_IFSOCK: ""}


def _entry(name: str, inode: int, mode: int, size: int) -> StoredEntry:
    return StoredEntry(name, _KINDS.get(stat.S_IFMT(mode), "p"), str(inode), size=size)


@dataclass(frozen=True)
class DeviceFiles:
    """The files of the file system that `debugfs` has open; the object ID of an entry is the number of its inode.

    `note` is what a reader should know about all of them, or None. `pipe` is where their content arrives.
    """

    debugfs: "_Debugfs"
    pipe: Path
    note: str | None

    async def find(self, path: str) -> StoredEntry:
        """Return the entry at a path; at an empty path it has no name. Raises AgentError if it cannot be read."""
        found = await find_below(_entry("", _ROOT, stat.S_IFDIR, 0), path, self.list)
        return (await self.complete([found]))[0]

    async def list(self, directory: StoredEntry) -> AsyncIterator[StoredEntry]:
        """Yield the entries of a directory, ordered, not complete; bytes of names that would be alike are escaped.

        Raises:
            AgentError: it cannot be read.
        """
        number = directory.object_id
        what = f"directory {escape_controls(directory.name) or '/'}"
        await self._read_inode(number, what, plain=True)
        entries: list[tuple[bytes, StoredEntry]] = []
        for line in await self.debugfs.run(f"ls -l <{number}>", what):
            if (found := _LISTED.fullmatch(line)) is None:
                raise self.debugfs.error(what, line)
            inode, mode, size, escaped = found.groups()
            name = _ESCAPED.sub(lambda one: bytes([int(one[1], 16)]), escaped.encode())
            if inode == "0" or name in {b".", b".."}:
                continue
            if not name or b"/" in name or b"\0" in name:
                raise self.debugfs.error(what, f'"{escaped}" is no name')
            shown = name.decode(errors="replace")
            entries.append((name, _entry(shown, int(inode), int(mode, 8), int(size))))
        alike = Counter(one.name for _, one in entries)
        for name, one in entries:
            if alike[one.name] > 1:
                one.name = name.decode(errors="backslashreplace")
        for one in sorted((one for _, one in entries), key=lambda one: one.name):
            yield one

    async def complete(self, entries: Sequence[StoredEntry]) -> Sequence[StoredEntry]:
        """Return the entries with all attributes. Raises AgentError if they cannot be read."""
        # In the order in which the device has them: few blocks of it are kept.
        for one in sorted(entries, key=lambda one: int(one.object_id)):
            inode = await self._read_inode(one.object_id, f"inode of {escape_controls(one.name) or '/'}")
            one.mode, one.uid, one.gid = f"{stat.S_IMODE(inode.mode):04o}", inode.uid, inode.gid
            one.size, one.modified = inode.size, inode.modified
        return entries

    async def read_link(self, link: StoredEntry) -> str:
        """Return the target of a symbolic link. Raises AgentError if it cannot be read."""
        what = f"link {escape_controls(link.name)}"
        inode = await self._read_inode(link.object_id, what, plain=True)
        if inode.target is not None:
            return os.fsdecode(inode.target)
        if not 0 < inode.size <= _LONGEST_LINK:
            raise self.debugfs.error(what, f"its target has {inode.size} bytes")
        ours, theirs = self.open_pipe()
        try:
            await self.copy_content(link, theirs)
            # A debugfs that was taken over may write nothing.
            with attempting(f"read {what}"):
                return os.fsdecode(os.read(ours, _LONGEST_LINK))
        finally:
            os.close(ours)
            os.close(theirs)

    def open_pipe(self) -> tuple[int, int]:
        """Return both ends of a pipe for content, which the caller closes. Raises DataPathError if it is none."""
        # debugfs may have been taken over, and have put a link there.
        with attempting("open the pipe of debugfs"):
            return open_fifo(self.pipe)

    async def copy_content(self, file: StoredEntry, _: int) -> None:
        """Write the content of a file into the pipe. Raises AgentError if it cannot be read."""
        what = f"file {escape_controls(file.name)}"
        await self._read_inode(file.object_id, what, plain=True)
        if lines := await self.debugfs.run(f"dump <{file.object_id}> {self.pipe}", what, seconds=None):
            raise self.debugfs.error(what, lines[0])

    async def walk(self, directory: StoredEntry) -> AsyncIterator[StoredEntry]:
        """Yield everything below a directory, each under its path, a directory before what is in it.

        Raises:
            AgentError: a directory cannot be read, or is in itself.
        """
        seen, rest = {directory.object_id}, [("", directory)]
        while rest:
            prefix, one = rest.pop()
            below = []
            for entry in await self.complete([entry async for entry in self.list(one)]):
                entry.name = f"{prefix}{entry.name}"
                if entry.type is FileType.DIRECTORY:
                    if entry.object_id in seen:
                        raise self.debugfs.error(f"directory {escape_controls(entry.name)}", "it is in two directories")
                    seen.add(entry.object_id)
                    below.append((f"{entry.name}/", entry))
                # A socket is of no use without the process that made it.
                if entry.kind:
                    yield entry
            rest.extend(reversed(below))

    async def _read_inode(self, number: str, what: str, *, plain: bool = False) -> _Inode:
        """Return an inode; `plain`: it must not be encrypted."""
        lines = await self.debugfs.run(f"inode_dump <{number}>", what)
        raw = b""
        for line in lines:
            if found := _DUMPED.match(line):
                raw = _repeat(raw, int(found[1], 8)) + bytes.fromhex(found[2])
            elif line != "*":
                raise self.debugfs.error(what, line)
        if lines[-1:] == ["*"]:
            raw = _repeat(raw, _INODE_BYTES)
        if len(raw) < _OLD_INODE_BYTES:
            raise self.debugfs.error(what, "it has no inode")
        inode = _Inode.parse(raw[:_INODE_BYTES])
        if plain and inode.encrypted:
            raise DataPathError(f"{what} is encrypted in the file system: the backup does not have its key")
        return inode


def _repeat(raw: bytes, length: int) -> bytes:
    """Return a dump up to a length: lines that are as the one before are not printed."""
    return raw + raw[-16:] * ((length - len(raw)) // 16)


class _Debugfs:
    """A debugfs that executes commands, one at a time; its errors come between its output, with the `note`."""

    def __init__(self, image: LazyFile, note: str | None) -> None:
        self._image = image
        self._note = f" ({note})" if note else ""
        self._lines: list[str] = []
        self._ended = asyncio.Event()
        self._number = 0
        self._commands_fd = -1
        self._child: asyncio.Task[ChildExit] | None = None

    @asynccontextmanager
    async def start(self, argv: Sequence[str], bounds: Bounds, home: Path) -> AsyncIterator[None]:
        """Run it, confined, until the end of the block."""
        means = find_means()
        async with AsyncExitStack() as stack:
            reads = await stack.enter_async_context(self._image.observed())
            confinement = stack.enter_context(confine(Path(argv[0]), bounds, means, home))
            if confinement is None:
                raise DataPathError(f"cannot confine debugfs: no Landlock ({means.missing}), and no chroot")
            steps = (("errors", lambda: os.dup2(1, 2)), ("limits", _limit), *confinement.steps, *reads)
            reading, self._commands_fd = os.pipe()
            stack.callback(os.close, self._commands_fd)
            environment = {"LC_ALL": "C", "TZ": "UTC0", "DEBUGFS_PAGER": "__none__"}
            files = ChildFiles(stdin_fd=reading, on_output=self._take)
            command = ChildCommand(argv, environment, files, replace(confinement, steps=steps))
            self._child = asyncio.create_task(run_child(command, self._take), name=_PROGRAM)
            self._child.add_done_callback(lambda _: os.close(reading))
            stack.push_async_callback(end_task, self._child)
            what = "the file system of the device"
            if errors := [line for line in await self.run("", what) if not _VERSION.fullmatch(line)]:
                raise self.error(what, errors[0])
            yield

    async def run(self, command: str, what: str, *, seconds: float | None = _COMMAND_SECONDS) -> list[str]:
        """Return what a command printed, its errors included."""
        if self._child is None:
            raise RuntimeError("debugfs was not started")
        self._number += 1
        self._lines = []
        self._ended.clear()
        write_all(self._commands_fd, f"{command}\n{self._mark}\n".encode())
        answered: bool | None = None
        while answered is None:
            try:
                async with asyncio.timeout(seconds):
                    answered = await wait_for_answer(self._ended, self._child)
            except TimeoutError as e:
                if not self._image.fetching:
                    raise DataPathError(f"cannot read {what}: debugfs did not answer within {seconds:.0f} s") from e
        if not answered:
            code = (await self._child).exit_code
            raise self.error(what, f"it ended ({code}) {' '.join(self._lines[-1:])}")
        if self._image.error is not None:
            raise self._image.error
        return [line for line in self._lines if line != f"debugfs: {command}"]

    def error(self, what: str, line: str) -> AgentError:
        """Return the error of a command that printed something else than expected."""
        found = DataPathError(f"cannot read {what}: debugfs: {escape_controls(line)}{self._note}")
        return self._image.error or found

    @property
    def _mark(self) -> str:
        # A comment is printed as it is, and no line of a list begins like that.
        return f"#{self._number}"

    def _take(self, line: str) -> None:
        if line == self._mark:
            self._ended.set()
        elif line:
            self._lines.append(line)


def _limit() -> int:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    return 0


@asynccontextmanager
async def open_device_files(repository: Repository, device: StoredEntry, home: Path) -> AsyncIterator[DeviceFiles]:
    """Open the file system in a stored device; `home` is a directory for temporary files, at most 256 MiB of them.

    Raises:
        AgentError: it is none that can be read, or the device cannot be read.
    """
    with TemporaryDirectory(prefix="device-", dir=home) as folder, create_image(Path(folder), device.size) as image:
        async with fetch_blocks(repository, device, image), open_image(image, Path(folder)) as files:
            yield files


@contextmanager
def create_image(folder: Path, size_bytes: int) -> Iterator[LazyFile]:
    """Create the image of a device, in a folder of its own in the folder. Raises DataPathError if it is too large."""
    (folder / _IMAGE).mkdir(mode=0o700)
    with LazyFile.create(folder / _IMAGE / "image", size_bytes) as image:
        yield image


@asynccontextmanager
async def open_image(image: LazyFile, folder: Path) -> AsyncIterator[DeviceFiles]:
    """Open the file system in the image of a device that was created in the folder, which has nothing else.

    Raises:
        AgentError: it is none that can be read, or the image cannot be read.
    """
    argv, needed = await _find_program()
    note = recognize(await image.read(0, HEAD_BYTES))
    pipe = folder / "out" / "pipe"
    pipe.parent.mkdir(mode=0o700)
    # It writes nothing but content into the pipe.
    bounds = Bounds(read=(folder / _IMAGE,), write=(pipe.parent,), files=needed, flushes=False)
    debugfs = _Debugfs(image, note)
    # Without -c it would read the bitmaps of all groups first.
    argv += ["-c", "-f", "-", str(image.path)]
    async with debugfs.start(argv, bounds, folder):
        yield DeviceFiles(debugfs, pipe, note)


async def _find_program() -> tuple[list[str], tuple[Path, ...]]:
    """Return how debugfs is started, and the files that it needs for that."""
    program, loader = shutil.which(_PROGRAM, path=_FOLDERS), _LOADERS.get(platform.machine())
    if program is None or loader is None:
        raise DataPathError("files of a device cannot be read: the image has no debugfs (Debian package e2fsprogs)")
    listed = await run_child(ChildCommand([loader, "--list", program], {}), lambda _: None)
    libraries = [Path(found) for found in _LIBRARY.findall(listed.output.decode(errors="replace"))]
    folders = ":".join(dict.fromkeys(str(one.parent) for one in libraries))
    return [loader, "--library-path", folders, program], (Path(program), *libraries)

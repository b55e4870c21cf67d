"""Files of a snapshot, read in a pod: listed, or sent as a tar to the one process in the pod that asks for them.

kopia writes the tar of a directory; headers of a single file, and of files in a device, are from here. No more than the
buffers of pipes is held in memory: a slow reader slows kopia down. The pod ends by itself if nothing is read.
Source: kopia 0.23.1, cli/command_restore.go (restoreModeTar), snapshot/restore/tar_output.go.
"""

import asyncio
import logging
import os
import socket
import tarfile
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import ClassVar, Final, TypeVar

from core.errors import AgentError, ConfigError, DataPathError
from core.models.base import parse_time
from core.models.job_output import JobOutput
from core.models.names import OBJECT_NAME
from core.mover_specs import FilesSpec, ListFiles, SendFiles
from core.snapshot_contract import ENTRY_LINE, FileListing, FileType, SentFiles
from datamover.kopia.process import KopiaFiles, Listener
from datamover.kopia.repository import Repository
from datamover.kopia.snapshot_files import StoredEntry, find_entry, find_only_file, read_directory
from datamover.kopia.snapshots import Snapshot, read_snapshot
from datamover.pod.cluster import PodContext, open_access
from datamover.pod.device_files import DeviceFiles, open_device_files
from datamover.pod.file_relay import RESULT_SUFFIX, SOCKET_NAME
from datamover.pod.reporting import Termination, build_success
from datamover.runtime.work_dir import open_fifo

_LISTED_BYTES: Final = 8 << 20
"""The limit of a list: kubelets keep 10 MiB of a log by default. Source: Kubernetes v1.34, KubeletConfiguration,
`containerLogMaxSize`."""


@dataclass(frozen=True)
class _StoredFiles:
    """What kopia has: the files of a volume, or a device."""

    repository: Repository
    snapshot: Snapshot
    device: bool
    note: ClassVar[str | None] = None

    async def find(self, path: str) -> StoredEntry:
        """Return the entry at a path; of a block device, the device. Raises DataPathError if there is none."""
        if self.device:
            return await find_only_file(self.repository, self.snapshot)
        return await find_entry(self.repository, self.snapshot, path)

    def list(self, directory: StoredEntry) -> AsyncIterator[StoredEntry]:
        return read_directory(self.repository, directory)

    async def complete(self, entries: Sequence[StoredEntry]) -> Sequence[StoredEntry]:
        return entries

    async def read_link(self, link: StoredEntry) -> str:
        answer = await self.repository.call(f"read link {link.name!a}", "show", link.object_id)
        return os.fsdecode(answer.check().output)

    def open_pipe(self) -> tuple[int, int]:
        return os.pipe()

    async def copy_content(self, file: StoredEntry, pipe: int) -> None:
        kopia, files, attempted = self.repository.kopia, KopiaFiles(stdout_fd=pipe), f"read file {file.name!a}"
        (await kopia.move_data(attempted, "show", file.object_id, files=files, listener=Listener())).check()

    async def copy_tar(self, directory: StoredEntry, pipe: Path) -> None:
        kopia, attempted = self.repository.kopia, f"read directory {directory.name!a}"
        (await kopia.call(attempted, "restore", directory.object_id, str(pipe), "--mode=tar", seconds=None)).check()


_Files = _StoredFiles | DeviceFiles


@asynccontextmanager
async def open_snapshot(source: FilesSpec, context: PodContext) -> AsyncIterator[tuple[Repository, Snapshot]]:
    """Connect to the repository, read-only, and yield it with the snapshot.

    Raises:
        AgentError: an argument is invalid, the repository cannot be opened, or does not have the snapshot.
    """
    namespace = source.volume_namespace
    if not OBJECT_NAME.fullmatch(namespace):
        raise ConfigError(f'--volume-namespace: not the name of a namespace: "{namespace}"')
    location = await context.reader.location(source.name)
    with open_access(context) as access:
        repository = await access.resolve_namespace(location, namespace)
        snapshot = await repository.open(partial(read_snapshot, repository, source.snapshot), read_only=True)
        yield repository, snapshot


@asynccontextmanager
async def _open_files(source: FilesSpec, repository: Repository, snapshot: Snapshot) -> AsyncIterator[_Files]:
    """Yield the files that the source is one of: as kopia has them, or in the file system of a device."""
    if not (source.path if source.device else snapshot.by_block):
        yield _StoredFiles(repository, snapshot, source.device)
        return
    device = await find_only_file(repository, snapshot)
    async with open_device_files(repository, device, repository.work_dir.path) as files:
        yield files


async def list_files(spec: ListFiles, context: PodContext) -> Termination:
    """Write a line for each entry of a directory of a snapshot, or for one file; return the FileListing.

    Raises:
        AgentError: the snapshot cannot be read, or has no such entry.
    """
    output, listed, total = JobOutput(), 0, 1
    async with open_snapshot(spec, context) as opened, _open_files(spec, *opened) as files:
        found = await files.find(spec.path)
        entries = [found]
        if found.type is FileType.DIRECTORY:
            entries, total = [], 0
            async for one in files.list(found):
                # Without `after`, too, an entry without a name is left out.
                if one.name > (spec.after or ""):
                    total += 1
                    entries.append(one)
                if len(entries) >= 2 * spec.limit:
                    entries = sorted(entries, key=lambda one: one.name)[: spec.limit]
        entries.sort(key=lambda one: one.name)
        for one in await files.complete(entries[: spec.limit]):
            if output.size_bytes > _LISTED_BYTES:
                break
            output.write(ENTRY_LINE, one.describe())
            listed += 1
        listing = FileListing(type=found.type, entries=total, listed=listed, note=files.note)
    return build_success(output.seal(listing))


_logger = logging.getLogger(__name__)

_PIECE_BYTES: Final = 256 * 1024
_BLOCK_BYTES: Final = 512
_END_OF_TAR: Final = bytes(2 * _BLOCK_BYTES)
_ERROR_CHARACTERS: Final = 2000
_PERMISSIONS: Final = 0o777

_T = TypeVar("_T")
_Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass
class FileSender:
    """Sends what the specification names.

    It waits `wait_seconds` for the request for the files, fails if nothing moves for `idle_seconds`, and stays for
    `linger_seconds` after the end: the end of the pod would end the process that passes the last bytes on. A command
    that has them deletes the Job.
    """

    spec: SendFiles
    context: PodContext
    wait_seconds: float = 300.0
    idle_seconds: float = 600.0
    linger_seconds: float = 60.0
    sent_bytes: int = field(default=0, init=False)

    async def run(self) -> Termination:
        """Send the files, and return SentFiles.

        Raises:
            AgentError: they cannot be read, are not requested, or the process that requested them has stopped reading.
        """
        async with open_snapshot(self.spec, self.context) as opened, _open_files(self.spec, *opened) as files:
            entry = await files.find(self.spec.path)
            if entry.type is FileType.OTHER:
                raise DataPathError(f"{self.spec.path} is neither a file, a directory nor a link")
            path = opened[0].work_dir.path.parent / SOCKET_NAME
            async with self._accept(path) as (reader, writer):
                try:
                    await self._send(files, entry, writer)
                except AgentError as e:
                    error = self.context.redactor.redact(str(e))[:_ERROR_CHARACTERS]
                    sent = SentFiles(bytes=self.sent_bytes, error=error, note=files.note)
                    await self._end(path, reader, writer, sent)
                    raise
                result = SentFiles(bytes=self.sent_bytes, note=files.note)
                await self._end(path, reader, writer, result)
        return build_success(result.to_json())

    @asynccontextmanager
    async def _accept(self, path: Path) -> AsyncIterator[_Connection]:
        """Wait for the process that asks for the files, and yield the connection to it; there is only one."""
        accepted: asyncio.Future[_Connection] = asyncio.get_running_loop().create_future()

        def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if accepted.done():
                writer.close()
            else:
                accepted.set_result((reader, writer))

        with _listen(path) as listening:
            server = await asyncio.start_unix_server(on_connection, sock=listening)
            _logger.info("waiting for the command that asks for the files")
            try:
                async with asyncio.timeout(self.wait_seconds):
                    reader, writer = await accepted
            except TimeoutError as e:
                raise DataPathError(f"the files were not requested within {self.wait_seconds:.0f} s") from e
            finally:
                server.close()
            try:
                yield reader, writer
            finally:
                writer.transport.abort()

    async def _send(self, files: _Files, entry: StoredEntry, writer: asyncio.StreamWriter) -> None:
        await self._write(writer, f"{ENTRY_LINE.format(entry.describe())}\n".encode())
        if entry.type is not FileType.DIRECTORY:
            await self._send_member(files, entry, writer)
        elif isinstance(files, DeviceFiles):
            async for one in files.walk(entry):
                await self._send_member(files, one, writer)
        else:
            pipe = files.repository.work_dir.path / "tar"
            await self._forward(files.copy_tar(entry, pipe), *open_fifo(pipe), writer)
            return
        await self._write(writer, _END_OF_TAR)

    async def _send_member(self, files: _Files, entry: StoredEntry, writer: asyncio.StreamWriter) -> None:
        """Send what is not a directory, or the header of one."""
        target = await files.read_link(entry) if entry.type is FileType.LINK else ""
        await self._write(writer, _header(entry, target))
        if entry.type is not FileType.FILE:
            return
        before = self.sent_bytes
        ours, theirs = files.open_pipe()
        await self._forward(files.copy_content(entry, theirs), ours, theirs, writer, most=entry.size)
        if (count := self.sent_bytes - before) != entry.size:
            raise DataPathError(f"read file {entry.name!a}: it has {count} bytes instead of {entry.size}")
        await self._write(writer, bytes(-entry.size % _BLOCK_BYTES))

    async def _forward(
        self, work: Awaitable[None], ours: int, theirs: int, writer: asyncio.StreamWriter, *, most: int | None = None
    ) -> None:
        """Do the work, and pass on what it writes to a pipe, at most so many bytes; both ends are closed."""

        async def run() -> None:
            try:
                await work
            finally:
                os.close(theirs)

        running = asyncio.create_task(run(), name="file-source")
        pumping = asyncio.create_task(self._pump(ours, writer, most), name="file-pump")
        try:
            await asyncio.wait({running, pumping}, return_when=asyncio.FIRST_EXCEPTION)
            if pumping.done():
                pumping.result()
            running.result()
        finally:
            running.cancel()
            pumping.cancel()
            await asyncio.wait({running, pumping})

    async def _pump(self, source: int, writer: asyncio.StreamWriter, most: int | None) -> None:
        loop, reader = asyncio.get_running_loop(), asyncio.StreamReader(limit=_PIECE_BYTES)
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(source, "rb", buffering=0)
        )
        try:
            while piece := await self._unless_idle(reader.read(_PIECE_BYTES)):
                if most is not None:
                    # The last block of a device may be longer than the device.
                    piece = piece[:most]
                    most -= len(piece)
                await self._write(writer, piece)
        finally:
            transport.close()

    async def _write(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        try:
            writer.write(data)
            await self._unless_idle(writer.drain())
        except ConnectionError as e:
            raise DataPathError("the command that reads the files does not read them any more") from e
        self.sent_bytes += len(data)

    async def _unless_idle(self, work: Awaitable[_T]) -> _T:
        try:
            async with asyncio.timeout(self.idle_seconds):
                return await work
        except TimeoutError as e:
            raise DataPathError(f"no byte was read or sent for {self.idle_seconds:.0f} s") from e

    async def _end(
        self, path: Path, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, result: SentFiles
    ) -> None:
        """End the stream, and wait until the process that passes it on has done so."""
        path.with_suffix(RESULT_SUFFIX).write_text(result.to_json())
        with suppress(OSError):
            writer.write_eof()
            async with asyncio.timeout(self.idle_seconds):
                await reader.read()
        await self.context.clock.sleep(self.linger_seconds)


@contextmanager
def _listen(path: Path) -> Iterator[socket.socket]:
    """Yield a socket at the path for this user alone, and remove it and its result at the end.

    It gets its name when it listens: a connection to one that does not is refused.
    """
    temporary = path.with_suffix(".new")
    files = (temporary, path, path.with_suffix(RESULT_SUFFIX))
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
            temporary.unlink(missing_ok=True)
            listening.bind(str(temporary))
            temporary.chmod(0o600)
            listening.listen()
            temporary.replace(path)
            yield listening
    finally:
        for one in files:
            one.unlink(missing_ok=True)


_TAR_TYPES: Final = {
    FileType.FILE: tarfile.REGTYPE,
    FileType.DIRECTORY: tarfile.DIRTYPE,
    FileType.LINK: tarfile.SYMTYPE,
    # The client refuses it when it unpacks it, and names it.
    FileType.OTHER: tarfile.FIFOTYPE,
}


def _header(entry: StoredEntry, target: str = "") -> bytes:
    info = tarfile.TarInfo(entry.name)
    info.type = _TAR_TYPES[entry.type]
    info.size = entry.size if entry.type is FileType.FILE else 0
    info.linkname = target
    info.mode = int(entry.mode or "0", 8) & _PERMISSIONS
    info.uid, info.gid = entry.uid, entry.gid
    info.mtime = int(parse_time(entry.modified).timestamp()) if entry.modified else 0
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")

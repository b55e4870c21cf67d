"""Copies a file or directory of a backup to a person's machine: from a pod, through the API server, into a directory.

Nothing is kept in between: a slow disk here slows the pod down. The Job is deleted in any case.
"""

import asyncio
import os
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Final, Protocol

from client.backups.files import FilePlace, FilesError, build_job
from client.backups.unpack import Unpacker, UnpackError, choose_target
from client.mover_jobs import JobTimeoutError, JobTools, check_end, open_job, wait_for_start
from client.permissions import FILES_PERMISSIONS
from core.errors import ContractError
from core.file_contract import ENTRY_LINE, SEND_COMMAND, FileEntry, SentFiles
from core.kube.errors import ForbiddenError, KubeError
from core.models.names import MAINTENANCE_CONTAINER
from nodeagent.runtime.access_review import missing_permissions
from nodeagent.runtime.pod_exec import ERRORS, OUTPUT, ExecError, ExecProcess, forbidden_exec

__all__ = ["CopyEvents", "CopyResult", "FileCopy", "copy_files"]

_WHAT: Final = "copy"
_LINE_BYTES: Final = 64 * 1024
_RESULT_BYTES: Final = 64 * 1024
_END: Final = timedelta(seconds=30)
"""How long the pod may take to say why it failed."""


class _PodExec(Protocol):
    def run(self, process: ExecProcess) -> AsyncGenerator[tuple[int, bytes], None]: ...


@dataclass(frozen=True)
class CopyEvents:
    """What is reported during the copy: bytes and files so far, of how many bytes; and each entry that is refused."""

    on_bytes: Callable[[int, int, int], None]
    on_refused: Callable[[str, str], None]


@dataclass(frozen=True)
class CopyResult:
    """What was copied, where to, and how many entries were refused."""

    target: Path
    files: int
    size_bytes: int
    refused: int


@dataclass(frozen=True)
class FileCopy:
    """A copy of `place` to `destination`; `overwrite`: existing files are replaced."""

    tools: JobTools
    pod_exec: _PodExec
    place: FilePlace
    destination: Path
    events: CopyEvents
    overwrite: bool = False


async def copy_files(copy: FileCopy, *, timeout: timedelta) -> CopyResult:  # noqa: ASYNC109 - of the start
    """Copy; `timeout` is how long the pod may take to start.

    Raises:
        ForbiddenError: the user may not execute processes in pods; nothing was created.
        JobError: the Job failed, such as for a path that does not exist, or did not start in time.
        UnpackError: the destination cannot be written.
        FilesError: not everything arrived. What was complete stays.
        KubeError: the API server rejected a request.
    """
    tools = copy.tools
    needed = [one for one in FILES_PERMISSIONS if one.subresource == "exec"]
    if await missing_permissions(tools.client, tools.namespace, needed):
        raise forbidden_exec(f"copy {copy.place.shown}", tools.namespace)
    async with open_job(tools, await build_job(tools, copy.place)) as job:
        pod = await wait_for_start(tools, job, _WHAT, timeout)
        meta = pod["metadata"]
        process = ExecProcess(meta["namespace"], meta["name"], MAINTENANCE_CONTAINER, SEND_COMMAND)
        try:
            return await _Stream(copy).receive(process)
        except ForbiddenError:
            raise
        except (ExecError, KubeError, _UnexplainedError):
            # A pod that failed says why; the process in it was ended with it, and the connection may break with it.
            with suppress(JobTimeoutError, KubeError):
                await check_end(tools, job, _WHAT, _END)
            raise


class _UnexplainedError(FilesError):
    """Not everything arrived, and the stream does not say why."""


class _Stream:
    """What the process in the pod sends: a line, then a tar; and at its end what the mover says about it."""

    def __init__(self, copy: FileCopy) -> None:
        self._copy = copy
        self._result = b""
        self._bytes = 0
        self._ended = False

    async def receive(self, process: ExecProcess) -> CopyResult:
        async with aclosing(self._output(process)) as pieces:
            entry, rest = await self._read_entry(pieces)
            copy = self._copy
            otherwise = copy.place.volume.claim.replace(":", "_")
            target = choose_target(copy.destination, entry, otherwise, overwrite=copy.overwrite)
            unpacker = Unpacker(target, self._refused, self._progress(entry), overwrite=copy.overwrite)
            try:
                await _feed(unpacker, rest, pieces)
            except UnpackError:
                if self._ended:
                    # The tar is incomplete because the pod could not send the rest.
                    self._check_result()
                raise
        self._check_result()
        return CopyResult(target.folder / target.name, unpacker.files, unpacker.size_bytes, unpacker.refused)

    async def _output(self, process: ExecProcess) -> AsyncGenerator[bytes, None]:
        async with aclosing(self._copy.pod_exec.run(process)) as pieces:
            async for channel, content in pieces:
                if channel == OUTPUT:
                    self._bytes += len(content)
                    yield content
                elif channel == ERRORS and len(self._result) < _RESULT_BYTES:
                    self._result += content
        self._ended = True

    async def _read_entry(self, pieces: AsyncIterator[bytes]) -> tuple[FileEntry, bytes]:
        """Return what the first line says, and what came behind it."""
        begin = b""
        async for piece in pieces:
            begin += piece
            line, end, rest = begin.partition(b"\n")
            if end and (entry := ENTRY_LINE.parse(line.decode(errors="replace"))) is not None:
                return entry, rest
            if end or len(begin) > _LINE_BYTES:
                break
        self._check_result()
        raise _UnexplainedError("what the pod sent does not say what it is")

    def _check_result(self) -> None:
        """Check that everything arrived.

        Raises:
            FilesError: it did not; the message says why.
        """
        lines = self._result.decode(errors="replace").splitlines()
        try:
            result = SentFiles.from_json(lines[-1] if lines else "")
        except ContractError as e:
            raise _UnexplainedError(f"the pod did not say how it ended: {' '.join(lines[-3:]) or 'nothing'}") from e
        if result.error:
            raise FilesError(result.error)
        if result.bytes != self._bytes:
            raise FilesError(f"{self._bytes} of {result.bytes} bytes arrived")

    def _refused(self, name: str, why: str) -> None:
        self._copy.events.on_refused(name, why)

    def _progress(self, entry: FileEntry) -> Callable[[int, int], None]:
        return lambda done, files: self._copy.events.on_bytes(done, files, entry.size_bytes)


async def _feed(unpacker: Unpacker, begin: bytes, pieces: AsyncIterator[bytes]) -> None:
    """Unpack the pieces in a thread, as fast as it can.

    Raises:
        UnpackError: the destination cannot be written, or the tar is broken.
    """
    ours, theirs = socket.socketpair()
    working = asyncio.create_task(asyncio.to_thread(_unpack, unpacker, theirs), name="unpack")
    try:
        _, writer = await asyncio.open_connection(sock=ours)
        try:
            writer.write(begin)
            async for piece in pieces:
                writer.write(piece)
                await writer.drain()
        except ConnectionError:
            # The thread has ended: its error says why.
            await working
        finally:
            writer.close()
        await working
    finally:
        # A thread cannot be canceled, but its stream has ended.
        await asyncio.wait({working})
        working.exception()


def _unpack(unpacker: Unpacker, source: socket.socket) -> None:
    with source, os.fdopen(os.dup(source.fileno()), "rb") as stream:
        unpacker.run(stream)
        # What follows the end of the tar fills up its last record.
        while stream.read(_LINE_BYTES):
            pass

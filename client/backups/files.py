"""Files of a backup without a restore: the list of a directory in its snapshot, and a copy on a person's machine.

A copy goes from a pod, through the API server, into a directory. Nothing is kept in between: a slow disk here slows
the pod down. The Jobs are deleted in any case.
"""

import asyncio
import os
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from msgspec import field

from client.backups.unpack import Unpacker, UnpackError, choose_target
from client.collections.models import Backup, BackupVolume
from client.mover_jobs import JobTimeoutError, check_end, find_subject, open_job, plan_job, run_job, wait_for_start
from client.permissions import FILES_PERMISSIONS
from client.session import Session
from core.contract import VolumeMode, parse_result
from core.errors import AgentError, ConfigError, ContractError
from core.kube.errors import ForbiddenError, KubeError
from core.kube.types import Manifest
from core.models.base import WireModel
from core.models.names import MAINTENANCE_CONTAINER
from core.mover_specs import ListFiles, SendFiles
from core.snapshot_contract import ENTRY_LINE, SEND_COMMAND, FileEntry, FileListing, FileType, SentFiles
from core.text import guess
from nodeagent.runtime.connection import OUTPUT, ExecError, ExecProcess, PodExec, forbidden_exec
from nodeagent.runtime.preflight import missing_permissions

_WHAT: Final = "copy"
_LINE_BYTES: Final = 64 * 1024
_END: Final = timedelta(minutes=2)
"""How long the pod may take to say how it ended, on a busy node."""


class FilesError(AgentError):
    """A file of a backup cannot be found, or cannot be copied."""


@dataclass(frozen=True)
class FilePlace:
    """A path in a volume of a backup; "" is its root.

    In a block `device`, a path begins with a slash: it is in the file system of the device.
    """

    volume: BackupVolume
    path: str = ""
    device: bool = False

    @property
    def shown(self) -> str:
        """It as a user writes it."""
        claim = f"{self.volume.namespace}/{self.volume.claim}"
        return f"{claim}/{self.path.removeprefix('/')}" if self.path else claim


class FileList(WireModel):
    """A directory in a volume of a backup, or one file: its entries, by name, and notes about what is not shown.

    `type` is the type of the entry that was asked for. `more` is how many entries follow the last one that is shown.
    """

    place: str
    type: FileType
    entries: list[FileEntry] = field(default_factory=list)
    more: int = 0
    notes: list[str] = field(default_factory=list)


def find_place(backup: Backup, text: str) -> FilePlace:
    """Return what `NAMESPACE/PVC/PATH` or `PVC/PATH` means in a backup; the first form wins.

    Of a block volume, `PVC` is the device, and `PVC/` the root of the file system in it.

    Raises:
        ConfigError: the text is not UTF-8.
        FilesError: there is no such volume, several have that name, or it is not in the bucket.
    """
    _check_text(text)
    first, _, rest = text.strip("/").partition("/")
    second, _, path = rest.partition("/")
    named = [one for one in backup.newest if (one.namespace, one.claim) == (first, second)]
    if not named:
        path, named = rest, [one for one in backup.newest if one.claim == first]
    if not named:
        raise _missing(backup, first, f"{first}/{second}" if second else first)
    if len(named) > 1:
        forms = " or ".join(f"{one.namespace}/{one.claim}" for one in named)
        raise FilesError(f"backup {backup.name} has several PVCs {first}: name one as {forms}")
    (volume,) = named
    if not volume.stored:
        raise FilesError(f"{volume.state}: it has no files")
    device = volume.by_block or (volume.saved is not None and volume.saved.volume_mode == VolumeMode.BLOCK)
    inside = path or text.endswith("/")
    return FilePlace(volume, f"/{path}" if device and inside else path, device)


def _check_text(text: str) -> None:
    """Check that the bytes of an argument are UTF-8: Python has half of a surrogate pair for each that is not."""
    shown = text.encode(errors="backslashreplace").decode()
    if shown != text:
        raise ConfigError(f'"{shown}" is not UTF-8: kopia keeps U+FFFD for each byte that is not, so name it with that')


def _missing(backup: Backup, claim: str, name: str) -> FilesError:
    claims, names = [one.claim for one in backup.volumes], [f"{one.namespace}/{one.claim}" for one in backup.volumes]
    hint = guess(name, names) or guess(claim, claims)
    known = f" ({hint})" if hint else f": nodeagent backup ls {backup.name} lists its volumes"
    return FilesError(f"backup {backup.name} has no PVC {claim}{known}")


async def _plan(tools: Session, place: FilePlace, kind: type[ListFiles | SendFiles], **more: Any) -> Manifest:  # noqa: ANN401 - of its fields
    volume, namespace = place.volume, place.volume.namespace
    spec = kind(volume_namespace=namespace, snapshot=volume.snapshot_id, path=place.path, device=place.device, **more)
    return await plan_job(tools, await find_subject(tools, "files", volume.location, namespace), spec)


async def list_files(
    tools: Session, place: FilePlace, *, limit: int, after: str | None = None, timeout: timedelta
) -> FileList:
    """Return the entries of a directory, at most `limit`, of names after `after`; or the file at the place.

    Raises:
        NotFoundError: the location of the backup does not exist.
        ConfigError: no agent is installed, its configuration cannot be read, or `after` is not UTF-8.
        JobError: the Job failed, such as for a path that does not exist, or did not end in time.
    """
    _check_text(after or "")
    answer = await run_job(tools, await _plan(tools, place, ListFiles, limit=limit, after=after), "list", timeout)
    found = parse_result(FileListing, answer.message)
    entries = answer.find(ENTRY_LINE)
    more, notes = max(0, found.entries - len(entries)), [found.note] if found.note else []
    if more:
        notes.append(f"{more} more entries are not shown: --after continues behind the last name, --limit shows more")
    return FileList(place=place.shown, type=found.type, entries=entries, more=more, notes=notes)


@dataclass(frozen=True)
class CopyResult:
    """What was copied, where to, and how many entries were refused; `note` is about the files, or None."""

    target: Path
    files: int
    size_bytes: int
    refused: int
    note: str | None = None


@dataclass(frozen=True)
class FileCopy:
    """A copy of `place` to `destination`; `overwrite`: existing files are replaced.

    `on_bytes` gets the bytes and files so far, and of how many bytes; `on_refused` each entry that is refused, and why.
    """

    tools: Session
    pod_exec: PodExec
    place: FilePlace
    destination: Path
    on_bytes: Callable[[int, int, int], None]
    on_refused: Callable[[str, str], None]
    overwrite: bool = False


async def copy_files(copy: FileCopy, *, timeout: timedelta) -> CopyResult:
    """Copy; `timeout` is how long the pod may take to start.

    Raises:
        ForbiddenError: the user may not execute processes in pods; nothing was created.
        JobError: the Job failed, such as for a path that does not exist, or did not start in time.
        UnpackError: the destination cannot be written.
        FilesError: not everything arrived. What was complete stays.
    """
    tools = copy.tools
    needed = [one for one in FILES_PERMISSIONS if one.subresource == "exec"]
    if await missing_permissions(tools.client, tools.namespace, needed):
        raise forbidden_exec(f"copy {copy.place.shown}", tools.namespace)
    async with open_job(tools, await _plan(tools, copy.place, SendFiles)) as job:
        pod = await wait_for_start(tools, job, _WHAT, timeout)
        meta = pod["metadata"]
        process = ExecProcess(meta["namespace"], meta["name"], MAINTENANCE_CONTAINER, SEND_COMMAND)
        stream = _Stream(copy)
        try:
            return await stream.receive(process)
        except ForbiddenError:
            raise
        except (ExecError, KubeError, _UnexplainedError):
            # A pod that failed says why; the process in it was ended with it, and the connection may break with it.
            # One that ended well says what it sent: the result may be all that was lost.
            with suppress(JobTimeoutError, KubeError, ContractError):
                return stream.finish(SentFiles.from_json(await check_end(tools, job, _WHAT, _END)))
            raise


class _UnexplainedError(FilesError):
    """Not everything arrived, and the stream does not say why."""


class _Stream:
    """What the process in the pod sends: a line, then a tar; and at its end what the mover says about it."""

    def __init__(self, copy: FileCopy) -> None:
        self._copy = copy
        self._said = b""
        self._sent: SentFiles | None = None
        self._bytes = 0
        self._ended = False
        self._fault: ExecError | KubeError | None = None
        self._unpacked: Unpacker | None = None

    async def receive(self, process: ExecProcess) -> CopyResult:
        async with aclosing(self._output(process)) as pieces:
            entry, rest = await self._read_entry(pieces)
            if entry is None:
                return self.finish(self._sent)
            copy = self._copy
            otherwise = copy.place.volume.claim.replace(":", "_")
            target = choose_target(copy.destination, entry, otherwise, overwrite=copy.overwrite)
            unpacker = Unpacker(
                target,
                copy.on_refused,
                lambda done, files: copy.on_bytes(done, files, entry.size_bytes),
                overwrite=copy.overwrite,
            )
            try:
                await _feed(unpacker, rest, pieces)
            except UnpackError:
                if self._ended:
                    # The tar is incomplete because the pod could not send the rest.
                    self._check(self._sent)
                raise
        self._unpacked = unpacker
        return self.finish(self._sent)

    def finish(self, sent: SentFiles | None) -> CopyResult:
        """Return the result if all that was `sent` has arrived.

        Raises:
            FilesError: not everything was sent or arrived.
            ExecError, KubeError: the connection broke, and nothing says what was sent.
        """
        note, unpacked = self._check(sent), self._unpacked
        if unpacked is None:
            raise _UnexplainedError("what the pod sent does not say what it is")
        target = unpacked.target
        return CopyResult(target.folder / target.name, unpacked.files, unpacked.size_bytes, unpacked.refused, note)

    async def _output(self, process: ExecProcess) -> AsyncGenerator[bytes, None]:
        try:
            async with aclosing(self._copy.pod_exec.run(process)) as pieces:
                async for channel, content in pieces:
                    if channel == OUTPUT:
                        self._bytes += len(content)
                        yield content
                    else:
                        self._said = (self._said + content)[-_LINE_BYTES:]
                        with suppress(ContractError):
                            self._sent = SentFiles.from_json(self._said.splitlines()[-1].decode(errors="replace"))
                    if self._sent is not None and self._bytes >= self._sent.bytes:
                        # The process stays, because what is on its way when it ends may be lost.
                        break
        except (ExecError, KubeError) as e:
            # It may have broken behind the last byte.
            self._fault = e
        self._ended = True

    async def _read_entry(self, pieces: AsyncIterator[bytes]) -> tuple[FileEntry | None, bytes]:
        """Return what the first line says, and what came behind it."""
        begin = b""
        async for piece in pieces:
            begin += piece
            line, end, rest = begin.partition(b"\n")
            if end and (entry := ENTRY_LINE.parse(line.decode(errors="replace"))) is not None:
                return entry, rest
            if end or len(begin) > _LINE_BYTES:
                break
        return None, b""

    def _check(self, sent: SentFiles | None) -> str | None:
        if sent is None:
            said = " ".join(self._said.decode(errors="replace").splitlines()[-3:])
            raise self._fault or _UnexplainedError(f"the pod did not say how it ended: {said or 'nothing'}")
        if sent.error:
            raise FilesError(sent.error)
        if sent.bytes != self._bytes:
            raise FilesError(f"{self._bytes} of {sent.bytes} bytes arrived")
        return sent.note


async def _feed(unpacker: Unpacker, begin: bytes, pieces: AsyncIterator[bytes]) -> None:
    """Unpack the pieces in a thread, as fast as it can."""
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

"""Velero's files about backups, in the location of a repository, with kopia as the client of its storage.

Knows the names of the files; of their content only that it names snapshots and backups, and not how kopia gets at them
(`datamover.kopia.location_files`).
Source: Velero v1.18, pkg/persistence/object_store_layout.go, internal/volume/volumes_information.go; kopia 0.23.1,
repo/blob/*.
"""

import json
import re
import zlib
from collections.abc import Iterator, Sequence
from typing import IO, Final

from core.errors import RepositoryError
from core.models.base import JsonDict
from datamover.kopia.location_files import Blob, LocationFiles
from datamover.kopia.long_lists import open_output, read_elements
from datamover.kopia.process import Kopia, KopiaAnswer
from datamover.runtime.cancellation import ShouldStop, run_in_background
from datamover.runtime.work_dir import WorkDir

__all__ = ["BackupFiles", "find_names", "unpack"]

_BACKUPS: Final = "backups/"

_METADATA: Final = "velero-backup.json"
"""The Backup, with its UID. Every backup has it."""

_COMPRESSED: Final = ("volumeinfo.json.gz", "podvolumebackups.json.gz")
"""Both name snapshots; preceded by the backup's name. Velero before 1.13 does not write the first one."""

_OBJECT_STORES: Final = frozenset({"s3", "azureBlob", "gcs"})
"""Types of storage whose blobs kopia gives the names of their objects. Source: kopia 0.23.1, repo/blob/*."""

_NOT_FOUND: Final = "error presenting blob: error reading blob: BLOB not found"
"""The whole line: kopia could also miss the format of the repository."""

_FILES_A_CALL: Final = 64
"""A start of kopia takes longer than to read a file."""

_PIECE_BYTES: Final = 1 << 16
_GZIP: Final = 16 + zlib.MAX_WBITS
_NAME: Final = re.compile(rb"[0-9A-Za-z-]+")
_LONGEST_NAME: Final = 256
"""Of a longer word, this is not a name either."""


class BackupFiles:
    """The files of all backups in the location of a repository."""

    def __init__(self, kopia: Kopia, work_dir: WorkDir, volume_namespace: str) -> None:
        """Read the location of the repository that `kopia` is connected to, by the configuration in `work_dir`."""
        self._files = LocationFiles(kopia, work_dir, "files of backups")
        self._work_dir = work_dir
        self._volume_namespace = volume_namespace
        self._count = 0

    async def exist(self) -> bool:
        """Return whether the location has any file or folder of a backup.

        Raises:
            RepositoryError: its files cannot be read in this way.
            DataPathError: they cannot be listed.
        """
        await self._prepare()
        with open_output(self._work_dir) as file:
            answer = await self._list_blobs(file)
            return any(blob.id.removeprefix(_BACKUPS) for blob in read_elements(answer, file, Blob))

    async def find_named(self, wanted: frozenset[str]) -> frozenset[str]:
        """Return the part of `wanted`, IDs of snapshots and UIDs of backups, that a file names.

        Raises:
            RepositoryError: the location has no backups, or its files cannot be read in this way.
            DataPathError: not all of them could be read.
        """
        await self._prepare()
        self._count = 0
        named: set[str] = set()
        for files, unpack in zip(await self._list(), (False, True), strict=True):
            for first in range(0, len(files), _FILES_A_CALL):
                named |= await self._read(files[first : first + _FILES_A_CALL], wanted, unpack=unpack)
        if not self._count:
            raise RepositoryError(f"the location has no backups: no files of any below {_BACKUPS}")
        return frozenset(named)

    async def _prepare(self) -> None:
        connected = json.loads(self._work_dir.config_file.read_bytes())
        await self._files.prepare(_outer_storage(connected["storage"], f"kopia/{self._volume_namespace}/"))

    async def _list_blobs(self, file: IO[bytes]) -> KopiaAnswer:
        return await self._files.call("blob", "list", f"--prefix={_BACKUPS}", "--json", output_fd=file.fileno())

    async def _list(self) -> tuple[list[str], list[str]]:
        """Return the blobs with the metadata of backups, and the compressed ones.

        Some storages list all objects, others the folder of each backup alone: then some of these may not exist.
        """
        plain: set[str] = set()
        compressed: set[str] = set()
        with open_output(self._work_dir) as file:
            answer = await self._list_blobs(file)
            for blob in read_elements(answer, file, Blob):
                name, _, rest = blob.id.removeprefix(_BACKUPS).partition("/")
                folder = f"{_BACKUPS}{name}/"
                if not name or blob.id == f"{_BACKUPS}{name}":
                    continue
                wanted = {f"{folder}{name}-{ending}" for ending in _COMPRESSED}
                if not rest:
                    plain.add(f"{folder}{_METADATA}")
                    compressed |= wanted
                elif rest == _METADATA:
                    plain.add(blob.id)
                elif blob.id in wanted:
                    compressed.add(blob.id)
        return sorted(plain), sorted(compressed)

    async def _read(self, files: Sequence[str], wanted: frozenset[str], *, unpack: bool) -> set[str]:
        """Return what the files name; one that does not exist names nothing."""
        with open_output(self._work_dir) as output:
            answer = await self._files.call("blob", "show", *files, output_fd=output.fileno())
            if answer.succeeded:
                self._count += len(files)
                return await _scan(answer, output, wanted, members=len(files) if unpack else 0)
        if not any(line.endswith(_NOT_FOUND) for line in answer.lines):
            raise answer.error()
        if len(files) == 1:
            return set()
        # kopia does not say which one.
        middle = len(files) // 2
        first = await self._read(files[:middle], wanted, unpack=unpack)
        return first | await self._read(files[middle:], wanted, unpack=unpack)


def _outer_storage(storage: JsonDict, inner: str) -> JsonDict:
    """Return the storage of the location, from the repository's at the prefix `inner` in it.

    Raises:
        RepositoryError: kopia cannot read files of others in it.
    """
    prefix = str(storage["config"].get("prefix", ""))
    if storage["type"] not in _OBJECT_STORES or not prefix.endswith(inner):
        raise RepositoryError(f"kopia cannot read Velero's files in a storage of the type {storage['type']}")
    return {"type": storage["type"], "config": storage["config"] | {"prefix": prefix.removesuffix(inner)}}


async def _scan(answer: KopiaAnswer, file: IO[bytes], wanted: frozenset[str], *, members: int) -> set[str]:
    """Return what the output in `file` names, which is of that many compressed files; 0: of plain ones.

    Raises:
        KopiaError: it is not of that many complete files.
    """
    file.seek(0)

    def work(should_stop: ShouldStop) -> set[str]:
        pieces = unpack(file, members) if members else iter(lambda: file.read(_PIECE_BYTES), b"")
        return find_names(pieces, wanted, should_stop)

    try:
        async with run_in_background(work, name="backup-files") as found:
            return await found
    except (zlib.error, EOFError) as e:
        raise answer.error(f"a file is damaged: {e}") from e


def find_names(pieces: Iterator[bytes], wanted: frozenset[str], should_stop: ShouldStop = lambda: False) -> set[str]:
    """Return the part of `wanted` that stands in the text by itself, which comes in pieces of any size."""
    names = {name.encode(): name for name in wanted}
    found: set[str] = set()
    rest = b""
    for piece in pieces:
        if should_stop():
            break
        text = rest + piece
        *words, last = [b"", *_NAME.findall(text)]
        if text.endswith(last):
            # It may go on in the next piece.
            rest = last[-_LONGEST_NAME:]
        else:
            rest = b""
            words.append(last)
        found.update(names[word] for word in words if word in names)
    return found | {names[word] for word in (rest,) if word in names}


def unpack(file: IO[bytes], members: int) -> Iterator[bytes]:
    """Yield the content of a file that consists of so many compressed ones.

    Raises:
        zlib.error: one of them is not a compressed file, or damaged.
        EOFError: one is cut off, or they are more or less: what is missing may name a snapshot.
    """
    count, data, inflater = 0, b"", None
    while data or (data := file.read(_PIECE_BYTES)):
        if inflater is None:
            count, inflater = count + 1, zlib.decompressobj(_GZIP)
        yield inflater.decompress(data, _PIECE_BYTES)
        data = inflater.unconsumed_tail or inflater.unused_data
        if inflater.eof:
            inflater = None
            yield b"\n"
    if inflater is not None or count != members:
        raise EOFError(f"{count} instead of {members}, or cut off")
